"""Families with a parameter that is known, and therefore no part of θ: a number of failures, a total.

Members with different known parameters do not belong to one exponential family: the base measure b depends
on it. So a class alone cannot make a member of θ or of a mean; `from_natural`, `from_mean` and
`log_partition` take the known parameter as well. The whole statistic is x.
"""

from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.checks import entries, finite
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete
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
    def _with_natural(self, theta: Tensor) -> Self:
        """The member with natural parameter θ and the same known parameter, unchecked."""

    @abstractmethod
    def _with_mean(self, mean: Tensor) -> Self:
        """The member with this attainable mean and the same known parameter, unchecked."""

    # What follows.

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
        return some._moved(theta, theta, "theta")

    @classmethod
    def from_mean(cls, mean: Tensor, *, known: Tensor | None = None) -> Solution[Self]:
        """The member with this mean, and whether there is one; as `ExponentialFamily.from_mean`.

        Args:
            mean: ``(..., K)``.
            known: the parameter that the mean does not hold, as the constructor takes it.
        """
        finite(cls.__name__, mean=cls._checked_statistic(mean, "mean"))
        some = cls._some(known, mean, "from_mean")
        excess = some._excess(mean, torch.ones_like(mean[..., 0], dtype=torch.bool))
        assert excess is not None
        inside = excess < 0
        usual = some.mean_parameter
        member = some._with_mean(torch.where(inside[..., None], mean, usual))
        sound = member._sound()
        member = some._with_mean(torch.where((inside & sound)[..., None], mean, usual))
        residual = (member.mean_parameter - mean).abs().amax(-1)
        close = sound & (residual <= torch.finfo(mean.dtype).eps ** 0.5 * (1 + mean.abs().amax(-1)))
        solved = torch.where(close, Status.CONVERGED.code, Status.STALLED.code)
        code = torch.where(inside, solved, torch.where(excess > 0, Status.OUTSIDE.code, Status.BOUNDARY.code))
        none = torch.zeros((), dtype=torch.int64)
        return Solution(member, code.to(torch.int8), residual, none, excess.clamp_min(0))

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
        return some._partition_at(theta)

    def _fisher(self) -> Tensor:
        return self.covariance()

    def update(self, statistic: Tensor) -> Self:
        """The member whose natural parameter is larger by this: the same as `tilt`.

        Args:
            statistic: ``(..., K)``.
        """
        return self._moved(self._shifted(self._checked(statistic, "statistic")), statistic, "statistic")

    def _moved(self, theta: Tensor, given: Tensor, name: str) -> Self:
        """The member at θ; outside the natural domain an error that names what was given."""
        member = self._with_natural(theta)
        if is_concrete(theta):
            valid = member._in_domain() & theta.isfinite().all(-1)
            wanted = "inside the natural domain, where the sum converges"
            entries(type(self).__name__, name, given.expand(*valid.shape, -1), valid, wanted)
        return member

    def _partition_at(self, theta: Tensor) -> Tensor:
        member = self._with_natural(theta)
        return torch.where(member._in_domain() | theta.isnan().any(-1), member._log_partition(), torch.inf)

    def _tilt(self, eta: Tensor) -> Self:
        return self._moved(self._shifted(eta), eta, "eta")

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._partition_at(self._shifted(eta)) - self._log_partition()

    def _mean(self, eta: Tensor) -> Tensor:
        return self._with_natural(self._shifted(eta)).mean_parameter

    def _dual(self, mean: Tensor) -> Tensor:
        return self._with_mean(mean).natural_parameter - self.natural_parameter

    def _diverges(self, eta: Tensor) -> Tensor | None:
        return ~self._with_natural(self._shifted(eta))._in_domain()
