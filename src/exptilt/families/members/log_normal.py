r"""Independent log-normal variables: log x is N(μ, σ²).

    p(x) = N(log x | μ, σ²) / x

Sufficient statistic u(x) = (log x, log² x), natural parameter θ = (μ/σ² − 1, −1/(2σ²)): the −1 is the 1/x.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, distributions

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
    _twin = (distributions.LogNormal, {"log_mean": "loc", "log_variance": "scale"})
    _squares = ("log_variance",)
    of = DiagonalGaussian
    jacobian = (-1.0, 0.0)

    @staticmethod
    def _forward(x: Tensor) -> Tensor:
        return x.log()

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = self._image()._sample(shape, generator)
        return drawn

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        return self._image()._log_prob(log_x) - log_x.sum(-1)

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        """e^{μ + σ²/2} and (e^{σ²} − 1) e^{2μ + σ²}."""
        mean = (self.log_mean + self.log_variance / 2).exp()
        return mean, torch.expm1(self.log_variance) * mean**2

    def _mode(self) -> Tensor:
        return (self.log_mean - self.log_variance).exp()

    def _cdf(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, self._image()._cdf(torch.where(x > 0, x, 1.0).log()), 0.0)

    def _icdf(self, q: Tensor) -> Tensor:
        return self._image()._icdf(q).exp()
