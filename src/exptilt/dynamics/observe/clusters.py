r"""How many clusters a cloud has, by a rule that is stated and exact:

    two points belong together if a chain of points links them whose neighbours are at most r = tolerance ·
    √(mean ‖x‖²) apart.

The length √(mean ‖x‖²) is what a renormaliser holds fixed, so r does not shrink with the clusters
themselves, and a cloud that has collapsed to one place is one cluster. A cloud that has not clustered yet
counts many: at this resolution every point may stand alone. Besides the count there is the effective number
e^{H}, H the entropy of the sizes, which stray points hardly change.

Points are sorted along their widest axis. A search then goes from point to point, looks only at points not
yet reached within r along that axis, and stops summing a distance once it is too long. Reached points are
never looked at again: a collapsed cloud costs N, and no pair is ever stored.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.checks import number
from exptilt.dynamics.observe.points import check_points

_LISTED = 16


@dataclass(frozen=True)
class Clusters:
    """Number and sizes of the clusters of each cloud.

    Attributes:
        count: ``(...)``, number of clusters.
        effective: ``(...)``, the exponential of the entropy of the clusters' shares.
        largest: ``(...)``, the share of points in the largest cluster.
        sizes: ``(..., 16)``, sizes of the largest clusters, falling; 0 where there are fewer.
    """

    count: Tensor
    effective: Tensor
    largest: Tensor
    sizes: Tensor


def cluster_labels(points: Tensor, *, tolerance: float = 0.05) -> Tensor:
    """The cluster of each point, ``(..., N)`` integers: 0 is the largest cluster, 1 the next.

    Example:
        >>> cluster_labels(torch.tensor([[1.0], [-1.0], [1.01], [1.04], [-1.01]]))
        tensor([0, 1, 0, 0, 1])
    """
    number("clusters", "tolerance", tolerance, least=0, otherwise=", a fraction of the length of the points")
    check_points("clusters", points)
    clouds = points.detach().cpu().double().reshape(-1, *points.shape[-2:])
    labels = [torch.from_numpy(_labels(cloud.numpy(), tolerance)) for cloud in clouds]
    return torch.stack(labels).reshape(points.shape[:-1])


def clusters(points: Tensor, *, tolerance: float = 0.05) -> Clusters:
    """The number and sizes of the clusters of each cloud.

    Args:
        points: ``(..., N, D)``.
        tolerance: the largest gap within a cluster, relative to the root mean square length of the points.

    Example:
        >>> clusters(torch.tensor([[1.0], [-1.0], [1.01], [1.04]])).sizes[:3]
        tensor([3, 1, 0])
    """
    labels = cluster_labels(points, tolerance=tolerance)
    count = labels.shape[-1]
    sizes = torch.stack([torch.bincount(row, minlength=count) for row in labels.reshape(-1, count)])
    sizes = sizes.reshape(labels.shape)
    share = sizes.double() / count
    entropy = -torch.special.xlogy(share, share).sum(-1)
    listed = torch.nn.functional.pad(sizes, (0, max(0, _LISTED - count)))[..., :_LISTED]
    return Clusters((sizes > 0).sum(-1), entropy.exp(), share[..., 0], listed)


def _labels(cloud: Any, tolerance: float) -> Any:
    """Cluster labels of the rows of a float64 array (N, D); 0 is the largest cluster."""
    scale = np.abs(cloud).max()
    cloud = cloud / scale if scale > 0 else cloud  # so that squares neither overflow nor vanish
    axes = np.argsort(-cloud.var(0), kind="stable")
    cloud = cloud[:, axes]
    order = np.argsort(cloud[:, 0], kind="stable")
    radius = tolerance * np.sqrt((cloud**2).sum(1).mean())
    found = np.empty(len(cloud), dtype=np.int64)
    found[order] = _components(np.ascontiguousarray(cloud[order]), float(radius))
    sizes = np.bincount(found)
    rank = np.empty(len(sizes), dtype=np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    return rank[found]


def _components(x: Any, radius: float) -> Any:
    """Component labels of points (N, D), sorted by first coordinate and linked up to distance `radius`."""
    labels = np.empty(len(x), np.int64)
    native.call("clusters", native.frame("Clusters")(*x.shape, radius, x.ctypes.data, labels.ctypes.data))
    return labels
