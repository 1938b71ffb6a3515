"""Attention one query and one key at a time, in Python's own floats, sharing nothing with the package."""

import math

import torch


def visible(i, j, length_q, length_k, causal, window):
    own = i + length_k - length_q
    if causal and j > own:
        return False
    if window is not None and own - j >= window:
        return False
    return not (window is not None and not causal and j - own >= window)


def attend(
    query,
    key,
    value,
    *,
    scale=None,
    log_weight=None,
    bias=None,
    mask=None,
    causal=False,
    window=None,
    softcap=None,
    sink=None,
):
    """All statistics of query (Hq, Q, D), key (Hkv, K, D), value (Hkv, K, Dv): a dict of float64 tensors."""
    Hq, Q, D = query.shape
    Hkv, K, _ = key.shape
    Dv = value.shape[-1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    bias = None if bias is None else bias.expand(Hq, Q, K)
    mask = None if mask is None else mask.expand(Hq, Q, K)
    result = {
        name: torch.zeros(Hq, Q, dtype=torch.float64)
        for name in ("log_normalizer", "entropy", "score_mean", "score_variance", "score_max")
    }
    result["output"] = torch.zeros(Hq, Q, Dv, dtype=torch.float64)
    result["key_mass"] = torch.zeros(Hq, K, dtype=torch.float64)
    for h in range(Hq):
        g = h // (Hq // Hkv)
        for i in range(Q):
            seen = []
            for j in range(K):
                if not visible(i, j, Q, K, causal, window) or (mask is not None and not mask[h, i, j]):
                    continue
                s = scale * sum(float(query[h, i, d]) * float(key[g, j, d]) for d in range(D))
                if softcap is not None:
                    s = softcap * math.tanh(s / softcap)
                if bias is not None:
                    s += float(bias[h, i, j])
                if log_weight is not None:
                    s += float(log_weight[g, j])
                if s > -math.inf:
                    seen.append((j, s))
            result["score_max"][h, i] = max((s for _, s in seen), default=-math.inf)
            outcomes = seen if sink is None else [*seen, (None, float(sink[h]))]
            if not outcomes:
                result["log_normalizer"][h, i] = -math.inf
                continue
            top = max(s for _, s in outcomes)
            G = top + math.log(math.fsum(math.exp(s - top) for _, s in outcomes))
            p = [math.exp(s - G) for _, s in outcomes]
            mean = math.fsum(w * s for w, (_, s) in zip(p, outcomes, strict=True))
            result["log_normalizer"][h, i] = G
            result["score_mean"][h, i] = mean
            result["score_variance"][h, i] = math.fsum(
                w * (s - mean) ** 2 for w, (_, s) in zip(p, outcomes, strict=True)
            )
            result["entropy"][h, i] = -math.fsum(w * math.log(w) for w in p if w > 0)
            for w, (j, _) in zip(p, outcomes, strict=True):
                if j is not None:
                    result["output"][h, i] += w * value[g, j].double()
                    result["key_mass"][h, j] += w
    return result
