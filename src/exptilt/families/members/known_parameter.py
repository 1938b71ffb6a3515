"""Families with a known parameter that is no part of θ, such as a number of failures or a total.

Members with different known parameters do not belong to one exponential family: the base measure b depends
on the known parameter. So θ or a mean alone does not determine a member; `from_natural`, `from_mean` and
`log_partition` take the known parameter as well. The whole statistic is x.
"""

import math
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.numerics.hull import box_excess


class KnownParameter(ExponentialFamily):
    """Base of the families with a known parameter and the statistic u(x) = x."""

    flat_base = False
    known_field: ClassVar[str]
    """Name of the field with the known parameter."""

    _mean_says_known: ClassVar[bool] = False
    """Whether a mean determines the known parameter."""

    def _outside(self, mean: Tensor) -> Tensor:
        low, high, _ = self._reach or (-math.inf, math.inf, None)
        return box_excess(mean, low, high)

    @classmethod
    def _some(cls, known: Tensor | None, like: Tensor, asked: str) -> Self:
        field = cls.known_field
        if known is None:
            raise ArgumentError(f"{cls.__name__}.{asked}: the {field} must be given; pass known={field}.")
        (other,) = cls.event_dims.keys() - {field}
        value = torch.ones_like(like) if other in cls._positive else torch.zeros_like(like)
        return cls(**{field: known, other: value})

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        return cls._some(None, mean, "from_mean")._outside(mean)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return cls._some(None, theta, "from_natural")._with_natural(theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return cls._some(None, mean, "from_mean")._with_mean(mean)

    def _with_natural(self, theta: Tensor) -> Self:
        return self._with(self._natural_field, theta)

    def _with_mean(self, mean: Tensor) -> Self:
        return self._with(self._mean_field, mean)

    def _with(self, field: str, value: Tensor) -> Self:
        """This member with another value of the field that is not known, unchecked."""
        return make(type(self), **{self.known_field: getattr(self, self.known_field), field: value})

    def _fisher(self) -> Tensor:
        return self.covariance()
