r"""Renormalisers: maps that bring a cloud of points back to a constraint after ∇G expands it (THEORY B3).

With N points x_n in D dimensions, each renormaliser moves to the nearest cloud that satisfies its constraint,
and leaves a cloud that already does unchanged:

    Layer    each point: coordinates of mean 0 and variance 1              x ← (x − mean_d x) / std_d x
    RMS      each point: coordinates of mean square 1                      x ← x / √(mean_d x²)
    Sphere   each point: a length                                          x ← r x / ‖x‖
    Batch    each coordinate: over the points, mean 0 and variance 1       x ← (x − mean_n x) / std_n x
    Whiten   the cloud: a mean m and a covariance S                        x ← m + A (x − mean_n x), A C A = S

C is the covariance of the cloud (divided by N). Of all matrices that turn C into S, the symmetric A = S^½
(S^½ C S^½)^{-½} S^½ moves the points least: it is the optimal transport between Gaussians. For S = 1 it is
C^{-½}.

Each is called with points ``(..., N, D)`` and returns the same shape. A point or a cloud that cannot be
brought back (a zero vector has no direction, a flat cloud no inverse covariance) is an error that names it.
``epsilon`` is the usual remedy of networks, √(variance + ε) instead of √variance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.checks import number
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import check_covariance
from exptilt._support.transforms import full_precision, is_concrete
from exptilt.dynamics.observe.points import check_points, cloud_scale

Renormalizer = Callable[[Tensor], Tensor]

_ZERO = "the point at index {} is zero and has no direction. Move it, or leave it out."


def _scaled(name: str, x: Tensor, dim: int, epsilon: float, size: Tensor | float, what: str) -> Tensor:
    """x scaled to mean square 1 along an axis.

    With epsilon=0 it is an error if x is no larger than the rounding error of numbers as large as `size`.
    """
    if epsilon:
        return x / (x.square().mean(dim, keepdim=True) + epsilon).sqrt()
    top = x.detach().abs().amax(dim, keepdim=True)
    least = size if isinstance(size, float) else size.detach().abs().amax(dim, keepdim=True)
    if is_concrete(top) and bool((bad := top <= 4 * torch.finfo(x.dtype).eps * least).any()):
        index = list(bad.nonzero()[0].tolist())
        index.pop(dim)
        raise ArgumentError(f"{name}: {what.format(tuple(index))}")
    scaled = x / top  # so that squares neither overflow nor vanish
    return scaled / (scaled.square().sum(dim, keepdim=True) / x.shape[dim]).sqrt()


@dataclass(frozen=True)
class _Softened:
    """Base of the renormalisers that divide by √(variance + ε)."""

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        number(type(self).__name__, "epsilon", self.epsilon, least=0)


@dataclass(frozen=True)
class Layer(_Softened):
    """Layer norm without gain: the coordinates of each point get mean 0 and variance 1, so its length is √D.

    Args:
        epsilon: added to the variance.

    Example:
        >>> Layer()(torch.tensor([[1.0, 2.0, 3.0, 2.0]]))
        tensor([[-1.4142,  0.0000,  1.4142,  0.0000]])
    """

    def __call__(self, points: Tensor) -> Tensor:
        """The points ``(..., N, D)``, renormalised."""
        if points.shape[-1] == 1:
            raise ArgumentError(
                "Layer: points have one coordinate, whose variance is always 0. "
                "Use RMS, Batch or Sphere in one dimension."
            )
        what = "all coordinates of the point at index {} are equal. Move it, or pass Layer(epsilon=1e-5)."
        centred = points - points.mean(-1, keepdim=True)
        return _scaled("Layer", centred, -1, self.epsilon, points, what)


@dataclass(frozen=True)
class RMS(_Softened):
    """RMS norm without gain: each point is scaled to length √D.

    Args:
        epsilon: added to the mean square.
    """

    def __call__(self, points: Tensor) -> Tensor:
        """The points ``(..., N, D)``, renormalised."""
        return _scaled("RMS", points, -1, self.epsilon, 0.0, _ZERO)


@dataclass(frozen=True)
class Sphere:
    """Each point is scaled to the same length, as for cosine similarity.

    Args:
        radius: the length.

    Example:
        >>> Sphere()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        number("Sphere", "radius", self.radius, above=0)

    def __call__(self, points: Tensor) -> Tensor:
        """The points ``(..., N, D)``, renormalised."""
        unit = _scaled("Sphere", points, -1, 0.0, 0.0, _ZERO)
        return unit * (self.radius / math.sqrt(points.shape[-1]))


@dataclass(frozen=True)
class Batch(_Softened):
    """Batch norm without gain: over the points, every coordinate gets mean 0 and variance 1.

    Args:
        epsilon: added to the variance.
    """

    def __call__(self, points: Tensor) -> Tensor:
        """The points ``(..., N, D)``, renormalised."""
        what = (
            "all points agree in the coordinate at index {}. Pass points that differ, or Batch(epsilon=1e-5)."
        )
        centred = points - points.mean(-2, keepdim=True)
        return _scaled("Batch", centred, -2, self.epsilon, points, what)


@dataclass(frozen=True, eq=False)
class Whiten:
    """The cloud gets a given mean and covariance, by the symmetric map that moves its points least.

    Args:
        mean: ``(..., D)``; default 0.
        covariance: ``(..., D, D)``, symmetric positive definite; default the identity.

    Example:
        >>> x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> y = Whiten(covariance=torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))(x)
        >>> torch.cov(y.T, correction=0)
        tensor([[2.0000, 1.0000],
                [1.0000, 2.0000]], dtype=torch.float64)
    """

    mean: Tensor | None = None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        for name, given, shape in ("mean", self.mean, "D"), ("covariance", self.covariance, "D, D"):
            if given is not None and not (isinstance(given, Tensor) and given.is_floating_point()):
                kind = f"tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
                raise ArgumentError(f"Whiten: {name} is a {kind}. Pass a floating tensor (..., {shape}).")
        if self.mean is not None and is_concrete(self.mean) and not bool(self.mean.isfinite().all()):
            raise ArgumentError(
                f"Whiten: mean holds NaN or infinity: {self.mean.tolist()}. Pass finite numbers."
            )
        if self.covariance is not None:
            check_covariance(self.covariance, "Whiten: covariance")

    def __call__(self, points: Tensor) -> Tensor:
        """The points ``(..., N, D)``, renormalised."""
        check_points("Whiten", points)
        count, dimension = points.shape[-2:]
        if points.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"Whiten: points are {points.dtype}, without eigenvalues in torch. Pass float32 or float64."
            )
        for name, given, axes in ("mean", self.mean, 1), ("covariance", self.covariance, 2):
            shape = (dimension,) * axes
            if given is not None and (given.shape[-axes:] != shape or given.dtype != points.dtype):
                raise ArgumentError(
                    f"Whiten: {name} must be (..., {', '.join(map(str, shape))}) and of the points' dtype; "
                    f"got {name} {tuple(given.shape)} {given.dtype}, points {tuple(points.shape)} "
                    f"{points.dtype}."
                )
        with full_precision(points.device):
            centred = points - points.mean(-2, keepdim=True)
            centred = centred / cloud_scale(
                centred
            )  # keeps squares in range; the result does not depend on it
            covariance = centred.mT @ centred / count
            if is_concrete(covariance):
                _check_full(covariance, count)
            if self.covariance is None:
                matrix = torch.linalg.inv(symmetric_root(covariance))
            else:
                root = symmetric_root(self.covariance)
                matrix = root @ torch.linalg.inv(symmetric_root(root @ covariance @ root)) @ root
            white: Tensor = centred @ (matrix + matrix.mT) / 2
            return white if self.mean is None else white + self.mean.unsqueeze(-2)


def _check_full(covariance: Tensor, count: int) -> None:
    """Raise unless clouds of `count` points, with covariances ``(..., D, D)``, span all dimensions."""
    values = torch.linalg.eigvalsh(covariance.detach())
    low = values <= covariance.shape[-1] * torch.finfo(covariance.dtype).eps * values[..., -1:]
    if bool(low.any()):
        index = tuple(low.any(-1).nonzero()[0].tolist())
        where = f" at batch index {index}" if index else ""
        raise ArgumentError(
            f"Whiten: {count} points in {covariance.shape[-1]} dimensions span only "
            f"{int((~low[index]).sum())}{where}, so no matrix gives them the covariance asked for. Pass more "
            "points, or other ones."
        )


def symmetric_root(matrix: Tensor) -> Tensor:
    r"""The symmetric root of positive definite ``(..., D, D)``, with derivatives at equal eigenvalues.

    Eigenvectors have no derivative where eigenvalues coincide, the root has: S dS + dS S = dC. So the
    eigenvectors are held fixed, and the chord iteration S ← S + L(C − S²), L the solution of S₀ L + L S₀ =
    · in the fixed eigenbasis, is run from the root itself. It changes no value beyond rounding, and each
    turn makes one more order of derivatives right: two turns, first and second derivatives.
    """
    with full_precision(matrix.device):
        values, vectors = torch.linalg.eigh(matrix.detach())
        roots = values.clamp_min(0).sqrt()
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        root: Tensor = vectors @ (roots.unsqueeze(-1) * vectors.mT)
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


def as_renormalizer(given: str | Renormalizer | None) -> Renormalizer | None:
    """The renormaliser of this name; None and callables are returned unchanged."""
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]
    raise ArgumentError(
        f"Flow: renormalize is {given!r}. Pass one of {', '.join(_NAMED)}, an instance such as "
        "Whiten(mean, covariance), None for none, or a function from points (..., N, D) to points."
    )
