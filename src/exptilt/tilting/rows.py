r"""Row algebra: the O(n) arithmetic between the sweeps, with the sink's share. The formulas are those of ``rules.py``.

All of it is on (N, Hq, Q) tensors, plain torch, the same for every backend.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.problem import Gradients, Options, Tensors, per_key_head


class Statistics(NamedTuple):
    """What the forward sweep found of each query, sink included: output (N, Hq, Q, Dv), the rest (N, Hq, Q)."""

    output: Tensor
    log_normalizer: Tensor
    mean: Tensor
    variance: Tensor


class Cotangents(NamedTuple):
    """Cotangents of `Statistics`; also its tangents, which have the same shapes."""

    output: Tensor
    log_normalizer: Tensor
    mean: Tensor
    variance: Tensor


def join_sink(output: Tensor, statistics: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add one outcome with score sink (N, Hq) and value 0 to the forward sweep's results; the maximum stays that of the keys."""
    G, entropy, mean, variance, maximum = statistics
    s = sink[:, :, None]
    total = torch.logaddexp(G, s.expand_as(G))
    a, b = torch.exp(G - total), torch.exp(s - total)  # shares of keys and sink
    gap = torch.where(a > 0, mean - s, 0.0)
    # −Σ p log p over the two groups: entropy within, plus entropy between
    between = -a * torch.where(a > 0, G - total, 0.0) - b * torch.where(b > 0, s - total, 0.0)
    rows = total, a * entropy + between, s + a * gap, a * variance + a * b * gap.square(), maximum
    return output * a[..., None], torch.stack(rows)


def _normalizer(log_normalizer: Tensor) -> Tensor:
    """G with +inf for queries that see nothing, so that e^{s − G} is 0 there."""
    return torch.where(log_normalizer == -torch.inf, torch.inf, log_normalizer)


def _sink_outcome(stats: Statistics, sink: Tensor) -> tuple[Tensor, Tensor]:
    """P and c of the sink, (N, Hq, Q)."""
    s = sink[:, :, None]
    return torch.exp(s - stats.log_normalizer), s - stats.mean


def coefficients(stats: Statistics, bar: Cotangents) -> tuple[Tensor, Tensor, Tensor]:
    """a0, a1, a2 of (gradient); 0 for queries that see nothing."""
    a0 = bar.log_normalizer - (bar.output * stats.output).sum(-1) + bar.mean - bar.variance * stats.variance
    alive = stats.log_normalizer != -torch.inf
    return tuple(torch.where(alive, x, 0.0) for x in (a0, bar.mean + 2 * bar.variance, bar.variance))  # type: ignore[return-value]


def tangent_rows(stats: Statistics) -> Tensor:
    return torch.stack([_normalizer(stats.log_normalizer), stats.mean])


def finish_tangent(pushed: Tensor, sums: Tensor, stats: Statistics, sink: Tensor | None, sink_tangent: Tensor | None) -> Cotangents:
    """(tangent) from the sweep's sums r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ' and Σ p (ṡ' v + v̇)."""
    r, x0, x1, x2 = sums
    if sink is not None:
        p, c = _sink_outcome(stats, sink)
        x = p * (-r if sink_tangent is None else sink_tangent[:, :, None] - r)
        x0, x1, x2 = x0 + x, x1 + c * x, x2 + c * c * x
    G = r + x0
    return Cotangents(pushed - x0[..., None] * stats.output, G, G + x1, x2 - stats.variance * x0 + 2 * x1)


def gradient_rows(stats: Statistics, bar: Cotangents) -> Tensor:
    return torch.stack([_normalizer(stats.log_normalizer), stats.mean, *coefficients(stats, bar)])


def sink_gradient(stats: Statistics, bar: Cotangents, sink: Tensor) -> Tensor:
    """(N, Hq): Σ_i p t of the sink."""
    a0, a1, a2 = coefficients(stats, bar)
    p, c = _sink_outcome(stats, sink)
    return (p * (a0 + c * (a1 + a2 * c))).sum(-1)


def second_rows(stats: Statistics, bar: Cotangents, dot: Cotangents) -> Tensor:
    """The ten rows of the second sweep: G, mean, a0, a1, a2, Ġ, b1, b2, e0, e1."""
    a0, a1, a2 = coefficients(stats, bar)
    x1 = dot.mean - dot.log_normalizer
    e0 = -(bar.output * dot.output).sum(-1) - a1 * x1 - a2 * dot.variance
    rows = _normalizer(stats.log_normalizer), stats.mean, a0, a1, a2, dot.log_normalizer, a1, 2 * a2, e0, -2 * a2 * x1
    return torch.stack(rows)


def second_sink(stats: Statistics, bar: Cotangents, dot: Cotangents, sink: Tensor, sink_tangent: Tensor | None) -> Tensor:
    """(N, Hq): Σ_i p r of the sink."""
    _, _, a0, a1, a2, pushed, b1, b2, e0, e1 = second_rows(stats, bar, dot)
    p, c = _sink_outcome(stats, sink)
    x = -pushed if sink_tangent is None else sink_tangent[:, :, None] - pushed
    t = a0 + c * (a1 + a2 * c)
    return (p * ((t + b1 + b2 * c) * x + e0 + e1 * c)).sum(-1)


def spread(found: Gradients, t: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients by query, key, value, bias, log_weight from a backward sweep's results, where what was not asked for has shape (0,)."""
    weight = None if t.log_weight is None or found.column_sum.dim() == 1 else per_key_head(found.column_sum, t.log_weight.shape[1])
    bias = None
    if t.bias is not None:
        if found.bias.dim() > 1:
            bias = found.bias
        elif t.bias.shape[3] == 1:
            bias = found.row_sum[..., None].sum_to_size(t.bias.shape)
        elif t.bias.shape[2] == 1 and found.column_sum.dim() > 1:
            bias = found.column_sum[:, :, None].sum_to_size(t.bias.shape)
    return found.query, found.key, found.value, bias, weight


class _AtMaximum:
    """The key that each query's maximum stands on: how to pick it from the inputs, and the score's slope there. Memory O(n)."""

    def __init__(self, t: Tensors, best: Tensor, options: Options):
        self.t = t
        N, Hq, Q, _ = t.query.shape
        n = torch.arange(N, device=best.device)[:, None, None]
        h = torch.arange(Hq, device=best.device)[None, :, None]
        i = torch.arange(Q, device=best.device)[None, None, :]
        self.key_at = (n, h // (Hq // t.key.shape[1]), best)
        self.weight_at = self.key_at if t.log_weight is None else (n, h // (Hq // t.log_weight.shape[1]), best)
        self.bias_at: tuple[Tensor, ...] = ()
        if t.bias is not None:
            self.bias_at = tuple(at if size > 1 else torch.zeros_like(at) for at, size in zip((n, h, i, best), t.bias.shape, strict=True))
        self.key = t.key[self.key_at]
        self.slope: Tensor | float = options.scale
        if options.softcap is not None:
            z = options.scale * (t.query * self.key).sum(-1)
            self.slope = options.scale * (1 - torch.tanh(z / options.softcap).square())


def maximum_tangent(t: Tensors, dots: tuple[Tensor | None, ...], best: Tensor, maximum: Tensor, options: Options) -> Tensor:
    """(N, Hq, Q): the maximum moves as the score it stands on; dots are tangents of query, key, value, bias, log_weight, sink."""
    query, key, _, bias, weight, _ = dots
    result = torch.zeros_like(maximum)
    if t.key.shape[2] == 0:
        return result
    at = _AtMaximum(t, best, options)
    if query is not None:
        result = result + at.slope * (query * at.key).sum(-1)
    if key is not None:
        result = result + at.slope * (t.query * key[at.key_at]).sum(-1)
    if bias is not None:
        result = result + bias[at.bias_at]
    if weight is not None:
        result = result + weight[at.weight_at]
    return torch.where(maximum == -torch.inf, 0.0, result)


def maximum_gradient(t: Tensors, bar: Tensor, best: Tensor, maximum: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """The transpose of ``maximum_tangent``: gradients by query, key, value, bias, log_weight, sink."""
    if t.key.shape[2] == 0:
        return (None,) * 6
    at = _AtMaximum(t, best, options)
    g = torch.where(maximum == -torch.inf, 0.0, bar)
    z = (g * at.slope)[..., None]
    weight = None if t.log_weight is None else torch.zeros_like(t.log_weight).index_put(at.weight_at, g, accumulate=True)
    bias = None if t.bias is None else torch.zeros_like(t.bias).index_put(at.bias_at, g, accumulate=True)
    return z * at.key, torch.zeros_like(t.key).index_put(at.key_at, z * t.query, accumulate=True), None, bias, weight, None
