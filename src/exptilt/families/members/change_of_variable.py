r"""Families that become another family by a change of variable, y = f(x).

    log |f'(x)| = ⟨c, u(y)⟩     gives     p(x) = e^{⟨u(f(x)), θ + c⟩ − A(θ)}

So x has the statistic, mean parameter, log-partition and divergences of y, and the natural parameter of y
plus c. Here x is a positive scalar in each coordinate, and u has two parts. x is no part of u, so tilting
acts on all of u.
"""

import math
from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.linalg import dot
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.members.positive import PositiveFamily


class ChangeOfVariable(PositiveFamily):
    """Base of the families of positive x for which y = f(x) belongs to another family."""

    of: ClassVar[type[ExponentialFamily]]
    """The family of y = f(x)."""

    jacobian: ClassVar[tuple[float, float]]
    """The constant c, one number for each of the two parts of u."""

    _statistic_size = staticmethod(lambda d: 2 * d)
    _reach = (0.0, math.inf, None)
    identity_coordinate = False

    @staticmethod
    @abstractmethod
    def _forward(x: Tensor) -> Tensor:
        """y = f(x)."""

    def _image(self) -> ExponentialFamily:
        """The law of y, whose fields are those of x in the same order."""
        pairs = zip(self.of.event_dims, self.event_dims, strict=True)
        return make(self.of, **{theirs: getattr(self, ours) for theirs, ours in pairs})

    @classmethod
    def _from_image(cls, image: ExponentialFamily) -> Self:
        """The law of x, from the law `image` of y."""
        pairs = zip(cls.of.event_dims, cls.event_dims, strict=True)
        return make(cls, **{ours: getattr(image, theirs) for theirs, ours in pairs})

    @classmethod
    def _constant(cls, like: Tensor) -> Tensor:
        """The constant c, expanded to the length of ``like (..., 2D)``."""
        return like.new_tensor(cls.jacobian).repeat_interleave(like.shape[-1] // 2)

    @property
    def natural_parameter(self) -> Tensor:
        """Natural parameter of y plus c, ``(..., 2D)``."""
        theta = self._image().natural_parameter
        return theta + self._constant(theta)

    @property
    def mean_parameter(self) -> Tensor:
        """E u(f(x)), ``(..., 2D)``."""
        return self._image().mean_parameter

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        return cls._from_image(cls.of._from_natural(theta - cls._constant(theta)))

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return cls._from_image(cls.of._from_mean(mean))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        return cls.of._mean_excess(mean)

    def _log_partition(self) -> Tensor:
        return self._image()._log_partition()

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        """u(f(x)), ``(..., D)`` to ``(..., 2D)``."""
        return cls.of._statistic(cls._forward(x))

    def _support(self, x: Tensor) -> Tensor:
        y = self._forward(torch.where(x > 0, x, 1.0))
        return ((x > 0) & x.isfinite() & y.isfinite()).all(-1)

    def _entropy(self) -> Tensor:
        """Entropy of f(x) minus the expected log-Jacobian."""
        return self._image()._entropy() - dot(self.mean_parameter, self._constant(self.mean_parameter))

    def _kl(self, other: Self) -> Tensor:
        return self._image()._kl(other._image())
