r"""Derivatives of the log-normalizer, and the inverse of the mean map.

The mean map η ↦ ∇G(η) is inverted by minimising the convex function F(η) = G(η) − ⟨m, η⟩ with damped Newton
steps

    η ← η − t ∇²G(η)⁻¹ (∇G(η) − m),     t = 1, ½, ¼, ... until F falls enough (Armijo).

If m lies on or outside the hull of the support, F has no minimiser: η goes to infinity. On the boundary
the residual still falls to zero, so a small residual proves nothing; but Newton's step then keeps its length
instead of shrinking quadratically. A problem counts as solved only when the residual is within the tolerance
*and* the step has shrunk. Outside, of points x_n with masses w_n,

    F(η) = log Σ_n w_n e^{⟨x_n − m, η⟩} < min_n log w_n     proves     ⟨x_n − m, η⟩ < 0 for every n:

η separates m from all points, and the search ends. For each unsolved problem the measure then says how far m
is outside, or that m is on the boundary (all points lie on one side of a hyperplane through m). If neither is
certain, the problem has stalled.

The solver itself is not differentiated. Two more Newton steps are taken from its answer with derivatives: the
first carries the exact first derivatives (implicit function theorem), the second the exact second ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support.linalg import dot, matvec
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import apply, has_tangent, is_wrapped, pytree

if TYPE_CHECKING:
    from exptilt.families.measure import Measure


class Point(NamedTuple):
    """A batch of η with G(η) and ∇G(η)."""

    eta: Tensor
    value: Tensor
    mean: Tensor


def gradient(log_normalizer: Callable[[Tensor], Tensor], eta: Tensor) -> Tensor:
    """∇G at every ``eta (..., D)`` of a batch at once."""
    result: Tensor = torch.func.grad(lambda e: log_normalizer(e).sum())(eta)
    return result


def hessian(log_normalizer: Callable[[Tensor], Tensor], eta: Tensor) -> Tensor:
    """∇²G at every ``eta (..., D)``: ``(..., D, D)``, one pull-back per column."""
    _, pull = torch.func.vjp(lambda e: gradient(log_normalizer, e), eta)  # type: ignore[misc]
    dimension = eta.shape[-1]
    basis = torch.eye(dimension, dtype=eta.dtype, device=eta.device)
    columns = basis.reshape(dimension, *[1] * (eta.ndim - 1), dimension).expand(dimension, *eta.shape)
    (rows,) = torch.func.vmap(pull)(columns)
    result: Tensor = rows.movedim(0, -2)
    return (result + result.mT) / 2


def solve_covariance(covariance: Tensor, vector: Tensor) -> Tensor:
    """C⁻¹ v for C ``(..., D, D)`` and v ``(..., D)``; the least-norm solution where C is singular.

    Each diagonal entry is raised by a few units in its last place (a constant coordinate by 1).
    """
    return _solve_factored(_factor(covariance), vector)


def _factor(covariance: Tensor) -> Tensor:
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    ridge = 4 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps * diagonal
    raised = covariance + torch.diag_embed(torch.where(diagonal > 0, ridge, 1.0))
    factor: Tensor = torch.linalg.cholesky_ex(raised)[0]
    return factor


def _solve_factored(factor: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(-1), factor).squeeze(-1)


def natural(measure: "Measure", mean: Tensor, tolerance: float | None, max_steps: int) -> Solution[Tensor]:
    """The η with the given mean, for any measure; ``mean (..., D)`` already has the full batch shape."""
    leaves, spec = pytree.tree_flatten(measure)
    events = [event for _, event in measure._leaves()]
    found = _Newton.apply(spec, events, tolerance, max_steps, mean, *leaves)  # type: ignore[no-untyped-call]
    eta, code, residual, steps, distance = found
    if torch.is_grad_enabled() and any(_differentiable(tensor) for tensor in (mean, *leaves)):
        eta = polish(measure, mean, eta, code == Status.CONVERGED.code)
    return Solution(eta, code, residual, steps, distance)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.requires_grad or is_wrapped(tensor) or has_tangent(tensor)


def polish(measure: "Measure", mean: Tensor, eta: Tensor, solved: Tensor) -> Tensor:
    """η after two Newton steps recorded by autograd, taken only where `solved`."""
    given = eta.dtype
    measure, mean = measure._centred(mean)
    eta = eta.to(mean.dtype)
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    for _ in range(2):
        covariance = torch.where(solved[..., None, None], measure._covariance(eta), eye)
        step = solve_covariance(covariance, mean - measure._mean(eta))
        eta = torch.where(solved[..., None], eta + step, eta)
    return eta.to(given)


@torch.no_grad()
def newton(
    measure: "Measure", mean: Tensor, tolerance: float | None, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Damped Newton on a batch: η, codes, residuals, steps, distances.

    Each covariance serves two steps (Shamanskii's method: third order for one covariance and two means), and
    further steps while each gains a factor of eight.
    """
    given, target = measure, mean
    measure, mean = measure._centred(mean)
    precision = torch.finfo(mean.dtype).eps
    tolerance = precision**0.75 if tolerance is None else tolerance
    here = Point(torch.zeros_like(mean), *measure._value_and_mean(torch.zeros_like(mean)))
    covariance = measure._covariance(here.eta)
    frame = Frame.of(covariance)
    spread = unit = frame.spread
    allowed = tolerance * spread + 16 * precision * mean.abs()
    rounding = torch.zeros_like(mean)
    done = torch.zeros(mean.shape[:-1], dtype=torch.bool, device=mean.device)
    stalled = torch.zeros_like(done)
    floor = measure._least_log_mass()
    if floor is not None and bool(frame.flat.any()):  # m may be off the plane that holds all points
        eta, gain = frame.away(mean - here.mean)
        eta = eta * ((2 * (here.value - floor) + 16) / gain.clamp_min(precision)).unsqueeze(-1)
        stalled = stalled | _separated(mean, Point(eta, *measure._value_and_mean(eta)), floor)
    # Near the edge of a natural domain variances grow without bound: rescale at each step, not only at η = 0.
    grows = measure._diverges(here.eta) is not None and not bool(frame.flat.any())
    nothing = 1e-4 if grows else min(1e-4, precision**0.5)
    steps = 0
    while steps < max_steps:
        if grows:
            frame, unit = frame.scaled(covariance), covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        if floor is None:
            tilted = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
            allowed = tolerance * torch.minimum(spread, tilted) + 16 * precision * mean.abs()
            rounding = 4 * precision * matvec(covariance.abs(), here.eta.abs())  # of η, in units of m
            rounding = rounding if grows else torch.minimum(rounding, precision**0.5 * spread)
        local = frame.covariance(covariance)
        # Regularised Newton: a hundredth of the slope is added, because the variance vanishes where one point
        # has all the weight. This term vanishes with the slope, so the last steps are pure Newton steps.
        # A density keeps some variance everywhere: there the term is in units of the tilted variance.
        slope = torch.linalg.vector_norm(frame.pull(measure._step_for(here.mean, mean)), dim=-1)[..., None]
        if floor is None:
            slope = slope * local.diagonal(dim1=-2, dim2=-1).amin(-1, keepdim=True)
        factor = _factor(local + torch.diag_embed(0.01 * slope.expand_as(mean)))
        last = (here.mean - mean).abs().amax(-1)
        turn = 0
        while True:
            move = _solve_factored(factor, frame.pull(measure._step_for(here.mean, mean)))
            uphill = dot(frame.push(move), mean - here.mean) <= 0  # possible if _step_for rescales
            if bool(uphill.any()):
                downhill = _solve_factored(factor, frame.pull(mean - here.mean))
                move = torch.where(uphill[..., None], downhill, move)
            small = move.abs().amax(-1) <= nothing * (1 + frame.size(here.eta))
            near = small & ((here.mean - mean).abs() <= allowed + rounding).all(-1) & ~(done | stalled)
            if bool(near.any()):
                # The error of η is the rounding of the mean over the least variance, which is 0 on the
                # boundary.
                least = torch.linalg.eigvalsh(local)[..., 0]
                noise = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt() + mean.abs()
                certain = 64 * precision * torch.where(unit > 0, noise / unit, 0.0).amax(-1) <= least
                done, stalled = done | (near & certain), stalled | (near & ~certain)
            moving = ~(done | stalled) & move.isfinite().all(-1)
            now = (here.mean - mean).abs().amax(-1)
            if not bool(moving.any()) or (turn >= 2 and bool((moving & (now > last / 8)).any())):
                break
            step = torch.where(moving[..., None], frame.push(move), 0.0)
            here, moved = _line_search(measure, mean, here, step, tries=1 if turn else 60)
            turn, last, steps = turn + 1, now, steps + 1
            stalled = stalled | (moving & ~moved) if turn == 1 else stalled
            stalled = stalled | _separated(mean, here, floor)
        if not bool(moving.any()):
            break
        covariance = measure._covariance(here.eta)
    eta, residual = here.eta.to(target.dtype), (here.mean - mean).abs()
    if eta.dtype != mean.dtype:  # the answer is rounded: say what the rounded one reaches
        residual = (measure._mean(eta.to(mean.dtype)) - mean).abs()
        digit = torch.finfo(eta.dtype).eps
        enough = max(tolerance, digit**0.75) * spread + 16 * digit * target.abs()
        rounded = done & (residual > enough).any(-1)
        done, stalled = done & ~rounded, stalled | rounded
    code, distance = _classify(given, target, done, stalled, spread)
    count = torch.tensor(steps, device=mean.device)
    return eta, code, residual.amax(-1).to(target.dtype), count, distance


class Frame(NamedTuple):
    """Coordinates z = Wᵀ t, η = W ζ in which the untilted measure has unit covariance.

    Flat directions, in which the points do not differ (one-hot vectors, redundant constraints), are left out:
    `flat` marks them, `normal` holds them.
    """

    spread: Tensor
    basis: Tensor
    normal: Tensor
    flat: Tensor

    @classmethod
    def of(cls, covariance: Tensor) -> "Frame":
        """The frame for the covariance at η = 0, scaled to correlations first so that units do not matter."""
        spread = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        inverse = torch.where(spread > 0, 1 / spread, 0.0)
        values, vectors = torch.linalg.eigh(covariance * inverse.unsqueeze(-1) * inverse.unsqueeze(-2))
        flat = values <= 16 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps
        scale = torch.where(flat, 0.0, values.clamp_min(torch.finfo(covariance.dtype).tiny).rsqrt())
        vectors = inverse.unsqueeze(-1) * vectors
        return cls(spread, vectors * scale.unsqueeze(-2), vectors * flat.unsqueeze(-2), flat)

    def scaled(self, covariance: Tensor) -> "Frame":
        """The frame in which each entry has variance 1 under another covariance without flat directions."""
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300)
        return self._replace(basis=torch.diag_embed(variance.rsqrt()))

    def covariance(self, covariance: Tensor) -> Tensor:
        """WᵀCW, with 1 for the flat directions."""
        return self.basis.mT @ covariance @ self.basis + torch.diag_embed(self.flat.to(covariance.dtype))

    def pull(self, vector: Tensor) -> Tensor:
        """A difference of means, converted to these coordinates."""
        return matvec(self.basis.mT, vector)

    def push(self, move: Tensor) -> Tensor:
        """A change of η, converted from these coordinates."""
        return matvec(self.basis, move)

    def away(self, offset: Tensor) -> tuple[Tensor, Tensor]:
        """The η along the flat directions that points to a mean off by ``offset``, and ⟨offset, η⟩."""
        components = matvec(self.normal.mT, offset)
        return matvec(self.normal, components), dot(components, components)

    def size(self, eta: Tensor) -> Tensor:
        """How large η is, in standard deviations of the untilted measure."""
        return (eta.abs() * self.spread).amax(-1)


def _line_search(
    measure: "Measure", mean: Tensor, here: Point, step: Tensor, *, tries: int
) -> tuple[Point, Tensor]:
    """The point after a step halved until F falls by a tenth of the slope's prediction, and which moved.

    Far-out points make G steep: a step that merely lowers F may land where one point has all the weight.
    Conversely, a step is doubled while the slope remains above half its first value: between separated
    components a Newton step is much too short.
    """
    before, promised = here.value - dot(mean, here.eta), dot(here.mean - mean, step)
    slack = _rounding(mean, here)
    size = torch.ones_like(before)
    for _ in range(tries):
        eta = here.eta + size[..., None] * step
        there = Point(eta, *measure._value_and_mean(eta))
        falls = there.value - dot(mean, eta) <= before + 0.1 * size * promised + slack
        # Reject a step so far beyond the minimum that the slope reverses with more than half its size.
        accepted = falls & (dot(there.mean - mean, step) <= -promised / 2 + slack)
        if bool(accepted.all()):
            break
        size = torch.where(accepted, size, size / 2)
    here = there if bool(accepted.all()) else _chosen(accepted, there, here)
    longer = accepted & (promised < -slack)
    for _ in range(tries if tries > 1 else 0):
        longer = longer & (dot(here.mean - mean, step) < promised / 2)
        if not bool(longer.any()):
            break
        size = 2 * size
        eta = torch.where(longer[..., None], here.eta + size[..., None] / 2 * step, here.eta)
        there = Point(eta, *measure._value_and_mean(eta))
        falls = there.value - dot(mean, eta) <= before + 0.1 * size * promised + slack
        longer = longer & falls & (dot(there.mean - mean, step) <= -promised / 2 + slack)
        here = _chosen(longer, there, here)
    return here, accepted


def _chosen(which: Tensor, new: Point, old: Point) -> Point:
    """The new point where `which (...)`, else the old one."""
    wide = which[..., None]
    eta, mean = torch.where(wide, new.eta, old.eta), torch.where(wide, new.mean, old.mean)
    return Point(eta, torch.where(which, new.value, old.value), mean)


def _separated(mean: Tensor, here: Point, floor: Tensor | None) -> Tensor:
    """``(...)``: whether η separates m from all points; `floor` is the least log-mass of a point."""
    if floor is None:
        return torch.zeros_like(here.value, dtype=torch.bool)
    return here.value - dot(mean, here.eta) < floor - _rounding(mean, here)


def _rounding(mean: Tensor, here: Point) -> Tensor:
    """Bound on the rounding error of F(η)."""
    return torch.finfo(mean.dtype).eps * (2 + 8 * (here.value.abs() + dot(mean.abs(), here.eta.abs())))


def _classify(
    measure: "Measure", mean: Tensor, done: Tensor, stalled: Tensor, spread: Tensor
) -> tuple[Tensor, Tensor]:
    """Status codes ``(...)``, and distances ``(...)`` of the means from the hull."""
    ended = torch.where(stalled, Status.STALLED.code, Status.MAX_STEPS.code)
    code = torch.where(done, Status.CONVERGED.code, ended).to(torch.int8)
    distance = torch.zeros_like(mean[..., 0])
    if bool(done.all()):
        return code, distance
    excess = measure._excess(mean, ~done)
    if excess is None:
        return code, distance
    size = spread.amax(-1) + mean.abs().amax(-1)
    slack = (4 * torch.finfo(mean.dtype).eps + 64 * torch.finfo(torch.float64).eps) * size
    outside = ~done & (excess > slack)
    code = torch.where(outside, Status.OUTSIDE.code, code)
    boundary = measure._bounds(mean, ~done & ~outside) & ~done & ~outside
    code = torch.where(boundary, Status.BOUNDARY.code, code)
    return code.to(torch.int8), torch.where(outside, excess, distance).to(mean.dtype)


class _Newton(torch.autograd.Function):
    """`newton` as one operation without derivatives but with a batching rule for `torch.func.vmap`."""

    @staticmethod
    def forward(
        spec: Any, events: list[int], tolerance: float | None, max_steps: int, mean: Tensor, *leaves: Tensor
    ) -> Any:
        return newton(pytree.tree_unflatten(leaves, spec), mean, tolerance, max_steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return (None,) * 5

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: Any, events: list[int], *rest: Any) -> Any:
        tolerance, max_steps, mean, *leaves = rest
        size, dims = info.batch_size, in_dims[4:]
        mean = mean.expand(size, *mean.shape) if dims[0] is None else mean.movedim(dims[0], 0)
        moved = []
        for leaf, dim, event in zip(leaves, dims[1:], events, strict=True):
            if dim is not None:
                leaf = leaf.movedim(dim, 0)
                ones = [1] * (mean.ndim - 1 - (leaf.ndim - event))
                leaf = leaf.reshape(size, *ones, *leaf.shape[1:])
            moved.append(leaf)
        found = apply(_Newton, spec, events, tolerance, max_steps, mean, *moved)
        return found, (0, 0, 0, None, 0)
