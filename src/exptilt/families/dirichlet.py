r"""The Dirichlet distribution on the simplex.

Sufficient statistic u(x) = log x, natural parameter θ = α − 1, A = Σ log Γ(α_k) − log Γ(Σ α_k), E[log x_k] = ψ(α_k) − ψ(Σ α). x is no
part of u, so tilting acts on log x: η adds pseudo-counts. Densities are with respect to Lebesgue measure of the first K − 1 coordinates.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.errors import ArgumentError
from exptilt.families.checks import check_positive, check_tensors
from exptilt.families.digamma import invert_dirichlet
from exptilt.families.draws import shares
from exptilt.families.family import ExponentialFamily
from exptilt.families.log_gamma import log_gamma, log_gamma_and_digamma
from exptilt.families.measure import Base, make


def dirichlet_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(Dirichlet(a) ‖ Dirichlet(b)) along the last axis: log B(b)/B(a) + <a − b, ψ(a) − ψ(Σa)>."""
    total = a.sum(-1)
    log_each, psi = log_gamma_and_digamma(a)
    log_total, psi_total = log_gamma_and_digamma(total)
    other = log_gamma(b) - log_each + (a - b) * (psi - psi_total.unsqueeze(-1))
    return other.sum(-1) + log_total - log_gamma(b.sum(-1))


@dataclass(frozen=True, eq=False)
class Dirichlet(ExponentialFamily):
    """Distribution of a probability vector.

    Args:
        concentration: ``(..., K)``, positive, K >= 2.

    Example:
        >>> Dirichlet(torch.tensor([2.0, 1.0])).mean()
        tensor([-0.5000, -1.5000])
    """

    concentration: Tensor
    event_dims: ClassVar = {"concentration": 1}
    _statistic_size = staticmethod(lambda d: d + 1)
    identity_coordinate = False
    base = Base.SIMPLEX

    def __post_init__(self) -> None:
        check_tensors("Dirichlet", {"concentration": (self.concentration, 1)})
        if self.concentration.shape[-1] < 2:
            raise ArgumentError(f"Dirichlet: concentration needs at least two entries; got shape {tuple(self.concentration.shape)}.")
        check_positive("Dirichlet", concentration=self.concentration)

    @property
    def natural_parameter(self) -> Tensor:
        """α − 1, ``(..., K)``."""
        return self.concentration - 1

    @property
    def mean_parameter(self) -> Tensor:
        """E log x, ``(..., K)``."""
        return torch.digamma(self.concentration) - torch.digamma(self.concentration.sum(-1, keepdim=True))

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, concentration=theta + 1)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, concentration=invert_dirichlet(mean))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Log Σ e^{E log x}, which Jensen keeps below 0."""
        return torch.logsumexp(mean, -1)

    @classmethod
    def _typical_mean(cls, mean: Tensor) -> Tensor:
        return make(cls, concentration=torch.ones_like(mean)).mean_parameter

    def _in_domain(self) -> Tensor:
        return (self.concentration > 0).all(-1)

    def _log_partition(self) -> Tensor:
        return torch.lgamma(self.concentration).sum(-1) - torch.lgamma(self.concentration.sum(-1))

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        """Log x, ``(..., K)``."""
        return x.log()

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Probability vectors, ``shape + batch + (K,)``."""
        alpha = self.concentration.expand(*shape, *self.concentration.shape)
        return shares(alpha, generator).clamp_min(torch.finfo(self.dtype).tiny)

    def _to_torch(self) -> distributions.Dirichlet:
        """The same as a `torch.distributions.Dirichlet`."""
        return distributions.Dirichlet(self.concentration)

    @classmethod
    def _from_torch(cls, other: Any) -> Self:
        """From a `torch.distributions.Dirichlet`."""
        return cls(other.concentration)

    def _support(self, x: Tensor) -> Tensor:
        return (x > 0).all(-1) & ((x.sum(-1) - 1).abs() <= torch.finfo(x.dtype).eps ** 0.5)

    def _kl(self, other: Self) -> Tensor:
        return dirichlet_kl(self.concentration, other.concentration)

    def _covariance(self, eta: Tensor) -> Tensor:
        alpha = self.concentration + eta
        return torch.diag_embed(torch.polygamma(1, alpha)) - torch.polygamma(1, alpha.sum(-1))[..., None, None]
