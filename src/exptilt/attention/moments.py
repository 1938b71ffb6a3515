r"""Mean and covariance of uncertain hidden states, and of functions of them.

A covariance is held as a set of directions d_1 … d_m with Σ = Σ_k d_k d_k', and a function f moves each of
them:

    delta method:   d_k ← J d_k,   mean ← f(μ)                                  J the derivative of f at μ
    unscented:      the mean and covariance of the 2m points f(μ ± √m d_k), each of weight 1/2m

Both are exact for affine f. The delta method errs by terms of second order in the noise, in the mean as
well as in the covariance; the points find the mean of a quadratic f exactly, and their covariance is never
indefinite.

There are three forms. Positions of a *full* or *diagonal* covariance are independent of each other, those
of a *low-rank* one move together: x = μ + U z with z ~ N(0, I), one z for all positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from exptilt._support.checks import alike, choice, entries, finite, floating, number
from exptilt._support.errors import ArgumentError

FORMS = ("full", "diagonal", "low-rank")
_CHUNK = 64  # directions that are pushed at once


@dataclass(frozen=True)
class Moments:
    """Uncertain hidden states of a sequence.

    Args:
        mean: ``(..., length, dim)``.
        covariance: ``(..., length, dim, dim)`` if full, ``(..., length, dim)`` of variances if diagonal, or
            ``(..., length, dim, rank)``, the factor U of a low-rank one.
        form: "full", "diagonal" or "low-rank"; None decides by the shape, and takes a square for full.

    Example:
        >>> noisy = Moments(torch.zeros(1, 2), torch.tensor([[1.0, 4.0]]))
        >>> noisy.through(lambda x: x @ torch.tensor([[1.0], [2.0]])).variance
        tensor([[17.]])
    """

    mean: Tensor
    covariance: Tensor
    form: str | None = None

    def __post_init__(self) -> None:
        doubles = (torch.float64, torch.float32)
        mean = floating("Moments", "mean", self.mean, axes=2, shape="(..., length, dim)", dtypes=doubles)
        covariance = floating("Moments", "covariance", self.covariance, axes=2, dtypes=doubles)
        alike("Moments", mean=mean, covariance=covariance)
        size = mean.shape[-1]
        if self.form is None:
            square = covariance.ndim > mean.ndim and covariance.shape[-1] == size
            found = "diagonal" if covariance.ndim == mean.ndim else "full" if square else "low-rank"
            object.__setattr__(self, "form", found)
        choice("Moments", "form", self.form, FORMS, otherwise=", or None")
        shape = covariance.shape if self.form == "diagonal" else covariance.shape[:-1]
        if shape != mean.shape or (self.form == "full" and covariance.shape[-1] != size):
            last = {"full": f", {size})", "diagonal": ")", "low-rank": ", rank)"}[str(self.form)]
            wanted = ", ".join(map(str, mean.shape))
            raise ArgumentError(
                f"Moments: covariance has shape {tuple(covariance.shape)}, mean {tuple(mean.shape)}. "
                f"A {self.form} covariance is ({wanted}{last}."
            )
        finite("Moments", mean=mean, covariance=covariance)
        if self.form == "diagonal":
            entries("Moments", "covariance", covariance, covariance >= 0, "a variance, at least 0")
        elif self.form == "full":
            uneven = (covariance - covariance.mT).abs().amax((-1, -2))
            even = uneven <= torch.finfo(mean.dtype).eps ** 0.5 * covariance.abs().amax((-1, -2))
            entries("Moments", "covariance", covariance, even, "symmetric")

    @property
    def variance(self) -> Tensor:
        """The variance of each coordinate, ``(..., length, dim)``."""
        if self.form == "diagonal":
            return self.covariance
        if self.form == "full":
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        return self.covariance.square().sum(-1)

    @property
    def matrix(self) -> Tensor:
        """The covariance at each position, ``(..., length, dim, dim)``."""
        if self.form == "full":
            return self.covariance
        low_rank = self.form == "low-rank"
        return self.covariance @ self.covariance.mT if low_rank else torch.diag_embed(self.covariance)

    def directions(self, *, joint: bool = False) -> Tensor:
        """Directions d whose Σ_k d_k d_k' is the covariance.

        Args:
            joint: whether each direction of a full or diagonal covariance moves one position only; otherwise
                it moves all of them, which is right for functions of one position.

        Returns:
            ``(count, ..., length, dim)``.
        """
        if self.form == "low-rank":
            return self.covariance.movedim(-1, 0)
        root = torch.diag_embed(self.covariance.sqrt()) if self.form == "diagonal" else _root(self.covariance)
        if not joint:
            return root.movedim(-1, 0)
        length = root.shape[-3]
        own = torch.eye(length, dtype=root.dtype, device=root.device).reshape(
            length, *(1,) * (root.ndim - 3), -1, 1
        )
        return (own * root.movedim(-1, 0).unsqueeze(1)).flatten(0, 1)

    def through(
        self, function: Callable[[Tensor], Tensor], *, method: str = "delta", joint: bool = False
    ) -> Self:
        """Moments of f(x), in the same form.

        Args:
            function: f, of ``(..., length, dim)``, to be differentiated (delta) or called (unscented)
                within `torch.func.vmap`: a norm, an MLP, a block with its residual connection.
            method: "delta" or "unscented", which doubles the rank of a low-rank covariance.
            joint: whether f mixes positions, as attention does. Then a full or diagonal covariance has
                length × dim directions in place of dim, and the results at different positions depend on
                each other, which only the low-rank form keeps.
        """
        choice("Moments.through", "method", method, ("delta", "unscented"))
        along = self.directions(joint=joint)
        if method == "delta":
            mean, moved = function(self.mean), pushed(function, self.mean, along)
        else:
            step = math.sqrt(len(along)) * along
            points = torch.func.vmap(function, chunk_size=_CHUNK)(
                torch.cat([self.mean + step, self.mean - step])
            )
            mean = points.mean(0)
            moved = (points - mean) / math.sqrt(len(points))
        return type(self)(mean, gathered(moved, str(self.form)), self.form)

    def covers(self, x: Tensor, level: float) -> Tensor:
        """Whether each coordinate of x lies in the central Gaussian interval of probability `level`.

        Args:
            x: ``(..., length, dim)``.
            level: in (0, 1).

        Returns:
            ``(..., length, dim)``.
        """
        number("Moments.covers", "level", level, above=0, below=1)
        half = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
        return (x - self.mean).abs() <= half * self.variance.sqrt()


def pushed(function: Callable[[Tensor], Tensor], mean: Tensor, along: Tensor) -> Tensor:
    """J d for each direction ``(count, ..., length, dim)``, J the derivative of f at the mean."""

    def push(direction: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(function, (mean,), (direction,))[1]
        return tangent

    moved: Tensor = torch.func.vmap(push, chunk_size=_CHUNK)(along)
    return moved


def gathered(moved: Tensor, form: str) -> Tensor:
    """The covariance Σ_k d_k d_k' of directions ``(count, ..., length, dim)``, in this form."""
    if form == "diagonal":
        return moved.square().sum(0)
    factor = moved.movedim(0, -1)
    return factor if form == "low-rank" else factor @ factor.mT


def _root(covariance: Tensor) -> Tensor:
    """R with RR' the covariance ``(..., dim, dim)``, which may be singular but not indefinite."""
    value, vector = torch.linalg.eigh(covariance)
    slack = 10 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps * value.abs().amax(-1, keepdim=True)
    entries("Moments", "covariance's eigenvalues", value, value >= -slack, "at least 0")
    root: Tensor = vector * value.clamp_min(0).sqrt().unsqueeze(-2)
    return root
