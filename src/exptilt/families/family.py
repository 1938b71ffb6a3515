r"""Exponential families with a finite statistic.

    p(x|θ) = b(x) e^{⟨u(x), θ⟩ − A(θ)},     m = ∇A(θ) = E[u],     ∇²A(θ) = Cov[u] = Fisher information

A family is a normalised `Measure` that also knows its whole sufficient statistic u(x), laid out as one flat
vector ``(..., K)`` whose first D entries are the t(x) that tilting acts on. So tilting adds η to the first D
entries of θ (THEORY A3), and

    G(η) = A(θ + (η, 0)) − A(θ).

A subclass gives the maps between its parameters and θ, its statistic, and A in its own parameters; also the
mean parameter and its inverse if they have closed forms.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import reduce
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, distributions

from exptilt._support.checks import choice, entries, finite, positive
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import check_covariance, common_shape, dot
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete, pytree
from exptilt.families import inverse_mean
from exptilt.families.checks import check_tensors, unlike_an_event, with_axes
from exptilt.families.measure import Base, Measure, make
from exptilt.families.numerics.hull import box_excess

Value = TypeVar("Value")
_HIDDEN = 0.01  # largest √(2 KL) by which rounding of a mean may move the member that it stands for


class ExponentialFamily(Measure):
    """Base of the families with a finite sufficient statistic."""

    minimal: ClassVar[bool] = True
    """Whether the entries of u are affinely independent. If not, several θ give the same member."""

    flat_base: ClassVar[bool] = True
    """Whether the base measure b is constant on the support."""

    _tilts_everywhere: ClassVar[bool] = False
    """Whether every η is inside the natural domain."""

    _statistic_size: ClassVar[Any] = staticmethod(lambda d: d)
    """A function from D, the length of every axis of a field, to K, the length of u(x)."""

    _least_length: ClassVar[int] = 1
    """The smallest D."""

    _event_ranks: ClassVar[tuple[int, ...]] = (1,)
    """Number of axes of each tensor of an event; every axis has length D."""

    _positive: ClassVar[tuple[str, ...]] = ()
    """Fields whose entries must be positive; entries of the other fields must be finite."""

    _twin: ClassVar[tuple[Any, Mapping[str, str]] | None] = None
    """The class in `torch.distributions`, and its name for each of our fields."""

    _natural_field: ClassVar[str] = ""
    """The field that holds θ itself, if there is one."""

    _mean_field: ClassVar[str] = ""
    """The field that holds E[u] itself, if there is one."""

    _open_ends: ClassVar[bool] = False
    """Whether the ends of `_reach` are outside the support."""

    _squares: ClassVar[tuple[str, ...]] = ()
    """Fields whose square root is the parameter in `torch.distributions`."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, x in with_axes({field: (x, event) for field, x, event in self._fields()}).items():
            object.__setattr__(self, field, x)
        check_tensors(name, {field: (x, event) for field, x, event in self._fields()})
        sized = [(field, x, event) for field, x, event in self._fields() if event]
        if len({size for _, x, event in sized for size in x.shape[x.ndim - event :]}) > 1:
            got = ", ".join(f"{field} {tuple(x.shape)}" for field, x, _ in sized)
            wanted = " and ".join(f"{field} must be (..., {', '.join('D' * e)})" for field, _, e in sized)
            raise ArgumentError(f"{name}: {wanted}; got {got}.")
        for field, x, event in self._fields():
            if event and x.shape[-1] < self._least_length:
                least = f"at least {self._least_length} entries"
                raise ArgumentError(f"{name}: {field} must have {least}; got shape {tuple(x.shape)}.")
            if event == 2:
                check_covariance(x, f"{name}: {field}")
            else:
                (positive if field in self._positive else finite)(name, **{field: x})
        self._check()

    def _fields(self) -> list[tuple[str, Tensor, int]]:
        return [(field, getattr(self, field), event) for field, event in self.event_dims.items()]

    def _check(self) -> None:
        """Raise if the fields break a rule that the class tables above do not state."""

    # A subclass must define these; the first four may be left out where a field holds θ or E[u].

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        """The member with natural parameter θ, unchecked."""
        return make(cls, **{cls._natural_field: theta})

    @property
    def natural_parameter(self) -> Tensor:
        """θ, ``(..., K)``."""
        return self._spread_out(getattr(self, self._natural_field))

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        """The member with attainable mean parameter ``(..., K)``, unchecked."""
        return make(cls, **{cls._mean_field: mean})

    @property
    def mean_parameter(self) -> Tensor:
        """E[u], ``(..., K)``."""
        if self._mean_field:
            return self._spread_out(getattr(self, self._mean_field))
        return inverse_mean.gradient(self._partition_at, self.natural_parameter)

    def _spread_out(self, field: Tensor) -> Tensor:
        """A field ``(..., K)``, expanded to the whole batch."""
        batch = self.batch_shape
        return field if field.shape[:-1] == batch else field.expand(*batch, -1)

    @abstractmethod
    def _log_partition(self) -> Tensor:
        """A(θ) in the family's own parameters."""

    # A subclass may override these.

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """``(...)``: how far ``mean (..., K)`` is outside the attainable set; negative inside.

        This default is for families with u(x) = x, whose means fill the box of `_reach`.
        """
        low, high, _ = cls._reach or (-math.inf, math.inf, None)
        return box_excess(mean, low, high)

    def _outside(self, mean: Tensor) -> Tensor:
        """`_mean_excess` for members with the same known parameters as this one."""
        return self._mean_excess(mean)

    def _with_natural(self, theta: Tensor) -> Self:
        """The member with natural parameter θ and the same known parameters, unchecked."""
        return self._from_natural(theta)

    def _with_mean(self, mean: Tensor) -> Self:
        """The member with this attainable mean parameter and the same known parameters, unchecked."""
        return self._from_mean(mean)

    def _in_domain(self) -> Tensor:
        """``(...)``: whether an unchecked member has a finite A. This default is for vector fields."""
        each = [x.isfinite() & ((x > 0) | (field not in self._positive)) for field, x, _ in self._fields()]
        return reduce(torch.logical_and, (valid.all(-1) for valid in each))

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        """Some member with u of the shape of ``like (..., K)``. This default: one vector of u per field."""
        one = torch.ones_like(like.chunk(len(cls.event_dims), -1)[0])
        return make(cls, **dict.fromkeys(cls.event_dims, one))

    @classmethod
    def _some(cls, known: Tensor | None, like: Tensor, asked: str) -> Self:
        """Some member as `_typical`, with this known parameter; errors name the method `asked`."""
        if known is not None:
            raise ArgumentError(f"{cls.__name__}.{asked}: known is given, but no parameter is known here.")
        return cls._typical(like)

    @property
    def _length(self) -> int:
        """D."""
        return next(x.shape[-1] for x, event in self._leaves() if event)

    @property
    def dimension(self) -> int:
        """Length of η and t(x): D if t(x) is x, else K, the length of the whole statistic."""
        return self._length if self.identity_coordinate else self._statistic_size(self._length)

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that makes up one x."""
        return tuple((self._length,) * rank for rank in self._event_ranks)

    @classmethod
    def _statistic(cls, x: Any) -> Tensor:
        """u(x), ``(..., K)``."""
        vector: Tensor = x
        return vector

    def _whole_statistic(self, x: Any) -> Tensor:
        """u(x), which may depend on the known parameter."""
        return self._statistic(x)

    def _log_base(self, x: Any) -> Tensor | float:
        return 0.0

    @classmethod
    def _mean_error(cls, reached: Tensor, mean: Tensor) -> Tensor:
        """``(...)``: error of ``reached (..., K)`` against the wanted mean, about as large as that of θ."""
        return (reached - mean).abs().amax(-1) / (1 + mean.abs().amax(-1))

    def _dual(self, mean: Tensor) -> Tensor:
        """The η whose tilted mean of t is the attainable ``mean``. This default: for families with t = u."""
        return self._with_mean(mean).natural_parameter - self.natural_parameter

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return self._outside(mean)

    def _support(self, x: Any) -> Tensor | None:
        """Whether x is within `_reach`: whole numbers if these are counts, with the total if it is fixed."""
        low, high, total = self._reach or (-math.inf, math.inf, None)
        if isinstance(low, float) and math.isinf(low):
            return None
        inside = (x > low) & (x < high) if self._open_ends else (x >= low) & (x <= high)
        if self.base is Base.COUNTING:
            inside = inside & (x == x.floor())
        if total is not None:
            inside = inside & (x.sum(-1, keepdim=True) == total)
        every: Tensor = inside.all(-1)
        return every

    def _diverges(self, eta: Tensor) -> Tensor | None:
        return None if self._tilts_everywhere else ~self._with_natural(self._shifted(eta))._in_domain()

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """Infinite: a density gives no mass to a face of its hull."""
        return torch.full_like(reached, torch.inf)

    def _kl(self, other: Self) -> Tensor:
        """KL(self ‖ other) as the Bregman divergence of A; loses digits where large terms cancel."""
        change = other.natural_parameter - self.natural_parameter
        return other._log_partition() - self._log_partition() - dot(self.mean_parameter, change)

    def _overlap(self, other: Self) -> Tensor:
        """log ∫ p q of two members, rounded upwards, if the base measure is 1; infinite where it diverges.

        Of many observations' worth, A is large and its differences are rounding: brackets need a true bound.
        """
        both = self._partition_at(self.natural_parameter + other.natural_parameter)
        one, two = self._log_partition(), other._log_partition()
        rounding = 64 * torch.finfo(both.dtype).eps * (both.abs() + one.abs() + two.abs())
        return both - one - two + rounding.detach()

    def _entropy(self) -> Tensor:
        """Entropy A(θ) − ⟨θ, E u⟩ for base measure b = 1."""
        return self._log_partition() - dot(self.natural_parameter, self.mean_parameter)

    def _log_prob(self, x: Any) -> Tensor:
        return dot(self._statistic(x), self.natural_parameter) - self._log_partition() + self._log_base(x)

    def _coordinate(self, x: Any) -> Tensor:
        return x if self.identity_coordinate else self._whole_statistic(x)

    def _to_torch(self) -> distributions.Distribution:
        if self._twin is None:
            return super()._to_torch()
        kind, names = self._twin
        fields = {theirs: getattr(self, ours) for ours, theirs in names.items()}
        made = kind(**fields | {names[ours]: fields[names[ours]].sqrt() for ours in self._squares})
        return made if made.event_shape else distributions.Independent(made, 1)

    # Common to all families.

    @classmethod
    def from_natural(cls, theta: Tensor, *, known: Tensor | None = None) -> Self:
        """The member with this natural parameter; an error outside the natural domain.

        Args:
            theta: ``(..., K)``.
            known: ``(...)`` or ``(..., D)`` as the constructor takes it, for families with a known parameter.
        """
        some = cls._some(known, cls._checked_statistic(theta, "theta"), "from_natural")
        return some._valid_at(theta, theta, "theta")

    def _valid_at(self, theta: Tensor, given: Tensor, name: str) -> Self:
        """The member with natural parameter θ; an error naming `given` outside the natural domain."""
        member = self._with_natural(theta)
        if is_concrete(theta):
            valid = member._in_domain() & theta.isfinite().all(-1)
            wanted = "inside the natural domain, where the integral converges"
            entries(type(self).__name__, name, given.expand(*valid.shape, -1), valid, wanted)
        return member

    @classmethod
    def from_mean(cls, mean: Tensor, *, known: Tensor | None = None) -> "Solution[Self]":
        """The member with this expected statistic, and whether there is one.

        Each problem of the batch has its own status. If the mean is on the boundary of the attainable set or
        outside, there is no member: the status is BOUNDARY or OUTSIDE, `distance` says how far outside, and
        the value is some other member of the family. STALLED: the mean that was reached is not the wanted
        one, or its rounding moves the member by more than a hundredth, √(2 KL): the mean of a Gaussian 1e8
        deviations from 0 does not say its variance.

        Args:
            mean: ``(..., K)``, wanted E[u].
            known: ``(...)`` or ``(..., D)`` as the constructor takes it, for families with a known parameter.
        """
        finite(cls.__name__, mean=cls._checked_statistic(mean, "mean"))
        return cls._some(known, mean, "from_mean")._solved(mean)

    def _solved(self, mean: Tensor) -> "Solution[Self]":
        """The members with this mean and the known parameters of this one; this one where there is none."""
        excess = self._outside(mean)
        inside = excess < 0
        all_inside = excess.numel() > 0 and is_concrete(excess) and bool(inside.all())
        usual = mean if all_inside else self.mean_parameter
        member = self._with_mean(mean if all_inside else torch.where(inside[..., None], mean, usual))
        reached = member.mean_parameter
        if all_inside and reached is mean:  # the field is the mean itself: no error
            nothing = torch.zeros_like(excess)
            code = torch.full_like(nothing, Status.CONVERGED.code, dtype=torch.int8)
            return Solution(member, code, nothing, torch.zeros((), dtype=torch.int64), nothing)
        sound = member._sound()
        if not is_concrete(sound) or not bool(sound.all()):  # rounding took a member across the boundary
            wanted = torch.where((inside & sound)[..., None], mean, self.mean_parameter)
            member = self._with_mean(wanted)
            reached = member.mean_parameter
        residual, precision = (reached - mean).abs().amax(-1), torch.finfo(mean.dtype).eps
        close = sound & (self._mean_error(reached, mean) <= precision**0.5)
        # Near the boundary the rounding of the mean may hide the member: see how far it moves the answer.
        near = inside & (excess > -(precision**0.5) * (1 + mean.abs().amax(-1)))
        if is_concrete(near) and bool(near.any()):
            signs = 1 - 2 * (torch.arange(mean.shape[-1]) % 2).to(mean)
            other = self._with_mean(torch.where(near[..., None], mean * (1 + precision * signs), usual))
            held = other._sound() & (other._kl(member) < _HIDDEN**2 / 2)
            close = close & (held | ~near)
        return judged(member, close, excess, residual)

    @classmethod
    def log_partition(cls, theta: Tensor, *, known: Tensor | None = None) -> Tensor:
        """A(θ).

        Args:
            theta: ``(..., K)``.
            known: ``(...)`` or ``(..., D)`` as the constructor takes it, for families with a known parameter.

        Returns:
            ``(...)``, infinite outside the natural domain.
        """
        some = cls._some(known, cls._checked_statistic(theta, "theta"), "log_partition")
        return some._partition_at(theta)

    def _partition_at(self, theta: Tensor) -> Tensor:
        """A(θ) with the known parameters of this member; infinite outside the natural domain."""
        member = self._with_natural(theta)
        outside = ~member._in_domain() & ~theta.isnan().any(-1)
        return torch.where(outside, torch.inf, member._log_partition())

    def fisher_information(self, coordinates: Literal["natural", "mean"] = "natural") -> Tensor:
        """Fisher information: ∇²A(θ), the covariance of u; in mean coordinates its (pseudo-)inverse.

        Args:
            coordinates: "natural" or "mean".

        Returns:
            ``(..., K, K)``.
        """
        choice("fisher_information", "coordinates", coordinates, ("natural", "mean"))
        fisher = self._fisher()
        if coordinates == "natural":
            return fisher
        inverse: Tensor = (
            torch.linalg.inv(fisher) if self.minimal else torch.linalg.pinv(fisher, hermitian=True)
        )
        return inverse

    def _fisher(self) -> Tensor:
        """Cov[u] ``(..., K, K)``."""
        return inverse_mean.hessian(self._partition_at, self.natural_parameter)

    def update(self, statistic: Tensor) -> Self:
        """The member with natural parameter θ + statistic, a sum of statistics; see `posterior`.

        Args:
            statistic: ``(..., K)``.
        """
        theta = self.natural_parameter
        if self._checked_statistic(statistic, "statistic").shape[-1] != theta.shape[-1]:
            wanted = f"(..., {theta.shape[-1]}) for this {type(self).__name__}"
            raise ArgumentError(f"update: statistic must be {wanted}; got shape {tuple(statistic.shape)}.")
        return self._valid_at(theta + statistic, statistic, "statistic")

    @classmethod
    def statistic(cls, x: Any) -> Tensor:
        """u(x), the whole sufficient statistic.

        Args:
            x: an event, or a batch of them.

        Returns:
            ``(..., K)``; its first D entries are t(x).
        """
        leaves, ranks = pytree.tree_leaves(x), cls._event_ranks
        good = len(leaves) == len(ranks) and all(isinstance(leaf, Tensor) for leaf in leaves)
        pairs = list(zip(leaves, ranks, strict=True)) if good else []
        sizes = {size for leaf, rank in pairs for size in leaf.shape[max(0, leaf.ndim - rank) :]}
        if len(sizes) != 1 or any(leaf.ndim < rank for leaf, rank in pairs):
            raise unlike_an_event(f"{cls.__name__}.statistic", ["D" * rank for rank in ranks], leaves)
        return cls._statistic(x)

    def entropy(self) -> Tensor:
        """A(θ) − ⟨θ, E u⟩ − E log b(x).

        Returns:
            ``(...)``, in nats.
        """
        return self._entropy()

    @classmethod
    def _checked_statistic(cls, vector: Tensor, name: str) -> Tensor:
        """The given vector; an error unless its dtype and length allow pairing it with u(x)."""
        if not isinstance(vector, Tensor) or not vector.is_floating_point():
            got = str(vector.dtype) if isinstance(vector, Tensor) else type(vector).__name__
            raise ArgumentError(
                f"{cls.__name__}: {name} must be a floating-point tensor (..., K); got {got}."
            )
        size = vector.shape[-1] if vector.ndim else 0
        sizes = [cls._statistic_size(d) for d in range(cls._least_length, max(size, 3) + 2)]
        if size not in sizes:
            wanted = ", ".join(map(str, sizes[:3]))
            got = str(tuple(vector.shape))
            raise ArgumentError(
                f"{cls.__name__}: {name} must be (..., K) with K one of {wanted}, ...; got shape {got}."
            )
        return vector

    def _sound(self) -> Tensor:
        """``(...)``: whether an unchecked member has finite fields and is in the natural domain."""
        good = [x.isfinite().flatten(x.ndim - n).all(-1) if n else x.isfinite() for x, n in self._leaves()]
        return torch.stack(torch.broadcast_tensors(self._in_domain(), *good)).all(0)

    def _shifted(self, eta: Tensor) -> Tensor:
        """θ + (η, 0)."""
        theta = self.natural_parameter
        extra = theta.shape[-1] - eta.shape[-1]
        return theta + (torch.nn.functional.pad(eta, (0, extra)) if extra else eta)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._partition_at(self._shifted(eta)) - self._log_partition()

    def _tilt(self, eta: Tensor) -> Self:
        return self._valid_at(self._shifted(eta), eta, "eta")

    def _mean(self, eta: Tensor) -> Tensor:
        return self._with_natural(self._shifted(eta)).mean_parameter[..., : self.dimension]

    def _natural(self, mean: Tensor, tolerance: float | None, max_steps: int) -> Solution[Tensor]:
        every = torch.ones_like(mean[..., 0], dtype=torch.bool)
        excess = self._excess(mean, every)
        if excess is None:
            excess = -torch.ones_like(mean[..., 0])
        inside = excess < 0
        origin = self._mean(torch.zeros_like(mean))
        eta = self._dual(torch.where(inside[..., None], mean, origin))
        eta = torch.where((inside & eta.isfinite().all(-1))[..., None], eta, 0.0)
        reached = self._mean(eta)
        error = (reached - mean).abs()
        spread, precision = mean.abs() + origin.abs(), torch.finfo(mean.dtype).eps
        relative = precision**0.5 if tolerance is None else tolerance
        close = (error <= relative * spread + 256 * precision * spread.amax(-1, keepdim=True)).all(-1)
        if mean.shape[-1] == self.natural_parameter.shape[-1]:
            close = close & (self._mean_error(reached, mean) <= max(relative, 256 * precision))
        return judged(eta, close, excess, error.amax(-1))


def joined(*parts: Tensor) -> Tensor:
    """Vectors ``(..., *)`` laid end to end, their batch axes broadcast."""
    batch = common_shape(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*batch, -1) for part in parts], -1)


def judged(value: Value, close: Tensor, excess: Tensor, residual: Tensor) -> Solution[Value]:
    """A `Solution` from a closed form: CONVERGED where `close`, if the target is inside."""
    code = torch.where(close, Status.CONVERGED.code, Status.STALLED.code)
    code = torch.where(excess == 0, Status.BOUNDARY.code, torch.where(excess > 0, Status.OUTSIDE.code, code))
    steps = torch.zeros((), dtype=torch.int64)
    return Solution(value, code.to(torch.int8), residual, steps, excess.clamp_min(0))
