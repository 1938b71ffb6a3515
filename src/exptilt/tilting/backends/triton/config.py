"""Options and tile of a kernel, from one table by sweep, bytes of a number, head dimension and GPU."""

from functools import cache
from typing import NamedTuple

import torch

from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule

WIDEST = 128  # columns of query, key or value that a program adds up
NARROWEST = 16  # Triton's smallest matrix product
LIKE = "sm80"  # any other GPU, and the interpreter, gets the tiles of this generation


class Tile(NamedTuple):
    """Rows and keys of a tile, columns of an inner product at a time, warps, and stages of its loads."""

    rows: int
    keys: int
    step: int
    warps: int = 8
    stages: int = 2


class Kind(NamedTuple):
    """Constants that a kernel is compiled for: options of the rule, how float32 is multiplied, and its tile.

    rows and keys are those of a tile; inner products take step columns at a time (whole_d, whole_v: all at
    once); a program adds up d columns of query and key and v columns of value. alone: a tile holds all keys.
    """

    causal: bool
    window: bool
    cap: bool
    precision: str
    rows: int
    keys: int
    step: int
    d: int
    v: int
    whole_d: bool
    whole_v: bool
    alone: bool = False


# By sweep and bytes of a number of the inputs, for vectors of at most 64 columns without and with further
# options (bias, mask, log-weight, softcap), then for longer vectors. As large as the assembler fits into
# registers without a spill (`make gpu-audit`); never timed on a GPU.
_NARROW, _SMALL, _LEAST = Tile(32, 16, 64), Tile(16, 16, 32), Tile(16, 16, 16, stages=1)
TILES: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("forward", 2): (Tile(64, 32, 64), Tile(32, 32, 64), Tile(64, 32, 64), Tile(32, 32, 64)),
    ("forward", 4): (Tile(64, 32, 32), Tile(32, 32, 32), Tile(32, 32, 32), Tile(32, 16, 32)),
    ("tangent", 2): (Tile(32, 32, 64), _NARROW, Tile(32, 32, 64), Tile(16, 16, 64)),
    ("tangent", 4): (_LEAST,) * 4,
    ("met", 2): (_SMALL,) * 4,
    ("met", 4): (_SMALL,) * 4,
    ("gradient by rows", 2): (Tile(32, 32, 64), _NARROW, Tile(16, 16, 64), Tile(16, 16, 64)),
    ("gradient by rows", 4): (_LEAST,) * 4,
    ("gradient by keys", 2): (Tile(32, 32, 64), _NARROW, Tile(16, 16, 64), Tile(16, 16, 64)),
    ("gradient by keys", 4): (_LEAST,) * 4,
    ("gradient by bias", 2): (Tile(16, 16, 16),) * 4,
    ("gradient by bias", 4): (Tile(16, 16, 16),) * 4,
    ("key mass", 2): (Tile(32, 32, 64), Tile(16, 16, 64), Tile(16, 16, 64), Tile(16, 16, 64)),
    ("key mass", 4): (_SMALL,) * 4,
    ("second by rows", 2): (Tile(16, 16, 64), Tile(16, 16, 64), _SMALL, _SMALL),
    ("second by rows", 4): (_LEAST,) * 4,
    ("second by bias", 2): (Tile(16, 16, 16),) * 4,
    ("second by bias", 4): (_LEAST,) * 4,
    ("second by keys", 2): (_SMALL,) * 4,
    ("second by keys", 4): (_LEAST,) * 4,
}
TILES |= {(sweep, 8): (_LEAST,) * 4 for sweep, _ in tuple(TILES)}
# A warp of NVIDIA's takes 16 rows of a matrix product: more warps than rows repeat each other's work.
_BY_ROWS = Tile(16, 16, 64, 2)
NVIDIA = TILES | {
    ("forward", 2): (Tile(64, 32, 64, 4), *TILES["forward", 2][1:]),
    ("tangent", 2): (Tile(32, 16, 64, 2), _NARROW, _BY_ROWS, Tile(16, 16, 64)),
    ("gradient by rows", 2): (Tile(32, 32, 64, 2), *TILES["gradient by rows", 2][1:]),
    ("gradient by keys", 2): (_BY_ROWS, *TILES["gradient by keys", 2][1:]),
    ("key mass", 2): (Tile(32, 32, 64, 2), Tile(16, 16, 64), Tile(16, 16, 64, 1), Tile(16, 16, 64)),
    ("second by rows", 2): (Tile(16, 16, 64, 4), *TILES["second by rows", 2][1:]),
}
# Generations differ in the entries named here. A warp of AMD's has 64 threads, not 32.
GENERATIONS: dict[str, dict[tuple[str, int], tuple[Tile, ...]]] = {
    "sm80": NVIDIA
    | {
        ("forward", 4): (Tile(32, 16, 32), Tile(32, 32, 32), Tile(32, 32, 32), Tile(32, 16, 32)),
        ("tangent", 2): (Tile(32, 16, 64, 2), _NARROW, _NARROW, Tile(16, 16, 64)),
        ("gradient by keys", 4): (Tile(16, 16, 16), _LEAST, _LEAST, _LEAST),
        ("key mass", 2): (Tile(32, 32, 64, 2), _SMALL, Tile(16, 16, 64, 1), _SMALL),
    },
    "sm90": NVIDIA
    | {
        ("forward", 4): (Tile(64, 32, 32), Tile(32, 16, 32), Tile(32, 32, 32), Tile(32, 16, 32)),
        ("gradient by bias", 2): (_LEAST,) * 4,
        ("gradient by bias", 4): (Tile(16, 16, 16), _LEAST, Tile(16, 16, 16), _LEAST),
        ("gradient by rows", 4): (_LEAST, _LEAST, _SMALL, Tile(16, 16, 16)),
        ("second by keys", 4): (_LEAST, Tile(16, 16, 16), _LEAST, _LEAST),
    },
    "sm100": NVIDIA
    | {
        ("forward", 4): (Tile(64, 32, 32), Tile(32, 16, 32), Tile(16, 16, 32, 4), Tile(16, 16, 32, 4)),
        ("key mass", 2): (Tile(32, 16, 64, 2), *NVIDIA["key mass", 2][1:]),
        ("gradient by keys", 2): (*NVIDIA["gradient by keys", 2][:3], _SMALL),
        ("gradient by rows", 4): (_LEAST, _LEAST, Tile(16, 16, 32, 4), _LEAST),
        ("second by keys", 4): (_LEAST, Tile(16, 16, 16), _LEAST, _LEAST),
    },
    "gfx942": {
        name: tuple(t._replace(warps=max(1, t.warps // 2)) for t in tiles) for name, tiles in TILES.items()
    },
}


@cache
def generation_of(device: torch.device) -> str:
    """The generation of a GPU, as `GENERATIONS` names it; a newer one counts as the newest of its maker's."""
    if device.type != "cuda":
        return LIKE
    if torch.version.hip:
        return "gfx942"
    return {8: "sm80", 9: "sm90"}.get(torch.cuda.get_device_capability(device)[0], "sm100")


def kind_of(sweep: str, t: Inputs, rule: ScoreRule) -> tuple[Kind, dict[str, int]]:
    """The kind that a sweep is compiled for, and the options of its launch.

    Products of float32 are exact (ieee) as long as `torch.get_float32_matmul_precision()` is "highest", its
    default; else, and where the inputs are of half precision, they are taken on tensor cores in three TF32
    products (tf32x3), with an error of 2⁻²¹.
    """
    D, Dv, size = t.query.shape[-1], t.value.shape[-1], t.query.element_size()
    d, v = (min(WIDEST, max(NARROWEST, 1 << (n - 1).bit_length())) for n in (D, Dv))
    generation = generation_of(t.query.device)
    busy = rule.softcap is not None or any(x is not None for x in (t.bias, t.log_weight, t.mask, t.packing))
    tile = GENERATIONS[generation][sweep, size][2 * (max(D, Dv) > 64) + busy]
    few = t.query.shape[-2] * (t.query.shape[-3] // t.key.shape[-3]) <= NARROWEST
    step = min(tile.step, max(d, v))
    exact = size == 8 or (size == 4 and torch.get_float32_matmul_precision() == "highest")
    exact |= generation == "gfx942"  # its matrix cores multiply float32 directly
    plan = t.packing is not None  # it includes causality and window
    options = (
        rule.causal and not plan,
        rule.window is not None and not plan,
        rule.softcap is not None,
        "ieee" if exact else "tf32x3",
    )
    rows = NARROWEST if few else tile.rows
    kind = Kind(*options, rows, tile.keys, step, d, v, step >= D, step >= Dv)
    return kind, {"num_warps": max(1, tile.warps * rows // tile.rows), "num_stages": tile.stages}
