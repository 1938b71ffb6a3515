r"""The normal-gamma distribution of means and precisions: the conjugate prior of `DiagonalGaussian`.

    τ ~ Gamma(a, b),     μ | τ ~ N(m, 1/(κτ))

Coordinate by coordinate. Sufficient statistic u(μ, τ) = (τμ, τ, τμ², log τ), natural parameter θ = (κm, −b −
½κm², −½κ, a − ½). Tilting acts on all of u.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.members.gamma import Gamma
from exptilt.families.numerics.deviance import log_excess
from exptilt.families.numerics.draws import log_standard_gamma, standard_normal
from exptilt.families.numerics.gamma_functions import invert_digamma_gap


class MeanPrecision(NamedTuple):
    """An event of a `NormalGamma`: ``mean (..., D)`` and ``precision (..., D)``."""

    mean: Tensor
    precision: Tensor


@dataclass(frozen=True, eq=False)
class NormalGamma(ExponentialFamily):
    """D independent normal-gamma pairs.

    Args:
        location: ``(..., D)``, m.
        count: ``(..., D)``, κ, how many observations the location is worth, positive.
        shape: ``(..., D)``, a, positive.
        rate: ``(..., D)``, b, positive.
    """

    location: Tensor
    count: Tensor
    shape: Tensor
    rate: Tensor
    event_dims: ClassVar = {"location": 1, "count": 1, "shape": 1, "rate": 1}
    _differentiable_draws = True
    identity_coordinate = False
    _positive = ("count", "shape", "rate")
    _statistic_size = staticmethod(lambda d: 4 * d)
    _event_ranks = (1, 1)
    _inner_form = ("√τ μ, log τ", (1, 1))

    @property
    def natural_parameter(self) -> Tensor:
        """(κm, −b − ½κm², −½κ, a − ½), ``(..., 4D)``."""
        m, k = self.location, self.count
        parts = torch.broadcast_tensors(k * m, -self.rate - k * m**2 / 2, -k / 2, self.shape - 0.5)
        return torch.cat(parts, -1)

    @property
    def mean_parameter(self) -> Tensor:
        """(E τμ, E τ, E τμ², E log τ), ``(..., 4D)``."""
        m, precision = self.location, self.shape / self.rate
        log_precision = torch.digamma(self.shape) - self.rate.log()
        square = 1 / self.count + m**2 * precision
        return torch.cat(torch.broadcast_tensors(m * precision, precision, square, log_precision), -1)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second, third, fourth = theta.chunk(4, -1)
        count = -2 * third
        location = first / count
        rate = -second - first * location / 2
        return make(cls, location=location, count=count, shape=fourth + 0.5, rate=rate)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        weighted, precision, square, log_precision = mean.chunk(4, -1)
        shape = invert_digamma_gap(precision.log() - log_precision)
        location = weighted / precision
        count = 1 / (square - weighted * location)
        return make(cls, location=location, count=count, shape=shape, rate=shape / precision)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest violation of E τ > 0, of (E τμ)²/E τ < E τμ² and of E log τ < log E τ."""
        weighted, precision, square, log_precision = mean.chunk(4, -1)
        safe = precision.clamp_min(torch.finfo(mean.dtype).tiny)
        rest = torch.maximum(weighted**2 / safe - square, log_precision - safe.log())
        return torch.where(precision > 0, torch.maximum(-precision, rest), -precision).amax(-1)

    def _log_partition(self) -> Tensor:
        spread = (self.count / (2 * math.pi)).log().sum(-1) / 2
        return (self._precision()._log_partition() - spread).expand(self.batch_shape)

    @classmethod
    def _statistic(cls, x: MeanPrecision) -> Tensor:
        mean, precision = x
        return torch.cat([precision * mean, precision, precision * mean**2, precision.log()], -1)

    def _precision(self) -> Gamma:
        """The law of τ."""
        return make(Gamma, shape=self.shape, rate=self.rate)

    def _log_prob(self, x: MeanPrecision) -> Tensor:
        mean, precision = x
        square = self.count * (precision.sqrt() * (mean - self.location)) ** 2
        each = precision.log() + (self.count / (2 * math.pi)).log() - square
        return self._precision()._log_prob(precision) + each.sum(-1) / 2

    def _entropy(self) -> Tensor:
        """Entropy of τ plus the expected entropy of μ given τ, ½ (log 2πe/κ − E log τ)."""
        log_precision = torch.digamma(self.shape) - self.rate.log()
        spread = math.log(2 * math.pi * math.e) - self.count.log() - log_precision
        return (self._precision()._entropy() + spread.sum(-1) / 2).expand(self.batch_shape)

    def _kl(self, other: Self) -> Tensor:
        """KL of τ plus the expected KL of μ given τ, ½ (r − 1 − log r) + ½ κ' E τ (m − m')², r = κ'/κ."""
        excess = log_excess(other.count, self.count)
        offset = other.count * (self.shape / self.rate) * (self.location - other.location) ** 2
        return self._precision()._kl(other._precision()) + (excess + offset).sum(-1) / 2

    def _event_moments(self) -> tuple[MeanPrecision, MeanPrecision]:
        """E and Var of (μ, τ); μ is Student t with 2a degrees: a mean if a > ½, finite variance if a > 1."""
        a, b, _ = torch.broadcast_tensors(self.shape, self.rate, self.location)
        known = a > 0.5
        spread = torch.where(a > 1, b / (self.count * (a - 1).clamp_min(0)), torch.inf)
        return (
            MeanPrecision(torch.where(known, self.location, torch.nan), a / b),
            MeanPrecision(torch.where(known, spread, torch.nan), a / b**2),
        )

    def _support(self, x: MeanPrecision) -> Tensor:
        mean, precision = x
        return (mean.isfinite() & (precision > 0)).all(-1)

    def _from_inner(self, y: tuple[Tensor, Tensor]) -> MeanPrecision:
        limits = torch.finfo(self.dtype)
        precision = y[1].exp().clamp_min(limits.tiny)
        return MeanPrecision((y[0] / precision.sqrt()).clamp(-limits.max / 4, limits.max / 4), precision)

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        size = (*shape, *self.batch_shape, self.location.shape[-1])
        log_precision = log_standard_gamma(self.shape.expand(size), generator) - self.rate.log()
        noise = standard_normal(self.location, size, generator)
        return noise / self.count.sqrt() + (log_precision / 2).exp() * self.location, log_precision

    def _log_prob_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        weighted, log_precision = y
        square = self.count * (weighted - (log_precision / 2).exp() * self.location) ** 2
        each = log_precision + (self.count / (2 * math.pi)).log() - square
        return self._precision()._log_prob_inner(log_precision) + each.sum(-1) / 2
