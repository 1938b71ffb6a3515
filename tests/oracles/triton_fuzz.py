"""The option mixes of `oracles.tilting_fuzz` through the GPU kernels, in Triton's interpreter.

Same oracle, same criterion: at most twice the error of plain torch. Small mixes with odd numbers run in the
tiles that a GPU would have; the others in large ones, which the interpreter walks sooner, a few to a problem.
What a mix costs is the number of tiles, so `small` draws the same mixes with fewer queries, keys, heads.

    make fuzz BACKEND=triton N=2000
"""

import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import numpy as np
import torch

from oracles import tilting_fuzz, tilting_mixes
from oracles.triton_interpreter import mend, tiles

FEW = 3000  # cells of the matrix of scores


def mix_of(seed):
    """The mix of this number, on the GPU's kernels."""
    mix = tilting_mixes.mix_of(seed)
    mix.backend = "gpu"
    return mix


def judge(mix):
    """Every Finding on a mix."""
    Hq, Q, _, K = mix.sizes
    few = mix.seed % 2 == 1 and Hq * Q * K <= FEW
    size = (None, None) if few else (64, 64 if K <= 128 else 128 if K <= 512 else 1024)
    with tiles(*size), np.errstate(all="ignore"):
        return tilting_fuzz.judge_in_place(mix)


def compiled(seed):
    """What is wrong with a mix in a compiled graph: it must not break, and all numbers stay the same.

    Shapes and dtypes are those of fake kernels there.
    """
    mix = mix_of(seed)
    mix.wanted["vmap"] = False
    ask = tilting_fuzz.questions(mix, tilting_fuzz.rows_of(mix))
    eager = tilting_fuzz.exptilt_function(mix)
    torch._dynamo.reset()
    whole = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=False)
    wrong = []
    with tiles(64, 128), np.errstate(all="ignore"):
        for kind, of in (("values", tilting_fuzz.values_of), ("gradients", tilting_fuzz.gradients_of)):
            rest = (ask,) if kind == "gradients" else ()
            found, right = (of(f, mix.tensors, *rest) for f in (whole, eager))
            for name, x in right.items():
                if not torch.equal(x.nan_to_num(), found[name].nan_to_num()) or x.dtype != found[name].dtype:
                    wrong.append(f"{mix}: {name} differs when compiled")
    return wrong


def small():
    """From now on mixes have a few hundred scores each."""
    tilting_mixes.CELLS, tilting_mixes.PRODUCTS = 400, 12_000
    tilting_mixes.CELLS_80_BIT, tilting_mixes.PRODUCTS_80_BIT = 400, 12_000


def covered(seeds):
    """How many mixes have each dtype, option and question, by name."""
    count = Counter()
    for mix in map(mix_of, seeds):
        Hq, Q, Hkv, K = mix.sizes
        given = [name for name in ("bias", "log_weight", "sink") if mix.tensors[name] is not None]
        asked = [name for name, x in mix.wanted.items() if x and name != "by"]
        odd = {
            "mask": mix.mask is not None,
            "grouped heads": Hq > Hkv,
            "several keys": K > 16,
            "rows": Q > 16,
        }
        odd |= {"by " + name: name in mix.wanted["by"] and mix.wanted["gradients"] for name in mix.tensors}
        count.update(
            [str(mix.dtype)[6:], *given, *asked, *mix.numbers, *(name for name, x in odd.items() if x)]
        )
    return count


def start():
    """Let this process judge the GPU's kernels."""
    mend()
    tilting_fuzz.mix_of, tilting_fuzz.judge = mix_of, judge


if __name__ == "__main__":
    start()
    sys.exit(tilting_fuzz.main())
