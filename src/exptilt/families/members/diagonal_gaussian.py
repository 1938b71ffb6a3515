r"""The Gaussian with independent coordinates, N(μ, diag σ²).

    G(η) = ⟨μ,η⟩ + ½ ⟨σ², η²⟩,     ∇G(η) = μ + σ² η

Sufficient statistic u(x) = (x, x²), natural parameter θ = (μ/σ², −1/(2σ²)).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import dot
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.numerics.deviance import log_excess
from exptilt.families.numerics.draws import standard_normal


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(ExponentialFamily):
    """Normal distribution with a diagonal covariance.

    Args:
        mean_vector: ``(..., D)``.
        variance: ``(..., D)``, positive.

    Example:
        >>> DiagonalGaussian(torch.zeros(2), torch.tensor([2.0, 1.0])).mean(torch.ones(2))
        tensor([2., 1.])
    """

    mean_vector: Tensor
    variance: Tensor
    event_dims: ClassVar = {"mean_vector": 1, "variance": 1}
    _reach = (-math.inf, math.inf, None)
    _decay = 2.0
    _differentiable_draws = True
    _tilts_everywhere = True
    _positive = ("variance",)
    _twin = (distributions.Normal, {"mean_vector": "loc", "variance": "scale"})
    _squares = ("variance",)
    _statistic_size = staticmethod(lambda d: 2 * d)

    @property
    def natural_parameter(self) -> Tensor:
        """(μ/σ², −1/(2σ²)), ``(..., 2D)``."""
        return torch.cat(torch.broadcast_tensors(self.mean_vector / self.variance, -0.5 / self.variance), -1)

    @property
    def mean_parameter(self) -> Tensor:
        """(μ, μ² + σ²), ``(..., 2D)``."""
        return torch.cat(torch.broadcast_tensors(self.mean_vector, self.mean_vector**2 + self.variance), -1)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second = theta.chunk(2, -1)
        variance = -0.5 / second
        return make(cls, mean_vector=first * variance, variance=variance)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        first, second = mean.chunk(2, -1)
        return make(cls, mean_vector=first, variance=second - first**2)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        first, second = mean.chunk(2, -1)
        return (first**2 - second).amax(-1)

    def _log_partition(self) -> Tensor:
        return (self.mean_vector**2 / self.variance + (2 * math.pi * self.variance).log()).sum(-1) / 2

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return torch.cat([x, x**2], -1)

    def _log_prob(self, x: Tensor) -> Tensor:
        square = (x - self.mean_vector) ** 2 / self.variance
        return -(square + (2 * math.pi * self.variance).log()).sum(-1) / 2

    def _entropy(self) -> Tensor:
        return ((2 * math.pi * math.e * self.variance).log().sum(-1) / 2).expand(self.batch_shape)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        noise = standard_normal(self.mean_vector, (*shape, *self.batch_shape, self.dimension), generator)
        return self.mean_vector + self.variance.sqrt() * noise

    def _kl(self, other: Self) -> Tensor:
        """½ Σ (r − 1 − log r + δ²/σ'²) with r = σ²/σ'²."""
        excess = log_excess(self.variance, other.variance)
        offset = (other.mean_vector - self.mean_vector) ** 2 / other.variance
        return (excess + offset).sum(-1) / 2

    def _overlap(self, other: Self) -> Tensor:
        """log N(μ | μ', diag(σ² + σ'²))."""
        variance = self.variance + other.variance
        return make(type(self), mean_vector=other.mean_vector, variance=variance)._log_prob(self.mean_vector)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return dot(self.mean_vector, eta) + dot(self.variance, eta**2) / 2

    def _mean(self, eta: Tensor) -> Tensor:
        return self.mean_vector + self.variance * eta

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self.variance).expand(*eta.shape, self.dimension)

    def _tilt(self, eta: Tensor) -> Self:
        return make(type(self), mean_vector=self._mean(eta), variance=self.variance)

    def _dual(self, mean: Tensor) -> Tensor:
        return (mean - self.mean_vector) / self.variance

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return None

    def _mode(self) -> Tensor:
        return self.mean_vector.expand(*self.batch_shape, -1)

    def _cdf(self, x: Tensor) -> Tensor:
        value: Tensor = torch.special.ndtr((x - self.mean_vector) / self.variance.sqrt())
        return value

    def _icdf(self, q: Tensor) -> Tensor:
        value: Tensor = self.mean_vector + self.variance.sqrt() * torch.special.ndtri(q)
        return value
