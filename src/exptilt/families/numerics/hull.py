r"""How far a point is outside of a convex hull.

For a box or an orthant that is arithmetic. For the hull of points x_n it is least squares with weights w ≥ 0,

    min_w ‖Σ_n w_n x_n‖² + (Σ_n w_n − 1)² = min_v ‖z‖² / (1 + ‖z‖²),     z = Σ_n v_n x_n,  w = v / (1 + ‖z‖²),

whose v are the weights of the point z of the hull nearest to the origin. Then z is the normal of a hyperplane
that separates the origin from every point: the certificate that no tilt has this mean.
"""

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

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
    weight = nnls(rows, np.eye(len(rows))[-1])[0]
    return np.asarray(weight / weight.sum() @ cloud)
