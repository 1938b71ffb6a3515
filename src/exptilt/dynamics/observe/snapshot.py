r"""The measurements of a cloud of points at one step of a flow.

Besides Gaussianity and clusters, which have files of their own: the mean of G over the points, lengths, the
covariance's trace and spectrum, the mean cosine over pairs,

    mean_{i≠j} cos(x_i, x_j) = (‖Σ u_i‖² − N) / (N(N−1)),    u_i = x_i/‖x_i‖,

and how the last step changed the size of the cloud: ∇G expands it, the renormaliser contracts it (THEORY B3),

    expansion = ‖x + step·g‖ / ‖x‖,    contraction = ‖RN(x + step·g)‖ / ‖x + step·g‖    (‖·‖ over all points).

All is in float64 and costs N·D² or less,
except Gaussianity and clusters.
"""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from exptilt.dynamics.observe.clusters import clusters
from exptilt.dynamics.observe.gaussianity import gaussianity
from exptilt.dynamics.observe.points import cloud_scale

Record = TypeVar("Record")


@dataclass(frozen=True)
class Norms:
    """Lengths of the points.

    Attributes:
        mean: ``(...)``.
        smallest: ``(...)``.
        largest: ``(...)``.
    """

    mean: Tensor
    smallest: Tensor
    largest: Tensor


@dataclass(frozen=True)
class Growth:
    """Factors by which the last step changed the size of the cloud; NaN before the first step.

    Attributes:
        expansion: ``(...)``, of the norm over all points, by the ascent.
        contraction: ``(...)``, of the norm over all points, by the renormaliser.
    """

    expansion: Tensor
    contraction: Tensor


def measure(
    points: Tensor, log_normalizer: Tensor, growth: Growth | None, *, tolerance: float
) -> dict[str, Any]:
    """One row of a `Trajectory`, by name, for a cloud ``(..., N, D)`` with G ``(..., N)`` at its points."""
    x = points.detach().double()
    scale = cloud_scale(x)  # so that no square overflows unless the result does
    s, x = scale.squeeze((-2, -1)), x / scale
    length = torch.linalg.vector_norm(x, dim=-1)
    centred = x - x.mean(-2, keepdim=True)
    G = log_normalizer.detach().double()
    sees = -torch.inf < G
    nothing = torch.full_like(length[..., 0], torch.nan)
    return {
        "log_normalizer": torch.where(sees, G, 0.0).sum(-1) / sees.sum(-1),
        "norms": Norms(s * length.mean(-1), s * length.amin(-1), s * length.amax(-1)),
        "covariance_trace": s * (s * (centred.square().sum((-2, -1)) / x.shape[-2])),
        "spectrum": s.unsqueeze(-1) * (s.unsqueeze(-1) * _spectrum(centred)),
        "mean_cosine": _mean_cosine(x, length),
        "gaussianity": gaussianity(x),
        "clusters": clusters(x, tolerance=tolerance),
        "growth": growth or Growth(nothing, nothing),
    }


def _spectrum(centred: Tensor) -> Tensor:
    """Eigenvalues of the covariance, falling, from the covariance or Gram matrix, whichever is smaller."""
    count, dimension = centred.shape[-2:]
    square = centred.mT @ centred if dimension <= count else centred @ centred.mT
    found: Tensor = torch.linalg.eigvalsh(square / count).flip(-1)
    return torch.nn.functional.pad(found, (0, max(0, dimension - count)))


def _mean_cosine(x: Tensor, length: Tensor) -> Tensor:
    """The mean cosine ``(...)`` over pairs of points that are not zero."""
    count = (length > 0).sum(-1)
    unit = x / torch.where(length > 0, length, 1.0).unsqueeze(-1)
    pairs: Tensor = torch.where(count > 1, count * (count - 1), torch.nan)
    mean: Tensor = (unit.sum(-2).square().sum(-1) - count) / pairs
    return mean


def growth(before: Tensor, ascended: Tensor, after: Tensor) -> Growth:
    """The `Growth` of a step, from its points before, after the ascent, and after: all ``(..., N, D)``."""

    def size(x: Tensor) -> Tensor:
        scale = cloud_scale(x)
        length: Tensor = torch.linalg.vector_norm(x / scale, dim=(-2, -1))
        return scale.squeeze((-2, -1)) * length

    a, b, c = (size(x.detach().double()) for x in (before, ascended, after))
    return Growth(b / a, c / b)


def stacked(records: list[Record]) -> Record:
    """One record from many, their tensors stacked along a new leading axis."""
    first: Any = records[0]
    if isinstance(first, Tensor):
        return torch.stack(records)  # type: ignore[return-value, arg-type]
    joined: Record = type(first)(*(stacked([getattr(r, f.name) for r in records]) for f in fields(first)))
    return joined
