r"""Renormalisers: what brings a cloud of points back after ∇G has blown it up (THEORY B3).

With N points x_n in D dimensions, each of these is the nearest way back to a constraint, and leaves a cloud that satisfies it alone:

    Layer    each point: coordinates of mean 0 and variance 1              x ← (x − mean_d x) / std_d x
    RMS      each point: coordinates of mean square 1                      x ← x / √(mean_d x²)
    Sphere   each point: a length                                          x ← r x / ‖x‖
    Batch    each coordinate: over the points, mean 0 and variance 1       x ← (x − mean_n x) / std_n x
    Whiten   the cloud: a mean m and a covariance S                        x ← m + A (x − mean_n x),   A C A = S,  A symmetric

C is the covariance of the cloud (divided by N). Of all matrices that turn C into S, A = S^½ (S^½ C S^½)^{-½} S^½ moves the points
least: it is the optimal transport between Gaussians. For S = 1 it is C^{-½}.

A point or a cloud that cannot be brought back (a zero vector has no direction, a flat cloud no inverse covariance) is an error that names
it. ``epsilon`` is the usual remedy of networks, √(variance + ε) instead of √variance; ``floor`` lifts a flat covariance and warns.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.linalg import check_covariance
from exptilt._support.transforms import derivatives_wanted, is_concrete
from exptilt.dynamics.observe.points import check_points, cloud_scale, full_precision

Renormalizer = Callable[[Tensor], Tensor]

# Between these, squares of coordinates and their sums keep full precision.
_RANGE = {torch.float32: (1e-15, 1e18), torch.float64: (1e-145, 1e150)}
_FAR = 100.0  # mean over standard deviation of a point's coordinates, up to which its differences are surely not all rounding
_ZERO = "the point at index {} is zero and has no direction. Move it, or leave it out."


def _unit(name: str, x: Tensor, dim: int, size: Tensor, what: str) -> Tensor:
    """Scale x to length 1 along an axis; an error if it is no longer than the rounding of numbers as large as `size`."""
    top = x.detach().abs().amax(dim, keepdim=True)
    least = 4 * torch.finfo(x.dtype).eps * size.detach().abs().amax(dim, keepdim=True)
    if is_concrete(top) and bool((bad := top <= least).any()):
        index = list(bad.nonzero()[0].tolist())
        index.pop(dim)
        raise ArgumentError(f"{name}: {what.format(tuple(index))}")
    scaled = x / top  # so that squares neither overflow nor vanish
    return scaled / scaled.square().sum(dim, keepdim=True).sqrt()


def _plain(points: Tensor) -> bool:
    """Whether the quick way may be tried: values may be looked at, and nobody asks for derivatives."""
    return points.dtype in _RANGE and is_concrete(points) and not derivatives_wanted((points,))


def _quick(x: Tensor, length: float, least: float = 0.0) -> Tensor | None:
    """Scale x to a length along its last axis, in two passes; None unless all lengths are ordinary and above `least`."""
    now = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    small, large = _RANGE[x.dtype]
    low, high = map(float, now.aminmax())
    return x / (now / length) if max(small, least) < low and high < large else None


def _to_length(name: str, points: Tensor, length: float) -> Tensor:
    """Every point scaled to a length."""
    if _plain(points) and (quick := _quick(points, length)) is not None:
        return quick
    return _unit(name, points, -1, torch.zeros_like(points), _ZERO) * length


def _check_epsilon(name: str, epsilon: float) -> None:
    if not (isinstance(epsilon, int | float) and 0 <= epsilon < math.inf):
        raise ArgumentError(f"{name}: epsilon is {epsilon!r}. Pass a number ≥ 0; 0 is exact.")


@dataclass(frozen=True)
class Layer:
    """Layer norm without gain: the coordinates of each point get mean 0 and variance 1, so its length is √D.

    Args:
        epsilon: added to the variance.

    Example:
        >>> Layer()(torch.tensor([[1.0, 2.0, 3.0, 2.0]]))
        tensor([[-1.4142,  0.0000,  1.4142,  0.0000]])
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_epsilon("Layer", self.epsilon)

    def __call__(self, points: Tensor) -> Tensor:
        """Renormalise.

        Args:
            points: ``(..., N, D)``.

        Returns:
            ``(..., N, D)``.
        """
        if points.shape[-1] == 1:
            raise ArgumentError(
                "Layer: points have one coordinate, whose variance is always 0. Use RMS, Batch or Sphere in one dimension."
            )
        mean, length = points.mean(-1, keepdim=True), math.sqrt(points.shape[-1])
        centred = points - mean
        if self.epsilon:
            return centred / (centred.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        if (
            _plain(points)
            and (quick := _quick(centred, length, float(mean.abs().max()) * length / _FAR)) is not None
        ):
            return quick
        what = "all coordinates of the point at index {} are equal. Move it, or pass Layer(epsilon=1e-5)."
        return _unit("Layer", centred, -1, points, what) * length


@dataclass(frozen=True)
class RMS:
    """RMS norm without gain: each point is scaled to length √D.

    Args:
        epsilon: added to the mean square.
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_epsilon("RMS", self.epsilon)

    def __call__(self, points: Tensor) -> Tensor:
        """Renormalise.

        Args:
            points: ``(..., N, D)``.

        Returns:
            ``(..., N, D)``.
        """
        if self.epsilon:
            return points / (points.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return _to_length("RMS", points, math.sqrt(points.shape[-1]))


@dataclass(frozen=True)
class Sphere:
    """Each point is scaled to one length: cosine similarity.

    Args:
        radius: the length.

    Example:
        >>> Sphere()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.radius, int | float) and 0 < self.radius < math.inf):
            raise ArgumentError(f"Sphere: radius is {self.radius!r}. Pass a number > 0.")

    def __call__(self, points: Tensor) -> Tensor:
        """Renormalise.

        Args:
            points: ``(..., N, D)``.

        Returns:
            ``(..., N, D)``.
        """
        return _to_length("Sphere", points, self.radius)


@dataclass(frozen=True)
class Batch:
    """Batch norm without gain: over the points, every coordinate gets mean 0 and variance 1.

    Args:
        epsilon: added to the variance.
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check_epsilon("Batch", self.epsilon)

    def __call__(self, points: Tensor) -> Tensor:
        """Renormalise.

        Args:
            points: ``(..., N, D)``.

        Returns:
            ``(..., N, D)``.
        """
        centred = points - points.mean(-2, keepdim=True)
        if self.epsilon:
            return centred / (centred.square().mean(-2, keepdim=True) + self.epsilon).sqrt()
        what = (
            "all points agree in the coordinate at index {}. Pass points that differ, or Batch(epsilon=1e-5)."
        )
        return _unit("Batch", centred, -2, points, what) * math.sqrt(points.shape[-2])


@dataclass(frozen=True, eq=False)
class Whiten:
    """The cloud gets a given mean and covariance, by the symmetric map that moves its points least.

    Args:
        mean: ``(..., D)``; default 0.
        covariance: ``(..., D, D)``, symmetric positive definite; default the identity.
        floor: eigenvalues of the cloud's covariance below this fraction of the largest are lifted to it, with a warning that says by how
            much. Default 0: a flat cloud is an error.

    Example:
        >>> x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> y = Whiten(covariance=torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))(x)
        >>> torch.cov(y.T, correction=0)
        tensor([[2.0000, 1.0000],
                [1.0000, 2.0000]], dtype=torch.float64)
    """

    mean: Tensor | None = None
    covariance: Tensor | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name, given, shape in (
            ("mean", self.mean, "(..., D)"),
            ("covariance", self.covariance, "(..., D, D)"),
        ):
            if given is not None and not (isinstance(given, Tensor) and given.is_floating_point()):
                got = (
                    f"a tensor of {given.dtype}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
                )
                raise ArgumentError(f"Whiten: {name} is {got}. Pass a floating tensor {shape}.")
        if self.mean is not None and is_concrete(self.mean) and not bool(self.mean.isfinite().all()):
            raise ArgumentError(
                f"Whiten: mean holds NaN or infinity: {self.mean.tolist()}. Pass finite numbers."
            )
        if self.covariance is not None:
            check_covariance(self.covariance, "Whiten: covariance")
        if not (isinstance(self.floor, int | float) and 0 <= self.floor < 1):
            raise ArgumentError(f"Whiten: floor is {self.floor!r}. Pass a fraction, 0 ≤ floor < 1.")

    def __call__(self, points: Tensor) -> Tensor:
        """Renormalise.

        Args:
            points: ``(..., N, D)``.

        Returns:
            ``(..., N, D)``.
        """
        check_points("Whiten", points)
        count, dimension = points.shape[-2:]
        if points.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"Whiten: points are {points.dtype}, in which no eigenvalues are found. Pass float32 or float64."
            )
        for name, given, shape in (
            ("mean", self.mean, (dimension,)),
            ("covariance", self.covariance, (dimension, dimension)),
        ):
            if given is not None and (given.shape[-len(shape) :] != shape or given.dtype != points.dtype):
                got = (
                    f"{name} {tuple(given.shape)} {given.dtype}, points {tuple(points.shape)} {points.dtype}"
                )
                raise ArgumentError(
                    f"Whiten: {name} must be (..., {', '.join(map(str, shape))}) and of the points' dtype; got {got}."
                )
        with full_precision(points):
            centred = points - points.mean(-2, keepdim=True)
            scale = cloud_scale(centred)  # the result does not depend on it
            centred = centred / scale
            covariance = self._lifted(centred.mT @ centred / count, count, scale)
            if self.covariance is None:
                matrix = torch.linalg.inv(symmetric_root(covariance))
            else:
                root = symmetric_root(self.covariance)
                matrix = root @ torch.linalg.inv(symmetric_root(root @ covariance @ root)) @ root
            white = centred @ (matrix + matrix.mT) / 2
            return white if self.mean is None else white + self.mean.unsqueeze(-2)

    def _lifted(self, covariance: Tensor, count: int, scale: Tensor) -> Tensor:
        """The covariance of points over `scale`, its small eigenvalues lifted to the floor; an error if one is 0 in this precision."""
        if not is_concrete(covariance):
            return covariance
        values, vectors = torch.linalg.eigh(covariance.detach())
        rounding = covariance.shape[-1] * torch.finfo(covariance.dtype).eps
        least = max(self.floor, rounding) * values[..., -1:]
        low = values <= least
        if not bool(low.any()):
            return covariance
        if self.floor <= rounding:
            index = tuple(low.any(-1).nonzero()[0].tolist())
            rank = int((~low[index]).sum())
            where = f" at batch index {index}" if index else ""
            raise ArgumentError(
                f"Whiten: {count} points in {covariance.shape[-1]} dimensions span only {rank}{where}, so no matrix gives them the "
                "covariance asked for. Pass more or other points, or Whiten(floor=1e-6) to lift what is missing."
            )
        added = torch.where(low, least - values, 0.0)
        most = float((added.amax(-1) * scale.squeeze((-2, -1)) ** 2).max())
        warnings.warn(
            f"Whiten: lifted {int(low.sum())} eigenvalues of the covariance by up to {most:.3g}.",
            ExptiltWarning,
            stacklevel=4,
        )
        return covariance + vectors @ (added.unsqueeze(-1) * vectors.mT)


def symmetric_root(matrix: Tensor) -> Tensor:
    r"""The symmetric square root of symmetric positive definite matrices, with right derivatives where eigenvalues coincide.

    Eigenvectors have no derivative at coinciding eigenvalues, the root has: S dS + dS S = dC. So the eigenvectors are held fixed, and the
    chord iteration S ← S + L(C − S²), L the solution of S₀ L + L S₀ = · in the fixed eigenbasis, is run from the root itself. It changes
    no value beyond rounding, and each turn makes one more order of derivatives right: two turns, first and second derivatives.

    Args:
        matrix: ``(..., D, D)``.

    Returns:
        ``(..., D, D)``.
    """
    with full_precision(matrix):
        values, vectors = torch.linalg.eigh(matrix.detach())
        roots = values.clamp_min(0).sqrt()
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        root = vectors @ (roots.unsqueeze(-1) * vectors.mT)
        for _ in range(2):
            residual = vectors.mT @ (matrix - root @ root) @ vectors
            root = root + vectors @ (residual / sums) @ vectors.mT
        return root


_NAMED: dict[str, Renormalizer] = {
    "layer": Layer(),
    "rms": RMS(),
    "batch": Batch(),
    "whiten": Whiten(),
    "sphere": Sphere(),
}


def as_renormalizer(given: "str | Renormalizer | None") -> Renormalizer | None:
    """A renormaliser from its name; None and callables pass.

    Args:
        given: "layer", "rms", "batch", "whiten", "sphere", None or a function from points ``(..., N, D)`` to points.
    """
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]
    raise ArgumentError(
        f"Flow: renormalize is {given!r}. Pass one of {', '.join(_NAMED)}, an instance such as Whiten(mean, covariance), None for no "
        "renormalisation, or a function from points (..., N, D) to points."
    )
