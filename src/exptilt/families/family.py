r"""Exponential families with a finite statistic.

    p(x|θ) = b(x) e^{<u(x), θ> − A(θ)},     m = ∇A(θ) = E[u],     ∇²A(θ) = Cov[u] = Fisher information

A family is a normalised `Measure` that also knows its whole sufficient statistic u(x), laid out as one flat vector ``(..., K)`` whose
first D entries are the t(x) that tilting acts on. So tilting adds η to the first D entries of θ (THEORY A3), and

    G(η) = A(θ + (η, 0)) − A(θ).

A subclass gives its parameters from θ and back, its statistic, and A in its own parameters; closed forms of the mean parameter and its
inverse where there are any.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import dot
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete, pytree
from exptilt.families import inverse_mean
from exptilt.families.checks import check_finite
from exptilt.families.measure import Measure


class ExponentialFamily(Measure):
    """Base of the families with a finite sufficient statistic."""

    minimal: ClassVar[bool] = True
    """Whether the entries of u are affinely independent. If not (Categorical), θ is known up to what they share."""

    _statistic_size: ClassVar[Any] = staticmethod(lambda d: d)
    """A function: K, the length of u(x), of the smallest, the second smallest, ... members, for d = 1, 2, ..."""

    _event_ranks: ClassVar[tuple[int, ...]] = (1,)
    """How many axes each tensor of an event has, all of one length D."""

    flat_base: ClassVar[bool] = True
    """Whether the base measure b is constant on the support."""

    # What a subclass gives.

    @classmethod
    @abstractmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        """The member with natural parameter θ, unchecked."""

    @property
    @abstractmethod
    def natural_parameter(self) -> Tensor:
        """θ, ``(..., K)``."""

    @abstractmethod
    def _log_partition(self) -> Tensor:
        """A(θ) in the family's own parameters."""

    @abstractmethod
    def _in_domain(self) -> Tensor:
        """``(...)``: whether an unchecked member has a finite A."""

    @classmethod
    @abstractmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        """The member with mean parameter ``(..., K)``, unchecked; only called with attainable ones."""

    @classmethod
    @abstractmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """How far a mean parameter ``(..., K)`` is outside of the attainable set: ``(...)``, 0 on its boundary, negative inside."""

    @classmethod
    @abstractmethod
    def _typical_mean(cls, mean: Tensor) -> Tensor:
        """The mean parameter of some member, of the shape of ``mean (..., K)``: stands in for one that is not attainable."""

    # What a subclass may give otherwise, or in closed form.

    @property
    def dimension(self) -> int:
        """D: where t(x) is x, the length of the family's first parameter."""
        return self._leaves()[0][0].shape[-1]

    @classmethod
    def _statistic(cls, x: Any) -> Tensor:
        """u(x), ``(..., K)``: x itself, if there is no more to it."""
        vector: Tensor = x
        return vector

    def _log_base(self, x: Any) -> Tensor | float:
        return 0.0

    @property
    def mean_parameter(self) -> Tensor:
        """E[u], ``(..., K)``."""
        return inverse_mean.gradient(self.log_partition, self.natural_parameter)

    def _dual(self, mean: Tensor) -> Tensor:
        """η such that the tilted mean of t is ``mean``, only called with attainable ones. Here for families with t = u."""
        return self._from_mean(mean).natural_parameter - self.natural_parameter

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return self._mean_excess(mean)

    def _diverges(self, eta: Tensor) -> Tensor | None:
        return ~self._from_natural(self._shifted(eta))._in_domain()

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """Infinite for a density, which gives no mass to a face of its hull."""
        return torch.full_like(reached, torch.inf)

    def _kl(self, other: Self) -> Tensor:
        """KL(self ‖ other) within the family: the Bregman divergence of A. Large terms cancel; a family that can says it better."""
        return (
            other._log_partition()
            - self._log_partition()
            - dot(self.mean_parameter, other.natural_parameter - self.natural_parameter)
        )

    def _overlap(self, other: Self) -> Tensor:
        """Log ∫ p q within a family whose base measure is 1; infinite where it diverges."""
        return (
            self.log_partition(self.natural_parameter + other.natural_parameter)
            - self._log_partition()
            - other._log_partition()
        )

    def _entropy(self) -> Tensor:
        """A(θ) − <θ, E u>, where b is 1."""
        return self._log_partition() - dot(self.natural_parameter, self.mean_parameter)

    def _log_prob(self, x: Any) -> Tensor:
        return dot(self._statistic(x), self.natural_parameter) - self._log_partition() + self._log_base(x)

    def _coordinate(self, x: Any) -> Tensor:
        return self._statistic(x)[..., : self.dimension]

    # What everyone gets.

    @classmethod
    def from_natural(cls, theta: Tensor) -> Self:
        """The member with this natural parameter; an error outside the natural domain.

        Args:
            theta: ``(..., K)``.
        """
        return cls._in_place(cls._checked_statistic(theta, "theta"), theta, "theta")

    @classmethod
    def _in_place(cls, theta: Tensor, given: Tensor, name: str) -> Self:
        """The member at θ; outside the natural domain an error that names what was given."""
        member = cls._from_natural(theta)
        if is_concrete(theta):
            valid = member._in_domain() & theta.isfinite().all(-1)
            if not bool(valid.all()):
                index = tuple((~valid).nonzero()[0].tolist())
                where = f"{name}[{', '.join(map(str, index))}]" if index else name
                got = given.expand(*valid.shape, given.shape[-1])[index].tolist()
                raise ArgumentError(
                    f"{cls.__name__}: {where} = {got} is outside the natural domain, where the integral converges."
                )
        return member

    @classmethod
    def from_mean(cls, mean: Tensor) -> "Solution[Self]":
        """The member with this expected statistic, and whether there is one.

        Each problem of the batch has its own status. Where the mean is on or outside the boundary of the attainable set there is no member:
        the status says BOUNDARY or OUTSIDE, the distance how far outside, and some other member of the family stands in its place. So it
        does where the mean is so near to the boundary that no member of this precision has it; there the status says STALLED.

        Args:
            mean: ``(..., K)``, wanted E[u].
        """
        check_finite(cls.__name__, mean=cls._checked_statistic(mean, "mean"))
        excess = cls._mean_excess(mean)
        inside = excess < 0
        all_inside = excess.numel() > 0 and is_concrete(excess) and bool(inside.all())
        member = cls._from_mean(
            mean if all_inside else torch.where(inside[..., None], mean, cls._typical_mean(mean))
        )
        reached = member.mean_parameter
        if (
            all_inside and reached is mean
        ):  # the mean is the parameter: nothing was solved, and nothing can be off
            nothing = torch.zeros_like(excess)
            code = torch.full_like(nothing, Status.CONVERGED.code, dtype=torch.int8)
            return Solution(member, code, nothing, torch.zeros((), dtype=torch.int64), nothing)
        sound = member._sound()
        if not is_concrete(sound) or not bool(
            sound.all()
        ):  # so close to the boundary that rounding took the member across
            member = cls._from_mean(torch.where((inside & sound)[..., None], mean, cls._typical_mean(mean)))
            reached = member.mean_parameter
        residual = (reached - mean).abs().amax(-1)
        scale = 1 + mean.abs().amax(-1)
        close = sound & (residual <= torch.finfo(mean.dtype).eps ** 0.5 * scale)
        code = torch.where(
            excess > 0, Status.OUTSIDE.code, torch.where(close, Status.CONVERGED.code, Status.STALLED.code)
        )
        code = torch.where(excess == 0, Status.BOUNDARY.code, code).to(torch.int8)
        return Solution(member, code, residual, torch.zeros((), dtype=torch.int64), excess.clamp_min(0))

    @classmethod
    def log_partition(cls, theta: Tensor) -> Tensor:
        """A(θ).

        Args:
            theta: ``(..., K)``.

        Returns:
            ``(...)``, infinite outside the natural domain.
        """
        member = cls._from_natural(cls._checked_statistic(theta, "theta"))
        return torch.where(member._in_domain() | theta.isnan().any(-1), member._log_partition(), torch.inf)

    def fisher_information(self, coordinates: Literal["natural", "mean"] = "natural") -> Tensor:
        """∇²A(θ), the covariance of u, or in mean coordinates its inverse (pseudo-inverse where u is not minimal).

        Args:
            coordinates: "natural" or "mean".

        Returns:
            ``(..., K, K)``.
        """
        if coordinates not in ("natural", "mean"):
            raise ArgumentError(f'coordinates must be "natural" or "mean"; got {coordinates!r}.')
        fisher = inverse_mean.hessian(self.log_partition, self.natural_parameter)
        if coordinates == "natural":
            return fisher
        return torch.linalg.inv(fisher) if self.minimal else torch.linalg.pinv(fisher, hermitian=True)

    def update(self, statistic: Tensor) -> Self:
        """The member whose natural parameter is larger by a sum of statistics: conjugate updating; see `posterior`.

        Args:
            statistic: ``(..., K)``.
        """
        theta = self.natural_parameter
        if self._checked_statistic(statistic, "statistic").shape[-1] != theta.shape[-1]:
            wanted = f"(..., {theta.shape[-1]}) for this {type(self).__name__}"
            raise ArgumentError(f"update: statistic must be {wanted}; got shape {tuple(statistic.shape)}.")
        return self.from_natural(theta + statistic)

    @classmethod
    def statistic(cls, x: Any) -> Tensor:
        """u(x), the whole sufficient statistic.

        Args:
            x: an event, or a batch of them.

        Returns:
            ``(..., K)``; its first D entries are t(x).
        """
        leaves = pytree.tree_leaves(x)
        ranks = cls._event_ranks
        good = len(leaves) == len(ranks) and all(
            isinstance(leaf, Tensor) and leaf.ndim >= r for leaf, r in zip(leaves, ranks, strict=True)
        )
        if (
            not good
            or len(
                {
                    size
                    for leaf, rank in zip(leaves, ranks, strict=True)
                    for size in leaf.shape[leaf.ndim - rank :]
                }
            )
            != 1
        ):
            got = ", ".join(
                str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
            )
            wanted = " and ".join(f"(..., {', '.join(['D'] * rank)})" for rank in ranks)
            raise ArgumentError(f"{cls.__name__}.statistic: x must be {wanted}; got {got}.")
        return cls._statistic(x)

    def entropy(self) -> Tensor:
        """A(θ) − <θ, E u> − E log b(x).

        Returns:
            ``(...)``, in nats.
        """
        return self._entropy()

    @classmethod
    def _checked_statistic(cls, vector: Tensor, name: str) -> Tensor:
        """A parameter that is paired with u(x), if its dtype and length can be."""
        if not isinstance(vector, Tensor) or not vector.is_floating_point():
            got = str(vector.dtype) if isinstance(vector, Tensor) else type(vector).__name__
            raise ArgumentError(
                f"{cls.__name__}: {name} must be a floating-point tensor (..., K); got {got}."
            )
        size = vector.shape[-1] if vector.ndim else 0
        if not any(cls._statistic_size(d) == size for d in range(1, size + 1)):
            known = ", ".join(str(cls._statistic_size(d)) for d in (1, 2, 3))
            raise ArgumentError(
                f"{cls.__name__}: {name} must be (..., K) with K one of {known}, ...; got shape {tuple(vector.shape)}."
            )
        return vector

    def _sound(self) -> Tensor:
        """``(...)``: whether an unchecked member is finite and in the domain."""
        finite = [
            leaf.isfinite().flatten(leaf.ndim - event).all(-1) if event else leaf.isfinite()
            for leaf, event in self._leaves()
        ]
        return torch.stack(torch.broadcast_tensors(self._in_domain(), *finite)).all(0)

    def _shifted(self, eta: Tensor) -> Tensor:
        """θ + (η, 0)."""
        theta = self.natural_parameter
        extra = theta.shape[-1] - eta.shape[-1]
        return theta + (torch.nn.functional.pad(eta, (0, extra)) if extra else eta)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self.log_partition(self._shifted(eta)) - self._log_partition()

    def _tilt(self, eta: Tensor) -> Self:
        return self._in_place(self._shifted(eta), eta, "eta")

    def _mean(self, eta: Tensor) -> Tensor:
        return self._from_natural(self._shifted(eta)).mean_parameter[..., : self.dimension]

    def _natural(self, mean: Tensor, tolerance: float | None, max_steps: int) -> Solution[Tensor]:
        excess = self._excess(mean, torch.ones_like(mean[..., 0], dtype=torch.bool))
        inside = torch.ones_like(mean[..., 0], dtype=torch.bool) if excess is None else excess < 0
        excess = torch.zeros_like(mean[..., 0]) if excess is None else excess
        origin = self._mean(torch.zeros_like(mean))
        eta = self._dual(torch.where(inside[..., None], mean, origin))
        eta = torch.where((inside & eta.isfinite().all(-1))[..., None], eta, 0.0)
        error = (self._mean(eta) - mean).abs()
        residual = error.amax(-1)
        spread, precision = mean.abs() + origin.abs(), torch.finfo(mean.dtype).eps
        allowed = (
            precision**0.5 if tolerance is None else tolerance
        ) * spread + 256 * precision * spread.amax(-1, keepdim=True)
        solved = torch.where((error <= allowed).all(-1), Status.CONVERGED.code, Status.STALLED.code)
        code = torch.where(inside, solved, torch.where(excess > 0, Status.OUTSIDE.code, Status.BOUNDARY.code))
        return Solution(
            eta, code.to(torch.int8), residual, torch.zeros((), dtype=torch.int64), excess.clamp_min(0)
        )
