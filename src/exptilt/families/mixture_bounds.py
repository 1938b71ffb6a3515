r"""Brackets for divergences and entropies of mixtures that hold without sampling.

For mixtures f = Σ_a π_a f_a and g = Σ_b ω_b g_b of an exponential family, two inequalities on E_{f_a}[log g] do all the work:

    variational   E_{f_a} log g  ≥  log Σ_b ω_b e^{−KL(f_a‖g_b)} − H(f_a)
    Jensen        E_{f_a} log g  ≤  log Σ_b ω_b ∫ f_a g_b

(Hershey and Olsen 2007; Durrieu, Thiran and Kelly 2012). KL(f_a‖g_b) and, where the base measure is 1, ∫ f_a g_b =
e^{A(θ_a+θ_b)−A(θ_a)−A(θ_b)} are closed. The upper bound on KL(f‖g) is the log-sum inequality over couplings of the components, tightened
by alternating minimisation: every round is a bound, and none is worse than the one before.
"""

import torch
from torch import Tensor

from exptilt.families.family import ExponentialFamily


def pairwise_kl(f: ExponentialFamily, g: ExponentialFamily) -> Tensor:
    """KL(f_a ‖ g_b) for components with batch ``(..., A)`` and ``(..., B)``: ``(..., A, B)``."""
    rows, columns = _pairs(f, g)
    return rows._kl(columns).clamp_min(0)


def pairwise_overlap(f: ExponentialFamily, g: ExponentialFamily) -> Tensor:
    """Log ∫ f_a g_b, ``(..., A, B)``; infinite where it diverges or is not known."""
    rows, columns = _pairs(f, g)
    if not f.flat_base:
        return torch.full(torch.broadcast_shapes(rows.batch_shape, columns.batch_shape), torch.inf, dtype=f.dtype, device=f.device)
    return rows._overlap(columns)


def _pairs(f: ExponentialFamily, g: ExponentialFamily) -> tuple[ExponentialFamily, ExponentialFamily]:
    """The components with batch ``(..., A, 1)`` and ``(..., 1, B)``."""
    rows = f.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event))
    columns = g.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event - 1) if leaf.ndim > event else leaf)
    return rows, columns


def expected_log_bounds(f: ExponentialFamily, log_weight: Tensor, g: ExponentialFamily) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on E_{f_a}[log Σ_b ω_b g_b]: ``(..., A)`` each."""
    weight = log_weight.unsqueeze(-2)
    lower = torch.logsumexp(weight - pairwise_kl(f, g), -1) - f.entropy()
    return lower, torch.logsumexp(weight + pairwise_overlap(f, g), -1)


def entropy_bounds(log_weight: Tensor, f: ExponentialFamily) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on the entropy of a mixture with normalised log-weights ``(..., K)``: ``(...)`` each."""
    low, high = expected_log_bounds(f, log_weight, f)
    weight = log_weight.exp()
    # Σ π H(f_a) ≤ H(f) ≤ Σ π H(f_a) + H(π): conditioning never raises entropy, and `low` includes the right side.
    within = _expect(weight, f.entropy())
    return torch.maximum(within, -_expect(weight, high)), -_expect(weight, low)


def kl_bounds(log_p: Tensor, f: ExponentialFamily, log_q: Tensor, g: ExponentialFamily, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on KL(Σ π_a f_a ‖ Σ ω_b g_b), log-weights normalised ``(..., A)`` and ``(..., B)``: ``(...)`` each."""
    weight = log_p.exp()
    own, _ = expected_log_bounds(f, log_p, f)
    _, other = expected_log_bounds(f, log_q, g)
    lower = _expect(weight, own - other).clamp_min(0)
    return lower, _coupling_bound(log_p, log_q, pairwise_kl(f, g), rounds)


def _coupling_bound(log_p: Tensor, log_q: Tensor, divergence: Tensor, rounds: int) -> Tensor:
    """Min over φ, ψ ≥ 0 with row sums π of φ and column sums ω of ψ of Σ_ab φ_ab (log φ_ab/ψ_ab + KL_ab), from the independent coupling."""
    psi = log_p.unsqueeze(-1) + log_q.unsqueeze(-2)
    phi = psi
    for _ in range(rounds):
        phi = log_p.unsqueeze(-1) + torch.log_softmax(psi - divergence, -1)
        column = torch.logsumexp(phi, -2, keepdim=True)
        psi = torch.where(column > -torch.inf, log_q.unsqueeze(-2) + phi - column, -torch.inf)
    cost = phi - psi + divergence
    return torch.where(phi > -torch.inf, phi.exp() * cost, 0.0).sum((-2, -1))


def _expect(weight: Tensor, value: Tensor) -> Tensor:
    """Σ weight · value, where nothing times infinity is nothing."""
    return torch.where(weight > 0, weight * value, 0.0).sum(-1)
