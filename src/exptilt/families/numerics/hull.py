r"""Distance of a point from a convex hull, and the face of the hull that holds a point.

For a box or an orthant the distance is elementary. For the hull of points x_n it is found by least squares
with weights w ≥ 0,

    min_w ‖Σ_n w_n x_n‖² + (Σ_n w_n − 1)² = min_v ‖z‖² / (1 + ‖z‖²),     z = Σ_n v_n x_n,  w = v / (1 + ‖z‖²),

whose v are the weights of the point z of the hull nearest to the origin. Then z is the normal of a hyperplane
that separates the origin from every point: the certificate that no tilt has this mean.

On the boundary the certificate is a normal d with ⟨d, x_n⟩ ≤ 0 for every n and < 0 for some, found by a
linear program. The points with ⟨d, x_n⟩ = 0 are a face of the hull that holds the origin.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.transforms import is_concrete

_START, _ADDED = 256, 64  # points of the linear program at the start, and points added per round
_FEASIBLE = 1e-7  # the linear program's tolerance for 0

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def box_excess(mean: Tensor, lower: float | Tensor, upper: float | Tensor) -> Tensor:
    """``(...)``: distance of ``mean (..., D)`` from the box; 0 on the boundary, negative inside."""
    below, above = lower - mean, mean - upper
    worst = torch.maximum(below, above)
    worst = worst.squeeze(-1) if worst.shape[-1] == 1 else worst.amax(-1)
    if worst.numel() and is_concrete(worst) and bool(worst.amax() < 0):
        return worst
    outside = (below.clamp_min(0) ** 2 + above.clamp_min(0) ** 2).sum(-1).sqrt()
    return torch.where(outside > 0, outside, worst.clamp_max(0))


def nearest_in_hull(points: Tensor, target: Tensor) -> Tensor:
    """The point of the hull of ``points (N, D)`` nearest to ``target (D)``.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> nearest_in_hull(square, torch.tensor([3.0, 0.5]))
        tensor([1.0000, 0.5000])
    """
    cloud, goal = (x.detach().cpu().double().numpy() for x in (points, target))
    return torch.as_tensor(goal + nearest_to_origin(cloud - goal)).to(target)


def nearest_to_origin(cloud: Array) -> Array:
    """The point of the hull of ``cloud (N, D)`` nearest to the origin."""
    scale = float(np.abs(cloud).max()) or 1.0
    rows = np.vstack([cloud.T / scale, np.ones(len(cloud))])
    from scipy.optimize import nnls

    weight = nnls(rows, np.eye(len(rows))[-1])[0]
    return np.asarray(weight / weight.sum() @ cloud)


def solve_by_rows(cost: Array, rows: Array, most: Array, few: set[int], slack: float, **options: Any) -> Any:
    """The x of least ⟨cost, x⟩ with ``rows @ x <= most``; None if there is none.

    Few of many rows matter: the program is solved for those in `few`, and rows that its answer violates by
    more than `slack` are added until none is. If a few rows have no answer, neither have all.
    """
    from scipy.optimize import linprog

    while True:
        chosen = sorted(few)
        program = linprog(cost, A_ub=rows[chosen], b_ub=most[chosen], method="highs", **options)
        if program.x is None:
            return None
        excess = rows @ program.x - most
        worst = np.argsort(excess)[-_ADDED:]
        violated = set(worst[excess[worst] > slack].tolist())
        if violated <= few:
            return program.x
        few |= violated


def some_rows(count: int) -> set[int]:
    """The rows that `solve_by_rows` starts from, spread evenly."""
    return set(range(0, count, max(1, count // _START)))


def face_of_origin(cloud: Array, rounding: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
    """Which of ``cloud (N, D)`` are on a face of the hull that holds the origin; None if there is none.

    Args:
        cloud: points less the target.
        rounding: ``(N, D)``, bound on the error of each entry.

    Example:
        >>> square = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> face_of_origin(square - [0.0, 0.5], 1e-15 * square).tolist()
        [True, False, True, False]
    """
    scale = float(np.abs(cloud).max()) or 1.0
    cloud, slack = cloud / scale, rounding / scale
    most, few = slack.sum(-1), some_rows(len(cloud))
    found = solve_by_rows(cloud.mean(0), cloud, most, few, _FEASIBLE, bounds=(-1, 1))
    if found is None:
        return None
    height = cloud @ found
    # The program is right to seven digits only; the points that it puts on the face give the exact normal.
    held = cloud[np.abs(height) <= 2 * _FEASIBLE + most]
    size, vectors = np.linalg.svd(held, full_matrices=False)[1:]
    along = vectors[size > 8 * len(held) ** 0.5 * (slack.max() + np.finfo(float).eps)]
    normal = found - along.T @ (along @ found)
    off = (slack + 64 * np.finfo(float).eps * np.abs(cloud)) @ np.abs(normal)  # errors of cloud and normal
    height = cloud @ normal
    return height >= -off if (height <= off).all() and (height < -off).any() else None
