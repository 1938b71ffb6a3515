"""What a record should hold, from whole matrices of weights and scores, one query at a time."""

import math

import torch

COLUMNS = (
    "queries",
    "visible_keys",
    "entropy",
    "relative_entropy",
    "effective_keys",
    "log_normalizer",
    "log_normalizer_std",
    "score_mean",
    "score_variance",
    "score_max",
    "first_key_mass",
    "key_mass_simpson",
    "key_mass_divergence",
)


def scores(call):
    """(N, Hq, Q, K) of an AttentionCall, −inf where hidden, by the definition in DESIGN.md."""
    o, q, k = call.options, call.query.double(), call.key.double()
    N, Hq, Q, _ = q.shape
    K = k.shape[2]
    k = k.repeat_interleave(Hq // k.shape[1], 1)
    s = o["scale"] * torch.einsum("nhqd,nhkd->nhqk", q, k)
    if o.get("softcap") is not None:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    if o.get("bias") is not None:
        s = s + o["bias"].double()
    own, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)[None]
    if o.get("causal"):
        s = s.masked_fill(j > own, -torch.inf)
    if o.get("window") is not None:
        s = s.masked_fill(own - j >= o["window"], -torch.inf)
        if not o.get("causal"):
            s = s.masked_fill(j - own >= o["window"], -torch.inf)
    if o.get("mask") is not None:
        s = s.masked_fill(~o["mask"].expand(N, Hq, Q, K), -torch.inf)
    return s


def statistics(s, weights, real_query, real_key, sink=None):
    """Columns of a frame as {name: (N, H)}, from scores (N, H, Q, K), weights from the model itself, and what
    is real.
    """
    N, H, Q, K = s.shape
    names = list(COLUMNS)
    result = {name: torch.full((N, H), torch.nan, dtype=torch.float64) for name in names}
    for n in range(N):
        first = int(real_key[n].int().argmax())
        for h in range(H):
            rows = {name: [] for name in names}
            mass, even = torch.zeros(2, K, dtype=torch.float64)
            for i in range(Q):
                seen = (s[n, h, i] > -torch.inf).nonzero().ravel().tolist()
                if not real_query[n, i] or not seen:
                    continue
                p = [float(weights[n, h, i, j]) for j in seen]
                x = [float(s[n, h, i, j]) for j in seen]
                rows["score_max"].append(max(x))
                rows["first_key_mass"].append(float(weights[n, h, i, first]) if first in seen else 0.0)
                rows["visible_keys"].append(len(seen))
                for j, probability in zip(seen, p, strict=True):
                    mass[j] += probability
                    even[j] += 1 / len(seen)
                if sink is not None:
                    p, x = [*p, 1 - sum(p)], [*x, float(sink[h])]
                entropy = -sum(a * math.log(a) for a in p if a > 0)
                mean = sum(a * b for a, b in zip(p, x, strict=True))
                rows["entropy"].append(entropy)
                if len(p) > 1:
                    rows["relative_entropy"].append(entropy / math.log(len(p)))
                rows["effective_keys"].append(math.exp(entropy))
                rows["log_normalizer"].append(math.log(sum(math.exp(b) for b in x)))
                rows["score_mean"].append(mean)
                rows["score_variance"].append(sum(a * (b - mean) ** 2 for a, b in zip(p, x, strict=True)))
            count = len(rows["entropy"])
            result["queries"][n, h] = count
            if count == 0:
                result["score_max"][n, h] = -math.inf
                continue
            for name in names[1:]:
                if rows[name]:
                    value = max(rows[name]) if name == "score_max" else sum(rows[name]) / len(rows[name])
                    result[name][n, h] = value
            G = rows["log_normalizer"]
            centre = sum(G) / count
            result["log_normalizer_std"][n, h] = math.sqrt(sum((g - centre) ** 2 for g in G) / count)
            result["key_mass_simpson"][n, h] = float((mass**2).sum() / mass.sum() ** 2)
            shares, wanted = mass / mass.sum(), even / even.sum()
            terms = [float(a) * math.log(float(a / b)) for a, b in zip(shares, wanted, strict=True) if a > 0]
            result["key_mass_divergence"][n, h] = sum(terms)
    return result
