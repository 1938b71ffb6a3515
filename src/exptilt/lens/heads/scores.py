r"""The scores of one sequence, a few rows at a time, as a measure over keys and a linear function of them.

    p_ij = h_ij e^{s_ij} / Z_i,     s_ij = scale <q_i, k_j>,     h_ij = e^{bias_ij} where query i may see key j, else 0

What depends on the query through an inner product is the score; what does not (masks, windows, position biases) belongs to the measure h
the query tilts. A learned sink is one more key, at the origin, of weight e^sink. Statistics that `attend` does not give are
sums over these blocks: their memory is one block, never the whole matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.tilting.score_rule import ScoreRule

# A block holds at most this many scores: 16 MB in float32, and a handful of them are alive at once.
BLOCK = 1 << 22
KNOWN = {"scale", "causal", "window", "softcap", "bias", "mask", "sink", "log_weight"}


class Block(NamedTuple):
    """Some rows of the scores.

    Attributes:
        rows: which queries.
        score: ``(head, row, key)``, after the softcap if there is one.
        log_weight: ``(head or 1, row, key)``, log h; −inf where a key is hidden.
    """

    rows: slice
    score: Tensor
    log_weight: Tensor


@dataclass(frozen=True)
class Scores:
    """What goes into the scores of one sequence.

    Attributes:
        query: ``(head, query, D)``, as the scores see them.
        key: ``(head, key, D)``, grouped heads repeated.
        scale: factor of the inner product.
        causal: as in `attend`.
        window: as in `attend`.
        softcap: as in `attend`.
        log_weight: ``(head or 1, query or 1, key or 1)``, bias and mask together, or None.
        sink: ``(head,)``, or None.
    """

    query: Tensor
    key: Tensor
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    log_weight: Tensor | None = None
    sink: Tensor | None = None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, options: dict[str, Any], item: int = 0) -> "Scores":
        """Those of one item of a batch.

        Args:
            query: ``(batch, Hq, Q, D)``.
            key: ``(batch, Hkv, K, D)``.
            options: keyword arguments of `attend`.
            item: which item.
        """
        unknown = set(options) - KNOWN
        if unknown:
            raise ArgumentError(
                f"Scores: options {sorted(unknown)} are not known here. Pass keyword arguments of attend that change scores."
            )
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        scale = options.get("scale")
        return cls(
            query[item].detach().to(wide),
            key[item].detach().to(wide).repeat_interleave(groups, 0),
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            bool(options.get("causal", False)),
            options.get("window"),
            options.get("softcap"),
            _log_weight(options, item, heads, groups, wide),
            None
            if options.get("sink") is None
            else options["sink"].detach().to(wide).expand(*query.shape[:1], heads)[item],
        )

    def blocks(self, rows: int | None = None) -> Iterator[Block]:
        """All rows, in blocks.

        Args:
            rows: how many in a block; by default as many as keep it small.
        """
        heads, Q, _ = self.query.shape
        K = self.key.shape[1]
        step = rows or max(1, min(Q, BLOCK // max(1, heads * K)))
        rule = ScoreRule(self.scale, self.causal, self.window, self.softcap)
        pattern = rule.visible(
            Q, K, 0, K, self.query.device
        )  # one byte a pair; blocks of scores are the larger part
        for start in range(0, Q, step):
            here = slice(start, min(start + step, Q))
            score = rule.soften(self.scale * (self.query[:, here] @ self.key.mT)).scores
            seen = None if pattern is None else pattern[here]
            weight = (
                score.new_zeros(1, score.shape[1], K)
                if seen is None
                else torch.where(seen, 0.0, -torch.inf).to(score.dtype)[None]
            )
            if self.log_weight is not None:
                own = self.log_weight if self.log_weight.shape[1] == 1 else self.log_weight[:, here]
                weight = weight + own
            yield Block(here, score, weight.expand(-1, -1, K))


def _log_weight(
    options: dict[str, Any], item: int, heads: int, groups: int, dtype: torch.dtype
) -> Tensor | None:
    """Bias, mask and key weights as one log-weight ``(head or 1, query or 1, key or 1)``."""
    found: Tensor | None = None
    for name in ("bias", "mask", "log_weight"):
        x = options.get(name)
        if x is None:
            continue
        x = x.detach()
        if name == "log_weight":
            x = x.repeat_interleave(groups, -2).unsqueeze(-2)
        x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
        x = x[item if x.shape[0] > 1 else 0]
        part = torch.where(x, 0.0, -torch.inf).to(dtype) if x.dtype == torch.bool else x.to(dtype)
        found = part if found is None else found + part
    return found
