r"""Sums of exponentials, and the KL divergence of measures that need not be normalised (THEORY A13).

    D(m ‖ h) = Σ_j m_j log(m_j/h_j) − m_j + h_j

is to the sum of exponentials what the KL divergence is to its logarithm: as maxima over all masses m ≥ 0, and
over probabilities p alone,

        Σ_j h_j e^{s_j} = max_m [⟨s, m⟩ − D(m ‖ h)] + Σ_j h_j,
    log Σ_j h_j e^{s_j} = max_p [⟨s, p⟩ − KL(p ‖ h)],

attained at m_j = h_j e^{s_j} and at p = m / Σ_j m_j. So with M = e^G in place of G, the tilted measure
stays unnormalised, and the Bregman divergence of M is D where that of G is KL. Minimising M over tilts, with
points −y_i f(x_i), is AdaBoost (Collins, Schapire and Singer 2000).
"""

import torch
from torch import Tensor

from exptilt._support.checks import entries, floating
from exptilt.families.measure import Measure
from exptilt.families.numerics.deviance import deviance


def unnormalized_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ_j p_j log(p_j/q_j) − p_j + q_j, at least 0; the KL divergence if p and q have the same sum.

    Args:
        p: ``(..., N)``, masses of at least 0.
        q: ``(..., N)``, masses of at least 0.

    Returns:
        ``(...)``, infinite where p has mass and q has none.

    Example:
        >>> unnormalized_kl(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))  # log ½ − 1 + 2
        tensor(0.3069)
    """
    for name, mass in (("p", p), ("q", q)):
        floating("unnormalized_kl", name, mass, axes=1, shape="(..., N)")
        entries("unnormalized_kl", name, mass, mass >= 0, "at least 0")
    some, other = torch.where(p > 0, p, 1.0), torch.where(q > 0, q, 1.0)
    both = deviance(some, other - some, other.log() - some.log())
    return torch.where(p > 0, torch.where(q > 0, both, torch.inf), q).sum(-1)


def exponential_sum(h: Measure, eta: Tensor) -> Tensor:
    """M(η) = ∫ h(x) e^{⟨t(x),η⟩}, the mass of the tilted measure: the sum whose logarithm is G.

    Args:
        h: a measure, such as `Empirical` with its log-weights.
        eta: ``(..., D)``.

    Returns:
        ``(...)``; its gradient is M(η) times the tilted mean.
    """
    return h.log_normalizer(eta).exp()


def exponential_bregman(h: Measure, a: Tensor, b: Tensor) -> Tensor:
    """M(a) − M(b) − ⟨∇M(b), a − b⟩ = D(h_b ‖ h_a) of h tilted by b and by a, not normalised.

    Equal to M(b) KL(p_b ‖ p_a) + D(M(b) ‖ M(a)).

    Args:
        h: a measure.
        a: ``(..., D)``.
        b: ``(..., D)``, where G is finite.

    Returns:
        ``(...)``, at least 0.
    """
    divergence, log_a, log_b = h.bregman(a, b), h.log_normalizer(a), h.log_normalizer(b)
    mass, ratio = log_b.exp(), log_a - log_b
    return mass * (divergence + deviance(torch.ones_like(ratio), torch.expm1(ratio), ratio))
