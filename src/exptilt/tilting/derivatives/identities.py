r"""Row algebra: the O(n) arithmetic between the sweeps, with the sink's share; formulas in ``rules.py``.

All of it is on (..., Hq, Q) tensors, plain torch, the same for every backend.

Nothing here uses the rounded log-normalizer: weights are p = e^{s − shift} / weight and centred scores c = (s
− shift) − gap, both from the difference to the largest score. So p <= 1 at any size of the scores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.problem import Gradients, Inputs, InputTangents, Needs, RowStatistics, per_key_head
from exptilt.tilting.score_rule import ScoreRule

FAR = -1e15  # stands in for a distance of −inf, which weighs nothing: 0 times its square is 0


class Statistics(NamedTuple):
    """Results of the forward sweep that derivatives need, the sink counted.

    output is (..., Hq, Q, Dv), the rest (..., Hq, Q). A query that sees nothing has shift, weight, gap and
    variance 0. `near` may be given for tangents: the tangent of a score that has most of the weight, or NaN.
    """

    output: Tensor
    shift: Tensor
    weight: Tensor
    gap: Tensor
    variance: Tensor
    near: Tensor | None = None


class Cotangents(NamedTuple):
    """Cotangents of output, log-normalizer, mean and variance, or gradients by them, in the same shapes."""

    output: Tensor
    log_normalizer: Tensor
    mean: Tensor
    variance: Tensor


class Tangents(NamedTuple):
    """Tangents of output, log-normalizer, gap (E[cṡ], the mean's less the log-normalizer's) and variance.

    The gap's tangent is kept, not the mean's: where attention is nearly one-hot, mean and log-normalizer have
    nearly equal tangents, and entropy depends on their difference.
    """

    output: Tensor
    log_normalizer: Tensor
    gap: Tensor
    variance: Tensor


def apart_from(shift: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """shift − top as a rounded difference and its rounding error: e^{shift − top} = e^apart (1 + slip).

    Both are finite. Without the error a weight at a distance of 30 would be off by up to eight units in its
    last place. The error is found by Knuth's sum of two numbers, and is 0 where the weight is 0 anyway.
    """
    apart = shift - top
    a, b, difference = shift.detach(), top.detach(), apart.detach()
    back = difference - a
    slip = (a - (difference - back)) - (b + back)
    return apart, torch.where(difference > -1e3, slip, 0.0)


def join_sink(output: Tensor, lines: RowStatistics, sink: Tensor) -> tuple[Tensor, RowStatistics, Tensor]:
    """Add one outcome with score sink (..., Hq) and value 0 to the forward sweep's results.

    Returns output, lines, and the shift: the largest score, the sink counted (0 where there is no outcome at
    all). The maximum in lines stays that of the keys.
    """
    s = sink.unsqueeze(-1)
    top = torch.maximum(lines.maximum, s)
    shift = torch.where(top == -torch.inf, 0.0, top).detach()  # it cancels out of every result: no derivative
    alive, sunk = lines.weight != 0, s != -torch.inf
    from_top, slip = apart_from(torch.where(alive, lines.maximum, shift), shift)
    sink_gap, sink_slip = apart_from(torch.where(sunk, s, shift), shift)
    a = torch.where(alive, lines.weight * torch.exp(from_top) * (1 + slip), 0.0)
    b = torch.where(sunk, torch.exp(sink_gap) * (1 + sink_slip), 0.0)
    z = a + b
    some = z != 0
    z_or_one = torch.where(some, z, 1.0)
    share, sink_share = a / z_or_one, b / z_or_one
    key_gap = lines.gap + from_top
    both = (share != 0) & (sink_share != 0)
    apart = torch.where(both, key_gap - sink_gap, 0.0)
    # From the side that weighs more, so that a share near 0 costs no digits. The mean is that of means, not
    # shift + gap: if the sink's score is the largest and the keys weigh more, those are far apart.
    heavy = share >= sink_share
    gap = torch.where(heavy, key_gap - sink_share * apart, sink_gap + share * apart)
    own = torch.where(sunk, s, 0.0)
    between = torch.where(both, lines.mean - own, 0.0)
    mean = torch.where(heavy, lines.mean - sink_share * between, own + share * between)
    variance = share * lines.variance + share * sink_share * apart.square()
    log_z = z_or_one.log()
    joined = RowStatistics(
        torch.where(some, shift + log_z, -torch.inf),
        torch.where(some, log_z - gap, 0.0),
        torch.where(some, mean, 0.0),
        torch.where(some, variance, 0.0),
        lines.maximum,
        z,
        gap,
    )
    return output * share.unsqueeze(-1), joined, shift


def shift_of(lines: RowStatistics) -> Tensor:
    """The largest score without a sink, 0 where there is none."""
    return torch.nan_to_num(lines.maximum, nan=math.nan, posinf=math.inf, neginf=0.0)


def _rows(stats: Statistics, *more: Tensor) -> Tensor:
    """Rows that make p and c from a score (shift, 1 / weight, gap) and more; 0 if a query sees nothing."""
    seen = stats.weight != 0
    inverse = 1 / torch.where(seen, stats.weight, 1.0)
    return torch.where(seen, torch.stack([stats.shift, inverse, stats.gap, *more]), 0.0)


def _sink_outcome(stats: Statistics, sink: Tensor) -> tuple[Tensor, Tensor]:
    """p and c of the sink, (..., Hq, Q)."""
    shift, inverse, gap = _rows(stats).unbind()
    d = sink.unsqueeze(-1) - shift
    return torch.exp(d) * inverse, (d - gap).clamp(min=FAR)


def _coefficients(stats: Statistics, bar: Cotangents) -> tuple[Tensor, Tensor, Tensor]:
    """a0 (without ⟨ō,o⟩, see below), a1, a2 of (gradient).

    A sweep subtracts ⟨ō,o⟩ from ⟨ō,v_j⟩ itself, by the same sum in the same order: where a query sees one key
    only, o is that key's value, and the two cancel to the last bit. The same goes for ⟨ō,ȯ⟩ and ⟨ō,v̇_j⟩ of
    second derivatives.
    """
    a0 = bar.log_normalizer + bar.mean - bar.variance * stats.variance
    return a0, bar.mean + 2 * bar.variance, bar.variance


def tangent_rows(stats: Statistics) -> Tensor:
    """The rows of the tangent sweep: those of the weights, then a first r, or NaN."""
    near = torch.full_like(stats.gap, math.nan) if stats.near is None else stats.near
    return _rows(stats, near)


def finish_tangent(
    pushed: Tensor, sums: Tensor, stats: Statistics, sink: Tensor | None, sink_dot: Tensor | None
) -> Tangents:
    """`Tangents` by (tangent) from the sweep's sums r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ' and Σ p (ṡ' v + v̇)."""
    r, x0, x1, x2 = sums.unbind()
    if sink is not None:
        p, c = _sink_outcome(stats, sink)
        x = torch.where(p != 0, p * (-r if sink_dot is None else sink_dot.unsqueeze(-1) - r), 0.0)
        x0, x1, x2 = x0 + x, x1 + c * x, x2 + torch.where(p != 0, c * c * x, 0.0)
    return Tangents(pushed - x0.unsqueeze(-1) * stats.output, r + x0, x1, x2 - stats.variance * x0 + 2 * x1)


def gradient_rows(stats: Statistics, bar: Cotangents) -> Tensor:
    """The rows of the gradient sweep: those of the weights, then a0, a1, a2."""
    return _rows(stats, *_coefficients(stats, bar))


def shift_gradient(stats: Statistics, bar: Cotangents) -> Tensor:
    """(..., Hq, Q): Σ p t over all outcomes, the derivative by a shift of all scores of a query."""
    return torch.where(stats.weight != 0, bar.log_normalizer + bar.mean, 0.0)


def sink_gradient(stats: Statistics, bar: Cotangents, sink: Tensor) -> Tensor:
    """(..., Hq): Σ_i p t of the sink."""
    a0, a1, a2 = gradient_rows(stats, bar)[3:].unbind()
    p, c = _sink_outcome(stats, sink)
    t = a0 - (bar.output * stats.output).sum(-1) + c * (a1 + a2 * c)
    return torch.where(p != 0, p * t, 0.0).sum(-1)


def second_rows(stats: Statistics, bar: Cotangents, dot: Tangents) -> Tensor:
    """The rows of the second sweep: those of the gradient, then Ġ, e0, e1."""
    a0, a1, a2 = _coefficients(stats, bar)
    e0 = -a1 * dot.gap - a2 * dot.variance
    return _rows(stats, a0, a1, a2, dot.log_normalizer, e0, -2 * a2 * dot.gap)


def second_sink(
    stats: Statistics,
    bar: Cotangents,
    dot: Tangents,
    sink: Tensor,
    sink_dot: Tensor | None,
    row_sum: Tensor | None = None,
) -> Tensor:
    """(..., Hq): Σ_i p r of the sink; row_sum (..., Hq, Q) is Σ_j p_j r_j over the keys.

    Over all outcomes Σ p r = 0: no tangent changes if all scores are shifted. A sink that has nearly all of
    the weight hardly differs from the mean over all, and the difference in its own r would be rounding only,
    so there the keys' sum is taken. If row_sum is None or of shape (0,), the sink's own r is used.
    """
    _, _, _, a0, a1, a2, pushed, e0, e1 = second_rows(stats, bar, dot).unbind()
    p, c = _sink_outcome(stats, sink)
    x = -pushed if sink_dot is None else sink_dot.unsqueeze(-1) - pushed
    t = a0 - (bar.output * stats.output).sum(-1) + c * (a1 + a2 * c)
    e0 = e0 - (bar.output * dot.output).sum(-1)
    own = torch.where(p != 0, p * ((t + a1 + 2 * a2 * c) * x + e0 + e1 * c), 0.0)
    if row_sum is not None and row_sum.dim() > 1:
        own = torch.where(p > 0.5, -row_sum, own)
    return own.sum(-1)


def needs_of(t: Inputs, wanted: tuple[bool, ...]) -> Needs:
    """The needs of a sweep for the wanted gradients by query, key, value, bias, log_weight, sink."""
    bias = wanted[3] and t.bias is not None
    columns = bias and t.bias is not None and t.bias.shape[-1] > 1 and t.bias.shape[-2] == 1
    one_for_all_keys = bias and t.bias is not None and t.bias.shape[-1] == 1
    rows = one_for_all_keys or (wanted[5] and t.sink is not None)  # ``second_sink`` needs them
    weight = wanted[4] and t.log_weight is not None
    return Needs(
        wanted[0],
        wanted[1],
        wanted[2] and t.value.shape[-1] > 0,
        weight or columns,
        rows,
        bias and not (columns or one_for_all_keys),
    )


def spread(found: Gradients, t: Inputs, shifted: Tensor | None) -> InputTangents:
    """Gradients by query, key, value, bias, log_weight, in their shapes, from a backward sweep's results.

    shifted (..., Hq, Q) is the derivative by a shift of all scores of a query: without a sink that is the row
    sum, to the last digit. It is needed only if there is a bias.
    """

    def there(x: Tensor, like: Tensor) -> Tensor | None:
        return None if x.dim() == 1 else x.sum_to_size(like.shape)

    weight = bias = None
    if t.log_weight is not None and found.column_sum.dim() > 1:
        weight = per_key_head(found.column_sum, t.log_weight.shape[-2], -2).sum_to_size(t.log_weight.shape)
    if t.bias is not None:
        if found.bias.dim() > 1:
            bias = found.bias
        elif t.bias.shape[-1] == 1 and found.row_sum.dim() > 1:
            row_sum = shifted if t.sink is None and shifted is not None else found.row_sum
            bias = row_sum.unsqueeze(-1).sum_to_size(t.bias.shape)
        elif t.bias.shape[-1] > 1 and t.bias.shape[-2] == 1 and found.column_sum.dim() > 1:
            bias = found.column_sum.unsqueeze(-2).sum_to_size(t.bias.shape)
    return InputTangents(
        there(found.query, t.query), there(found.key, t.key), there(found.value, t.value), bias, weight
    )


def maximum_tangent(t: Inputs, dots: InputTangents, best: Tensor, maximum: Tensor, rule: ScoreRule) -> Tensor:
    """(..., Hq, Q): the tangent of the maximum, which is that of the score of key `best`."""
    result = torch.zeros_like(maximum)
    if t.key.shape[-2] == 0:
        return result
    at = rule.at_key(t, best)
    if dots.query is not None:
        result = result + at.slope * (dots.query * at.key).sum(-1)
    if dots.key is not None:
        result = result + at.slope * (t.query * dots.key[at.key_at].to(at.key.dtype)).sum(-1)
    if dots.bias is not None:
        result = result + dots.bias[at.bias_at]
    if dots.log_weight is not None:
        result = result + dots.log_weight[at.weight_at]
    return torch.where(maximum == -torch.inf, 0.0, result)


def maximum_gradient(t: Inputs, bar: Tensor, best: Tensor, maximum: Tensor, rule: ScoreRule) -> InputTangents:
    """The transpose of ``maximum_tangent``."""
    if t.key.shape[-2] == 0:
        return InputTangents()
    at = rule.at_key(t, best)
    g = torch.where(maximum == -torch.inf, 0.0, bar)
    z = (g * at.slope).unsqueeze(-1)

    def put(like: Tensor, place: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=x.dtype, device=x.device).index_put(place, x, accumulate=True)

    return InputTangents(
        z * at.key,
        put(t.key, at.key_at, z * t.query),
        None,
        None if t.bias is None else put(t.bias, at.bias_at, g),
        None if t.log_weight is None else put(t.log_weight, at.weight_at, g),
    )
