r"""The obvious version, with the whole n×n matrix of scores: the oracle every other backend is held against.

    s = softcap(scale q kᵀ) + bias + log_weight,   p = softmax(s),   output = p v,   G = log Σ e^s,   entropy = −Σ p log p,  …

Plain torch operations throughout, so torch differentiates it in every way and to any order, by rules that owe nothing to ``rules.py``.
"""

import torch
from torch import Tensor

from exptilt.tilting.problem import Options, Tensors, per_query_head, visibility


def scores(t: Tensors, options: Options) -> Tensor:
    """(N, Hq, Q, K), −inf where hidden."""
    Hq, Q = t.query.shape[1:3]
    K = t.key.shape[2]
    s = options.scale * (t.query @ per_query_head(t.key, Hq).mT)
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if t.bias is not None:
        s = s + t.bias
    if t.log_weight is not None:
        s = s + per_query_head(t.log_weight, Hq)[:, :, None, :]
    seen = visibility(options, Q, 0, K, K, s.device)
    for m in (seen, t.mask):
        if m is not None:
            s = s.masked_fill(~m, -torch.inf)
    return s


def attend(t: Tensors, sink: Tensor | None, options: Options) -> tuple[Tensor, ...]:
    """output, G, entropy, mean, variance, maximum and key mass (N, Hq, K), from the whole matrix."""
    s = scores(t, options)
    Q, K = s.shape[2:]
    maximum = s.amax(-1) if K else s.new_full(s.shape[:3], -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[:, :, None, None].expand(*s.shape[:3], 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)  # no outcome at all: true of K = 0 as well
    s_safe = s.masked_fill(dead, 0.0)
    G = torch.logsumexp(s_safe, -1) if s.shape[-1] else s.new_zeros(s.shape[:3])
    p = torch.exp(s_safe - G[..., None]).masked_fill(dead, 0.0)
    s_finite = s.masked_fill(s == -torch.inf, 0.0)  # times a weight of exactly 0
    mean = (p * s_finite).sum(-1)
    variance = (p * (s_finite - mean[..., None]).square()).sum(-1)
    log_p = (s_finite - G[..., None]).masked_fill(p == 0, 0.0)
    entropy = -(p * log_p).sum(-1)
    G = G.masked_fill(dead[..., 0], -torch.inf)
    keys = p[..., :K]
    return keys @ per_query_head(t.value, s.shape[1]), G, entropy, mean, variance, maximum, keys.sum(2)
