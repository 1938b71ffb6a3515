"""The check and the scale of clouds of points ``(..., N, D)``, which the whole folder uses."""

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete


def check_points(caller: str, points: Tensor, name: str = "points") -> None:
    """Raise unless points are a floating tensor ``(..., N, D)`` with N ≥ 1, D ≥ 1 and finite entries.

    Within `torch.func` and `torch.compile` the entries are not checked.
    """
    given = isinstance(points, Tensor)
    if not given or not points.is_floating_point() or points.ndim < 2 or 0 in points.shape:
        got = f"{tuple(points.shape)} {points.dtype}" if given else type(points).__name__
        raise ArgumentError(
            f"{caller}: {name} must be a floating tensor (..., N, D) with at least one point; got {got}."
        )
    if is_concrete(points) and not bool((good := points.isfinite().all(-1)).all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise ArgumentError(
            f"{caller}: {name}{list(index)} holds NaN or infinity: {points[index].tolist()}. "
            "Pass finite points."
        )


def cloud_scale(points: Tensor) -> Tensor:
    """``(..., 1, 1)``, the power of two below the largest coordinate of each cloud, a constant to autograd.

    Dividing by it is exact, and squares of the quotients neither overflow nor all vanish.
    """
    top = points.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(top > 0, top.log2().floor().exp2(), 1.0)
