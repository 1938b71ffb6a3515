r"""Independent Beta variables on (0, 1).

Sufficient statistic u(x) = (log x, log(1 − x)), natural parameter θ = (α − 1, β − 1), A = Σ_d log B(α_d,
β_d). x is no part of u, so tilting acts on all of u: η adds pseudo-counts.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.members.dirichlet import dirichlet_entropy, dirichlet_kl, dirichlet_mean_error
from exptilt.families.numerics.deviance import deviance
from exptilt.families.numerics.distribution_functions import by_scipy
from exptilt.families.numerics.draws import log_standard_gamma
from exptilt.families.numerics.gamma_functions import (
    HALF_LOG_2PI,
    dirichlet_mean,
    invert_dirichlet,
    log_sum_exp,
    remainder,
)


def _pairs(vector: Tensor) -> Tensor:
    """``(..., 2D)`` reshaped to ``(..., D, 2)``: the entry for ones, then for zeros."""
    return torch.stack(vector.chunk(2, -1), -1)


@dataclass(frozen=True, eq=False)
class Beta(ExponentialFamily):
    """D independent Beta variables.

    Args:
        alpha: ``(..., D)``, positive, pseudo-count of ones.
        beta: ``(..., D)``, positive, pseudo-count of zeros.

    Example:
        >>> Beta(torch.tensor([1.0]), torch.tensor([1.0])).entropy()
        tensor(0.)
    """

    alpha: Tensor
    beta: Tensor
    event_dims: ClassVar = {"alpha": 1, "beta": 1}
    _reach = (0.0, 1.0, None)
    _open_ends = True
    _differentiable_draws = True
    _inner_form = ("log x, log(1 − x)", (1, 1))
    identity_coordinate = False
    _positive = ("alpha", "beta")
    _statistic_size = staticmethod(lambda d: 2 * d)
    _twin = (distributions.Beta, {"alpha": "concentration1", "beta": "concentration0"})

    @property
    def natural_parameter(self) -> Tensor:
        """(α − 1, β − 1), ``(..., 2D)``."""
        return torch.cat(torch.broadcast_tensors(self.alpha - 1, self.beta - 1), -1)

    @property
    def mean_parameter(self) -> Tensor:
        """(E log x, E log(1 − x)), ``(..., 2D)``."""
        return torch.cat(dirichlet_mean(self._both()).unbind(-1), -1)

    def _both(self) -> Tensor:
        """(α, β), ``(..., D, 2)``."""
        return torch.stack(torch.broadcast_tensors(self.alpha, self.beta), -1)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second = theta.chunk(2, -1)
        return make(cls, alpha=first + 1, beta=second + 1)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        alpha, beta = invert_dirichlet(_pairs(mean)).unbind(-1)
        return make(cls, alpha=alpha, beta=beta)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest log(e^{E log x} + e^{E log(1−x)}) over coordinates; below 0 by Jensen's inequality."""
        return log_sum_exp(_pairs(mean)).amax(-1)

    @classmethod
    def _mean_error(cls, reached: Tensor, mean: Tensor) -> Tensor:
        return dirichlet_mean_error(_pairs(reached), _pairs(mean)).amax(-1)

    def _dual(self, mean: Tensor) -> Tensor:
        member = self._from_mean(mean)
        return torch.cat([member.alpha - self.alpha, member.beta - self.beta], -1)

    def _log_partition(self) -> Tensor:
        both = torch.lgamma(self.alpha) + torch.lgamma(self.beta)
        return (both - torch.lgamma(self.alpha + self.beta)).sum(-1)

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return torch.cat([x.log(), torch.log1p(-x)], -1)

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        both = self._both()
        drawn = log_standard_gamma(both.expand(*shape, *both.shape), generator)
        log_x, log_rest = torch.log_softmax(drawn, -1).unbind(-1)
        return log_x, log_rest

    def _from_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        return y[0].exp().clamp(torch.finfo(self.dtype).tiny, 1 - torch.finfo(self.dtype).eps / 2)

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        total = self.alpha + self.beta
        mean = self.alpha / total
        return mean, mean * (self.beta / total) / (total + 1)

    def _log_prob(self, x: Tensor) -> Tensor:
        return self._log_density(x, 1 - x, x.log(), torch.log1p(-x))

    def _log_prob_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        return self._log_density(y[0].exp(), y[1].exp(), *y)

    def _log_density(self, x: Tensor, rest: Tensor, log_x: Tensor, log_rest: Tensor) -> Tensor:
        """Log-density as −D(α, nx) − D(β, n(1−x)) with n = α + β, plus Stirling's factors."""
        a, b = self.alpha, self.beta
        n = a + b
        gap = b * x - a * rest  # nx − a, but more accurate if a is much larger than b
        away = deviance(a, gap, log_x + (n / a).log()) + deviance(b, -gap, log_rest + (n / b).log())
        peak = (a.log() + b.log() - n.log()) / 2 - HALF_LOG_2PI + remainder(n) - remainder(a) - remainder(b)
        return (peak - away - log_x - log_rest).sum(-1)

    def _entropy(self) -> Tensor:
        return dirichlet_entropy(self._both()).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        return dirichlet_kl(self._both(), other._both()).sum(-1)

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return -1.0, self.alpha

    def _mode(self) -> Tensor:
        """(α − 1)/(α + β − 2) if α, β ≥ 1, the end of largest density if one is below 1; NaN if both are."""
        a, b = torch.broadcast_tensors(self.alpha - 1, self.beta - 1)
        inside = (a >= 0) & (b >= 0) & (a + b > 0)
        ends = torch.where((a > b) & (a >= 0), 1.0, torch.where((b > a) & (b >= 0), 0.0, torch.nan))
        return torch.where(inside, a / torch.where(inside, a + b, 1.0), ends)

    def _cdf(self, x: Tensor) -> Tensor:
        return by_scipy("betainc", self.alpha, self.beta, x.clamp(0, 1))

    def _icdf(self, q: Tensor) -> Tensor:
        return by_scipy("betaincinv", self.alpha, self.beta, q)
