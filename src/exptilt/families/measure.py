r"""A measure h, tilted.

    G(η) = log ∫ h(x) e^{⟨t(x), η⟩} dx,     ∇G(η) = E_η[t],     ∇²G(η) = Cov_η[t]

`Measure` is a frozen dataclass of tensors whose leading axes are batch. A subclass gives the log-normalizer G
and the tilted measure h(x) e^{⟨t(x),η⟩−G(η)}; everything else follows here: mean, covariance,
the inverse of the mean map, the Bregman divergence of G and its conjugate G*. A subclass that knows a closed
form gives it in the hook of the same name with an underscore; the laws in `tests/laws` hold each against the
derivative.

The statistic t(x) that tilting pairs with η is x itself wherever x is a statistic of the family (Gaussian,
Poisson, Wishart, ...). For families whose sufficient statistic does not contain x (Beta, Dirichlet,
NormalGamma, NormalInverseWishart) t is the whole statistic. η and t(x) are always vectors ``(...,
D)``; a matrix is laid out by `exptilt._support.linalg.pack`.

Draws that could round to the edge of the support have an inner form: the logarithm of a positive number, the
Cholesky factor of a matrix. Means over inner draws are right even if x itself has been rounded to the edge.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries, finite
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape, dot
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete, pytree
from exptilt.families import inverse_mean
from exptilt.families.batch import STATIC as STATIC
from exptilt.families.batch import Fields
from exptilt.families.batch import make as make
from exptilt.families.checks import one_coordinate, sizes
from exptilt.families.estimate import Estimate


class Base(Enum):
    """The measure that a density is taken with respect to."""

    COUNTING = "counts"
    VOLUME = "a density"
    SPHERE = "a density on the sphere"
    SIMPLEX = "a density on the simplex"


class Measure(Fields):
    """Base class of every measure; derives all else from the log-normalizer."""

    identity_coordinate: ClassVar[bool] = True
    """Whether t(x) is x itself."""

    _reach: ClassVar[tuple[Any, Any, Any] | None] = None
    """Least entries, largest entries and total of x, each a number or ``(..., D)``; None: unknown support.

    The total is None unless it is fixed.
    """

    _decay: ClassVar[float] = 0.0
    """The power r such that −log p(x) grows as |x|^r, at infinity or (negative) at 0; 0 if slower."""

    @property
    def _moments(self) -> tuple[float, Tensor] | None:
        """A sign s and ``t (..., D)``: E|x|^r is infinite if s r ≥ t. None if every power has a mean."""
        return None

    _differentiable_draws: ClassVar[bool] = False
    """Whether draws are differentiable in the parameters."""

    _inner_form: ClassVar[tuple[str, tuple[int, ...]] | None] = None
    """Name of the inner form and the number of event axes of each of its tensors; None if it is x itself."""

    # A subclass must define these.

    @property
    @abstractmethod
    def dimension(self) -> int:
        """D, the length of η and of t(x)."""

    @abstractmethod
    def _log_normalizer(self, eta: Tensor) -> Tensor:
        """G(η), ``(..., D)`` to ``(...)``."""

    @abstractmethod
    def _tilt(self, eta: Tensor) -> Self:
        """The measure h e^{⟨t,η⟩}, normalised where the class holds normalised measures."""

    @abstractmethod
    def _log_prob(self, x: Any) -> Tensor:
        """Log-density of the normalised measure at x, which has the right shape and is in the support."""

    @abstractmethod
    def entropy(self) -> Tensor | Estimate:
        """−E[log p] of the normalised measure, with respect to counting, Lebesgue or surface measure.

        Returns:
            ``(...)``, in nats; an `Estimate` where no closed form exists.
        """

    # A subclass may override these by closed forms.

    @property
    def _knows_hull(self) -> bool:
        """Whether `_excess` is exactly 0 on the boundary, where the search for η does not converge."""
        return False

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that makes up one x."""
        return ((self.dimension,),)

    @property
    def base(self) -> Base:
        """The measure that densities are taken with respect to; KL needs the same for both arguments."""
        return Base.VOLUME

    def _support(self, x: Any) -> Tensor | None:
        """``(...)``: whether x is in the support; None if every x is."""
        return None

    def _coordinate(self, x: Any) -> Tensor:
        vector: Tensor = x
        return vector

    def _to_torch(self) -> distributions.Distribution:
        raise ArgumentError(f"torch.distributions has no {type(self).__name__}, so it cannot be converted.")

    def _mean(self, eta: Tensor) -> Tensor:
        return inverse_mean.gradient(self._log_normalizer, eta)

    def _covariance(self, eta: Tensor) -> Tensor:
        return inverse_mean.hessian(self._log_normalizer, eta)

    def _natural(self, mean: Tensor, tolerance: float | None, max_steps: int) -> Solution[Tensor]:
        solution = inverse_mean.natural(self, mean, tolerance, max_steps)
        every = torch.ones_like(solution.code, dtype=torch.bool)
        excess = self._excess(mean, every) if self._knows_hull else None
        if excess is None:
            return solution
        code = torch.where(excess == 0, Status.BOUNDARY.code, solution.code)
        return dataclasses.replace(solution, code=code.to(torch.int8))

    def _value_and_mean(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        return self._log_normalizer(eta), self._mean(eta)

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        """``(...)``: how far ``mean (..., D)`` is outside the hull of t, where `where`; None for no hull.

        Negative inside; but measures of points give 0 inside and on the boundary: see `_bounds`.
        """
        return None

    def _centred(self, mean: Tensor) -> tuple["Measure", Tensor]:
        """A shifted measure and mean with the same η and less rounding; unchanged by default."""
        return self, mean

    def _bounds(self, mean: Tensor, where: Tensor) -> Tensor:
        """``(...)``: whether ``mean (..., D)`` is on the boundary of the hull, where `where (...)`."""
        excess = self._excess(mean, where)
        return torch.zeros_like(where) if excess is None else excess == 0

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        """Change of the mean that a Newton step aims at; to first order ``wanted − reached (..., D)``."""
        return wanted - reached

    def _diverges(self, eta: Tensor) -> Tensor | None:
        """``(...)``: whether η is outside the natural domain, so that G is infinite; None if it never is."""
        return None

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """G* on the boundary of the hull; ``reached (...)`` is ⟨m,η⟩ − G(η) where Newton's method stopped."""
        return reached

    def _face(self, mean: Tensor, where: Tensor) -> "Measure | None":
        """The measure on the face of the hull that holds the mean, where `where`; None if it is not known."""
        return None

    def _least_log_mass(self) -> Tensor | None:
        """Log of the smallest point mass, ``(...)``; None unless the measure is a finite set of points."""
        return None

    def _event_moments(self) -> tuple[Any, Any]:
        """E[x] and Var[x], each shaped like one draw."""
        if not self.identity_coordinate:
            raise ArgumentError(
                f"{type(self).__name__}: E[x] has no closed form here. Average `sample` instead."
            )
        return self.mean(), self.covariance().diagonal(dim1=-2, dim2=-1)

    def _event_covariance(self) -> Tensor:
        """Cov[x] ``(..., D, D)`` of a vector x; diagonal (independent coordinates) if t(x) is not x."""
        return self.covariance() if self.identity_coordinate else torch.diag_embed(self._event_moments()[1])

    def _sample_scored(self, count: int, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Inner draws ``(count,) + batch`` for a mean over them, and the `score` of `Estimate.sampled`."""
        y = self._sample_inner((count,), generator)
        if self._differentiable_draws:
            return y, torch.zeros(count, *self.batch_shape, dtype=self.dtype, device=self.device)
        y = pytree.tree_map(torch.detach, y)
        return y, self._log_prob_inner(y)

    # A subclass must define one of the next two.

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Any:
        """Draws ``shape + batch + event``."""
        return self._from_inner(self._sample_inner(shape, generator))

    def _sample_inner(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Any:
        """Draws in the inner form."""
        return self._sample(shape, generator)

    def _from_inner(self, y: Any) -> Any:
        """The x nearest to a draw in the inner form."""
        return y

    def _log_prob_inner(self, y: Any) -> Tensor:
        """Log-density of x at a draw in the inner form."""
        return self.log_prob(y)

    # Common to all measures.

    def log_normalizer(self, eta: Tensor) -> Tensor:
        """G(η) = log ∫ h(x) e^{⟨t(x),η⟩}.

        Args:
            eta: ``(..., D)``.

        Returns:
            ``(...)``, infinite where the integral diverges.
        """
        return self._log_normalizer(self._checked(eta, "eta"))

    def mean(self, eta: Tensor | None = None) -> Tensor:
        """E[t] under the tilted measure, the gradient of G.

        Args:
            eta: ``(..., D)``, the tilt, where G is finite; default 0.

        Returns:
            ``(..., D)``.
        """
        return self._mean(self._origin() if eta is None else self._within(eta, "eta"))

    def covariance(self, eta: Tensor | None = None) -> Tensor:
        """Cov[t] under the tilted measure: the Hessian of G, and the Fisher information of η.

        Args:
            eta: ``(..., D)``, the tilt, where G is finite; default 0.

        Returns:
            ``(..., D, D)``.
        """
        return self._covariance(self._origin() if eta is None else self._within(eta, "eta"))

    def tilt(self, eta: Tensor) -> Self:
        """The measure h(x) e^{⟨t(x),η⟩}, of the same class; ``h.tilt(a).tilt(b)`` is ``h.tilt(a + b)``.

        Args:
            eta: ``(..., D)``, finite; its batch axes broadcast with those of the measure.
        """
        finite(type(self).__name__, eta=self._checked(eta, "eta"))
        return self._tilt(eta)

    def natural(
        self, mean: Tensor, *, tolerance: float | None = None, max_steps: int = 100
    ) -> Solution[Tensor]:
        """The η whose tilted measure has this mean: the inverse of `mean`.

        Differentiable twice in ``mean`` and in the fields of the measure. Each problem has its own status: a
        mean on the boundary of the hull of the support or outside is reported with its distance from the
        hull; an unsolved problem for which neither is certain is reported as stalled. The residual is the
        largest error of a coordinate of the mean.

        Args:
            mean: ``(..., D)``, wanted mean of t.
            tolerance: on the residual, in standard deviations of h, or of the tilted density if that is
                narrower (closed forms: relative to the mean); default by the dtype's precision.
            max_steps: of Newton's method, where no closed form exists.

        Returns:
            A `Solution` whose value is ``(..., D)``.
        """
        mean = self._spread(mean, "mean")
        finite(type(self).__name__, mean=mean)
        if max_steps < 1 or (tolerance is not None and not tolerance >= 0):
            wanted = "tolerance must be at least 0 and max_steps at least 1"
            raise ArgumentError(f"{type(self).__name__}.natural: {wanted}; got {tolerance} and {max_steps}.")
        return self._natural(mean, tolerance, max_steps)

    def conjugate(self, mean: Tensor) -> Tensor:
        """G*(m) = sup_η ⟨m,η⟩ − G(η).

        Args:
            mean: ``(..., D)``.

        Returns:
            ``(...)``, infinite outside the hull of the support. On the boundary the limit from inside: finite
            only if a face of the hull has mass, as for points and counts. An error if η is not found.
        """
        solution = self.natural(mean)
        boundary = solution.code == Status.BOUNDARY.code
        face = self._face(mean, boundary)
        if face is not None:
            return face.conjugate(mean)
        lost = (solution.code == Status.STALLED.code) | (solution.code == Status.MAX_STEPS.code)
        if is_concrete(lost) and bool(lost.any()):
            dataclasses.replace(solution, code=torch.where(lost, solution.code, 0)).or_raise()
        value = dot(mean, solution.value) - self.log_normalizer(solution.value)
        limit = self._boundary_conjugate(mean, value)
        value = torch.where(lost, torch.nan, torch.where(boundary, limit, value))
        return torch.where(solution.code == Status.OUTSIDE.code, torch.inf, value)

    def bregman(self, a: Tensor, b: Tensor) -> Tensor:
        """B_G(a,b) = G(a) − G(b) − ⟨∇G(b), a−b⟩, which is KL(p_b ‖ p_a): mind the order.

        Args:
            a: ``(..., D)``.
            b: ``(..., D)``, where G is finite.

        Returns:
            ``(...)``, infinite where G(a) is.
        """
        a, b = self._checked(a, "a"), self._within(b, "b")
        return self._log_normalizer(a) - self._log_normalizer(b) - dot(self._mean(b), a - b)

    def coordinate(self, x: Any) -> Tensor:
        """t(x), the vector that tilting pairs with η.

        Args:
            x: an event, or a batch of them.

        Returns:
            ``(..., D)``.
        """
        return self._coordinate(self._event(x))

    def log_prob(self, x: Any) -> Tensor:
        """Log-density (or log-probability) of the normalised measure h / e^{G(0)} at x.

        Args:
            x: an event, or a batch of them whose leading axes broadcast with those of the measure.

        Returns:
            ``(...)``, −inf off the support. On a sphere or a simplex x may be off by rounding, up to the root
            of the dtype's precision.
        """
        x = self._event(x)
        inside = self._support(x)
        if inside is None:
            return self._log_prob(x)
        leaves, spec = pytree.tree_flatten(x)
        ranks = [len(shape) for shape in self.event_shapes]
        for leaf, rank in zip(leaves, ranks, strict=True):  # NaN in, NaN out
            inside = inside | leaf.isnan().any(-1 if rank == 1 else (-2, -1))
        safe = []  # x off the support is replaced by one with finite density and derivatives
        for leaf, rank in zip(leaves, ranks, strict=True):
            eye = torch.eye(leaf.shape[-1], dtype=leaf.dtype, device=leaf.device)
            anywhere = leaf.new_tensor(0.5) if rank == 1 else eye
            safe.append(torch.where(inside[(..., *[None] * rank)], leaf, anywhere))
        return torch.where(inside, self._log_prob(pytree.tree_unflatten(safe, spec)), -torch.inf)

    def sample(self, shape: int | Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Draws from the normalised measure, ``shape + batch + event``.

        Args:
            shape: how many, as a number or a shape.
            generator: the source of randomness; torch's own if not given.
        """
        return self._sample(sizes(type(self).__name__, shape), generator)

    def to_torch(self) -> distributions.Distribution:
        """The same law in `torch.distributions`; ``Independent(..., 1)`` if coordinates are independent."""
        return self._to_torch()

    def _origin(self) -> Tensor:
        return torch.zeros(*self.batch_shape, self.dimension, dtype=self.dtype, device=self.device)

    def _spread(self, vector: Tensor, name: str) -> Tensor:
        """The checked vector, expanded to the whole batch."""
        vector = self._checked(vector, name)
        return vector.expand(*common_shape(self.batch_shape, vector.shape[:-1]), self.dimension)

    def _within(self, eta: Tensor, name: str) -> Tensor:
        """As `_spread`; an error outside the natural domain, or NaN if values cannot be read."""
        eta = self._spread(eta, name)
        diverges = self._diverges(eta)
        if diverges is None:
            return eta
        wanted = "inside the natural domain, where the integral converges"
        entries(type(self).__name__, name, eta, ~diverges, wanted)
        return eta if is_concrete(eta, diverges) else torch.where(diverges.unsqueeze(-1), torch.nan, eta)

    def _checked(self, vector: Tensor, name: str) -> Tensor:
        kind, shape = type(self).__name__, f"(..., {self.dimension})"
        vector = one_coordinate(vector, self._leaves()[0][0]) if self.dimension == 1 else vector
        if not isinstance(vector, Tensor):
            raise ArgumentError(f"{name} must be a tensor {shape}; got {type(vector).__name__}.")
        if vector.ndim == 0 or vector.shape[-1] != self.dimension:
            raise ArgumentError(f"{name} must be {shape} for this {kind}; got shape {tuple(vector.shape)}.")
        if vector.dtype != self.dtype:
            convert = "Convert one with .to(dtype)."
            raise ArgumentError(f"{name} is {vector.dtype}, this {kind} is {self.dtype}. {convert}")
        return vector
