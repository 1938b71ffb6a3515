r"""Independent Gamma variables.

    G(η) = −Σ_d a_d log(1 − η_d/b_d)   for η < b,     ∇G(η) = a / (b − η)

Sufficient statistic u(x) = (x, log x), natural parameter θ = (−b, a − 1); tilting acts on x, so it changes
the rate alone.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
from exptilt._support.linalg import total
from exptilt.families.measure import make
from exptilt.families.members.positive import PositiveFamily
from exptilt.families.numerics.deviance import gamma_kl, gamma_log_density
from exptilt.families.numerics.distribution_functions import by_scipy, incomplete_gamma
from exptilt.families.numerics.draws import log_standard_gamma
from exptilt.families.numerics.gamma_functions import gamma_entropy, invert_digamma_gap
from exptilt.families.numerics.hull import box_excess


class GammaLaw(PositiveFamily):
    """Formulas in ``shape (..., D)`` and ``rate (..., D)`` of Gamma variables."""

    shape: Tensor
    rate: Tensor
    _reach = (0.0, math.inf, None)
    _decay = 1.0

    def _log_partition(self) -> Tensor:
        return (torch.lgamma(self.shape) - self.shape * self.rate.log()).sum(-1)

    def _entropy(self) -> Tensor:
        return (gamma_entropy(self.shape) - self.rate.log()).sum(-1)

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        value = gamma_log_density(self.shape, self.rate * x, log_x + self.rate.log())
        return (value - log_x).sum(-1)

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        a = self.shape.expand(*shape, *self.batch_shape, self.dimension)
        return log_standard_gamma(a, generator) - self.rate.log()

    def _kl(self, other: Self) -> Tensor:
        change, log_rate = (other.rate - self.rate) / self.rate, other.rate.log() - self.rate.log()
        return total(gamma_kl(self.shape, other.shape, change, log_rate))

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        ratio = eta / self.rate
        inside = ((ratio < 1) | ratio.isnan()).all(-1, keepdim=True)
        value = -self.shape * torch.log1p(-torch.where(inside, ratio, 0.0))
        return torch.where(inside, value, torch.inf).sum(-1)

    def _tilt(self, eta: Tensor) -> Self:
        rate = self.rate - eta
        entries(type(self).__name__, "eta", eta.expand(rate.shape), rate > 0, "below the rate")
        fields = {name: getattr(self, name) for name in self.event_dims}
        return make(type(self), **fields | {"rate": rate})

    def _mean(self, eta: Tensor) -> Tensor:
        return self.shape / (self.rate - eta)

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed(self.shape / (self.rate - eta) ** 2)

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        """Newton's step for 1/mean, which is linear in η, so the step stays in the natural domain."""
        return torch.where(wanted > 0, (wanted - reached) * (reached / wanted), wanted - reached)

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return -1.0, self.shape

    def _mode(self) -> Tensor:
        return (self.shape - 1).clamp_min(0) / self.rate


@dataclass(frozen=True, eq=False)
class Gamma(GammaLaw):
    """D independent Gamma variables.

    Args:
        shape: ``(..., D)``, positive.
        rate: ``(..., D)``, positive.

    Example:
        >>> Gamma(torch.tensor([3.0]), torch.tensor([2.0])).mean()
        tensor([1.5000])
    """

    shape: Tensor
    rate: Tensor
    event_dims: ClassVar = {"shape": 1, "rate": 1}
    _open_ends = True
    _positive = ("shape", "rate")
    _statistic_size = staticmethod(lambda d: 2 * d)
    _twin = (distributions.Gamma, {"shape": "concentration", "rate": "rate"})

    @property
    def natural_parameter(self) -> Tensor:
        """(−rate, shape − 1), ``(..., 2D)``."""
        return torch.cat(torch.broadcast_tensors(-self.rate, self.shape - 1), -1)

    @property
    def mean_parameter(self) -> Tensor:
        """(E x, E log x), ``(..., 2D)``."""
        return torch.cat([self.shape / self.rate, torch.digamma(self.shape) - self.rate.log()], -1)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second = theta.chunk(2, -1)
        return make(cls, shape=second + 1, rate=-first)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        x, log_x = mean.chunk(2, -1)
        shape = invert_digamma_gap(x.log() - log_x)
        return make(cls, shape=shape, rate=shape / x)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest violation of E x > 0 and of Jensen's E log x < log E x."""
        x, log_x = mean.chunk(2, -1)
        jensen = torch.where(x > 0, log_x - x.clamp_min(torch.finfo(x.dtype).tiny).log(), -1.0)
        return torch.maximum(-x, jensen).amax(-1)

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return torch.cat([x, x.log()], -1)

    def _dual(self, mean: Tensor) -> Tensor:
        return self.rate - self.shape / mean

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return box_excess(mean, 0.0, math.inf)

    def _cdf(self, x: Tensor) -> Tensor:
        return incomplete_gamma(self.shape, self.rate * x.clamp_min(0))

    def _icdf(self, q: Tensor) -> Tensor:
        return by_scipy("gammaincinv", self.shape, q) / self.rate
