r"""How far a point is outside of a convex hull.

For a box or an orthant that is arithmetic. For the hull of finitely many points it is Wolfe's
minimum-norm-point algorithm (1976): keep a small affinely independent set of points, go to the nearest point
of its affine hull, drop points whose weight would turn negative, add the point that lies farthest towards the
target. It ends after finitely many rounds with the nearest point z of the hull, and m − z is the normal of a
hyperplane that separates m from every point: the certificate that no tilt has mean m.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def box_excess(mean: Tensor, lower: float | Tensor, upper: float | Tensor) -> Tensor:
    """Distance of ``mean (..., D)`` to the box, 0 on its boundary, negative inside: ``(...)``."""
    below, above = lower - mean, mean - upper
    worst = torch.maximum(below, above)
    worst = worst.squeeze(-1) if worst.shape[-1] == 1 else worst.amax(-1)
    if worst.numel() and is_concrete(worst) and bool(worst.amax() < 0):
        return worst
    outside = (below.clamp_min(0) ** 2 + above.clamp_min(0) ** 2).sum(-1).sqrt()
    return torch.where(outside > 0, outside, worst.clamp_max(0))


def ended_on_boundary(solution: Solution[Tensor], excess: Tensor | None) -> Solution[Tensor]:
    """The solution, said to be on the boundary where ``excess (...)`` is exactly 0."""
    if excess is None:
        return solution
    return replace(
        solution, code=torch.where(excess == 0, Status.BOUNDARY.code, solution.code).to(torch.int8)
    )


def nearest_in_hull(points: Tensor, target: Tensor, *, max_rounds: int = 1000) -> Tensor:
    """The point of the hull of ``points (N, D)`` nearest to ``target (D)``.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> nearest_in_hull(square, torch.tensor([3.0, 0.5]))
        tensor([1.0000, 0.5000])
    """
    goal = target.detach().cpu().double().numpy()
    cloud = (
        points.detach().cpu().double().numpy() - goal
    )  # first of all: far from the origin products would lose what tells points apart
    return torch.as_tensor(goal + _wolfe(cloud, max_rounds)).to(target)


def distance_from_origin(cloud: Array, *, max_rounds: int = 1000) -> float:
    """Distance of the hull of ``cloud (N, D)`` from the origin."""
    return float(np.linalg.norm(_wolfe(cloud, max_rounds)))


def _wolfe(cloud: Array, max_rounds: int) -> Array:
    """The point of the hull nearest to the origin."""
    scale = float(np.abs(cloud).max()) or 1.0
    start = int(np.argmin((cloud**2).sum(1)))
    active = [start]
    weight: Array = np.ones(1)
    rounding = 4 * np.finfo(float).eps * cloud.shape[1] * scale
    before = np.inf
    for _ in range(max_rounds):
        current = weight @ cloud[active]
        size = float(np.linalg.norm(current))
        if size <= rounding or size >= before:  # each round comes nearer, until rounding keeps it from that
            break
        before = size
        scores = cloud @ current
        farthest = int(np.argmin(scores))
        # No point lies on the near side of the hyperplane through the current one: it is the nearest.
        if scores[farthest] >= scores[active].min() - 1e-13 * scale * size or farthest in active:
            break
        active, weight = [*active, farthest], np.append(weight, 0.0)
        active, weight = _corral(cloud, active, weight)
    return np.asarray(weight @ cloud[active])


def _corral(cloud: Array, active: list[int], weight: Array) -> tuple[list[int], Array]:
    """The nearest point of the affine hull of the active set, less points until it is within their hull."""
    while True:
        wanted = _affine_weights(cloud[active])
        if (wanted > 1e-14).all() or len(active) == 1:
            return active, wanted
        falling = wanted <= 1e-14
        ratio = np.where(falling, weight / np.maximum(weight - wanted, 1e-300), np.inf)
        weight = weight + min(1.0, float(ratio.min())) * (wanted - weight)
        weight[int(np.argmin(np.where(falling, ratio, np.inf)))] = 0.0
        keep = weight > 1e-14
        active = [index for index, kept in zip(active, keep, strict=True) if kept]
        weight = weight[keep] / weight[keep].sum()


def _affine_weights(offsets: Array) -> Array:
    """Weights (sum 1) of the point of the affine hull nearest to the origin."""
    edges = offsets[1:] - offsets[0]
    rest, *_ = np.linalg.lstsq(edges.T, -offsets[0], rcond=None) if len(edges) else (np.zeros(0),)
    return np.concatenate([[1.0 - rest.sum()], rest])
