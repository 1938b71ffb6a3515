r"""Independent geometric counts: failures before the first success.

    p(x) = (1 − p)^x p,     E[x] = (1 − p)/p = e^{−ℓ}

Sufficient statistic u(x) = x, natural parameter θ = log(1 − p). A member holds the log-odds ℓ = log p/(1 − p)
of a success. It is a `NegativeBinomial` that counts failures until one success.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.members.negative_binomial import NegativeBinomial
from exptilt.families.numerics.deviance import softplus
from exptilt.families.numerics.distribution_functions import least_count


@dataclass(frozen=True, eq=False)
class Geometric(ExponentialFamily):
    """D independent counts of failures before the first success.

    Args:
        logit: ``(..., D)``, log-odds of a success.

    Example:
        >>> Geometric(torch.zeros(1)).mean()  # of coins
        tensor([1.])
    """

    logit: Tensor
    event_dims: ClassVar = {"logit": 1}
    _reach = (0.0, math.inf, None)
    base = Base.COUNTING
    _twin = (distributions.Geometric, {"logit": "logits"})

    @property
    def natural_parameter(self) -> Tensor:
        """log(1 − p), ``(..., D)``."""
        return -softplus(self.logit)

    @property
    def mean_parameter(self) -> Tensor:
        """(1 − p)/p, ``(..., D)``."""
        return (-self.logit).exp()

    def _counts(self) -> NegativeBinomial:
        """The same law as a `NegativeBinomial`."""
        return make(NegativeBinomial, failures=torch.ones_like(self.logit), logit=-self.logit)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, logit=torch.log(-torch.expm1(theta)) - theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, logit=-mean.log())

    def _log_partition(self) -> Tensor:
        """−log p, summed."""
        return softplus(-self.logit).sum(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Counts, ``shape + batch + (D,)``: the whole part of an exponential waiting time."""
        size = (*shape, *self.logit.shape)
        uniform = torch.rand(size, dtype=torch.float64, device=self.device, generator=generator)
        return (torch.log1p(-uniform) / -softplus(self.logit.detach().double())).floor().to(self.dtype)

    def _kl(self, other: Self) -> Tensor:
        return self._counts()._kl(other._counts())

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        return self._counts()._boundary_conjugate(mean, reached)

    def _covariance(self, eta: Tensor) -> Tensor:
        return self._counts()._covariance(eta)

    def _mode(self) -> Tensor:
        return torch.zeros_like(self.logit)

    def _cdf(self, x: Tensor) -> Tensor:
        return -torch.expm1(-softplus(self.logit) * (x.floor() + 1).clamp_min(0))

    def _icdf(self, q: Tensor) -> Tensor:
        guess = (torch.log1p(-q) / -softplus(self.logit)).ceil() - 1
        return least_count(self._cdf, guess, q)
