r"""The scores of one sequence, a few rows at a time, as a measure over keys and a linear function of them.

    p_ij = h_ij e^{s_ij} / Z_i,   s_ij = scale ⟨q_i, k_j⟩,   h_ij = e^{bias_ij} if i sees j, else 0

What depends on the query through an inner product is the score; what does not (masks, windows, position
biases) belongs to the measure h that the query tilts. A learned sink is one more key, at the origin, of
weight e^sink. Statistics that `attend` does not give are sums over these blocks: their memory is one block,
never the whole matrix. `ScoreRule` defines the score, and who sees whom.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting.arguments import prepare
from exptilt.tilting.problem import Inputs, per_query_head, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

# A block holds at most this many scores: 16 MB in float32, and a handful of them are alive at once.
BLOCK = 1 << 22


def problem(query: Tensor, key: Tensor, options: dict[str, Any]) -> tuple[ScoreRule, Inputs]:
    """The rule and the canonical inputs of a call of `attend`, outside of autograd."""
    call = prepare("lens", query.detach(), key.detach(), None, **options, autocast=True)
    return call.settings.rule, call.inputs


class Block(NamedTuple):
    """Some rows of the scores."""

    rows: slice
    score: Tensor  # (head, row, key), after the softcap if there is one
    log_weight: Tensor  # (head, row, key), log h; −inf where a key is hidden


@dataclass(frozen=True)
class Scores:
    """Rule and inputs of the scores of one sequence, which are computed in blocks of rows."""

    rule: ScoreRule
    inputs: Inputs  # query (head, query, D), key (head, key, D), log_weight; grouped heads repeated

    @classmethod
    def of(cls, query: Tensor, key: Tensor, options: dict[str, Any], item: int = 0) -> "Scores":
        """The `Scores` of one batch item; the other arguments are those of `problem`."""
        rule, t = problem(query, key, options)
        items: list[Any] = [None if x is None else x[item if x.shape[0] > 1 else 0] for x in t]
        one = Inputs(*items)
        wide, heads = wide_dtype(query.dtype), query.shape[1]
        weight = None if one.log_weight is None else per_query_head(one.log_weight, heads, -2)
        key = per_query_head(one.key.to(wide), heads, -3)
        return cls(rule, one._replace(query=one.query.to(wide), key=key, log_weight=weight))

    def blocks(self, rows: int | None = None, every: int = 1) -> Iterator[Block]:
        """Scores of every so many rows, `rows` in a block; by default a block has at most `BLOCK` scores."""
        t, rule = self.inputs, self.rule
        heads, Q, _ = t.query.shape
        K = t.key.shape[1]
        step = every * (rows or max(1, min(Q, BLOCK // max(1, heads * K))))
        for start in range(0, Q, step):
            here = slice(start, min(start + step, Q), every)
            z = rule.scale * (t.query[:, here] @ t.key.mT)
            log_weight = rule.block(t, torch.zeros_like(z), 0, K, here).scores
            yield Block(here, rule.soften(z).scores, log_weight)

    def weights(self, log_normalizer: Tensor, rows: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Attention ``(head, row, key)``, block by block, with its rows; G is ``(head, query)``."""
        G = log_normalizer.masked_fill(log_normalizer == -torch.inf, 0.0)  # of a query that sees no key
        for here, score, log_weight in self.blocks(rows):
            yield here, torch.exp(score + log_weight - G[:, here, None].to(score.dtype))

    def pooled(self, log_normalizer: Tensor, cells: Tensor) -> Tensor:
        """Attention among cells ``(head, cell, cell)``: mean over a cell's queries, sum over its keys.

        `cells` ``(token,)`` is the number of each token's cell, from 0.
        """
        onto = torch.nn.functional.one_hot(cells).to(self.inputs.query)
        total = torch.zeros((), dtype=onto.dtype, device=onto.device)
        for rows, p in self.weights(log_normalizer):
            total = total + onto[rows].mT @ (p @ onto)
        return total / onto.sum(0)[:, None]

    def strip(self, log_normalizer: Tensor, length: int) -> Tensor:
        """Attention among the first tokens, ``(head, length, length)``."""
        found = []
        for rows, p in self.weights(log_normalizer, rows=16):
            found.append(p[..., :length])
            if rows.stop >= length:
                break
        return torch.cat(found, 1)[:, :length]
