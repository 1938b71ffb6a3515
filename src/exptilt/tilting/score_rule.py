r"""The score rule: what a score is, and who sees whom.

    s_ij = softcap(scale <q_i, k_j>) + bias_ij + log_weight_j,     −inf where key j is hidden from query i.

Query and key sequences end together: query i stands at key i' = i + K − Q. Causality hides keys j > i', a
window of w those with i' − j >= w, and without causality also those with j − i' >= w; a mask hides what it
says. Everything in this package that needs scores in torch asks here; the compiled kernels have the same rule
in ``backends/numba/score_row.py`` and ``backends/triton.py``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.problem import Inputs, per_query_head, wide_dtype


class Scores(NamedTuple):
    """Scores (..., Hq, Q, columns), −inf where hidden; the softcap's slope and bend d²s/dz², or None."""

    scores: Tensor
    slope: Tensor | None
    bend: Tensor | None


@dataclass(frozen=True)
class ScoreRule:
    """The numbers of the rule; the tensors are those of `Inputs`.

    Attributes:
        scale: factor of <q,k>.
        causal: whether query i sees no key after its own place.
        window: how far it sees from its own place; None for all the way.
        softcap: c of c·tanh(s/c), or None.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def numbers(self) -> tuple[float, bool, int | None, float | None]:
        """The four, in order."""
        return self.scale, self.causal, self.window, self.softcap

    def visible(
        self, length_q: int, length_k: int, start: int, stop: int, device: torch.device
    ) -> Tensor | None:
        """(Q, stop − start) booleans: the keys that causality and window leave each query; None if all."""
        if not self.causal and self.window is None:
            return None
        own = torch.arange(length_q, device=device)[:, None] + (length_k - length_q)
        j = torch.arange(start, stop, device=device)[None, :]
        seen = torch.ones(length_q, stop - start, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (j <= own)
        if self.window is not None:
            seen = seen & (own - j < self.window)
            if not self.causal:
                seen = seen & (j - own < self.window)
        return seen

    def count(self, length_q: int, length_k: int, device: torch.device | None = None) -> Tensor:
        """(Q,): how many keys each query may see by causality and window."""
        own = torch.arange(length_q, device=device) + (length_k - length_q)
        first, last = torch.zeros_like(own), torch.full_like(own, length_k)
        if self.causal:
            last = torch.minimum(last, own + 1)
        if self.window is not None:
            first = torch.maximum(first, own - self.window + 1)
            if not self.causal:
                last = torch.minimum(last, own + self.window)
        return (last - first).clamp(min=0)

    def soften(self, z: Tensor) -> Scores:
        """softcap(z), with slope and bend."""
        if self.softcap is None:
            return Scores(z, None, None)
        t = torch.tanh(z / self.softcap)
        slope = 1 - t.square()
        return Scores(self.softcap * t, slope, (-2 / self.softcap) * t * slope)

    def block(self, t: Inputs, z: Tensor, start: int, stop: int) -> Scores:
        """Scores of keys start..stop from z = scale <q,k> (..., Hq, Q, stop − start)."""
        s, slope, bend = self.soften(z)
        s = s + columns(t.bias, start, stop) + weights(t.log_weight, z.shape[-3], start, stop)
        seen = self.visible(z.shape[-2], t.key.shape[-2], start, stop, z.device)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        if t.mask is not None:
            s = s.masked_fill(~columns(t.mask, start, stop), -torch.inf)
        return Scores(s, slope, bend)

    def at_key(self, t: Inputs, best: Tensor) -> "AtKey":
        """One key for each query, best (..., Hq, Q): how its score depends on the inputs."""
        return AtKey(self, t, best)


def columns(x: Tensor | None, start: int, stop: int) -> Any:
    """The part of a bias or mask for keys start..stop, which may share one column; 0 if there is none."""
    return 0.0 if x is None else x[..., start:stop] if x.shape[-1] > 1 else x


def weights(x: Tensor | None, heads: int, start: int, stop: int) -> Any:
    """The part of a log-weight that belongs to keys start..stop, for all query heads; 0 if there is none."""
    return 0.0 if x is None else per_query_head(x[..., start:stop], heads, -2).unsqueeze(-2)


class AtKey:
    """The score of one key for each query: where its parts are in the inputs, and its slope. Memory O(n)."""

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
            z = rule.scale * (t.query * self.key).sum(-1)
            self.slope = rule.scale * (1 - torch.tanh(z / rule.softcap).square())

    def _index(self, shape: torch.Size, heads: int, best: Tensor) -> tuple[Tensor, ...]:
        """Index of the batch item, the head and the key in a tensor (..., heads or a divisor, K, ...)."""
        lead = [
            at if size > 1 else torch.zeros_like(at)
            for at, size in zip(self.places[:-3], shape[:-1], strict=True)
        ]
        return (*lead, self.places[-3] // (heads // shape[-1]), best)
