r"""Families that become another family by a change of variable, y = f(x).

    log |f'(x)| = <c, u(y)>     gives     p(x) = e^{<u(f(x)), θ + c> − A(θ)}

So statistic, mean parameter, log-partition and divergences are those of y, and the natural parameter is
larger by c. Here x is a positive scalar in each coordinate, and u has two parts. x is no part of u, so
tilting acts on all of u.
"""

from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.linalg import dot
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make


class ChangeOfVariable(ExponentialFamily):
    """Base of the families of positive x whose f(x) has a law that is known."""

    of: ClassVar[type[ExponentialFamily]]
    """The family of y = f(x)."""

    jacobian: ClassVar[tuple[float, float]]
    """c, for either part of u."""

    _statistic_size = staticmethod(lambda d: 2 * d)
    _differentiable_draws = True
    identity_coordinate = False

    @staticmethod
    @abstractmethod
    def _forward(x: Tensor) -> Tensor:
        """y = f(x)."""

    @staticmethod
    @abstractmethod
    def _backward(y: Tensor) -> Tensor:
        """x where f(x) = y."""

    def _image(self) -> ExponentialFamily:
        """The law of y, whose fields are those of x in the same order."""
        pairs = zip(self.of.event_dims, self.event_dims, strict=True)
        return make(self.of, **{theirs: getattr(self, ours) for theirs, ours in pairs})

    @classmethod
    def _from_image(cls, image: ExponentialFamily) -> Self:
        """The law of x where that of y is this."""
        pairs = zip(cls.of.event_dims, cls.event_dims, strict=True)
        return make(cls, **{ours: getattr(image, theirs) for theirs, ours in pairs})

    @classmethod
    def _constant(cls, like: Tensor) -> Tensor:
        """c, as long as ``like (..., 2D)``."""
        return like.new_tensor(cls.jacobian).repeat_interleave(like.shape[-1] // 2)

    @property
    def natural_parameter(self) -> Tensor:
        """That of y plus c, ``(..., 2D)``."""
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

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-density of ``x (..., D)``: that of f(x), and the Jacobian."""
        statistic = self._statistic(x)
        return self._image()._log_prob(self._forward(x)) + dot(statistic, self._constant(statistic))

    def _entropy(self) -> Tensor:
        """That of f(x), less the expected log-Jacobian."""
        return self._image()._entropy() - dot(self.mean_parameter, self._constant(self.mean_parameter))

    def _kl(self, other: Self) -> Tensor:
        return self._image()._kl(other._image())

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Positive draws, ``shape + batch + (D,)``, differentiable in both parameters."""
        limits = torch.finfo(self.dtype)
        return self._backward(self._image()._sample(shape, generator)).clamp(limits.tiny, limits.max / 4)
