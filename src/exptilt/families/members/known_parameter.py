"""Families with a parameter that is known, and therefore no part of θ: a number of failures, a total.

Members with different known parameters do not belong to one exponential family: the base measure b depends
on it. So a class alone cannot make a member of θ or of a mean; `from_natural`, `from_mean` and
`log_partition` take the known parameter as well. The whole statistic is x.
"""

from abc import abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from exptilt._support.checks import finite
from exptilt._support.solution import Solution
from exptilt.families.family import ExponentialFamily


class KnownParameter(ExponentialFamily):
    """Base of the families with a known parameter and the statistic u(x) = x."""

    flat_base = False
    known_field: ClassVar[str]
    """The name of the field that is known."""

    # What a subclass gives.

    @classmethod
    @abstractmethod
    def _some(cls, known: Tensor | None, vector: Tensor, asked: str) -> Self:
        """Some member with the known parameter and the length of ``vector (..., K)``.

        Raises if `known` is missing, in the name of the method that was `asked` for.
        """

    @abstractmethod
    def _outside(self, mean: Tensor) -> Tensor:
        """How far ``mean (..., K)`` is outside of what members with the same known parameter attain."""

    # What follows.

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
            known: the parameter that the mean does not hold, as the constructor takes it.
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
        """The member whose natural parameter is larger by this: the same as `tilt`.

        Args:
            statistic: ``(..., K)``.
        """
        theta = self._shifted(self._checked(statistic, "statistic"))
        return self._with_natural(theta)._valid_at(theta, statistic, "statistic")
