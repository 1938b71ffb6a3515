"""Memory and time of a Hessian-vector product of a transformer: exptilt beside torch's own attention.

A transformer of two layers (width 64, one head) reads n tokens, and the loss is a mean of squares. Forward mode
over the gradient gives the Hessian by the weights times a vector. Fused attention of torch raises here; its
"math" attention makes n×n matrices. Each call runs in a process of its own, in float32.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "differentiable.md"
LENGTHS, QUICK = (1024, 2048, 4096, 8192), (256,)
WAYS = ("exptilt", "math attention")


def product(way: str, n: int) -> Callable[[], object]:
    """A call that makes one Hessian-vector product at `n` tokens."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 1, 128, dropout=0.0, activation="gelu", batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, target = torch.randn(2, 1, n, 64)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in weights.items()}

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = (functional_call(model, w, (x,)) - target).square().mean()
        return found

    def run() -> object:
        with xt.differentiable(model) if way == "exptilt" else nullcontext(), sdpa_kernel(SDPBackend.MATH):
            return jvp(grad(loss), (weights,), (along,))[1]

    return run


def prepare(way: str, n: int) -> Callable[[], object]:
    """In the new process: one small call, so that code is loaded, then the call to measure."""
    product(way, 64)()
    return product(way, n)


def measure(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Bytes beyond inputs and results for each way and length, and the largest difference of results."""
    rows = []
    for n in harness.track(list(lengths), "lengths"):
        row: dict[str, Any] = {"n": n}
        for way in WAYS:
            row[way] = harness.peak_extra_memory(prepare, way, n).beyond
        rows.append(row)
    ours, theirs = (product(way, lengths[0])() for way in WAYS)
    scale = max(x.abs().max().item() for x in theirs.values())
    apart = max((ours[name] - theirs[name]).abs().max().item() for name in ours) / scale
    last = rows[-1]
    goals = [Goal(f"memory at n = {last['n']} over math's", last["exptilt"] / last[WAYS[1]], 1 / 20, "×")]
    return {"rows": rows, "apart": apart, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: megabytes beyond inputs and results, by length."""
    rows = [
        [
            f"{row['n']:,}",
            *(f"{row[way] / 1e6:,.0f}" for way in WAYS),
            f"{row[WAYS[1]] / max(row[WAYS[0]], 1):.0f} ×",
        ]
        for row in results["rows"]
    ]
    return ["tokens", *(f"{way}, MB" for way in WAYS), "ratio"], rows


PARTS = (harness.Part(PAGE, "hessian product", "hessian_product", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    found = measure(QUICK if arguments.quick else LENGTHS)
    path = harness.save("hessian_product", found, folder=harness.folder(arguments.quick))
    results = harness.read(path)
    print(f"\nResults of the two ways differ by {results['apart']:.1e} of the largest entry.\n")
    harness.print_table(*table(results))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
