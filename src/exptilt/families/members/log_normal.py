r"""Independent log-normal variables: log x is N(μ, σ²).

    p(x) = N(log x | μ, σ²) / x

Sufficient statistic u(x) = (log x, log² x), natural parameter θ = (μ/σ² − 1, −1/(2σ²)): the −1 is the 1/x.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.measure import make
from exptilt.families.members.change_of_variable import ChangeOfVariable
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian


@dataclass(frozen=True, eq=False)
class LogNormal(ChangeOfVariable):
    """D independent log-normal variables.

    Args:
        log_mean: ``(..., D)``, μ, the mean of log x.
        log_variance: ``(..., D)``, σ², the variance of log x, positive.

    Example:
        >>> LogNormal(torch.tensor([1.0]), torch.tensor([2.0])).mean()  # E log x and E log² x
        tensor([1., 3.])
    """

    log_mean: Tensor
    log_variance: Tensor
    event_dims: ClassVar = {"log_mean": 1, "log_variance": 1}
    _positive = ("log_variance",)
    of = DiagonalGaussian
    jacobian = (-1.0, 0.0)

    def _image(self) -> DiagonalGaussian:
        return make(DiagonalGaussian, mean_vector=self.log_mean, variance=self.log_variance)

    @classmethod
    def _from_image(cls, image: Any) -> Self:
        return make(cls, log_mean=image.mean_vector, log_variance=image.variance)

    @staticmethod
    def _forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def _backward(y: Tensor) -> Tensor:
        return y.exp()

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        """e^{μ + σ²/2} and (e^{σ²} − 1) e^{2μ + σ²}."""
        mean = (self.log_mean + self.log_variance / 2).exp()
        return mean, torch.expm1(self.log_variance) * mean**2

    def _to_torch(self) -> distributions.Distribution:
        """The same as ``Independent(LogNormal, 1)``."""
        return distributions.Independent(distributions.LogNormal(self.log_mean, self.log_variance.sqrt()), 1)

    @classmethod
    def _from_torch(cls, other: Any) -> Self:
        """From ``Independent(LogNormal, 1)``."""
        return cls(other.base_dist.loc, other.base_dist.scale**2)
