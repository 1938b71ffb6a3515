r"""Fixed points x = f(x), each sample to its own tolerance, with their derivatives.

    residual of a sample = ‖f(x) − x‖ / (max(‖x‖, scale) + ε)

where ‖·‖ is Euclidean over the event axes, scale is 0 unless given, and ε the smallest normal number over the precision eps, so that x = 0
is a fixed point like any other; but towards x = 0 the relative residual of a linear map never falls, and there a scale is wanted. A sample
is solved once its residual is within the tolerance; from then on it stands still while others go on. It has diverged when

    ‖x‖ > eps^(−1/2) (1 + ‖x₀‖ + ‖f(x₀)‖),

and then, as after NaN or at max_steps, it returns the point on its way with the least residual. (A relative residual cannot tell a fixed
point from infinity: x + 1/x has one of 1e-10 at x = 1e5. Look at the size of the answer where f may have none.)

The ways to go are in ``solvers.py``, the derivatives in ``implicit.py``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import is_concrete
from exptilt._support.solution import Solution, Status
from exptilt.dynamics.implicit import attach
from exptilt.dynamics.levels import Seat, bare, differentiated, plain, spread
from exptilt.dynamics.solvers import Anderson, Broyden, NewtonKrylov, Picard, Solver
from exptilt.dynamics.tape import Tape

SOLVERS = ("anderson", "picard", "broyden", "newton-krylov")
_CONVERGED, _MAX_STEPS, _DIVERGED, _NOT_FINITE = (
    status.code for status in (Status.CONVERGED, Status.MAX_STEPS, Status.DIVERGED, Status.NOT_FINITE)
)


def fixed_point(
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    solver: str = "anderson",
    tolerance: float | None = None,
    max_steps: int = 500,
    event_dims: int = 1,
    damping: float | None = None,
    window: int | None = None,
    regularization: float | None = None,
    order: int = 2,
    scale: float | Tensor | None = None,
    throw: bool = True,
    strict: bool | None = None,
) -> Solution[Tensor]:
    r"""Solve x = f(x) and differentiate the answer.

    Derivatives flow to every tensor that `function` uses, parameters of modules included, backwards and forwards, and through all
    `torch.func` transforms; none flow to `start`. They are the implicit ones, exact at the fixed point whatever the solver did, and cost
    one linear solve each. Where a sample did not converge (``throw=False``) they belong to the point where it stopped.

    Args:
        function: f, from ``(..., *event)`` to the same shape and dtype. Samples along the leading axes must not influence each other.
        start: ``(..., *event)``, floating point.
        solver: ``"anderson"``, ``"picard"``, ``"broyden"`` or ``"newton-krylov"`` (needs second derivatives of f to be defined).
        tolerance: of the residual ‖f(x) − x‖ / (max(‖x‖, scale) + ε); default 256 eps, 6e-14 in float64 and 3e-5 in float32.
        max_steps: most evaluations of f; those inside linear solves are not counted.
        event_dims: how many of the last axes make up one sample.
        damping: ω of Picard and Anderson, in (0, 1]; default 1.
        window: how many past steps Anderson (default 6) and Broyden (default 30) keep, or the dimension of a Krylov space (default 30).
        regularization: λ of Anderson, relative to the Gram matrix's unit diagonal; default 10 eps.
        order: derivatives up to this order are exact, those beyond are not; each order after the first costs an evaluation of f.
        scale: a number ≥ 0 or a tensor that broadcasts to ``(...)``; where ‖x‖ is smaller, the residual is measured in this instead.
        throw: raise a `ConvergenceError` where a sample did not converge.
        strict: raise one where a derivative does not exist, 1 − J being singular; False makes it NaN or huge there. Default: as throw.

    Returns:
        A `Solution`: value ``(..., *event)``, code and residual ``(...)``, trace ``(steps, ...)`` of residuals.

    Example:
        >>> import torch
        >>> a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        >>> found = fixed_point(lambda x: a * torch.cos(x), torch.zeros(1, dtype=torch.float64))
        >>> found.status.name, float(found.value.detach().round(decimals=6))
        ('CONVERGED', 0.450184)
        >>> found.value.backward()  # dx/da = cos x / (1 + a sin x)
        >>> float(a.grad.round(decimals=6))
        0.739482
    """
    options = (solver, tolerance, max_steps, event_dims, damping, window, regularization, order, scale, throw, strict)
    if torch.compiler.is_compiling():  # a loop that ends when the numbers say so is not a graph: it runs beside the compiled parts
        found: Solution[Tensor] = torch.compiler.disable(_solve)(function, start, *options)
        return found
    return _solve(function, start, *options)


def _solve(
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    solver: str,
    tolerance: float | None,
    max_steps: int,
    event_dims: int,
    damping: float | None,
    window: int | None,
    regularization: float | None,
    order: int,
    scale: float | Tensor | None,
    throw: bool,
    strict: bool | None,
) -> Solution[Tensor]:
    _check(start, solver, tolerance, max_steps, event_dims, order)
    least = _scale(scale, start, event_dims)
    finfo = torch.finfo(start.dtype)
    tolerance = 256 * finfo.eps if tolerance is None else tolerance
    start = start.detach()
    first = function(start)
    _check_image(first, start)
    follow = differentiated(first)
    with plain() as stack, torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        record = follow and not stack and first.requires_grad
        seat, state, image, floor = _sit(function, start, first, least, event_dims, stack)
        del first  # and its graph
        way = _way(seat, solver, damping, window, regularization, finfo.eps)
        run = _iterate(seat, way, state, image, floor, tolerance, max_steps, finfo, record=record)
        value, samples = run.value.reshape(seat.full), seat.samples
        code, residual = run.code.reshape(samples), run.residual.reshape(samples)
        trace = run.trace.reshape(run.steps, *samples).movedim(0, len(seat.sizes))
        steps, distance = torch.tensor(run.steps), torch.zeros_like(residual)
        if throw:
            Solution(value, code, residual, steps, distance).or_raise()
    if follow and value.numel():
        x = attach(seat, value, run.tape, order=order, tolerance=tolerance, strict=throw if strict is None else strict)
    else:
        x = seat.wrap(value.clone())  # it may be the start itself, or what f keeps
    return Solution(x, seat.wrap(code), seat.wrap(residual), steps, seat.wrap(distance), seat.wrap(trace))


class _Run(NamedTuple):
    value: Tensor
    code: Tensor
    residual: Tensor
    trace: Tensor
    steps: int
    tape: Tape | None  # of f at the value


def _iterate(
    seat: Seat,
    way: Solver,
    x: Tensor,
    image: Tensor,
    floor: Tensor,
    tolerance: float,
    max_steps: int,
    finfo: torch.finfo,
    *,
    record: bool,
) -> _Run:
    """Step until every sample has ended, on flat plain states ``(S, n)`` with scales ``(S,)``. `record` keeps the graph of the last f."""
    tiny = finfo.tiny / finfo.eps
    bound = finfo.eps**-0.5 * (1 + torch.linalg.vector_norm(x, dim=-1) + torch.linalg.vector_norm(image, dim=-1))
    value, least = x, torch.full_like(bound, torch.inf)
    moving, all_move = torch.ones_like(bound, dtype=torch.bool), True
    trace: list[Tensor] = []
    tape: Tape | None = None
    for step in range(1, max_steps + 1):
        residual = image - x
        norm, size = torch.linalg.vector_norm(residual, dim=-1), torch.linalg.vector_norm(x, dim=-1)
        now = norm / (torch.maximum(size, floor) + tiny)
        trace.append(now)
        best = now <= least
        value, least = x if bool(best.all()) else torch.where(best.unsqueeze(-1), x, value), torch.fmin(now, least)
        still = moving & (now > tolerance) & (size <= bound)  # NaN is neither
        if not torch.equal(still, moving):
            moving, all_move = still, False
        if step == max_steps or not (all_move or bool(moving.any())) or not moving.numel():
            break
        following = way.step(x, image, residual, norm)
        x = following if all_move else torch.where(moving.unsqueeze(-1), following, x)
        if record:
            tape = None  # one graph at a time
            tape = Tape(seat, x.reshape(seat.full))
            image = tape.value.reshape(x.shape)
        else:
            image = seat(x)
    solved = least <= tolerance
    code = torch.full_like(solved, _CONVERGED, dtype=torch.int8)
    if not bool(solved.all()):  # a sample that has ended stands still: the last step shows how
        lost = torch.where(moving, _MAX_STEPS, torch.where(norm.isfinite(), _DIVERGED, _NOT_FINITE))
        code = torch.where(solved, code, lost.to(torch.int8))
    return _Run(value, code, least, torch.stack(trace), step, tape if torch.equal(value, x) else None)


def _scale(scale: float | Tensor | None, start: Tensor, event_dims: int) -> Tensor:
    """The scale of every sample ``(...)``."""
    samples = start.shape[: start.ndim - event_dims]
    if scale is None:
        return torch.zeros((), dtype=start.dtype, device=start.device).expand(samples)
    if isinstance(scale, bool) or not isinstance(scale, int | float | Tensor):
        raise ArgumentError(f"fixed_point: scale is {scale!r}. Pass a number ≥ 0, or a tensor that broadcasts to {tuple(samples)}.")
    value = torch.as_tensor(scale, dtype=start.dtype, device=start.device).detach()
    if is_concrete(value) and not bool(((value >= 0) & value.isfinite()).all()):
        raise ArgumentError(f"fixed_point: scale is {scale}. Pass finite numbers ≥ 0.")
    try:
        return value.expand(samples)
    except RuntimeError:
        got = tuple(value.shape)
        raise ArgumentError(f"fixed_point: scale has shape {got}, which does not broadcast to the samples {tuple(samples)}.") from None


def _sit(
    function: Callable[[Tensor], Tensor], start: Tensor, first: Tensor, scale: Tensor, event_dims: int, stack: object
) -> tuple[Seat, Tensor, Tensor, Tensor]:
    """The seat, and the flat plain start, its image and its scale."""
    (x, levels), (y, more), (z, last) = bare(start), bare(first), bare(scale)
    sizes = {level: size for raw, found in ((x, levels), (y, more), (z, last)) for level, size in zip(found, raw.shape, strict=False)}
    wanted = tuple(sorted(sizes))
    seat = Seat(function, start.shape, event_dims, wanted, tuple(sizes[level] for level in wanted), stack)
    samples = math.prod(seat.samples)
    x, y = (spread(raw.detach(), found, wanted, seat.sizes).reshape(samples, seat.event) for raw, found in ((x, levels), (y, more)))
    return seat, x, y, spread(z.detach(), last, wanted, seat.sizes).reshape(samples)


def _way(seat: Seat, solver: str, damping: float | None, window: int | None, regularization: float | None, eps: float) -> Solver:
    given = {"damping": damping, "window": window, "regularization": regularization}
    known = {
        "anderson": ("damping", "window", "regularization"),
        "picard": ("damping",),
        "broyden": ("window",),
        "newton-krylov": ("window",),
    }
    for name, value in given.items():
        if value is not None and name not in known[solver]:
            raise ArgumentError(
                f"fixed_point: {name} means nothing to the solver {solver!r}, which takes {', '.join(known[solver])}. Leave it out."
            )
    if damping is not None and not 0 < damping <= 1:
        raise ArgumentError(f"fixed_point: damping must be in (0, 1]; got {damping}. 1 takes the full step.")
    if window is not None and window < 1:
        raise ArgumentError(f"fixed_point: window must be at least 1; got {window}.")
    if regularization is not None and regularization < 0:
        raise ArgumentError(f"fixed_point: regularization must not be negative; got {regularization}.")
    omega = 1.0 if damping is None else damping
    if solver == "picard":
        return Picard(omega)
    if solver == "anderson":
        return Anderson(6 if window is None else window, omega, 10 * eps if regularization is None else regularization)
    if solver == "broyden":
        return Broyden(30 if window is None else window)
    return NewtonKrylov(seat, 30 if window is None else window)


def _check(start: Tensor, solver: str, tolerance: float | None, max_steps: int, event_dims: int, order: int) -> None:
    if solver not in SOLVERS:
        raise ArgumentError(f"fixed_point: no solver is called {solver!r}. Pass one of {', '.join(SOLVERS)}.")
    if not isinstance(start, Tensor):
        raise ArgumentError(f"fixed_point: start is a {type(start).__name__}. Pass a tensor: torch.as_tensor(start).")
    if not start.is_floating_point():
        raise ArgumentError(f"fixed_point: start has dtype {start.dtype}, in which nothing can converge. Pass a floating point start.")
    if not 0 <= event_dims <= start.ndim:
        raise ArgumentError(f"fixed_point: event_dims is {event_dims}, start has shape {tuple(start.shape)}. Pass 0 to {start.ndim}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise ArgumentError(f"fixed_point: max_steps must be an integer of at least 1; got {max_steps!r}.")
    if tolerance is not None and not tolerance > 0:
        raise ArgumentError(f"fixed_point: tolerance must be positive; got {tolerance}.")
    if order < 1:
        raise ArgumentError(f"fixed_point: order must be at least 1; got {order}. Within torch.no_grad no derivative is prepared at all.")


def _check_image(image: Tensor, start: Tensor) -> None:
    if not isinstance(image, Tensor):
        raise ArgumentError(f"fixed_point: function returned {type(image).__name__}; it must return a tensor like its argument.")
    if image.shape != start.shape or image.dtype != start.dtype or image.device != start.device:
        raise ArgumentError(
            f"fixed_point: function turned {tuple(start.shape)}, {start.dtype}, {start.device} into {tuple(image.shape)}, {image.dtype}, "
            f"{image.device}. It must return the shape, dtype and device that it was given."
        )
