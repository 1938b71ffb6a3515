r"""Which queries and keys are real, and how many keys each query sees.

The caller says what is padding. `ScoreRule` counts the keys that each query sees, in O(n) unless a mask has
an axis of queries.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exptilt.tilting.score_rule import ScoreRule


@dataclass
class Visibility:
    """Which queries and keys of one attention call are real, and who sees whom; None stands for "all"."""

    rule: ScoreRule  # causality and window
    mask: Tensor | None  # (batch or 1, heads or 1, Q or 1, K or 1) booleans, True shows
    length: int  # number of keys
    real_query: Tensor | None  # (batch, Q) booleans
    real_key: Tensor | None  # (batch, K) booleans
    visible: Tensor  # (batch or 1, heads or 1, Q), number of keys each query sees
    counted: Tensor | None  # the same shape, booleans: the queries that count, real ones that see a key
    first: Tensor | None  # (batch,), place of the first real key; None if it is 0
    _known: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        options: dict[str, Any],
        real_query: Tensor | None = None,
        real_key: Tensor | None = None,
    ) -> "Visibility":
        """Visibility in a call of `attend`, given its real queries ``(batch, Q)`` and keys ``(batch, K)``."""
        Q, K, mask = query.shape[2], key.shape[2], options.get("mask")
        rule = ScoreRule(1.0, bool(options.get("causal")), options.get("window"))
        visible = rule.count(Q, K, query.device, mask)
        visible = visible[None, None] if mask is None else visible
        counted = visible > 0
        if real_query is not None:
            counted = counted & real_query[:, None]
        first = None if real_key is None or bool(real_key[:, 0].all()) else real_key.int().argmax(-1)
        everyone = bool(counted.all())
        return cls(rule, mask, K, real_query, real_key, visible, None if everyone else counted, first)

    def inverse_log(self, sink: bool) -> tuple[Tensor, Tensor]:
        """1 / log(outcomes: keys and sink) of each counted query with a choice, else 0; and their number."""
        name = f"log {sink}"
        if name not in self._known:
            outcomes = self.visible + int(sink)
            use = outcomes > 1 if self.counted is None else (outcomes > 1) & self.counted
            inverse = torch.where(use, 1 / outcomes.clamp(min=2).double().log(), 0.0)
            self._known[name] = inverse, use.sum(-1)
        return self._known[name]

    def even(self) -> tuple[Tensor, Tensor]:
        """Σ_i 1/n_i over the counted queries that see a key, and their number (batch or 1, heads or 1, K)."""
        if "even" not in self._known:
            shares = 1 / self.visible.clamp(min=1).double()
            ones = torch.ones_like(shares)
            if self.counted is not None:
                shares, ones = (torch.where(self.counted, x, 0.0) for x in (shares, ones))
            seen_by = self.rule.drawn(ones, self.length, self.mask)
            even = self.rule.drawn(shares, self.length, self.mask)
            self._known["even"] = torch.where(seen_by > 0, even, 0.0), seen_by
        return self._known["even"]
