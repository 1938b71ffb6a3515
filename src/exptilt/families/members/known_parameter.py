"""Families with a known parameter that is no part of θ, such as a number of failures or a total.

Members with different known parameters do not belong to one exponential family: the base measure b depends
on the known parameter. So θ or a mean alone does not determine a member; `from_natural`, `from_mean` and
`log_partition` take the known parameter as well. The whole statistic is x.
"""

import math
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.checks import finite
from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution
from exptilt.families.family import ExponentialFamily
from exptilt.families.numerics.hull import box_excess


class KnownParameter(ExponentialFamily):
    """Base of the families with a known parameter and the statistic u(x) = x."""

    flat_base = False
    known_field: ClassVar[str]
    """Name of the field with the known parameter."""

    _mean_says_known: ClassVar[bool] = False
    """Whether a mean determines the known parameter."""

    def _outside(self, mean: Tensor) -> Tensor:
        """``(...)``: how far ``mean (..., K)`` is outside the means of members with this known parameter."""
        low, high, _ = self._reach or (-math.inf, math.inf, None)
        return box_excess(mean, low, high)

    @classmethod
    def _some(cls, known: Tensor | None, vector: Tensor, asked: str) -> Self:
        """Some member with this known parameter and the length of ``vector (..., K)``.

        Raises if `known` is missing; the message names the method `asked`.
        """
        field = cls.known_field
        if known is None:
            raise ArgumentError(f"{cls.__name__}.{asked}: the {field} must be given; pass known={field}.")
        (other,) = cls.event_dims.keys() - {field}
        value = torch.ones_like(vector) if other in cls._positive else torch.zeros_like(vector)
        return cls(**{field: known, other: value})

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        return cls._some(None, mean, "from_mean")._outside(mean)

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return self._outside(mean)

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return cls._some(None, theta, "from_natural")._with_natural(theta)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return cls._some(None, mean, "from_mean")._with_mean(mean)

    @classmethod
    def from_natural(cls, theta: Tensor, *, known: Tensor | None = None) -> Self:
        """The member with this natural parameter; an error outside the natural domain.

        Args:
            theta: ``(..., K)``.
            known: the parameter that θ does not hold, as the constructor takes it.
        """
        some = cls._some(known, cls._checked_statistic(theta, "theta"), "from_natural")
        return some._with_natural(theta)._valid_at(theta, theta, "theta")

    @classmethod
    def from_mean(cls, mean: Tensor, *, known: Tensor | None = None) -> Solution[Self]:
        """The member with this mean, and whether there is one; as `ExponentialFamily.from_mean`.

        Args:
            mean: ``(..., K)``.
            known: the known parameter, as the constructor takes it.
        """
        finite(cls.__name__, mean=cls._checked_statistic(mean, "mean"))
        some = cls._some(known, mean, "from_mean")
        return cls._solved(mean, some._outside(mean), some._with_mean, lambda: some)

    @classmethod
    def log_partition(cls, theta: Tensor, *, known: Tensor | None = None) -> Tensor:
        """A(θ).

        Args:
            theta: ``(..., K)``.
            known: the parameter that θ does not hold, as the constructor takes it.

        Returns:
            ``(...)``, infinite outside the natural domain.
        """
        some = cls._some(known, cls._checked_statistic(theta, "theta"), "log_partition")
        return some._with_natural(theta)._partition_at(theta)

    def _fisher(self) -> Tensor:
        return self.covariance()

    def update(self, statistic: Tensor) -> Self:
        """The member with natural parameter θ + statistic: the same as `tilt`.

        Args:
            statistic: ``(..., K)``.
        """
        theta = self._shifted(self._checked(statistic, "statistic"))
        return self._with_natural(theta)._valid_at(theta, statistic, "statistic")
