r"""Independent exponential waiting times.

    G(η) = −Σ_d log(1 − η_d/λ_d)   for η < λ,     ∇G(η) = 1 / (λ − η)

Sufficient statistic u(x) = x, natural parameter θ = −λ.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.checks import check_positive, check_tensors, check_values
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.numerics.deviance import log_excess
from exptilt.families.numerics.hull import box_excess


@dataclass(frozen=True, eq=False)
class Exponential(ExponentialFamily):
    """D independent exponential variables.

    Args:
        rate: ``(..., D)``, positive.

    Example:
        >>> Exponential(torch.tensor([2.0])).mean(torch.tensor([1.0]))
        tensor([1.])
    """

    rate: Tensor
    event_dims: ClassVar = {"rate": 1}

    def __post_init__(self) -> None:
        check_tensors("Exponential", {"rate": (self.rate, 1)})
        check_positive("Exponential", rate=self.rate)

    @property
    def natural_parameter(self) -> Tensor:
        """−λ, ``(..., D)``."""
        return -self.rate

    @property
    def mean_parameter(self) -> Tensor:
        """1/λ, ``(..., D)``."""
        return 1 / self.rate

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return make(cls, rate=-theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, rate=1 / mean)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        return box_excess(mean, 0.0, math.inf)

    @classmethod
    def _typical_mean(cls, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def _in_domain(self) -> Tensor:
        return (self.rate > 0).all(-1)

    def _log_partition(self) -> Tensor:
        return -self.rate.log().sum(-1)

    def _support(self, x: Tensor) -> Tensor:
        return (x >= 0).all(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Waiting times, ``shape + batch + (D,)``, differentiable in the rate."""
        uniform = torch.rand(
            (*shape, *self.rate.shape), dtype=self.dtype, device=self.device, generator=generator
        )
        return -torch.log1p(-uniform) / self.rate

    def _to_torch(self) -> distributions.Independent:
        """The same as ``Independent(Exponential, 1)``."""
        return distributions.Independent(distributions.Exponential(self.rate), 1)

    @classmethod
    def _from_torch(cls, other: Any) -> Self:
        """From ``Independent(Exponential, 1)``."""
        return cls(other.base_dist.rate)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        ratio = eta / self.rate
        inside = ((ratio < 1) | ratio.isnan()).all(-1, keepdim=True)
        return torch.where(inside, -torch.log1p(-torch.where(inside, ratio, 0.0)), torch.inf).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d r − 1 − log r with r = λ'/λ."""
        return log_excess(other.rate, self.rate).sum(-1)

    def _entropy(self) -> Tensor:
        """Σ_d 1 − log λ."""
        return (1 - self.rate.log()).sum(-1)

    def _tilt(self, eta: Tensor) -> Self:
        rate = self.rate - eta
        check_values("Exponential", "eta", eta.expand(rate.shape), rate > 0, "below the rate")
        return make(type(self), rate=rate)

    def _mean(self, eta: Tensor) -> Tensor:
        return 1 / (self.rate - eta)

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed((self.rate - eta) ** -2)

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        """Newton's step for 1/mean, which is straight in η: a step for the mean itself would leave the natural domain, or crawl in it."""
        return torch.where(wanted > 0, (wanted - reached) * (reached / wanted), wanted - reached)

    def _dual(self, mean: Tensor) -> Tensor:
        return self.rate - 1 / mean
