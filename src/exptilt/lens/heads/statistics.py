r"""From the statistics of every query to those of a head: one small tensor a call.

Over the queries i of a head that count (real ones, that see a key):

    entropy            mean of H_i                          effective_keys     mean of e^{H_i}
    relative_entropy   mean of H_i / log(outcomes of i), over queries with more than one outcome
    log_normalizer     mean of G_i, and its variance        score_mean, score_variance   means over queries
    score_max          the largest                          first_key_mass     mean of e^{s_{i1} − G_i}, s_{i1} the first real key's score
    key_mass_concentration     Σ_j m_j² / (Σ_j m_j)², m_j the attention that key j gets from all queries

The first key's mass needs one score a query, so O(n) work; the mass of all keys is a second sweep over them and made only if asked for.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt.attention import attend
from exptilt.lens.heads.visibility import Sight
from exptilt.tilting import Tilted

PER_QUERY = ("entropy", "log_normalizer", "score_mean", "score_variance", "score_max", "first_key_mass")
FIELDS = (
    "queries", "relative_queries", "visible_keys", "entropy", "relative_entropy", "effective_keys", "log_normalizer",
    "log_normalizer_variance", "score_mean", "score_variance", "score_max", "first_key_mass", "key_mass_concentration",
)  # fmt: skip


def first_key_mass(
    query: Tensor, key: Tensor, options: dict[str, Any], first: Tensor | None, G: Tensor
) -> Tensor:
    """(N, Hq, Q): the attention that each query gives to the first real key.

    Args:
        query: ``(N, Hq, Q, D)``.
        key: ``(N, Hkv, K, D)``.
        options: as in `AttentionCall`.
        first: ``(N,)`` place of the first real key, None for 0.
        G: ``(N, Hq, Q)``, the log-normalizers.
    """
    N, Hq, Q, _ = query.shape
    Hkv, K = key.shape[1:3]
    if K == 0:
        return torch.zeros_like(G)
    at = torch.zeros(1, dtype=torch.int64, device=key.device) if first is None else first
    rows = torch.arange(at.shape[0], device=key.device)

    def column(x: Tensor) -> Tensor:
        """(N or 1, heads or 1, Q or 1): the part of a bias or mask that belongs to the first key."""
        if x.shape[-1] == 1 and K > 1:
            return x[..., 0]
        return x[..., 0] if first is None else x.expand(N, *x.shape[1:])[rows, :, :, at]

    k = (key[:, :, 0] if first is None else key[rows, :, at]).to(G.dtype)
    s = options["scale"] * (query.to(G.dtype) @ k.repeat_interleave(Hq // Hkv, 1)[..., None])[..., 0]
    if options.get("softcap") is not None:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if options.get("bias") is not None:
        s = s + column(options["bias"])
    p = torch.exp((s - G).clamp(max=0))
    own = torch.arange(Q, device=key.device) + (K - Q) - at[:, None, None]  # how far back the first key is
    hidden = torch.isneginf(G)
    if options.get("causal"):
        hidden = hidden | (own < 0)
    if options.get("window") is not None:
        hidden = hidden | (own >= options["window"])
        if not options.get("causal"):
            hidden = hidden | (own <= -options["window"])
    if options.get("mask") is not None:
        hidden = hidden | ~column(options["mask"])
    return p.masked_fill(hidden, 0.0)


def mass_of_keys(
    query: Tensor, key: Tensor, options: dict[str, Any], sight: Sight, check: bool | None = None
) -> Tensor:
    """(N, Hq, K): the attention each key gets from the queries that are real."""
    bias = options.get("bias")
    if sight.real_query is not None:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        absent = torch.zeros(sight.real_query.shape, dtype=wide, device=query.device).masked_fill(
            ~sight.real_query, -torch.inf
        )
        bias = absent[:, None, :, None] if bias is None else bias + absent[:, None, :, None].to(bias.dtype)
    mass = attend(query, key, key[..., :0], **{**options, "bias": bias}, key_mass=True, check=check).key_mass
    assert mass is not None
    return mass


def summarise(
    tilted: Tilted, first_mass: Tensor, key_mass: Tensor | None, sight: Sight, sink: bool
) -> Tensor:
    """(fields, N, Hq): `FIELDS` of each head and batch item.

    Args:
        tilted: statistics of the call.
        first_mass: ``(N, Hq, Q)``.
        key_mass: ``(N, Hq, K)`` or None.
        sight: of the call.
        sink: whether there is one more outcome.
    """
    G, H, top = tilted.log_normalizer, tilted.entropy, tilted.score_max
    N, heads, Q = G.shape
    counted = sight.counted
    inverse, relative_queries = sight.relative(sink)
    visible = sight.visible.to(G.dtype).expand_as(G)
    rows = torch.stack([visible, H, H.exp(), G, tilted.score_mean, tilted.score_variance, first_mass])
    if counted is None:
        number = G.new_full((N, heads), Q)
        means = rows.mean(-1)
        spread = (G - means[3][..., None]).square().mean(-1)
    else:
        number = counted.sum(-1).to(G.dtype).expand(N, heads)
        means = rows.masked_fill(~counted, 0.0).sum(-1) / number
        spread = (G - means[3][..., None]).square().masked_fill(~counted, 0.0).sum(-1) / number
        top = top.masked_fill(~counted, -torch.inf)
    relative = (H * inverse.to(H.dtype)).sum(-1) / relative_queries
    highest = top.amax(-1) if Q else top.new_full((N, heads), -torch.inf)
    if key_mass is None:
        concentration = torch.full_like(number, torch.nan)
    else:
        concentration = key_mass.square().sum(-1) / key_mass.sum(-1).square()
    spread_relative = relative_queries.to(G.dtype).expand(N, heads)
    seen, entropy, effective, log_normalizer, mean, variance, first = means
    return torch.stack(
        [
            number,
            spread_relative,
            seen,
            entropy,
            relative,
            effective,
            log_normalizer,
            spread,
            mean,
            variance,
            highest,
            first,
            concentration,
        ]
    )
