r"""Any measure with a log-density: its log Laplace transform by quadrature or Monte Carlo.

    G(η) = log ∫ h(x) e^{⟨x,η⟩} dx ≈ log Σ_i v_i h(x_i) e^{⟨x_i,η⟩}          (THEORY A6)

In one or two dimensions the x_i come from the double-exponential rule: a change of variables x = φ(t) under
which the integrand dies off at both ends whatever the domain (line, half-line, interval), then the
trapezoidal rule in t, which converges exponentially. In any dimension they may be draws of a proposal q with
v_i = 1 / (n q(x_i)). Either way the measure becomes weighted points, and tilting reweights them.

`log_normalizer_error` says how far G may be off. For Monte Carlo it is the standard error by the delta
method. For quadrature it is the larger of the changes of G when every second node is left out and when finer
nodes are added, plus the mass beyond the last node of each axis, extrapolated from the last two nodes. It is
infinite, that is unknown, if the integrand does not fall there, if fewer than three nodes hold the mass, or
if finer nodes change G much more than leaving nodes out does: a peak that the nodes miss. A peak that even
the finer nodes miss is invisible to any rule; `resolution` says how narrow it must be, and every `Estimate`
made by quadrature says that it is one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import dot
from exptilt._support.transforms import is_concrete
from exptilt.families.estimate import Estimate, EstimateKind
from exptilt.families.measure import STATIC, Base, Measure, make
from exptilt.families.members.empirical import Empirical, Points
from exptilt.families.numerics.hull import box_excess

LogDensity = Callable[[Tensor], Tensor]
_FINER = {1: 64, 2: 4}  # nodes of the finer grid per node of an axis, by dimension


class Axis(NamedTuple):
    """One axis of a quadrature grid: its domain, its scale, and the nodes in t on [−reach, reach]."""

    lower: float
    upper: float
    center: float
    scale: float
    reach: float
    nodes: int

    @property
    def step(self) -> float:
        """Distance between neighbouring nodes in t."""
        return 2 * self.reach / (self.nodes - 1)

    def places(self) -> Tensor:
        """The t of the nodes, ``(nodes,)``."""
        return torch.linspace(-self.reach, self.reach, self.nodes, dtype=torch.float64)

    def place(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """x = φ(t) and log φ'(t)."""
        u, log_u = math.pi / 2 * torch.sinh(t), (math.pi / 2 * torch.cosh(t)).log()
        log_scale = math.log(self.scale)
        if math.isinf(self.lower) and math.isinf(self.upper):
            return self.center + self.scale * torch.sinh(u), log_scale + torch.cosh(u).log() + log_u
        if math.isinf(self.upper):
            return self.lower + self.scale * u.exp(), log_scale + u + log_u
        if math.isinf(self.lower):
            return self.upper - self.scale * (-u).exp(), log_scale - u + log_u
        width = self.upper - self.lower
        below, above = self.lower + width * torch.sigmoid(2 * u), self.upper - width * torch.sigmoid(-2 * u)
        slope = math.log(2 * width) + logsigmoid(2 * u) + logsigmoid(-2 * u) + log_u
        return torch.where(t < 0, below, above), slope


def _grid(axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Nodes ``(N, D)`` and their log-volumes ``(N,)``; the last axis varies fastest."""
    places = [axis.place(axis.places()) for axis in axes]
    points = torch.cartesian_prod(*(x for x, _ in places)).reshape(-1, len(axes))
    volumes = (v + math.log(axis.step) for (_, v), axis in zip(places, axes, strict=True))
    return points, torch.cartesian_prod(*volumes).reshape(-1, len(axes)).sum(-1)


@dataclass(frozen=True, eq=False)
class FromDensity(Points):
    """A measure known by its log-density, made by `FromDensity.quadrature` or `FromDensity.monte_carlo`.

    Args:
        points: ``(N, D)``, nodes or draws.
        log_weight: ``(..., N)``, log h(x_i) v_i e^{⟨x_i, shift⟩}.
        shift: ``(..., D)``, the η by which the density has been tilted.
        log_density: the untilted log-density, ``(..., D)`` to ``(...)``; need not be normalised.
        axes: the grid; empty for Monte Carlo.
        base: the measure that the density is taken with respect to; for Monte Carlo that of the proposal.

    Example:
        >>> h = FromDensity.quadrature(lambda x: -(x**2).sum(-1) / 2)
        >>> round(float(h.log_normalizer(torch.ones(1, dtype=torch.float64))), 6)  # ½ log 2π + ½
        1.418939
    """

    points: Tensor
    log_weight: Tensor
    shift: Tensor
    log_density: LogDensity = dataclasses.field(metadata=STATIC)
    axes: tuple[Axis, ...] = dataclasses.field(metadata=STATIC)
    base: Base = dataclasses.field(default=Base.VOLUME, metadata=STATIC)
    event_dims: ClassVar = {"points": 2, "log_weight": 1, "shift": 1}

    @classmethod
    def quadrature(
        cls,
        log_density: LogDensity,
        *,
        lower: Sequence[float] = (-math.inf,),
        upper: Sequence[float] = (math.inf,),
        center: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        nodes: int | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Self:
        """The measure by the double-exponential rule in one or two dimensions.

        A peak narrower than `resolution` may lie between all nodes that are looked at. Then G lacks its mass,
        and no error estimate can tell: if there may be such a peak, pass its place and width as `center` and
        `scale`, or bounds around it.

        Args:
            log_density: ``(..., D)`` to ``(...)``.
            lower: where the domain begins, one number per dimension; may be infinite.
            upper: where the domain ends.
            center: roughly where the mass is, for domains infinite at both ends; default 0.
            scale: roughly how wide the mass is, for infinite domains; default 1.
            nodes: nodes per dimension; an odd number gives the best error estimate. Default 801 in one
                dimension, 257 in two.
            dtype: of the result.
        """
        low, high = _numbers("lower", lower), _numbers("upper", upper)
        dimension = len(low)
        if (
            dimension not in _FINER
            or len(high) != dimension
            or any(a >= b for a, b in zip(low, high, strict=True))
        ):
            raise ArgumentError(
                f"FromDensity.quadrature: lower < upper, one or two of each; got lower {low}, upper {high}. "
                "Beyond 2 dimensions use monte_carlo."
            )
        middle = (0.0,) * dimension if center is None else _numbers("center", center)
        width = (1.0,) * dimension if scale is None else _numbers("scale", scale)
        if len(middle) != dimension or len(width) != dimension or any(not 0 < s < math.inf for s in width):
            wanted = "one center and one positive scale per dimension"
            got = f"center {middle}, scale {width} for {dimension} dimensions"
            raise ArgumentError(f"FromDensity.quadrature: {wanted}; got {got}.")
        default = 801 if dimension == 1 else 257
        count = default if nodes is None else whole("FromDensity.quadrature", "nodes", nodes, least=3)
        axes = []
        for a, b, c, s in zip(low, high, middle, width, strict=True):
            reach = (3.8, 4.2, 3.4)[math.isinf(a) + math.isinf(b)]
            axes.append(Axis(a, b, c, s, reach, count))
        points, log_volume = _grid(axes)
        log_weight = log_density(points) + log_volume
        return cls._checked_new(points.to(dtype), log_weight.to(dtype), log_density, tuple(axes))

    @classmethod
    def monte_carlo(
        cls,
        log_density: LogDensity,
        proposal: Measure,
        *,
        samples: int = 16384,
        generator: torch.Generator | None = None,
    ) -> Self:
        """The measure by importance sampling.

        Args:
            log_density: ``(..., D)`` to ``(...)``.
            proposal: a measure of vectors of length D, without batch, whose tails are no lighter than the
                density's.
            samples: how many draws of the proposal.
            generator: for those draws.
        """
        got = None if isinstance(proposal, Measure) else type(proposal).__name__
        if got is None and proposal.batch_shape:
            got = f"batch {tuple(proposal.batch_shape)}"
        if got is None and [len(shape) for shape in proposal.event_shapes] != [1]:
            got = type(proposal).__name__
        if got is not None:
            raise ArgumentError(
                f"FromDensity.monte_carlo: proposal must be a measure of vectors without batch; got {got}."
            )
        whole("FromDensity.monte_carlo", "samples", samples, least=2)
        points = proposal.sample((samples,), generator=generator)
        log_weight = log_density(points) - proposal.log_prob(points) - math.log(samples)
        return cls._checked_new(points, log_weight, log_density, (), proposal.base)

    @classmethod
    def _checked_new(
        cls,
        points: Tensor,
        log_weight: Tensor,
        log_density: LogDensity,
        axes: tuple[Axis, ...],
        base: Base = Base.VOLUME,
    ) -> Self:
        if log_weight.shape != points.shape[:-1]:
            got = f"{tuple(log_weight.shape)} for {tuple(points.shape)}"
            raise ArgumentError(f"FromDensity: log_density must map (N, D) to (N,); got {got}.")
        if is_concrete(log_weight):
            bad = log_weight.isnan() | (log_weight == torch.inf)
            if bool(bad.any()):
                got = f"{float(log_weight[bad][0])} at x = {points[bad][0].tolist()}"
                wanted = "a number below +inf, −inf where there is no mass"
                raise ArgumentError(f"FromDensity: log_density must be {wanted}; got {got}.")
            if not bool((log_weight > -torch.inf).any()):
                raise ArgumentError(
                    "FromDensity: log_density is −inf at all nodes or draws: no mass was found. "
                    "Move them to where it is."
                )
        return cls(points, log_weight, torch.zeros_like(points[0]), log_density, axes, base)

    @property
    def _reach(self) -> tuple[Any, Any, Any] | None:  # type: ignore[override]
        """Ends of the interval common to all axes of the grid, and no total; None for Monte Carlo."""
        bounds = [(axis.lower, axis.upper) for axis in self.axes]
        return (max(low for low, _ in bounds), min(high for _, high in bounds), None) if bounds else None

    @property
    def kind(self) -> EstimateKind:
        """How expectations are obtained: by quadrature, or as means of draws."""
        return EstimateKind.QUADRATURE if self.axes else EstimateKind.ESTIMATED

    @property
    def resolution(self) -> Tensor:
        """Width of the narrowest peak that quadrature is sure to see where the mass is, ``(..., D)``.

        It is the largest distance between neighbouring finer nodes over the part of each axis that holds all
        but a millionth of the mass. NaN for Monte Carlo.
        """
        if not self.axes:
            return torch.full_like(self.shift, torch.nan)
        found = []
        for axis, share in zip(self.axes, self._marginals(torch.softmax(self.log_weight, -1)), strict=True):
            below = share.cumsum(-1)
            held = (below > 5e-7) & (below - share < 1 - 5e-7)
            gap = axis.place(axis.places())[1].exp() * axis.step / _FINER[len(self.axes)]
            found.append(torch.where(held, gap.to(share), 0.0).amax(-1))
        return torch.stack(found, -1)

    def log_normalizer_error(self, eta: Tensor) -> Tensor:
        """Estimated error of `log_normalizer`, blind to peaks that all nodes miss (see `quadrature`).

        Args:
            eta: ``(..., D)``.

        Returns:
            ``(...)``, infinite where the integral may diverge, too few nodes hold the mass, or finer nodes
            show a peak that these miss.
        """
        eta = self._checked(eta, "eta")
        score = (eta.unsqueeze(-2) @ self.points.mT).squeeze(-2) + self.log_weight
        if not self.axes:
            return _delta_error(torch.softmax(score, -1), torch.zeros_like(score), 1.0)
        total = torch.logsumexp(score, -1)
        coarse = torch.logsumexp(self._halved(score), -1) + len(self.axes) * math.log(2)
        less, more = (total - coarse).abs(), (total - self._finer(eta + self.shift)).abs()
        seen = more <= 8 * less + 64 * torch.finfo(self.dtype).eps * (1 + total.abs())
        error = torch.where(seen, torch.maximum(less, more), torch.inf)
        for share in self._marginals(torch.softmax(score, -1)):
            error = error + _axis_error(share.log())
        return error

    def _finer(self, shift: Tensor) -> Tensor:
        """G of the untilted density at ``shift (..., D)``, on the finer grid."""
        times = _FINER[self.dimension]
        axes = [axis._replace(nodes=times * (axis.nodes - 1) + 1) for axis in self.axes]
        points, log_volume = (x.to(self.device) for x in _grid(axes))
        log_weight = self.log_density(points).to(torch.float64) + log_volume
        fine = make(Empirical, points=points, log_weight=log_weight)
        return fine._log_normalizer(shift.double()).to(self.dtype)

    def _support(self, x: Tensor) -> Tensor | None:
        if not self.axes:
            return None  # the density itself is −inf off the support
        lower, upper = (x.new_tensor([axis[end] for axis in self.axes]) for end in (0, 1))
        return ((x >= lower) & (x <= upper)).all(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-density of the normalised, tilted measure at ``x (..., D)``."""
        return self.log_density(x) + dot(x, self.shift) - torch.logsumexp(self.log_weight, -1)

    def entropy(self) -> Estimate:
        """−E log p = E[−log h] + G by the same nodes or draws.

        Returns:
            An `Estimate` of shape ``(...)``, in nats.
        """
        weight = torch.softmax(self.log_weight, -1)
        surprise = -(self.log_density(self.points) + (self.shift.unsqueeze(-2) @ self.points.mT).squeeze(-2))
        surprise = torch.where(weight > 0, surprise, 0.0)
        total = torch.logsumexp(self.log_weight, -1)
        value = dot(weight, surprise) + total
        infinite = torch.full_like(value, torch.inf)
        return Estimate(value, self._expectation_error(surprise, 1.0), -infinite, infinite, self.kind)

    def _expectation_error(self, values: Tensor, share: float) -> Tensor:
        """Estimated error of Σ_i p_i values_i + share · G(0) for ``values (..., N)`` at the points."""
        weight = torch.softmax(self.log_weight, -1)
        if not self.axes:
            return _delta_error(weight, values, share)
        mean = dot(weight, values)
        half, seen = self._halved(weight), self._halved(values)
        change = (mean - dot(half, seen) / half.sum(-1)).abs()
        error = self.log_normalizer_error(torch.zeros_like(self.shift)) * (mean.abs() + abs(share))
        beyond = self._beyond(values)
        return error + change + torch.where(beyond > 0, beyond * dot(weight, values.abs()), 0.0)

    def _beyond(self, values: Tensor) -> Tensor:
        """Estimated Σ_i p_i |values_i| beyond the last nodes, as a part of the sum over the nodes.

        Infinite where the terms do not fall, so that the expectation may not exist; 0 for Monte Carlo.
        """
        terms = torch.softmax(self.log_weight, -1) * values.abs()
        share = terms / terms.sum(-1, keepdim=True).clamp_min(torch.finfo(self.dtype).tiny)
        total = torch.zeros_like(share[..., 0])
        return sum((_beyond_ends(part.log()) for part in self._marginals(share)), total)

    def _by_axis(self, values: Tensor) -> Tensor:
        """Values ``(..., N)`` as a grid, one axis of nodes for each dimension."""
        return values.unflatten(-1, tuple(axis.nodes for axis in self.axes)) if self.axes else values

    def _marginals(self, share: Tensor) -> list[Tensor]:
        """Sums ``(..., nodes)`` of the shares ``(..., N)`` of nodes, for each axis of the grid."""
        grid = self._by_axis(share)
        return [grid] if len(self.axes) == 1 else [grid.sum(-1), grid.sum(-2)] if self.axes else []

    def _halved(self, values: Tensor) -> Tensor:
        """Values ``(..., N)`` at every second node of each axis, ``(..., N')``."""
        grid = self._by_axis(values)
        return (grid[..., ::2] if len(self.axes) == 1 else grid[..., ::2, ::2]).flatten(-len(self.axes))

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws: a node by weight, then uniform within its cell in t; for Monte Carlo one of the points."""
        if not self.axes:
            return super()._sample(shape, generator)
        cells = torch.cartesian_prod(*(axis.places() for axis in self.axes)).reshape(-1, self.dimension)
        node = make(Empirical, points=cells.to(self.device), log_weight=self.log_weight.double())
        drawn = node.sample(shape, generator=generator)
        jitter = torch.rand(drawn.shape, dtype=drawn.dtype, device=self.device, generator=generator) - 0.5
        places = (drawn[..., i] + axis.step * jitter[..., i] for i, axis in enumerate(self.axes))
        placed = [axis.place(t)[0] for axis, t in zip(self.axes, places, strict=True)]
        return torch.stack(placed, -1).to(self.dtype)

    def _tilt(self, eta: Tensor) -> Self:
        score = (eta.unsqueeze(-2) @ self.points.mT).squeeze(-2)
        return dataclasses.replace(self, log_weight=self.log_weight + score, shift=self.shift + eta)

    def _centred(self, mean: Tensor) -> tuple[Measure, Tensor]:
        return self, mean

    def _least_log_mass(self) -> Tensor | None:
        return None

    @property
    def _knows_hull(self) -> bool:
        return bool(self.axes)  # the box

    def _bounds(self, mean: Tensor, where: Tensor) -> Tensor:
        return Measure._bounds(self, mean, where) if self.axes else super()._bounds(mean, where)

    def _face(self, mean: Tensor, where: Tensor) -> Measure | None:
        return None if self.axes else super()._face(mean, where)

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """Infinite for quadrature: a density gives no mass to the sides of its box."""
        return torch.full_like(reached, torch.inf) if self.axes else reached

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        if not self.axes:
            return super()._excess(mean, where)
        lower, upper = (mean.new_tensor([axis[end] for axis in self.axes]) for end in (0, 1))
        return box_excess(mean, lower, upper)


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        wanted = "a sequence of numbers, one per dimension"
        raise ArgumentError(f"FromDensity.quadrature: {name} must be {wanted}; got {values!r}.") from None


def _axis_error(log_share: Tensor) -> Tensor:
    """Error of the log of a sum from the mass beyond the ends of an axis with log-shares ``(..., nodes)``."""
    # On fewer than three nodes the integral of a Gaussian may be wrong by 1 %, unseen by leaving out nodes.
    held = 1 / (2 * log_share).exp().sum(-1)
    return torch.where(held < 3, torch.inf, torch.log1p(_beyond_ends(log_share)))


def _beyond_ends(log_share: Tensor) -> Tensor:
    """The part of a sum that lies beyond both ends of an axis with log-shares ``(..., nodes)``.

    If the last share is s and shares fall by the ratio r from node to node, the part beyond is s r / (1 − r).
    A share below rounding counts as 0.
    """
    precision = torch.finfo(log_share.dtype).eps
    beyond = torch.zeros_like(log_share[..., 0])
    for last, before in ((log_share[..., 0], log_share[..., 1]), (log_share[..., -1], log_share[..., -2])):
        ratio = (last - before).exp()
        rest = torch.where(ratio < 1, last.exp() * ratio / (1 - ratio), torch.inf)
        beyond = beyond + torch.where(last > math.log(precision), rest, 0.0)
    return beyond


def _delta_error(weight: Tensor, values: Tensor, share: float) -> Tensor:
    """Standard error of Σ p_i v_i + share · log Σ w_i over draws, p = w/Σw, by the delta method."""
    offset = torch.where(weight > 0, values - dot(weight, values).unsqueeze(-1) + share, 0.0)
    return (dot(weight**2, offset**2) - share**2 / weight.shape[-1]).clamp_min(0).sqrt()
