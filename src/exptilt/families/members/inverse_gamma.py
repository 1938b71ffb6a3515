r"""Independent inverse Gamma variables: 1/x is Gamma(a, b).

    p(x) = b^a/Γ(a) x^{−a−1} e^{−b/x}

Sufficient statistic u(x) = (1/x, −log x), natural parameter θ = (−b, a + 1), mean parameter
(a/b, ψ(a) − log b).
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, distributions

from exptilt.families.members.change_of_variable import ChangeOfVariable
from exptilt.families.members.gamma import Gamma
from exptilt.families.numerics.distribution_functions import by_scipy, incomplete_gamma


@dataclass(frozen=True, eq=False)
class InverseGamma(ChangeOfVariable):
    """D independent inverse Gamma variables.

    Args:
        shape: ``(..., D)``, a, positive.
        scale: ``(..., D)``, b, positive: the rate of 1/x.

    Example:
        >>> InverseGamma(torch.tensor([3.0]), torch.tensor([6.0])).mean()  # E 1/x and −E log x
        tensor([ 0.5000, -0.8690])
    """

    shape: Tensor
    scale: Tensor
    event_dims: ClassVar = {"shape": 1, "scale": 1}
    _positive = ("shape", "scale")
    _twin = (distributions.InverseGamma, {"shape": "concentration", "scale": "rate"})
    of = Gamma
    jacobian = (0.0, 2.0)
    _decay = -1.0

    @staticmethod
    def _forward(x: Tensor) -> Tensor:
        return 1 / x

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = -self._image()._sample_inner(shape, generator)
        return drawn

    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        return cast(Gamma, self._image())._log_density(1 / x, -log_x) - 2 * log_x.sum(-1)

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        """b/(a − 1) and b²/((a − 1)²(a − 2)); infinite for a up to 1 and up to 2."""
        a, b = torch.broadcast_tensors(self.shape, self.scale)
        mean = torch.where(a > 1, b / (a - 1), torch.inf)
        variance = torch.where(a > 2, (b / (a - 1)) ** 2 / (a - 2), torch.inf)
        return mean, torch.where(a > 1, variance, torch.nan)

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return 1.0, self.shape

    def _mode(self) -> Tensor:
        return self.scale / (self.shape + 1)

    def _cdf(self, x: Tensor) -> Tensor:
        rate = self.scale / torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, incomplete_gamma(self.shape, rate, upper=True), 0.0)

    def _icdf(self, q: Tensor) -> Tensor:
        return self.scale / by_scipy("gammainccinv", self.shape, q)
