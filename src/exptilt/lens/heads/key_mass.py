r"""How much attention keys draw, and how much an even-handed query would give them.

    mass_j = Σ_i p_ij,     even_j = Σ_i 1/n_i over the queries i that see key j,     n_i = number of keys query i sees

Under a causal mask early keys are seen by more queries, and by queries that see little else, so that even attention piles mass on
them; concentration is therefore measured against `even`, not against a flat line.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt.lens.heads.scores import Scores


@dataclass(frozen=True)
class Mass:
    """Sums over the attention matrix of one sequence, by row and by column.

    Attributes:
        visible: ``(head, query)``, number of keys each query sees; a learned sink is not counted.
        log_measure: ``(head, query)``, log Σ_j h_ij, a sink's weight included; log of `visible` where no key is weighted.
        first: ``(head, query)``, attention on the first key; 0 where it is hidden.
        sees_first: ``(head, query)`` booleans.
        key: ``(head, key)``, attention each key draws, summed over queries.
        even: ``(head, key)``, what it would draw from queries that attend evenly.
        seen_by: ``(head, key)``, number of queries that see it.
        mean_key: ``(head, query, D)``, ∇G: the keys averaged under attention (a sink counts as a key at the origin).
    """

    visible: Tensor
    log_measure: Tensor
    first: Tensor
    sees_first: Tensor
    key: Tensor
    even: Tensor
    seen_by: Tensor
    mean_key: Tensor

    def concentration(self) -> Tensor:
        """``(head,)``: KL divergence, in nats, of the keys' shares of attention from their shares under even attention."""
        p = self.key.double() / self.key.double().sum(-1, keepdim=True)
        q = self.even.double() / self.even.double().sum(-1, keepdim=True)
        return torch.where(p > 0, p * (p.clamp_min(1e-300) / q).log(), 0.0).sum(-1)


def mass(scores: Scores, log_normalizer: Tensor) -> Mass:
    """Count and weigh, block by block.

    Args:
        scores: of one sequence.
        log_normalizer: ``(head, query)``, G.
    """
    heads, Q, _ = scores.query.shape
    K = scores.key.shape[1]
    new = scores.query.new_zeros
    visible, measure, first = new(heads, Q), new(heads, Q), new(heads, Q)
    sees_first = torch.zeros(heads, Q, dtype=torch.bool, device=scores.query.device)
    drawn, even, seen_by = new(heads, K), new(heads, K), new(heads, K)
    mean_key = torch.zeros_like(scores.query)
    G = torch.where(log_normalizer == -torch.inf, 0.0, log_normalizer).to(scores.query.dtype)
    for rows, score, weight in scores.blocks():
        seen = (weight > -torch.inf).to(score.dtype)
        count = seen.sum(-1)
        p = torch.exp(score + weight - G[:, rows, None])
        visible[:, rows] = count
        measure[:, rows] = torch.logsumexp(weight, -1)
        first[:, rows], sees_first[:, rows] = p[..., 0], seen[..., 0].bool()
        mean_key[:, rows] = p @ scores.key
        drawn += p.sum(1)
        even += (seen / count.clamp_min(1)[..., None]).sum(1)
        seen_by += seen.sum(1)
    if scores.sink is not None:
        measure = torch.logaddexp(measure, scores.sink[:, None])
    return Mass(visible, measure, first, sees_first, drawn, even, seen_by, mean_key)


def strip(scores: Scores, log_normalizer: Tensor, length: int) -> Tensor:
    """Attention among the first tokens of a sequence.

    Args:
        scores: of one sequence.
        log_normalizer: ``(head, query)``, G over all keys, so that rows need not sum to 1 where later keys are seen too.
        length: how many tokens.

    Returns:
        ``(head, length, length)``.
    """
    found = []
    for rows, score, weight in scores.blocks(rows=16):
        if rows.start >= length:
            break
        p = torch.exp(score + weight - log_normalizer[:, rows, None].to(score.dtype))
        found.append(p[..., :length])
    return torch.cat(found, 1)[:, :length]
