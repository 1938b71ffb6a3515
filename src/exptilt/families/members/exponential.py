r"""Independent exponential waiting times.

    G(η) = −Σ_d log(1 − η_d/λ_d)   for η < λ,     ∇G(η) = 1 / (λ − η)

Sufficient statistic u(x) = x, natural parameter θ = −λ.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
from exptilt.families.family import PositiveFamily
from exptilt.families.measure import make
from exptilt.families.members.gamma import Gamma
from exptilt.families.numerics.deviance import log_excess


@dataclass(frozen=True, eq=False)
class Exponential(PositiveFamily):
    """D independent exponential variables.

    Args:
        rate: ``(..., D)``, positive.

    Example:
        >>> Exponential(torch.tensor([2.0])).mean(torch.tensor([1.0]))
        tensor([1.])
    """

    rate: Tensor
    event_dims: ClassVar = {"rate": 1}
    _reach = (0.0, math.inf, None)
    _decay = 1.0
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

    def _as_gamma(self) -> Gamma:
        """The same law as a `Gamma`."""
        return make(Gamma, shape=torch.ones_like(self.rate), rate=self.rate)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, rate=-theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, rate=1 / mean)

    def _log_partition(self) -> Tensor:
        return -self.rate.log().sum(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.rate.shape)
        uniform = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        return -torch.log1p(-uniform) / self.rate

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return self._as_gamma()._sample_inner(shape, generator)

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        return (self.rate.log() - self.rate * x).sum(-1)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._as_gamma()._log_normalizer(eta)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d r − 1 − log r with r = λ'/λ."""
        return log_excess(other.rate, self.rate).sum(-1)

    def _entropy(self) -> Tensor:
        return (1 - self.rate.log()).sum(-1)

    def _tilt(self, eta: Tensor) -> Self:
        rate = self.rate - eta
        entries("Exponential", "eta", eta.expand(rate.shape), rate > 0, "below the rate")
        return make(type(self), rate=rate)

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed((self.rate - eta) ** -2)

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        return self._as_gamma()._step_for(reached, wanted)

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return -1.0, torch.ones_like(self.rate)

    def _mode(self) -> Tensor:
        return torch.zeros_like(self.rate)

    def _cdf(self, x: Tensor) -> Tensor:
        return -torch.expm1(-self.rate * x.clamp_min(0))

    def _icdf(self, q: Tensor) -> Tensor:
        return -torch.log1p(-q) / self.rate
