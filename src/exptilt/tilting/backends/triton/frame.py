"""What the Triton kernels are told: tensors with their strides, sizes, and the tiles of a sweep.

An `Operand` is a tensor (batch, heads, length, columns); its strides are 0 along axes that are shared, so
nothing is copied or repeated. What is absent has None for an address, and costs nothing: kernels are compiled
without it.

Rows of a tile are queries of all the heads that share a key head, one head after the other: with one query
and eight heads to a key head a tile holds eight rows, not eight tiles one row each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.problem import Dots, Inputs
from exptilt.tilting.score_rule import ScoreRule

WIDEST = 128  # columns of query, key or value in one tile
NARROWEST = 16  # Triton's smallest matrix product


class Operand(NamedTuple):
    """A tensor: its first number's address, and its strides."""

    at: Any
    steps: Any


class Frame(NamedTuple):
    """A problem; members as in ``problem.py``, mask as bytes, weight for log_weight."""

    query: Operand
    key: Operand
    value: Operand
    bias: Operand
    weight: Operand
    mask: Operand
    heads: int
    group: int
    weight_group: int
    Q: int
    K: int
    D: int
    Dv: int
    window: int


class Tangents(NamedTuple):
    """Tangents of the inputs, as operands."""

    query: Operand
    key: Operand
    value: Operand
    bias: Operand
    weight: Operand


class Kind(NamedTuple):
    """What a kernel is compiled for: options of the rule, how float32 is multiplied, and its tile.

    A tile has so many rows and keys, columns of query and key, and columns of value; whole_d and whole_v say
    whether those are all columns.
    """

    causal: bool
    window: bool
    cap: bool
    precision: str
    rows: int
    keys: int
    d: int
    v: int
    whole_d: bool
    whole_v: bool


# Rows and keys of a tile, and warps: by sweep and bytes of a number of the inputs, for vectors of at most 64
# columns without and with further options (bias, mask, log-weight, softcap), then for longer vectors. As
# large as the assembler fits into registers, or nearly (`make gpu-audit`); never timed on a GPU.
TILES = {
    ("forward", 2): ((64, 32, 8), (32, 32, 4), (64, 32, 8), (32, 32, 8)),
    ("forward", 4): ((64, 32, 8), (32, 32, 8), (32, 32, 4), (32, 16, 4)),
    ("forward", 8): ((32, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("tangent", 2): ((64, 32, 8), (32, 16, 4), (32, 32, 8), (16, 16, 4)),
    ("tangent", 4): ((16, 16, 4), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("tangent", 8): ((16, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("gradient", 2): ((32, 32, 8), (32, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("gradient", 4): ((32, 16, 8), (32, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("gradient", 8): ((16, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("second", 2): ((32, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("second", 4): ((16, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
    ("second", 8): ((16, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8)),
}


def kind_of(sweep: str, t: Inputs, rule: ScoreRule) -> tuple[Kind, int]:
    """What to compile a sweep for, and how many warps a program has.

    Products of float32 are exact (ieee) as long as `torch.get_float32_matmul_precision()` is "highest", its
    default; else, and where the inputs are of half precision, they are taken on tensor cores in three TF32
    products (tf32x3), with an error of 2⁻²¹.
    """
    D, Dv = t.query.shape[-1], t.value.shape[-1]
    d, v = (min(WIDEST, max(NARROWEST, 1 << (n - 1).bit_length())) for n in (max(D, 1), max(Dv, 1)))
    busy = rule.softcap is not None or any(x is not None for x in (t.bias, t.log_weight, t.mask))
    rows, keys, warps = TILES[sweep, t.query.element_size()][2 * (max(d, v) > 64) + busy]
    rows = NARROWEST if t.query.shape[-2] * (t.query.shape[-3] // t.key.shape[-3]) <= NARROWEST else rows
    exact = t.query.element_size() == 8 or (
        t.query.element_size() == 4 and torch.get_float32_matmul_precision() == "highest"
    )
    options = rule.causal, rule.window is not None, rule.softcap is not None, "ieee" if exact else "tf32x3"
    return Kind(*options, rows, keys, d, v, d >= D, v >= Dv), warps


def operand(x: Tensor | None, axes: int = 4) -> Operand:
    """A tensor with as many axes, 0 for the stride of each axis of size 1."""
    if x is None or not x.numel():
        return Operand(None, (0,) * axes)
    return Operand(x, tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)))


def one_batch_axis(x: Tensor | None, lead: torch.Size) -> Tensor | None:
    """A tensor with all its batch axes as one, which stays of size 1 if all of them are."""
    if x is None or len(lead) == 1:
        return x
    if not lead:
        return x.unsqueeze(0)
    mine, rest = x.shape[: len(lead)], x.shape[len(lead) :]
    return x.reshape(1, *rest) if mine.numel() == 1 else x.expand(*lead, *rest).flatten(0, len(lead) - 1)


def flat(t: Inputs) -> Inputs:
    """The inputs with one batch axis."""
    lead = t.query.shape[:-3]
    return Inputs(*(one_batch_axis(x, lead) for x in t))  # type: ignore[arg-type]


def frame_of(t: Inputs, rule: ScoreRule) -> Frame:
    """The frame of inputs with one batch axis."""
    (_, heads, Q, D), (key_heads, K), Dv = t.query.shape, t.key.shape[1:3], t.value.shape[3]
    mask = None if t.mask is None else t.mask.view(torch.uint8)
    planes = operand(t.bias), operand(t.log_weight, 3), operand(mask)
    shared = 1 if t.log_weight is None else heads // t.log_weight.shape[1]
    window = 0 if rule.window is None else min(rule.window, Q + K)  # more hides nothing either
    vectors = operand(t.query), operand(t.key), operand(t.value)
    return Frame(*vectors, *planes, heads, heads // key_heads, shared, Q, K, D, Dv, window)


def tangents_of(dots: Dots | None, lead: torch.Size) -> Tangents:
    """The tangents as operands; a sink has none here."""
    given = [None] * 5 if dots is None else [one_batch_axis(x, lead) for x in dots[:5]]
    return Tangents(*(operand(x, 3 if i == 4 else 4) for i, x in enumerate(given)))
