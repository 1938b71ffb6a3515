r"""The Dirichlet distribution on the simplex.

Sufficient statistic u(x) = log x, natural parameter θ = α − 1, A = Σ log Γ(α_k) − log Γ(Σ α_k), E[log x_k] =
ψ(α_k) − ψ(Σ α). x is no part of u, so tilting acts on log x: η adds pseudo-counts. Densities are with respect
to Lebesgue measure of the first K − 1 coordinates.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import dot
from exptilt.families.measure import Base, make
from exptilt.families.members.positive import PositiveFamily
from exptilt.families.numerics.deviance import gamma_kl, gamma_log_density, not_negative
from exptilt.families.numerics.draws import log_standard_gamma
from exptilt.families.numerics.gamma_functions import (
    dirichlet_mean,
    gamma_entropy,
    invert_dirichlet,
    log_sum_exp,
)


def dirichlet_kl(a: Tensor, b: Tensor) -> Tensor:
    r"""KL(Dirichlet(a) ‖ Dirichlet(b)) along the last axis.

    log B(b)/B(a) + ⟨a − b, ψ(a) − ψ(Σa)⟩, computed as the KL of independent gammas minus that of their sums,
    with rates that give the sums the same mean:

        Σ_k KL(Gamma(a_k, 1) ‖ Gamma(b_k, B/A)) − KL(Gamma(A, 1) ‖ Gamma(B, B/A)),     A = Σa,  B = Σb
    """
    total, others = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
    change, log_rate = (others - total) / total, others.log() - total.log()
    sums = gamma_kl(total, others, change, log_rate).squeeze(-1)
    return not_negative(gamma_kl(a, b, change, log_rate).sum(-1) - sums)


def dirichlet_entropy(a: Tensor) -> Tensor:
    """Entropy of Dirichlet(a) along the last axis, log B(a) + (A − K) ψ(A) − Σ_k (a_k − 1) ψ(a_k)."""
    total = a.sum(-1)
    return gamma_entropy(a).sum(-1) - gamma_entropy(total) - (a.shape[-1] - 1) * torch.digamma(total)


def dirichlet_mean_error(reached: Tensor, mean: Tensor) -> Tensor:
    """The largest relative error of the entries of E log x and of the gap −log Σ e^{E log x}.

    The gap determines the size of α. Its error counts beyond the rounding of the mean; if that rounding is a
    hundredth of the gap or more, α is not determined and the error is infinite.
    """
    each = ((reached - mean) / mean).abs().amax(-1)
    gap = -log_sum_exp(mean)
    rounding = 4 * torch.finfo(mean.dtype).eps * dot(torch.softmax(mean, -1), mean.abs()) / gap
    off = ((log_sum_exp(reached) + gap).abs() / gap - rounding).clamp_min(0)
    return torch.where(rounding < 0.01, torch.maximum(each, off), torch.inf)


@dataclass(frozen=True, eq=False)
class Dirichlet(PositiveFamily):
    """Distribution of a probability vector.

    Args:
        concentration: ``(..., K)``, positive, K >= 2.

    Example:
        >>> Dirichlet(torch.tensor([2.0, 1.0])).mean()
        tensor([-0.5000, -1.5000])
    """

    concentration: Tensor
    event_dims: ClassVar = {"concentration": 1}
    base = Base.SIMPLEX
    identity_coordinate = False
    _positive = ("concentration",)
    _least_length = 2
    _twin = (distributions.Dirichlet, {"concentration": "concentration"})

    @property
    def natural_parameter(self) -> Tensor:
        """α − 1, ``(..., K)``."""
        return self.concentration - 1

    @property
    def mean_parameter(self) -> Tensor:
        """E log x, ``(..., K)``."""
        return dirichlet_mean(self.concentration)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, concentration=theta + 1)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, concentration=invert_dirichlet(mean))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """log Σ e^{E log x}, which is below 0 by Jensen's inequality."""
        return log_sum_exp(mean)

    @classmethod
    def _mean_error(cls, reached: Tensor, mean: Tensor) -> Tensor:
        return dirichlet_mean_error(reached, mean)

    def _dual(self, mean: Tensor) -> Tensor:
        return invert_dirichlet(mean) - self.concentration

    def _log_partition(self) -> Tensor:
        return torch.lgamma(self.concentration).sum(-1) - torch.lgamma(self.concentration.sum(-1))

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return x.log()

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        alpha = self.concentration.expand(*shape, *self.concentration.shape)
        return torch.log_softmax(log_standard_gamma(alpha, generator), -1)

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        """Log-density of independent gammas at τx minus that of their sum at τ = Σα."""
        total = self.concentration.sum(-1, keepdim=True)
        log_total = total.log()
        each = gamma_log_density(self.concentration, total * x, log_total + log_x) - log_x
        return each.sum(-1) - gamma_log_density(total, total, log_total).squeeze(-1)

    def _support(self, x: Tensor) -> Tensor:
        on: Tensor = (x > 0).all(-1) & ((x.sum(-1) - 1).abs() <= torch.finfo(x.dtype).eps ** 0.5)
        return on

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        total = self.concentration.sum(-1, keepdim=True)
        mean = self.concentration / total
        return mean, mean * ((total - self.concentration) / total) / (total + 1)

    def _entropy(self) -> Tensor:
        return dirichlet_entropy(self.concentration)

    def _kl(self, other: Self) -> Tensor:
        return dirichlet_kl(self.concentration, other.concentration)

    def _covariance(self, eta: Tensor) -> Tensor:
        alpha = self.concentration + eta
        shared = torch.polygamma(1, alpha.sum(-1))[..., None, None]
        return torch.diag_embed(torch.polygamma(1, alpha)) - shared

    def _event_covariance(self) -> Tensor:
        """(diag m − mm')/(Σα + 1); singular because draws sum to 1."""
        total = self.concentration.sum(-1, keepdim=True)
        mean = self.concentration / total
        return (torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)) / (total + 1).unsqueeze(-1)

    def _mode(self) -> Tensor:
        """(α − 1)/(Σα − K) where every α is above 1, NaN elsewhere."""
        extra = self.concentration - 1
        inside = (extra > 0).all(-1, keepdim=True)
        return torch.where(inside, extra / extra.sum(-1, keepdim=True), torch.nan)
