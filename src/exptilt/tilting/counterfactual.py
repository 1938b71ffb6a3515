r"""The key side of attention: what each key is worth, and which keys a query attends to most.

A measure is a sum of atoms, so an atom can be taken away. Without key j the output of query i moves by

    o'_i − o_i = p_ij / (1 − p_ij) (o_i − v_j)          and G_i by   log(1 − p_ij),

exactly, for all keys at once from one matrix of weights, of which a few rows of one head
exist at a time. For a key that has most of a query's weight, 1 − p_ij and o_i − v_j would be all rounding:
they are summed over the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.tilting.arguments import explain_keywords, prepare
from exptilt.tilting.attend import run
from exptilt.tilting.key_side import weight_rows
from exptilt.tilting.problem import per_query_head, wide_dtype


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
    v = per_query_head(t.value.to(wide), heads, -3)
    if is_concrete(v):
        checks.finite(caller, query=query, key=key, value=value)
    full = (*t.query.shape[:-1], v.shape[-1])
    if direction is not None and (not isinstance(direction, Tensor) or direction.shape != full):
        got = tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise ArgumentError(f"{caller}: direction is {got}. Pass the shape of the output, {full}.")
    known = run(call)
    top = (known.score_max - known.log_normalizer).exp()  # the largest weight of each query
    middle = v.mean(-2, keepdim=True)  # values about their mean: differences of norms lose fewer digits
    v, o = v - middle, known.output.to(wide) - middle
    one = torch.ones_like(o[..., :1])
    # ‖o − v‖² as one product; with a direction ⟨g, o − v⟩
    right = torch.cat([v, v.square().sum(-1, keepdim=True), torch.ones_like(v[..., :1])], -1)
    if direction is None:
        left = torch.cat([-2 * o, one, o.square().sum(-1, keepdim=True)], -1)
    else:
        g = direction.to(wide)
        left = torch.cat([-g, 0 * one, (g * o).sum(-1, keepdim=True)], -1)
    total, largest, log_normalizer, alone = v.new_zeros(4, *full[:-2], v.shape[-2])
    for index, rows, keys, p, outside in weight_rows(call, known.log_normalizer):
        if not p.numel():
            continue
        change = left[index][rows] @ right[index][keys].mT
        if direction is None:
            change = change.clamp_(min=0).sqrt_()
        change.mul_(p).div_(1 - p)
        heavy = (top[index][rows] > 0.4).nonzero()[:, 0]
        certain = (p[heavy] > 0.5).nonzero()  # at most one key of a query
        if len(certain):
            row, at = heavy[certain[:, 0]], certain[:, 1]
            moved, lack = _without(p[row], at, outside[row], v[index][keys], middle[index])
            change[row, at] = (
                moved.norm(dim=-1) if direction is None else (g[index][rows][row] * moved).sum(-1)
            )
            p[row, at] = 0.0
            hit = torch.where(lack > 0, torch.where(lack > 0, lack, 1.0).log(), 0.0)
            log_normalizer[index][keys].index_add_(0, at, hit)
            alone[index][keys].index_add_(0, at, (lack == 0).to(wide))
        total[index][keys] += change.sum(0)
        seen = largest[index][keys]
        change = change if direction is None else change.abs_()
        seen.copy_(torch.maximum(seen, change.amax(0)))
        log_normalizer[index][keys] += p.neg_().log1p_().sum(0)
    return LeaveOneOut(total, largest, log_normalizer, alone.long())


def _without(p: Tensor, at: Tensor, outside: Tensor, v: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """The change (rows, Dv) of the output without the key `at` of each row, and the weight that is left.

    p (rows, K) has most of its weight there; what is left is summed over the others and the sink.
    """
    others = p.scatter(-1, at[:, None], 0.0)
    lack, rest = others.sum(-1) + outside.sum(-1), others @ v - outside.sum(-1, keepdim=True) * middle
    mean = torch.where((lack > 0)[:, None], rest / torch.where(lack > 0, lack, 1.0)[:, None], -middle)
    return p.gather(-1, at[:, None]) * (mean - v[at]), lack
