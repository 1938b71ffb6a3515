r"""The obvious version, with the whole n×n matrix of scores: the oracle every other backend is held against.

    s = softcap(scale q kᵀ) + bias + log_weight,   p = softmax(s),   output = p v,   G = log Σ e^s,
    entropy = −Σ p log p,  …

Plain torch operations throughout, so torch differentiates it in every way and to any order, by rules that owe
nothing to ``derivatives``.
"""

import torch
from torch import Tensor

from exptilt.tilting.problem import Inputs, per_query_head, wide_dtype
from exptilt.tilting.score_rule import ScoreRule, mean_score


def scores(t: Inputs, rule: ScoreRule) -> Tensor:
    """Scores (..., Hq, Q, K), −inf where hidden."""
    wide = wide_dtype(t.query.dtype)
    key = per_query_head(t.key.to(wide), t.query.shape[-3], -3)
    return rule.block(t, rule.scale * (t.query.to(wide) @ key.mT), 0, key.shape[-2]).scores


def _first_largest(s: Tensor) -> Tensor:
    """The maximum, with the derivatives of the first of the largest scores; constant if all are −inf."""
    largest = s.gather(-1, s.detach().argmax(-1, keepdim=True))[..., 0]
    return largest.masked_fill(largest == -torch.inf, -torch.inf)


def attend(t: Inputs, rule: ScoreRule) -> tuple[Tensor, ...]:
    """Output, G, entropy, mean, variance, maximum and key mass (..., Hq, K), from the whole matrix.

    Then come shift, weight and gap of ``problem.RowStatistics``, as constants.
    """
    s = scores(t, rule)
    K = s.shape[-1]
    maximum = _first_largest(s) if K else s.new_full(s.shape[:-1], -torch.inf)
    if t.sink is not None:
        s = torch.cat([s, t.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)  # no outcome at all: true of K = 0 as well
    s_safe = s.masked_fill(dead, 0.0)
    G = torch.logsumexp(s_safe, -1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    p = torch.softmax(s_safe, -1).masked_fill(dead, 0.0)
    top = torch.where(dead[..., 0], 0.0, s.detach().amax(-1)) if s.shape[-1] else G
    hidden = p == 0  # such an outcome adds nothing, however far its score
    above = (s_safe - top[..., None]).masked_fill(hidden, 0.0)
    gap = (p * above).sum(-1)
    seen = s_safe.masked_fill(hidden, 0.0)
    mean = mean_score(top, gap, (p * seen).sum(-1), (p * seen.abs()).sum(-1))
    variance = (p * (above - gap[..., None]).masked_fill(hidden, 0.0).square()).sum(-1)
    log_z = torch.logsumexp(s_safe - top[..., None], -1) if s.shape[-1] else G
    entropy = torch.where(dead[..., 0], 0.0, log_z - gap)
    G = G.masked_fill(dead[..., 0], -torch.inf)
    keys = p[..., :K]
    value = per_query_head(t.value.to(s.dtype), s.shape[-3], -3)
    parts = top, torch.where(dead[..., 0], 0.0, log_z.detach().exp()), gap.detach()
    return keys @ value, G, entropy, mean, variance, maximum, keys.sum(-2), *parts
