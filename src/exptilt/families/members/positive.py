"""Families of positive numbers, whose draws have their logarithm as inner form."""

from abc import abstractmethod

import torch
from torch import Tensor

from exptilt.families.family import ExponentialFamily


class PositiveFamily(ExponentialFamily):
    """Base of the families of positive numbers."""

    _differentiable_draws = True
    _inner_form = ("log x", (1,))

    @abstractmethod
    def _log_density(self, x: Tensor, log_x: Tensor) -> Tensor:
        """Log-density at ``x (..., D)``, given its logarithm as well."""

    @abstractmethod
    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Logarithms of draws, ``shape + batch + (D,)``."""

    def _from_inner(self, y: Tensor) -> Tensor:
        limits = torch.finfo(y.dtype)
        return y.exp().clamp(limits.tiny, limits.max / 4)

    def _log_prob(self, x: Tensor) -> Tensor:
        return self._log_density(x, x.log())

    def _log_prob_inner(self, y: Tensor) -> Tensor:
        return self._log_density(y.exp(), y)
