r"""What is measured of a cloud of points at one step of a flow.

Besides Gaussianity and clusters, which have files of their own: the mean of G over the points, lengths, the covariance's trace and
spectrum, the mean cosine over pairs,

    mean_{i≠j} cos(x_i, x_j) = (‖Σ u_i‖² − N) / (N(N−1)),    u_i = x_i/‖x_i‖,

and what the last step did to the size of the cloud: ∇G expands it, the renormaliser contracts it (THEORY B3),

    expansion = ‖x + step·g‖ / ‖x‖,    contraction = ‖RN(x + step·g)‖ / ‖x + step·g‖       (‖·‖ over all points together),

the same for the spread, the root of the covariance's trace. All in float64, at the price of N·D² or less but for Gaussianity and clusters.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from exptilt.dynamics.observe.clusters import Clusters, clusters
from exptilt.dynamics.observe.gaussianity import Gaussianity, gaussianity
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
    """What the last step did to the size of the cloud; NaN before the first.

    Attributes:
        expansion: ``(...)``, of all lengths together by the ascent.
        contraction: ``(...)``, of them by the renormaliser.
        spread_expansion: ``(...)``, of the distances from the mean by the ascent.
        spread_contraction: ``(...)``, of them by the renormaliser.
    """

    expansion: Tensor
    contraction: Tensor
    spread_expansion: Tensor
    spread_contraction: Tensor


@dataclass(frozen=True)
class Snapshot:
    """One row of a trajectory.

    Attributes:
        log_normalizer: ``(...)``, mean of G over the points that see something.
        norms: lengths.
        covariance_trace: ``(...)``.
        spectrum: ``(..., D)``, eigenvalues of the covariance, falling.
        mean_cosine: ``(...)``, over pairs of points that are not zero.
        gaussianity: Mardia's and the sliced tests.
        clusters: count and sizes.
        growth: by the step that led here.
    """

    log_normalizer: Tensor
    norms: Norms
    covariance_trace: Tensor
    spectrum: Tensor
    mean_cosine: Tensor
    gaussianity: Gaussianity
    clusters: Clusters
    growth: Growth


def measure(points: Tensor, log_normalizer: Tensor, growth: Growth | None, *, tolerance: float) -> Snapshot:
    """Measure a cloud.

    Args:
        points: ``(..., N, D)``.
        log_normalizer: ``(..., N)``.
        growth: from `growth`, or None.
        tolerance: of the clusters' rule.
    """
    x = points.detach().double()
    scale = cloud_scale(x)  # so that only what is itself too large overflows
    s, x = scale.squeeze((-2, -1)), x / scale
    length = torch.linalg.vector_norm(x, dim=-1)
    centred = x - x.mean(-2, keepdim=True)
    G = log_normalizer.detach().double()
    sees = -torch.inf < G
    nothing = torch.full_like(length[..., 0], torch.nan)
    return Snapshot(
        torch.where(sees, G, 0.0).sum(-1) / sees.sum(-1),
        Norms(s * length.mean(-1), s * length.amin(-1), s * length.amax(-1)),
        s * (s * (centred.square().sum((-2, -1)) / x.shape[-2])),
        s.unsqueeze(-1) * (s.unsqueeze(-1) * _spectrum(centred)),
        _mean_cosine(x, length),
        gaussianity(x),
        clusters(x, tolerance=tolerance),
        growth or Growth(nothing, nothing, nothing, nothing),
    )


def _spectrum(centred: Tensor) -> Tensor:
    """Eigenvalues of the covariance, falling, from the smaller of the two matrices that have them."""
    count, dimension = centred.shape[-2:]
    if dimension <= count:
        return torch.linalg.eigvalsh(centred.mT @ centred / count).flip(-1)
    found = torch.linalg.eigvalsh(centred @ centred.mT / count).flip(-1)
    return torch.nn.functional.pad(found, (0, dimension - count))


def _mean_cosine(x: Tensor, length: Tensor) -> Tensor:
    count = (length > 0).sum(-1)
    unit = x / torch.where(length > 0, length, 1.0).unsqueeze(-1)
    pairs = torch.where(count > 1, count * (count - 1), torch.nan)
    return (unit.sum(-2).square().sum(-1) - count) / pairs


def growth(before: Tensor, ascended: Tensor, after: Tensor) -> Growth:
    """How a step changed the size of the cloud.

    Args:
        before: ``(..., N, D)``.
        ascended: ``(..., N, D)``, after the ascent and before the renormaliser.
        after: ``(..., N, D)``.
    """

    def size(x: Tensor) -> Tensor:
        x = x.detach().double()
        scale = cloud_scale(x)
        return scale.squeeze((-2, -1)) * torch.linalg.vector_norm(x / scale, dim=(-2, -1))

    def spread(x: Tensor) -> Tensor:
        x = x.detach().double()
        return size(x - x.mean(-2, keepdim=True))

    a, b, c = (size(x) for x in (before, ascended, after))
    p, q, r = (spread(x) for x in (before, ascended, after))
    return Growth(b / a, c / b, q / p, r / q)


def stacked(records: Sequence[Record]) -> Record:
    """Many records as one whose tensors have a new leading axis."""
    first: Any = records[0]

    def join(name: str) -> Any:
        parts = [getattr(record, name) for record in records]
        return torch.stack(parts) if isinstance(parts[0], Tensor) else stacked(parts)

    joined: Record = type(first)(**{field.name: join(field.name) for field in dataclasses.fields(first)})
    return joined
