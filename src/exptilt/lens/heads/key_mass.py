r"""The attention that each key draws, and what it would draw from queries that attend evenly.

    m_j = Σ_i p_ij,   even_j = Σ_i 1/n_i over the queries i that see key j,   n_i = number of keys i sees

Under a causal mask early keys are seen by more queries, and by queries that see little else, so that even
attention piles mass on them. Two numbers say how unevenly keys draw attention:

    simpson      Σ_j m_j² / (Σ_j m_j)²    its inverse is the number of keys that share attention
    divergence   Σ_j p_j log(p_j / q_j)   of the shares p of m from the shares q of even: 0 for even attention
"""

from typing import Any

import torch
from torch import Tensor

from exptilt.lens.heads.visibility import Visibility
from exptilt.tilting import attend
from exptilt.tilting.problem import wide_dtype


def key_mass(
    query: Tensor, key: Tensor, options: dict[str, Any], visible: Visibility, check: bool | None = None
) -> Tensor:
    """The attention each key draws from real queries, ``(batch, Hq, K)``; `options` are those of `attend`."""
    bias = options.get("bias")
    if visible.real_query is not None:
        absent = torch.where(visible.real_query, 0.0, -torch.inf)[:, None, :, None]
        bias = absent.to(wide_dtype(query.dtype)) if bias is None else bias + absent.to(bias.dtype)
    mass = attend(query, key, key[..., :0], **{**options, "bias": bias}, key_mass=True, check=check).key_mass
    assert mass is not None
    return mass


def simpson(mass: Tensor) -> Tensor:
    """Simpson's index Σ m² / (Σ m)² of mass ``(..., key)``."""
    return mass.square().sum(-1) / mass.sum(-1).square()


def divergence(mass: Tensor, even: Tensor) -> Tensor:
    """KL divergence, in nats, of the shares of mass ``(..., key)`` from the shares under even attention."""
    p, q = (x.double() / x.double().sum(-1, keepdim=True) for x in (mass, even))
    return torch.where(p > 0, p * (p.clamp_min(1e-300) / q).log(), 0.0).sum(-1)
