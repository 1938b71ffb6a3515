r"""Brackets for divergences and entropies of mixtures that hold without sampling.

For mixtures f = Σ_a π_a f_a and g = Σ_b ω_b g_b of an exponential family, two inequalities on E_{f_a}[log g]
do all the work:

    variational   E_{f_a} log g  ≥  log Σ_b ω_b e^{−KL(f_a‖g_b)} − H(f_a)
    Jensen        E_{f_a} log g  ≤  log Σ_b ω_b ∫ f_a g_b

(Hershey and Olsen 2007; Durrieu, Thiran and Kelly 2012). KL(f_a‖g_b) and, where the base measure is 1, ∫ f_a
g_b = e^{A(θ_a+θ_b)−A(θ_a)−A(θ_b)} are closed. The upper bound on KL(f‖g) is the log-sum inequality over
couplings of the components, tightened by alternating minimisation: every round gives a bound, no worse than
the one before.
"""

import torch
from torch import Tensor

from exptilt.families.family import ExponentialFamily


def pairwise_kl(f: ExponentialFamily, g: ExponentialFamily) -> Tensor:
    """KL(f_a ‖ g_b) for components with batch ``(..., A)`` and ``(..., B)``: ``(..., A, B)``."""
    rows, columns = _pairs(f, g)
    return rows._kl(columns).clamp_min(0)


def pairwise_overlap(f: ExponentialFamily, g: ExponentialFamily) -> Tensor:
    """Log ∫ f_a g_b, ``(..., A, B)``, for base measure 1; infinite where the integral diverges."""
    rows, columns = _pairs(f, g)
    return rows._overlap(columns)


def _pairs(f: ExponentialFamily, g: ExponentialFamily) -> tuple[ExponentialFamily, ExponentialFamily]:
    """The components with batch ``(..., A, 1)`` and ``(..., 1, B)``."""
    rows = f.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event))
    columns = g.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event - 1) if leaf.ndim > event else leaf)
    return rows, columns


def log_lower(f: ExponentialFamily, log_weight: Tensor, g: ExponentialFamily) -> Tensor:
    """The variational lower bound on E_{f_a}[log Σ_b ω_b g_b]: ``(..., A)``."""
    return torch.logsumexp(_weighted(log_weight, -pairwise_kl(f, g)), -1) - f.entropy()


def log_upper(f: ExponentialFamily, log_weight: Tensor, g: ExponentialFamily) -> Tensor | None:
    """Jensen's upper bound on E_{f_a}[log Σ_b ω_b g_b]: ``(..., A)``; None if overlaps are not known."""
    return torch.logsumexp(_weighted(log_weight, pairwise_overlap(f, g)), -1) if f.flat_base else None


def entropy_bounds(log_weight: Tensor, f: ExponentialFamily) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on the entropy of a mixture, ``(...)`` each; log-weights must be normalised."""
    weight = log_weight.exp()
    # Σ π H(f_a) ≤ H(f) ≤ Σ π H(f_a) + H(π): conditioning never raises entropy, and `log_lower` includes the
    # right side.
    within, high = _expect(weight, f.entropy()), log_upper(f, log_weight, f)
    lower = within if high is None else torch.maximum(within, -_expect(weight, high))
    return lower, -_expect(weight, log_lower(f, log_weight, f))


def kl_bounds(
    log_p: Tensor, f: ExponentialFamily, log_q: Tensor, g: ExponentialFamily, rounds: int = 30
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on KL(Σ π_a f_a ‖ Σ ω_b g_b), ``(...)`` each; normalised log-weights."""
    upper = _coupling_bound(log_p, log_q, pairwise_kl(f, g), rounds)
    other = log_upper(f, log_q, g)
    if other is None:
        return torch.zeros_like(upper), upper
    return _expect(log_p.exp(), log_lower(f, log_p, f) - other).clamp_min(0), upper


def _coupling_bound(log_p: Tensor, log_q: Tensor, divergence: Tensor, rounds: int) -> Tensor:
    """Min over φ, ψ ≥ 0 with row sums π of φ and column sums ω of ψ of Σ_ab φ_ab (log φ_ab/ψ_ab + KL_ab)."""
    psi = log_p.unsqueeze(-1) + log_q.unsqueeze(-2)
    phi = psi
    for _ in range(rounds):
        phi = log_p.unsqueeze(-1) + _log_softmax(psi - divergence, -1)
        psi = log_q.unsqueeze(-2) + _log_softmax(phi, -2)
    cost = torch.where(phi > -torch.inf, phi - psi + divergence, 0.0)
    return (phi.exp() * cost).sum((-2, -1))


def _log_softmax(score: Tensor, dim: int) -> Tensor:
    """torch's `log_softmax`, but uniform where all scores are −inf (no weight, or infinite divergence)."""
    alive = (score > -torch.inf).any(dim, keepdim=True)
    return torch.log_softmax(torch.where(alive, score, 0.0), dim)


def _weighted(log_weight: Tensor, value: Tensor) -> Tensor:
    """Log ω_b + value_ab; −inf where ω_b = 0, even if the value is infinite."""
    weight = log_weight.unsqueeze(-2)
    return weight + torch.where(weight > -torch.inf, value, 0.0)


def _expect(weight: Tensor, value: Tensor) -> Tensor:
    """Σ weight · value, where a weight of 0 counts as 0 even if the value is infinite."""
    return (weight * torch.where(weight > 0, value, 0.0)).sum(-1)
