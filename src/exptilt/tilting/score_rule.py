r"""The score rule: what a score is, and who sees whom.

    s_ij = softcap(scale ⟨q_i, k_j⟩) + bias_ij + log_weight_j,     −inf where key j is hidden from query i.

Query and key sequences end together: query i stands at key i' = i + K − Q. Causality hides keys j > i', a
window of w those with i' − j >= w, and without causality also those with j − i' >= w, and a mask those where
it is False. Everything in this package that needs scores in torch asks here; the compiled kernels have the
same rule in ``csrc/attention/scores.hpp`` (CPU) and ``backends/triton/scores.py`` (GPU).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.plan import planned
from exptilt.tilting.problem import Inputs, per_query_head, wide_dtype


class Scores(NamedTuple):
    """Scores (..., Hq, Q, columns) of some keys, −inf where hidden.

    Slope ds/dz and bend d²s/dz² are the softcap's, None without one.
    """

    scores: Tensor
    slope: Tensor | None
    bend: Tensor | None


@dataclass(frozen=True)
class ScoreRule:
    """The numbers of the rule; the tensors are those of `Inputs`.

    Attributes:
        scale: factor of ⟨q,k⟩.
        causal: whether query i sees no key after its own place.
        window: how far a query sees from its own place; None for all the way.
        softcap: c of c·tanh(s/c), or None.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def numbers(self) -> tuple[float, bool, int | None, float | None]:
        """The four numbers of the rule, in order."""
        return self.scale, self.causal, self.window, self.softcap

    def sees(self, own: Tensor, key: Tensor) -> Tensor | None:
        """Whether a query that stands at key `own` may see `key`, by causality and window; None if all."""
        if not self.causal and self.window is None:
            return None
        seen = key <= own if self.causal else torch.ones_like(own, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (own - key < self.window)
            if not self.causal:
                seen = seen & (key - own < self.window)
        return seen

    def visible(
        self,
        length_q: int,
        length_k: int,
        start: int,
        stop: int,
        device: torch.device,
        rows: slice | None = None,
    ) -> Tensor | None:
        """(rows, stop − start) booleans, which of the keys start..stop each query may see; None if all.

        Only causality and window count here, not a mask.
        """
        if not self.causal and self.window is None:
            return None
        own = torch.arange(length_q, device=device) + (length_k - length_q)
        own = own if rows is None else own[rows]
        return self.sees(own[:, None], torch.arange(start, stop, device=device)[None, :])

    def interval(self, length_q: int, length_k: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """Two (Q,): the first key each query may see by causality and window, and the one after the last."""
        own = torch.arange(length_q, device=device) + (length_k - length_q)
        first, last = torch.zeros_like(own), torch.full_like(own, length_k)
        if self.causal:
            last = (own + 1).clamp(0, length_k)
        if self.window is not None:
            first = (own - self.window + 1).clamp(0, length_k)
            if not self.causal:
                last = (own + self.window).clamp(0, length_k)
        return first, torch.maximum(first, last)

    def count(
        self, length_q: int, length_k: int, device: torch.device | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(Q,), or (..., Q) for a mask (..., Q or 1, K or 1): how many keys each query sees.

        A mask that is the same for all queries is counted by prefix sums, in O(n).
        """
        first, last = self.interval(length_q, length_k, device if mask is None else mask.device)
        if mask is None:
            return last - first
        mask = mask.expand(*mask.shape[:-1], length_k)
        if mask.shape[-2] == 1:
            before = torch.nn.functional.pad(mask[..., 0, :].cumsum(-1), (1, 0))
            return before[..., last] - before[..., first]
        seen = self.visible(length_q, length_k, 0, length_k, mask.device)
        return (mask if seen is None else mask & seen).sum(-1)

    def drawn(self, weight: Tensor, length_k: int, mask: Tensor | None = None) -> Tensor:
        """(..., K): Σ_i w_i over the queries i that see key j, for weights (..., Q), mask as in `count`."""
        length_q = weight.shape[-1]
        if mask is not None and mask.shape[-2] > 1:
            seen = self.visible(length_q, length_k, 0, length_k, weight.device)
            mask = mask.expand(*mask.shape[:-1], length_k)
            seen = mask if seen is None else mask & seen
            return (weight.unsqueeze(-2) @ seen.to(weight.dtype)).squeeze(-2)
        edges = weight.new_zeros(*weight.shape[:-1], length_k + 1)
        first, last = self.interval(length_q, length_k, weight.device)
        sums = edges.index_add(-1, first, weight).index_add(-1, last, weight, alpha=-1).cumsum(-1)[..., :-1]
        return sums if mask is None else torch.where(mask[..., 0, :], sums, 0.0)

    def soften(self, z: Tensor) -> Scores:
        """softcap(z), with slope and bend."""
        if self.softcap is None:
            return Scores(z, None, None)
        x = z / self.softcap
        t, slope = torch.tanh(x), tanh_slope(2 * x)
        return Scores(self.softcap * t, slope, (-2 / self.softcap) * t * slope)

    def block(self, t: Inputs, z: Tensor, start: int, stop: int, rows: slice | None = None) -> Scores:
        """Scores of keys start..stop from z = scale ⟨q,k⟩ (..., Hq, rows, stop − start); None is all rows."""
        s, slope, bend = self.soften(z)
        s = s + columns(t.bias, start, stop, rows) + weights(t.log_weight, z.shape[-3], start, stop)
        shape, length = t.query.shape[:-1], t.key.shape[-2]
        if t.packing is not None:
            there = planned(t.packing, self.causal, self.window, shape, length, start, stop)
            seen: Tensor | None = columns(there, 0, stop - start, rows)
        else:
            seen = self.visible(shape[-1], length, start, stop, z.device, rows)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        if t.mask is not None:
            s = s.masked_fill(~columns(t.mask, start, stop, rows), -torch.inf)
        return Scores(s, slope, bend)

    def column(self, t: Inputs, index: Tensor | None = None) -> Tensor:
        """(..., Hq, Q): the scores of one key, the first or that of index (...), −inf where hidden."""

        def pick(x: Tensor, axis: int) -> Tensor:
            """The key's part of x, along an axis counted from the end; one part may stand for all keys."""
            if index is None or x.shape[axis] == 1:
                return x.select(axis, 0)
            at = index.reshape(*index.shape, *(1,) * (x.dim() - index.dim()))
            return torch.take_along_dim(x, at, axis).squeeze(axis)

        heads, length_q = t.query.shape[-3:-1]
        wide = wide_dtype(t.query.dtype)
        key = per_query_head(pick(t.key, -2).to(wide), heads, -2)
        s = self.soften(self.scale * (t.query.to(wide) @ key.unsqueeze(-1)).squeeze(-1)).scores
        if t.bias is not None:
            s = s + pick(t.bias, -1)
        if t.log_weight is not None:
            s = s + per_query_head(pick(t.log_weight, -1), heads, -1).unsqueeze(-1)
        own = torch.arange(length_q, device=s.device) + (t.key.shape[-2] - length_q)
        seen = self.sees(own, own.new_zeros(()) if index is None else index[..., None, None])
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        return s if t.mask is None else s.masked_fill(~pick(t.mask, -1), -torch.inf)

    def at_key(self, t: Inputs, best: Tensor) -> "AtKey":
        """How the score of one key for each query, best (..., Hq, Q), depends on the inputs."""
        return AtKey(self, t, best)


def tanh_slope(x: Tensor) -> Tensor:
    """1/cosh²(x/2), the slope of tanh at x/2: it never overflows, and keeps digits that 1 − tanh² loses."""
    return 4 * torch.sigmoid(x) * torch.sigmoid(-x)


def columns(x: Tensor | None, start: int, stop: int, rows: slice | None = None) -> Any:
    """The part of a bias or mask for keys start..stop and some queries; axes of size 1 stay; 0 for None."""
    if x is None:
        return 0.0
    x = x if rows is None or x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., start:stop]


def weights(x: Tensor | None, heads: int, start: int, stop: int) -> Any:
    """The part of a log-weight that belongs to keys start..stop, for all query heads; 0 if there is none."""
    return 0.0 if x is None else per_query_head(x[..., start:stop], heads, -2).unsqueeze(-2)


class AtKey:
    """The score of one key for each query: indices of the inputs behind it, and its slope. Memory O(n)."""

    def __init__(self, rule: ScoreRule, t: Inputs, best: Tensor):
        self.shape = best.shape
        axes = best.dim()

        def along(axis: int) -> Tensor:
            return torch.arange(best.shape[axis], device=best.device).reshape(
                [-1 if a == axis else 1 for a in range(axes)]
            )

        self.places = [*(along(axis) for axis in range(axes)), best]
        heads = best.shape[-2]
        self.key_at = self._index(t.key.shape[:-2], heads, best)
        self.weight_at = () if t.log_weight is None else self._index(t.log_weight.shape[:-1], heads, best)
        self.bias_at: tuple[Tensor, ...] = ()
        if t.bias is not None:
            pairs = zip(self.places, t.bias.shape, strict=True)
            self.bias_at = tuple(at if size > 1 else torch.zeros_like(at) for at, size in pairs)
        self.key = t.key[self.key_at].to(wide_dtype(t.query.dtype))
        self.slope: Tensor | float = rule.scale
        if rule.softcap is not None:
            q, k = t.query, self.key
            if q.device.type == "cpu":  # a relative error of z grows 2z/c times in the slope
                q, k = q.double(), k.double()
            x = (2 * rule.scale / rule.softcap) * (q * k).sum(-1)
            self.slope = (rule.scale * tanh_slope(x)).to(self.key.dtype)

    def _index(self, shape: torch.Size, heads: int, best: Tensor) -> tuple[Tensor, ...]:
        """Index of batch item, head and key in a tensor (..., heads or a divisor of them, K, ...)."""
        lead = [
            at if size > 1 else torch.zeros_like(at)
            for at, size in zip(self.places[:-3], shape[:-1], strict=True)
        ]
        return (*lead, self.places[-3] // (heads // shape[-1]), best)


def mean_score(top: Tensor, gap: Tensor, about_zero: Tensor, size: Tensor) -> Tensor:
    """The mean score, as `about_zero` = Σ p s or as top + gap, whichever rounds less; `size` is Σ p |s|.

    Σ p s is off by some roundings of Σ p |s|: too much where all scores are near 1e4. top + gap is off by a
    rounding of each: too much where they nearly cancel.
    """
    return torch.where(2 * size.detach() < top.abs() - gap.detach(), about_zero, top + gap)
