r"""Independent Poisson counts.

    G(η) = Σ_d λ_d (e^{η_d} − 1),     ∇G(η) = λ e^η

Sufficient statistic u(x) = x, natural parameter θ = log λ, base measure b(x) = 1 / x!.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import total
from exptilt.families.checks import check_positive, check_tensors, check_values
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.numerics.deviance import deviance, deviance_of
from exptilt.families.numerics.draws import poisson
from exptilt.families.numerics.gamma_functions import HALF_LOG_2PI, remainder
from exptilt.families.numerics.hull import box_excess


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
    base = Base.COUNTING
    flat_base = False

    def __post_init__(self) -> None:
        check_tensors("Poisson", {"rate": (self.rate, 1)})
        check_positive("Poisson", rate=self.rate)

    @property
    def natural_parameter(self) -> Tensor:
        """Log λ, ``(..., D)``."""
        return self.rate.log()

    @property
    def mean_parameter(self) -> Tensor:
        """λ, ``(..., D)``."""
        return self.rate

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, rate=theta.exp())

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, rate=mean)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        return box_excess(mean, 0.0, math.inf)

    @classmethod
    def _typical_mean(cls, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def _in_domain(self) -> Tensor:
        return (self.rate.isfinite() & (self.rate > 0)).all(-1)

    def _log_partition(self) -> Tensor:
        return self.rate.sum(-1)

    def _log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1).sum(-1)

    def _support(self, x: Tensor) -> Tensor:
        return ((x >= 0) & (x == x.floor())).all(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-probability of counts ``x (..., D)``, as a distance from the mean: −D(x, λ) − ½ log 2πx − R(x), and −λ of x = 0."""
        some = x.clamp_min(1.0)
        factor = some.log() / 2 + HALF_LOG_2PI + remainder(some)
        away = deviance(x, self.rate - x, self.rate.log() - some.log())
        return -(away + torch.where(x > 0, factor, 0.0)).sum(-1)

    def _entropy(self) -> Tensor:
        return _entropy_of_counts(self.rate).sum(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Counts, ``shape + batch + (D,)``."""
        return poisson(self.rate.expand(*shape, *self.rate.shape), generator)

    def _to_torch(self) -> distributions.Independent:
        """The same as ``Independent(Poisson, 1)``."""
        return distributions.Independent(distributions.Poisson(self.rate), 1)

    @classmethod
    def _from_torch(cls, other: Any) -> Self:
        """From ``Independent(Poisson, 1)``."""
        return cls(other.base_dist.rate)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d λ log(λ/λ') − λ + λ'."""
        return total(deviance_of(self.rate, other.rate))

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return (self.rate * torch.expm1(eta)).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self.rate * eta.exp()

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """KL of counts with this mean from these: Σ_d m log m − m log λ − m + λ, 0 log 0 = 0."""
        m = mean.clamp_min(0)
        return (self.rate - m * (1 + self.rate.log()) - torch.special.entr(m)).sum(-1)

    def _diverges(self, eta: Tensor) -> Tensor | None:
        return None

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self.rate * eta.exp())

    def _tilt(self, eta: Tensor) -> Self:
        rate = self.rate * eta.exp()
        valid = (rate > 0) & rate.isfinite()
        check_values(
            "Poisson",
            "eta",
            eta.expand(rate.shape),
            valid,
            f"such that the rate λe^η is a positive number of {rate.dtype}",
        )
        return make(type(self), rate=rate)

    def _dual(self, mean: Tensor) -> Tensor:
        return (mean / self.rate).log()


def _entropy_of_counts(rate: Tensor) -> Tensor:
    """Entropy of each count: −Σ p log p over the first 220 counts below rate 64, ½ log 2πeλ minus a series in 1/λ from there on."""
    few = rate.clamp_max(_MANY)
    count = torch.arange(_TERMS, dtype=rate.dtype, device=rate.device)
    log_probability = count * few.log().unsqueeze(-1) - few.unsqueeze(-1) - torch.lgamma(count + 1)
    series = -(log_probability.exp() * log_probability).sum(-1)
    many = rate.clamp_min(_MANY)
    r = 1 / many
    tail = r * (1 / 12 + r * (1 / 24 + r * (19 / 360 + r * (9 / 80 + r * (863 / 2520)))))
    return torch.where(rate < _MANY, series, (math.log(2 * math.pi * math.e) + many.log()) / 2 - tail)


_MANY = 64.0  # the asymptotic series with five terms is right to 1e-10 there
_TERMS = 220  # P(x >= 220) < 1e-50 at rate 64
