"""Arguments of the Triton kernels: tensors with their strides, and sizes.

An `Operand` is a tensor (batch, heads, length, columns); its strides are 0 along axes that are shared, so
nothing is copied or repeated. An absent tensor has None for an address, and costs nothing: kernels are
compiled without it.

Rows of a tile are queries of all the heads that share a key head, the heads of one query next to each other:
with one query and eight heads to a key head a tile holds eight rows, not eight tiles one row each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.plan import drops, spans
from exptilt.tilting.problem import Inputs, InputTangents
from exptilt.tilting.score_rule import ScoreRule


class Operand(NamedTuple):
    """A tensor: its first number's address, and its strides."""

    at: Any
    steps: Any


class Frame(NamedTuple):
    """A problem; members as in ``problem.py``, mask as bytes, weight for log_weight.

    Of a plan (``plan.py``): which keys each query sees (batch, 2, Q), which queries see each key (batch, 2,
    K), seed and share of dropped weights (batch, 2).
    """

    query: Operand
    key: Operand
    value: Operand
    bias: Operand
    weight: Operand
    mask: Operand
    seen: Operand
    seen_by: Operand
    random: Operand
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


def operand(x: Tensor | None, axes: int = 4) -> Operand:
    """The operand of a tensor with `axes` axes; the stride of an axis of size 1 is 0."""
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


def _plan_of(t: Inputs, rule: ScoreRule) -> tuple[Operand, Operand, Operand]:
    """The members of a frame that come from a plan."""
    if t.packing is None:
        return operand(None, 3), operand(None, 3), operand(None, 2)
    plan = t.packing[:, 0]
    views = spans(plan, rule.causal, rule.window, t.query.shape[2], t.key.shape[2])
    seen, by = (operand(x.to(torch.int32), 3) for x in views)
    return seen, by, operand(plan[:, 3, :2] if drops(plan) else None, 2)


def frame_of(t: Inputs, rule: ScoreRule) -> Frame:
    """The frame of inputs with one batch axis."""
    (_, heads, Q, D), (key_heads, K), Dv = t.query.shape, t.key.shape[1:3], t.value.shape[3]
    mask = None if t.mask is None else t.mask.view(torch.uint8)
    planes = operand(t.bias), operand(t.log_weight, 3), operand(mask)
    shared = 1 if t.log_weight is None else heads // t.log_weight.shape[1]
    window = 0 if rule.window is None else min(rule.window, Q + K)  # a wider one hides nothing
    vectors, plan = (operand(t.query), operand(t.key), operand(t.value)), _plan_of(t, rule)
    return Frame(*vectors, *planes, *plan, heads, heads // key_heads, shared, Q, K, D, Dv, window)


def tangents_of(dots: InputTangents | None, lead: torch.Size) -> Tangents:
    """The tangents as operands, without that of a sink."""
    given = [None] * 5 if dots is None else [one_batch_axis(x, lead) for x in dots[:5]]
    return Tangents(*(operand(x, 3 if i == 4 else 4) for i, x in enumerate(given)))
