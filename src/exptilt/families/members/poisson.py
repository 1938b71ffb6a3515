r"""Independent Poisson counts.

    G(η) = Σ_d λ_d (e^{η_d} − 1),     ∇G(η) = λ e^η

Sufficient statistic u(x) = x, natural parameter θ = log λ, base measure b(x) = 1 / x!.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
from exptilt._support.linalg import total
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.numerics.deviance import deviance, deviance_of
from exptilt.families.numerics.distribution_functions import by_scipy, incomplete_gamma, least_count
from exptilt.families.numerics.draws import poisson
from exptilt.families.numerics.gamma_functions import HALF_LOG_2PI, remainder

_MANY = 64.0  # the entropy's series with five terms is used from this rate on, where it is right to 1e-10
_TERMS = 220  # number of counts in the sum below rate 64, where P(x >= 220) < 1e-50


@dataclass(frozen=True, eq=False)
class Poisson(ExponentialFamily):
    """D independent Poisson counts.

    Args:
        rate: ``(..., D)``, positive.

    Example:
        >>> Poisson(torch.tensor([3.0])).mean(torch.tensor([2.0]).log())
        tensor([6.])
    """

    rate: Tensor
    event_dims: ClassVar = {"rate": 1}
    _mean_field = "rate"
    _reach = (0.0, math.inf, None)
    base = Base.COUNTING
    flat_base = False
    _tilts_everywhere = True
    _positive = ("rate",)
    _twin = (distributions.Poisson, {"rate": "rate"})

    @property
    def natural_parameter(self) -> Tensor:
        """log λ, ``(..., D)``."""
        return self.rate.log()

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, rate=theta.exp())

    def _log_partition(self) -> Tensor:
        return self.rate.sum(-1)

    def _log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1).sum(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-probability as −D(x, λ) − ½ log 2πx − R(x), summed over coordinates; −λ for x = 0."""
        some = x.clamp_min(1.0)
        factor = some.log() / 2 + HALF_LOG_2PI + remainder(some)
        away = deviance(x, self.rate - x, self.rate.log() - some.log())
        return -(away + torch.where(x > 0, factor, 0.0)).sum(-1)

    def _entropy(self) -> Tensor:
        """Entropy of each count, summed: −Σ p log p below rate 64, else ½ log 2πeλ minus a series in 1/λ."""
        few, many = self.rate.clamp_max(_MANY), self.rate.clamp_min(_MANY)
        count = torch.arange(_TERMS, dtype=self.dtype, device=self.device)
        log_probability = count * few.log().unsqueeze(-1) - few.unsqueeze(-1) - torch.lgamma(count + 1)
        sums, r = -(log_probability.exp() * log_probability).sum(-1), 1 / many
        tail = r * (1 / 12 + r * (1 / 24 + r * (19 / 360 + r * (9 / 80 + r * (863 / 2520)))))
        series = (math.log(2 * math.pi * math.e) + many.log()) / 2 - tail
        return torch.where(self.rate < _MANY, sums, series).sum(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return poisson(self.rate.expand(*shape, *self.rate.shape), generator)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d λ log(λ/λ') − λ + λ'."""
        return total(deviance_of(self.rate, other.rate))

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return (self.rate * torch.expm1(eta)).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.rate * eta.exp()

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """KL(counts with this mean ‖ self) = Σ_d m log m − m log λ − m + λ, 0 log 0 = 0."""
        m = mean.clamp_min(0)
        value: Tensor = (self.rate - m * (1 + self.rate.log()) - torch.special.entr(m)).sum(-1)
        return value

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self.rate * eta.exp())

    def _tilt(self, eta: Tensor) -> Self:
        rate = self.rate * eta.exp()
        wanted = f"such that the rate λe^η is a positive number of {rate.dtype}"
        entries("Poisson", "eta", eta.expand(rate.shape), (rate > 0) & rate.isfinite(), wanted)
        return make(type(self), rate=rate)

    def _dual(self, mean: Tensor) -> Tensor:
        return (mean / self.rate).log()

    def _mode(self) -> Tensor:
        return self.rate.floor()

    def _cdf(self, x: Tensor) -> Tensor:
        count = x.floor() + 1
        return torch.where(count > 0, incomplete_gamma(count.clamp_min(1), self.rate, upper=True), 0.0)

    def _icdf(self, q: Tensor) -> Tensor:
        return least_count(self._cdf, by_scipy("pdtrik", q, self.rate).ceil(), q)
