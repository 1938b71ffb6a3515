r"""Independent exponential waiting times.

    G(η) = −Σ_d log(1 − η_d/λ_d)   for η < λ,     ∇G(η) = 1 / (λ − η)

Sufficient statistic u(x) = x, natural parameter θ = −λ. A coordinate is Gamma(1, λ).
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.measure import make
from exptilt.families.members.gamma import Gamma, GammaLaw


@dataclass(frozen=True, eq=False)
class Exponential(GammaLaw):
    """D independent exponential variables.

    Args:
        rate: ``(..., D)``, positive.

    Example:
        >>> Exponential(torch.tensor([2.0])).mean(torch.tensor([1.0]))
        tensor([1.])
    """

    rate: Tensor
    event_dims: ClassVar = {"rate": 1}
    _positive = ("rate",)
    _twin = (distributions.Exponential, {"rate": "rate"})

    @property
    def natural_parameter(self) -> Tensor:
        """−λ, ``(..., D)``."""
        return -self.rate

    @property
    def mean_parameter(self) -> Tensor:
        """1/λ, ``(..., D)``."""
        return 1 / self.rate

    @property
    def shape(self) -> Tensor:  # type: ignore[override]
        """1, ``(..., D)``."""
        return torch.ones_like(self.rate)

    def _as_gamma(self) -> Gamma:
        """The same law as a `Gamma`."""
        return make(Gamma, shape=self.shape, rate=self.rate)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, rate=-theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, rate=1 / mean)

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        return (self.rate.log() - self.rate * x).sum(-1)  # also at x = 0

    def _cdf(self, x: Tensor) -> Tensor:
        return -torch.expm1(-self.rate * x.clamp_min(0))

    def _icdf(self, q: Tensor) -> Tensor:
        return -torch.log1p(-q) / self.rate
