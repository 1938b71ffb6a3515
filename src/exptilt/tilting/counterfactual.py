r"""The key side of attention: what each key is worth, and which keys a query attends to most.

A measure is a sum of atoms, so an atom can be taken away. Without key j the output of query i moves by

    o'_i − o_i = p_ij / (1 − p_ij) (o_i − v_j)          and G_i by   log(1 − p_ij),

exactly, for all keys at once from one matrix of weights, of which a few rows exist at a time. For a key that
has most of a query's weight, 1 − p_ij and o_i − v_j would be all rounding: they are summed over the others.
On the CPU the compiled core sweeps (``csrc/attention/mass.hpp``); elsewhere plain torch does, head by head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, is_concrete, is_wrapped
from exptilt.tilting.arguments import Call, explain_keywords, prepare
from exptilt.tilting.backends import cpu
from exptilt.tilting.derivatives import identities
from exptilt.tilting.key_side import score_rows, sink_weight, swept, weight_rows, weights_of
from exptilt.tilting.problem import RowStatistics, per_query_head, wide_dtype

HEAVY = 7 / 8  # up to this weight of one key, o − p v and 1 − p lose at most three bits


class LeaveOneOut(NamedTuple):
    """What leaving out each key would change, over all queries.

    Attributes:
        total: ``(..., Hq, K)``, the norm of the output's change, summed over queries; with a direction, the
            change along it.
        largest: ``(..., Hq, K)``, the largest of these norms; with a direction, of the absolute values.
        log_normalizer: ``(..., Hq, K)``, the summed change of G, Σ_i log(1 − p_ij), over queries that see
            another key; its negative is the divergence of the attention with the key from that without.
        alone: ``(..., Hq, K)``, how many queries see this key only; their output becomes 0.
    """

    total: Tensor
    largest: Tensor
    log_normalizer: Tensor
    alone: Tensor


@explain_keywords
@torch.no_grad()
def leave_one_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    direction: Tensor | None = None,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> LeaveOneOut:
    """What leaving out each key would change, for all keys at once, without the matrix of weights.

    Exact, as if `attend` were called again without the key. Carries no derivatives.

    Args:
        query: ``(..., Hq, Q, D)``.
        key: ``(..., Hkv, K, D)``.
        value: ``(..., Hkv, K, Dv)``.
        direction: ``(..., Hq, Q, Dv)``, such as the gradient of a loss by the output: changes are dotted with
            it, and keep their sign. None for norms.
        scale: as in `attend`, like all that follow.
        log_weight: ``(..., Hkv, K)``.
        bias: broadcasts to ``(..., Hq, Q, K)``.
        mask: broadcasts to ``(..., Hq, Q, K)``.
        causal: see `attend`.
        window: see `attend`.
        softcap: see `attend`.
        sink: ``(..., Hq)``.

    Returns:
        A record of total, largest, log_normalizer and alone, each ``(..., Hq, K)``.

    Example:
        >>> q, k = torch.zeros(1, 3, 2), torch.zeros(1, 4, 2)
        >>> v = torch.tensor([[[0.0], [0.0], [0.0], [4.0]]])
        >>> xt.leave_one_out(q, k, v).largest  # the mean is 1, without the last value 0
        tensor([[0.3333, 0.3333, 0.3333, 1.0000]])
    """
    caller = "leave_one_out"
    options = scale, log_weight, bias, mask, causal, window, softcap, sink
    call = prepare(caller, query, key, value, *options)
    t = call.inputs
    wide, heads = wide_dtype(t.query.dtype), t.query.shape[-3]
    v = per_query_head(t.value.to(wide), heads, -3).expand(*t.query.shape[:-2], *t.value.shape[-2:])
    if is_wrapped(t.query) or is_wrapped(t.key) or is_wrapped(v):
        raise ArgumentError(
            f"{caller}: does not run under torch.func. Pass whole batches, (..., heads, length, dim)."
        )
    if is_concrete(v):
        checks.finite(caller, value=value)
    full = (*t.query.shape[:-1], v.shape[-1])
    if direction is not None and (not isinstance(direction, Tensor) or direction.shape != full):
        got = tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise ArgumentError(f"{caller}: direction is {got}. Pass the shape of the output, {full}.")
    g = None if direction is None else direction.to(wide)
    total, largest, log_normalizer, alone = v.new_zeros(4, *full[:-2], v.shape[-2])
    if v.device.type == "meta":
        return LeaveOneOut(total, largest, log_normalizer, alone.long())
    if swept(call):
        found = _swept(call, g)
        _check(caller, query, key, found)
        return found
    with full_precision(v.device):
        middle = v.mean(-2, keepdim=True)
        v = v - middle  # about their mean: differences of norms lose fewer digits
        for index, rows, keys, s in score_rows(call):
            if keys.stop == keys.start:
                continue
            values = (
                v[index][keys]
                if s.shape[-1] == keys.stop - keys.start
                else torch.cat([v[index][keys], -middle[index]])
            )
            change, lost, only = _without_each(
                s, keys.stop - keys.start, values, -middle[index], g if g is None else g[index][rows]
            )
            total[index][keys] += change.sum(0)
            seen = largest[index][keys]
            change = change if g is None else change.abs_()
            seen.copy_(torch.maximum(seen, change.amax(0)))
            log_normalizer[index][keys] += lost
            alone[index][keys] += only
    found = LeaveOneOut(total, largest, log_normalizer, alone.long())
    _check(caller, query, key, found)
    return found


def _check(caller: str, query: Tensor, key: Tensor, found: LeaveOneOut) -> None:
    """Raise if a result is NaN, and say why."""
    if bool((found.total + found.log_normalizer).isnan().any()):
        checks.finite(caller, query=query, key=key)
        raise ArgumentError(
            f"{caller}: a result is NaN, though queries and keys are finite. Look for NaN or +inf in bias, "
            "log_weight, sink or direction, or scores that overflow."
        )


def _swept(call: Call, g: Tensor | None) -> LeaveOneOut:
    """The record by the compiled sweeps: all keys but those that have most of a query's weight at once.

    Those need the output and G over the others: a second forward sweep, which leaves them out.
    """
    t, rule = call.inputs, call.settings.rule
    middle = t.value.to(wide_dtype(t.query.dtype)).mean(-2, keepdim=True)
    t = t._replace(value=t.value.to(middle.dtype) - middle)  # differences of norms lose fewer digits
    middle = per_query_head(middle, t.query.shape[-3], -3)

    def forward(skip: Tensor | None) -> tuple[Tensor, RowStatistics, Tensor, Tensor, Tensor]:
        """Output about the middle, lines, shift, rows of weights, and the place of the heaviest key."""
        output, stacked, best, *_ = cpu.forward(t._replace(sink=None), rule, skip=skip)
        lines = RowStatistics(*stacked.unbind())
        shift, rows = identities.shift_of(lines), None
        if t.sink is not None:
            output, lines, shift = identities.join_sink(output, lines, t.sink)
            rows = weight_rows(shift, lines.weight)
            output = output - sink_weight(rows, t.sink).unsqueeze(-1) * middle
        return output, lines, shift, weight_rows(shift, lines.weight) if rows is None else rows, best

    output, lines, shift, rows, best = forward(None)
    most = (lines.maximum - rows[0]).exp() * rows[1]
    heavy = most > HEAVY
    skip = torch.where(heavy, best, -1)
    own = (output.square() if g is None else g * output).sum(-1)
    vectors = output if g is None else g
    total, largest, lost = cpu.worth(t, rule, vectors, torch.cat([rows, own.unsqueeze(0)]), g is None, skip)
    alone = torch.zeros_like(total, dtype=torch.int64)
    if bool(heavy.any()):
        rest, others, other_shift, *_ = forward(skip)
        only = heavy & (others.weight == 0)
        rest = torch.where(only.unsqueeze(-1), -middle, rest)
        at = skip.clamp(min=0)
        v = per_query_head(t.value, t.query.shape[-3], -3).expand(*total.shape, -1)
        moved = most.unsqueeze(-1) * (rest - v.gather(-2, at.unsqueeze(-1).expand_as(rest)))
        change = torch.where(heavy, moved.norm(dim=-1) if g is None else (g * moved).sum(-1), 0.0)
        less = (other_shift - shift) + (others.weight / lines.weight).log()
        total.scatter_add_(-1, at, change)
        largest.scatter_reduce_(-1, at, change.abs(), "amax")
        lost.scatter_add_(-1, at, torch.where(heavy & ~only, less, 0.0))
        alone.scatter_add_(-1, at, only.long())
    return LeaveOneOut(total, largest, lost, alone)


def _without_each(s: Tensor, K: int, v: Tensor, nothing: Tensor, g: Tensor | None) -> tuple[Tensor, ...]:
    """Changes (rows, K) of the output without each key; the sum of G's changes, and who sees nothing else.

    Scores s and values v may have the sink after the K keys; `nothing` is the output of who sees nothing.
    """
    p = weights_of(s)
    o = p @ v
    p = p[:, :K]
    if g is None:
        change = _distances(o, v[:K])
    else:
        change = (g * o).sum(-1, keepdim=True) - g @ v[:K].mT
    change.mul_(p).div_(1 - p)
    row = (p.amax(-1) > 0.5).nonzero()[:, 0]
    lost = p.neg().log1p_()
    (most, at), some = p[row].max(-1), s[row]
    some = some - some.amax(-1, keepdim=True)
    others = some.scatter(-1, at[:, None], -torch.inf)
    only = (others == -torch.inf).all(-1)
    rest = torch.where(only[:, None], nothing, weights_of(others) @ v)
    moved = most[:, None] * (rest - v[at])
    change[row, at] = moved.norm(dim=-1) if g is None else (g[row] * moved).sum(-1)
    lost[row, at] = torch.where(only, 0.0, others.logsumexp(-1) - some.logsumexp(-1))
    return change, lost.sum(0), lost.new_zeros(K).index_add_(0, at, only.to(lost.dtype))


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Distances (n, m) of points (n, D) and (m, D), by a product where it leaves enough digits."""
    size, one = x.square().sum(-1, keepdim=True), torch.ones_like(y[:, :1])
    found = (
        torch.cat([-2 * x, torch.ones_like(size), size], -1)
        @ torch.cat([y, y.square().sum(-1, keepdim=True), one], -1).mT
    )
    row, at = (found < size / 32).nonzero(as_tuple=True)  # mostly rounding: there |y| is near |x|
    found = found.clamp_(min=0).sqrt_()
    if 16 * len(row) > found.numel():
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    found[row, at] = (x[row] - y[at]).norm(dim=-1)
    return found
