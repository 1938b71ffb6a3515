r"""The divergence between two attentions over the same keys, without either matrix.

    KL(p_i‖q_i) = Σ_j p_ij log(p_ij / q_ij) = E_p[s_p − s_q] − G_p + G_q

with p and q the attention of two heads, layers or models. The scores of a few queries exist at a time, over
all keys they see; derivatives of every order compute them again (``derivatives/rows.py``).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, is_concrete
from exptilt.tilting.arguments import explain_keywords, prepare
from exptilt.tilting.derivatives.rows import Results, Rows
from exptilt.tilting.problem import Inputs, per_query_head
from exptilt.tilting.score_rule import ScoreRule

CELLS = 2**20  # scores of one attention held at a time


def divergence_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    r"""The terms p log(p/q) − p + q, none of them negative; their sum is KL(p‖q) of two distributions.

    Infinite where q excludes what p does not, be p ever so small.

    Where p and q nearly agree a term is p (e^{−d} − 1 + d), d = log p − log q, which is of second order in d:
    the sum of the p·d alone would be lost in the rounding of terms of the first order.
    """
    seen = log_p != -torch.inf
    p, q = log_p.exp(), log_q.exp()
    d = torch.where(seen, log_p, 0.0) - torch.where(seen, log_q, 0.0)
    near = d.abs() < 0.5
    small = torch.where(near, d, 0.0)
    some = p.clamp(min=torch.finfo(p.dtype).tiny)  # times d = inf it is inf, also where p has underflowed
    return torch.where(near & seen, p * (torch.expm1(-small) + small), some * d - p + q)


class Side:
    """One attention of a comparison, cut into rows: which of its tensors are rows, and which are shared."""

    def __init__(self, t: Inputs, rule: ScoreRule):
        self.rule = rule
        rows: list[str] = []
        shared: list[str] = []
        self.offset = t.key.shape[-2] - t.query.shape[-2]
        self.rows: list[Tensor] = []
        self.shared: list[Tensor] = []
        for name, x in t._asdict().items():
            if x is None or name == "value":
                continue
            by_row = name == "query" or (name in ("bias", "mask") and x.shape[-2] > 1)
            (self.rows if by_row else self.shared).append(x.movedim(-2, 0) if by_row else x)
            (rows if by_row else shared).append(name)
        self.names = [*rows, *shared]

    def scores(self, rows: Sequence[Tensor], shared: Sequence[Tensor], place: Tensor, keys: slice) -> Tensor:
        """Scores (..., Hq, rows, keys), −inf where hidden, for queries at `place` of the sequence."""
        x = dict(zip(self.names, (*rows, *shared), strict=True))
        query = x["query"].movedim(0, -2)
        heads = query.shape[-3]
        key = x["key"][..., keys, :].to(query.dtype)
        grouped = query.unflatten(-3, (key.shape[-3], -1))
        s = self.rule.soften(self.rule.scale * (grouped @ key.unsqueeze(-3).mT).flatten(-4, -3)).scores
        for name in ("bias", "mask"):
            if name in x:
                part = x[name].movedim(0, -2) if name in self.names[: len(rows)] else x[name]
                part = part if part.shape[-1] == 1 else part[..., keys]
                s = s + part if name == "bias" else s.masked_fill(~part, -torch.inf)
        if "log_weight" in x:
            s = s + per_query_head(x["log_weight"][..., keys], heads, -2).unsqueeze(-2)
        own = (place + self.offset).unsqueeze(-1)
        seen = self.rule.sees(own, torch.arange(keys.start, keys.stop, device=s.device))
        return s if seen is None else s.masked_fill(~seen, -torch.inf)

    def sink(self, shared: Sequence[Tensor], like: Tensor) -> Tensor | None:
        """The score of the sink (..., Hq, rows, 1), None without one."""
        if "sink" not in self.names:
            return None
        found = shared[self.names.index("sink") - len(self.rows)]
        return found[..., None, None].expand(*like.shape[:-1], 1)

    def keys(self, place: Tensor, length: int) -> slice:
        """The keys that some of these queries may see, by causality and window."""
        first, last = 0, length
        if place.numel() and is_concrete(place):
            low, high = int(place[0]) + self.offset, int(place[-1]) + self.offset
            if self.rule.causal:
                last = min(max(high + 1, 0), length)
            if self.rule.window is not None:
                first = min(max(low - self.rule.window + 1, 0), last)
                if not self.rule.causal:
                    last = min(max(high + self.rule.window, first), length)
        return slice(first, last)


def log_probabilities(s: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of scores along the last axis, and which rows see anything; −inf where hidden."""
    alive = (s.detach() != -torch.inf).any(-1, keepdim=True)
    return torch.where(alive, s, 0.0).log_softmax(-1).masked_fill(~alive, -torch.inf), alive[..., 0]


@explain_keywords
def divergence(
    query_p: Tensor,
    key_p: Tensor,
    query_q: Tensor,
    key_q: Tensor,
    *,
    scale: Any = None,
    log_weight: Any = None,
    bias: Any = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: Any = None,
    sink: Any = None,
    average_heads: bool = False,
    check: bool | None = None,
) -> Tensor:
    r"""KL(p‖q) in nats between two attentions over the same keys, for each query and head.

    p and q may come from two heads, two layers or two models, of different dimensions: key j of one stands
    for key j of the other. Differentiable in all tensors, backwards, forwards and twice, in the memory of a
    few queries. An option is one value for both, or a pair (for p, for q).

    Args:
        query_p: ``(..., Hq, Q, D)``, of the attention p; half precision is summed in float32.
        key_p: ``(..., Hkv, K, D)``; Hkv divides Hq.
        query_q: ``(..., Hq, Q, E)``, of the attention q, in the same dtype.
        key_q: ``(..., H, K, E)``; H divides Hq.
        scale: factor of ⟨q,k⟩; 1/sqrt of the dimension if None. Or a pair.
        log_weight: ``(..., Hkv, K)``, log h of each key. Or a pair.
        bias: broadcasts to ``(..., Hq, Q, K)``; added to the scores. Or a pair.
        mask: booleans that broadcast to ``(..., Hq, Q, K)``, for both.
        causal: query i sees key j where j <= i + K − Q, for both.
        window: see `attend`; for both.
        softcap: c, for scores c·tanh(s/c). Or a pair.
        sink: ``(..., Hq)``, the score of one more outcome. Or a pair.
        average_heads: compare the mean of p over its heads with each head of q, as when a sparse indexer is
            trained; p may then have another number of heads than q.
        check: raise if a result is NaN; None means yes.

    Returns:
        ``(..., Hq, Q)``, with the heads of q; never negative. Infinite where p sees a key that q does not; 0
        for a query whose p sees nothing.

    Example:
        >>> q, k = torch.zeros(1, 2, 4), torch.randn(1, 8, 4)
        >>> xt.divergence(q, k, q, k, log_weight=(None, torch.tensor([0.0] * 7 + [-torch.inf])))
        tensor([[inf, inf]])
        >>> xt.divergence(q, k, q, k, log_weight=(torch.tensor([0.0] * 7 + [-torch.inf]), None))  # log 8/7
        tensor([[0.1335, 0.1335]])
    """
    calls = []
    for side, (query, key) in enumerate(((query_p, key_p), (query_q, key_q))):
        name = f"divergence ({'pq'[side]})"
        numbers: Any = [_of(x, side) for x in (scale, log_weight, bias)]
        numbers += [mask, causal, window, _of(softcap, side), _of(sink, side), None, check]
        calls.append(prepare(name, query, key, None, *numbers))
    p, q = (call.inputs for call in calls)
    _check_pair(p, q, average_heads)
    wide = torch.promote_types(
        *(torch.float32 if x.query.dtype.itemsize < 4 else x.query.dtype for x in (p, q))
    )
    p, q = (x._replace(query=x.query.to(wide)) for x in (p, q))
    sides = [Side(x, call.settings.rule) for x, call in zip((p, q), calls, strict=True)]
    length, (Q, K) = len(sides[0].rows), (p.query.shape[-2], p.key.shape[-2])
    held = len(sides[0].shared)

    def some(rows: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
        place, ours, theirs = rows[0], rows[1 : 1 + length], rows[1 + length :]
        keys = sides[0].keys(place, K)
        s = sides[0].scores(ours, shared[:held], place, keys)
        t = sides[1].scores(theirs, shared[held:], place, keys)
        more = sides[0].sink(shared[:held], s), sides[1].sink(shared[held:], t)
        if more != (None, None):
            empty = [x.new_full((*x.shape[:-1], 1), -torch.inf) for x in (s, t)]
            s, t = (
                torch.cat([x, e if m is None else m], -1) for x, e, m in zip((s, t), empty, more, strict=True)
            )
        (log_p, alive), (log_q, there) = log_probabilities(s), log_probabilities(t)
        if average_heads:
            count = alive.sum(-2, keepdim=True)
            alive = count > 0
            seen = (log_p.detach() != -torch.inf).any(-3, keepdim=True)
            log_p = torch.where(seen, log_p, 0.0).logsumexp(-3, keepdim=True).masked_fill(~seen, -torch.inf)
            log_p = log_p - count.clamp(min=1).to(log_p.dtype).log().unsqueeze(-1)
        terms = divergence_terms(log_p, log_q).sum(-1)
        found = torch.where(alive, torch.where(there, terms, torch.inf), 0.0)
        return (found.movedim(-1, 0),), ()

    cells = max(math.prod(x.query.shape[:-2]) for x in (p, q)) * max(1, K)
    size = max(1, Q) if torch.compiler.is_compiling() else max(1, CELLS // max(1, cells))
    place = torch.arange(Q, device=p.query.device)
    tensors = [place, *sides[0].rows, *sides[1].rows, *sides[0].shared, *sides[1].shared]
    plan = Rows(some, 1 + length + len(sides[1].rows), size)
    with full_precision(p.query.device):
        compiling = torch.compiler.is_compiling()
        found = some(tensors[: plan.rows], tensors[plan.rows :])[0][0] if compiling else plan(*tensors)[0]
    result = found.movedim(0, -1)
    if check is not False and is_concrete(result) and bool(result.isnan().any()):
        checks.finite("divergence", query_p=query_p, key_p=key_p, query_q=query_q, key_q=key_q)
        raise ArgumentError(
            "divergence: a result is NaN, though queries and keys are finite. Look for NaN or +inf in bias, "
            "log_weight or sink, or scores that overflow."
        )
    return result


def _of(option: Any, side: int) -> Any:
    return option[side] if isinstance(option, tuple) and len(option) == 2 else option


def _check_pair(p: Inputs, q: Inputs, average_heads: bool) -> None:
    """Raise unless both attentions have the same queries and keys, and heads that can be compared."""
    for name, axis, word in (("query", -2, "queries"), ("key", -2, "keys")):
        ours, theirs = getattr(p, name).shape[axis], getattr(q, name).shape[axis]
        if ours != theirs:
            raise ArgumentError(
                f"divergence: p has {ours} {word}, q has {theirs}. Pass two attentions over "
                "the same sequence."
            )
    if not average_heads and p.query.shape[-3] != q.query.shape[-3]:
        raise ArgumentError(
            f"divergence: p has {p.query.shape[-3]} heads, q has {q.query.shape[-3]}. Pass as many heads, or "
            "average_heads=True to compare the mean over the heads of p with each head of q."
        )
    if p.query.dtype != q.query.dtype:
        raise ArgumentError(
            f"divergence: p is {p.query.dtype}, q is {q.query.dtype}. Convert one of them: query_q.to(...)."
        )
    try:
        torch.broadcast_shapes(p.query.shape[:-3], q.query.shape[:-3])
    except RuntimeError:
        raise ArgumentError(
            f"divergence: batch axes are {tuple(p.query.shape[:-3])} for p and "
            f"{tuple(q.query.shape[:-3])} for q. Pass axes that are the same or 1."
        ) from None
