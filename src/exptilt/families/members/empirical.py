r"""Points with weights: the measure that attention tilts.

    h = Σ_n w_n δ(x − x_n),   G(η) = log Σ_n w_n e^{⟨x_n,η⟩},   ∇G(η) = Σ_n softmax_n(⟨x_n,η⟩ + log w_n) x_n

(THEORY A1). One attention output is the mean of the keys tilted by the query. G and the mean are streamed
over the points by `exptilt.tilting`, the covariance is summed over blocks of points. Large sets of points are
not copied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.checks import finite, floating
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape, dot
from exptilt._support.transforms import is_concrete
from exptilt.families.checks import check_log_weight, check_tensors
from exptilt.families.measure import Measure, make
from exptilt.families.numerics.hull import face_of_origin, nearest_in_hull
from exptilt.tilting import AttentionResult
from exptilt.tilting.arguments import prepare
from exptilt.tilting.attend import run

_COPY = 1 << 20  # largest number of entries in a copy of the points that counts as small
_BLOCK = 1 << 18  # entries of a temporary in the covariance: 2 MiB of float64, which fits a cache


class Points(Measure):
    """Base of the measures with ``points (..., N, D)`` and log-weights ``(..., N)``."""

    points: Tensor
    log_weight: Tensor

    @property
    def dimension(self) -> int:
        """D."""
        return self.points.shape[-1]

    @property
    def log_probability(self) -> Tensor:
        """Normalised log-weights, ``(..., N)``."""
        return torch.log_softmax(self.log_weight, -1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws among the points with replacement, ``shape + batch + (D,)``."""
        batch = self.batch_shape
        count = int(torch.Size(shape).numel())
        cumulative = (
            torch.softmax(self.log_weight.detach().double(), -1).cumsum(-1).expand(*batch, -1).contiguous()
        )
        uniform = torch.rand((*batch, count), dtype=torch.float64, device=self.device, generator=generator)
        index = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True).clamp_max(
            cumulative.shape[-1] - 1
        )
        points = self.points.expand(*batch, *self.points.shape[-2:])
        drawn = torch.take_along_dim(points, index.unsqueeze(-1), -2)
        return drawn.movedim(-2, 0).reshape(*shape, *batch, self.dimension)

    def _blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Ranges of points such that a temporary (rows, block, D) stays small."""
        count = self.points.shape[-2]
        length = max(16, _BLOCK // max(1, rows * self.dimension))
        for start in range(0, count, length):
            yield start, min(count, start + length)

    def _streamed(self, eta: Tensor) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Query ``(..., 1, Q, D)``, key and log-weight for `tilting`, and a function that restores η's shape.

        The axes of η in front of the measure's batch (all axes if there is no batch) become the Q rows of
        one query.
        """
        batch = self.batch_shape
        if batch.numel() == 1:
            shape = common_shape(batch, eta.shape[:-1])
            query = eta.expand(*shape, self.dimension).reshape(1, shape.numel(), self.dimension)
            key, weight = self.points.reshape(1, *self.points.shape[-2:]), self.log_weight.reshape(1, -1)
            return query, key, weight, lambda rows: rows.reshape((*shape, *rows.shape[2:]))
        shape = common_shape(batch, eta.shape[:-1])
        front = shape[: len(shape) - len(batch)]
        if tuple(shape[len(front) :]) != tuple(batch):
            batch = shape[len(front) :]
        query = (
            eta.expand(*shape, self.dimension)
            .reshape(front.numel(), *batch, self.dimension)
            .movedim(0, -2)
            .unsqueeze(-3)
        )
        key = self.points.expand(*batch, *self.points.shape[-2:]).unsqueeze(-3)
        weight = self.log_weight.expand(*batch, self.log_weight.shape[-1]).unsqueeze(-2)
        where = len(batch)
        return (
            query,
            key,
            weight,
            lambda rows: rows.squeeze(where).movedim(where, 0).reshape((*shape, *rows.shape[where + 2 :])),
        )

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        query, key, weight, back = self._streamed(eta)
        return back(_sweep(query, key, key[..., :0], weight).log_normalizer)

    def _value_and_mean(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        query, key, weight, back = self._streamed(eta)
        tilted = _sweep(query, key, key, weight)
        return back(tilted.log_normalizer), back(tilted.output)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._value_and_mean(eta)[1]

    def _covariance(self, eta: Tensor) -> Tensor:
        value, mean = self._value_and_mean(eta)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for start, stop in self._blocks(max(1, value.numel())):
            block = self.points[..., start:stop, :]
            log_weight = (
                (eta.unsqueeze(-2) @ block.mT).squeeze(-2)
                + self.log_weight[..., start:stop]
                - value.unsqueeze(-1)
            )
            # With √weight in the offset, offset' offset is symmetric and has no negative diagonal.
            offset = (block - mean.unsqueeze(-2)) * (log_weight / 2).exp().unsqueeze(-1)
            total = total + offset.mT @ offset
        return total

    def _centred(self, mean: Tensor) -> tuple[Measure, Tensor]:
        """Points and mean less the wanted mean if a float64 copy is small, else less the points' mean."""
        each, all_of_them = self.points.numel(), mean[..., 0].numel() * self.points[..., 0, :].numel()
        if all_of_them * self.points.shape[-2] <= _COPY:
            middle = mean.double()
        elif each <= 4 * _COPY or self._far_out():
            middle = self.points.mean(-2).double()
        else:
            return self, mean
        kind = torch.float64 if each <= 4 * _COPY else self.dtype
        points = self.points.to(kind) - middle.to(kind).unsqueeze(-2)
        centred = make(Empirical, points=points, log_weight=self.log_weight.to(kind))
        return centred, mean.to(kind) - middle.to(kind)

    def _far_out(self) -> bool:
        """Whether the points are so far from the origin that products lose their differences to rounding."""
        if not is_concrete(self.points):
            return False
        some = self.points[..., :: max(1, self.points.shape[-2] // 1024), :]
        return bool((some.mean(-2).abs() > 64 * some.std(-2, correction=0)).any())

    def _bounds(self, mean: Tensor, where: Tensor) -> Tensor:
        return self._off_face(mean, where).any(-1)

    def _off_face(self, mean: Tensor, where: Tensor) -> Tensor:
        """``(..., N)``: points off the face of the hull that holds the mean; none if the mean is inside."""
        points = self.points.expand(*where.shape, *self.points.shape[-2:])
        weight = self.log_weight.expand(*where.shape, self.log_weight.shape[-1])
        off = torch.zeros_like(weight, dtype=torch.bool)
        for index in map(tuple, where.nonzero().tolist()):
            alive = weight[index] > -torch.inf
            x, m = (y.detach().double().cpu() for y in (points[index][alive], mean[index]))
            rounding = 4 * torch.finfo(self.dtype).eps * (x.abs() + m.abs())
            face = face_of_origin((x - m).numpy(), rounding.numpy())
            if face is not None:
                off[index] = off[index].masked_scatter(alive, (~torch.as_tensor(face)).to(off.device))
        return off

    def _face(self, mean: Tensor, where: Tensor) -> Measure | None:
        if not is_concrete(where, self.points, mean) or not bool(where.any()):
            return None
        log_weight = torch.where(self._off_face(mean, where), -torch.inf, self.log_weight)
        return make(Empirical, points=self.points, log_weight=log_weight)

    def _least_log_mass(self) -> Tensor | None:
        return torch.where(self.log_weight > -torch.inf, self.log_weight, torch.inf).amin(-1)

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        distance = torch.zeros_like(mean[..., 0])
        points = self.points.expand(*where.shape, *self.points.shape[-2:])
        weight = self.log_weight.expand(*where.shape, self.log_weight.shape[-1])
        for index in map(tuple, where.nonzero().tolist()):
            target = mean[index]
            nearest = nearest_in_hull(points[index][weight[index] > -torch.inf], target)
            distance[index] = dot(target - nearest, target - nearest).sqrt()
        return distance


@dataclass(frozen=True, eq=False, init=False)
class Empirical(Points):
    """A weighted cloud of points.

    Args:
        points: ``(..., N, D)``.
        log_weight: ``(..., N)``, log w_n; −inf leaves a point out. The total need not be one. Default 0, so
            that every point has mass one.

    Example:
        >>> h = Empirical(torch.tensor([[0.0], [1.0]]))
        >>> h.mean(torch.tensor([3.0]).log())
        tensor([0.7500])
    """

    points: Tensor
    log_weight: Tensor
    event_dims: ClassVar = {"points": 2, "log_weight": 1}

    def __init__(self, points: Tensor, log_weight: Tensor | None = None) -> None:
        floating("Empirical", "points", points, axes=2, shape="(..., N, D)")
        weight = points.new_zeros(points.shape[-2]) if log_weight is None else log_weight
        self.__dict__.update(points=points, log_weight=weight)
        check_tensors("Empirical", {"points": (self.points, 2), "log_weight": (self.log_weight, 1)})
        if self.log_weight.shape[-1] != points.shape[-2]:
            got = f"points {tuple(points.shape)}, log_weight {tuple(self.log_weight.shape)}"
            raise ArgumentError(
                f"Empirical: points are (..., N, D) and log_weight (..., N) with the same N; got {got}."
            )
        finite("Empirical", points=points)
        check_log_weight("Empirical", self.log_weight)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-mass of the points equal to ``x (..., D)``; −inf if there are none."""
        found = []
        for start, stop in self._blocks(max(1, x[..., 0].numel())):
            equal = (x.unsqueeze(-2) == self.points[..., start:stop, :]).all(-1)
            found.append(
                torch.logsumexp(torch.where(equal, self.log_probability[..., start:stop], -torch.inf), -1)
            )
        return torch.logsumexp(torch.stack(found), 0)

    def entropy(self) -> Tensor:
        """−Σ p_n log p_n over the points; a point that is listed twice counts as two.

        Returns:
            ``(...)``, in nats.
        """
        p = self.log_probability
        return -torch.where(p > -torch.inf, p.exp() * p.clamp_min(torch.finfo(p.dtype).min), 0.0).sum(-1)

    def _tilt(self, eta: Tensor) -> Self:
        score = (eta.unsqueeze(-2) @ self.points.mT).squeeze(-2)
        return make(type(self), points=self.points, log_weight=self.log_weight + score)


def _sweep(query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor) -> AttentionResult:
    """One sweep of `tilting` over points that the constructor has checked."""
    return run(prepare("Empirical", query, key, value, scale=1.0, log_weight=log_weight, check=False))
