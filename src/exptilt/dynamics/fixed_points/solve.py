r"""Fixed points x = f(x), each sample to its own tolerance, with their derivatives.

    residual of a sample = ‖f(x) − x‖ / (max(‖x‖, scale) + ε)

where ‖·‖ is Euclidean over the event axes, scale is eps (‖x₀‖ + ‖f(x₀)‖) unless given, and ε the smallest normal number over eps. The scale
is there for fixed points at 0: towards them ‖x‖ falls along with ‖f(x) − x‖, and without it their ratio never would. A sample
is solved once its residual is within the tolerance; from then on it stands still while others go on. It has diverged when

    ‖x‖ > eps^(−1/2) (1 + ‖x₀‖ + ‖f(x₀)‖),

and then, as after NaN or at max_steps, it returns the point on its way with the least residual. (A relative residual cannot tell a fixed
point from infinity: x + 1/x has one of 1e-10 at x = 1e5. Look at the size of the answer where f may have none.) A solver whose own step is
not finite, though f was, takes Picard's step instead.

Half precision and autocast are for f; the solver keeps its state in float32 (``precision.py``). eps above is that of the solver's state.

The ways to go are in ``solvers.py``, the derivatives in ``implicit.py``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import forward_derivatives
from exptilt.dynamics.fixed_points.implicit import attach
from exptilt.dynamics.fixed_points.jacobian import Tape
from exptilt.dynamics.fixed_points.options import Options
from exptilt.dynamics.fixed_points.precision import DTYPES, Precision, exact
from exptilt.dynamics.fixed_points.problem import Seat, bare, differentiated, plain, spread
from exptilt.dynamics.fixed_points.solvers import Anderson, Broyden, NewtonKrylov, Picard, Solver, damped

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
        start: ``(..., *event)``, floating point. In half precision f is given that and so is the answer; the solver works in float32.
        solver: ``"anderson"``, ``"picard"``, ``"broyden"`` or ``"newton-krylov"`` (needs second derivatives of f to be defined).
        tolerance: of the residual ‖f(x) − x‖ / (max(‖x‖, scale) + ε); default 256 eps of float64 (6e-14) or float32 (3e-5),
            and 4 eps of half precision, be it the dtype of `start` or of autocast: 0.03 for bfloat16, 0.004 for float16.
        max_steps: most evaluations of f; those inside linear solves are not counted.
        event_dims: how many of the last axes make up one sample.
        damping: ω of Picard and Anderson, in (0, 1]; default 1.
        window: how many past steps Anderson (default 6) and Broyden (default 30) keep, or the size of Newton's Krylov space (default 30).
        regularization: λ of Anderson, relative to the Gram matrix's unit diagonal; default 10 eps.
        order: derivatives up to this order are exact, those beyond are not; each order after the first costs an evaluation of f.
        scale: a number ≥ 0 or a tensor that broadcasts to ``(...)``; where ‖x‖ is smaller, the residual is measured in this instead.
            Default: eps (‖x₀‖ + ‖f(x₀)‖), so that fixed points at 0 are found. A larger one ends sooner there.
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
    options = Options(
        "fixed_point",
        solver,
        tolerance,
        max_steps,
        event_dims,
        damping,
        window,
        regularization,
        order,
        scale,
        throw,
        strict,
    )
    if (
        torch.compiler.is_compiling()
    ):  # a loop that ends when the numbers say so is not a graph: it runs beside the compiled parts
        found: Solution[Tensor] = torch.compiler.disable(_solve)(function, start, options)
        return found
    return _solve(function, start, options)


def _solve(function: Callable[[Tensor], Tensor], start: Tensor, options: Options) -> Solution[Tensor]:
    check_state("fixed_point", "start", start, options.event_dims)
    precision = Precision.of(start)
    first = function(start := start.detach())
    check_image("fixed_point", first, start, precision)
    function, start, first = precision.lift(function), start.to(precision.own), first.to(precision.own)
    tolerance = precision.tolerance if options.tolerance is None else options.tolerance
    with exact(start.device):
        scale = None if options.scale is None else _scale(options.scale, start, options.event_dims)
        follow = differentiated(first)
        with plain() as stack, torch.no_grad(), forward_derivatives(False):
            record = follow and not stack and first.requires_grad
            seat, state, image, floor = _sit(function, start, first, scale, options.event_dims, stack)
            del first  # and its graph
            way = _way(seat, options, torch.finfo(state.dtype).eps)
            run = _iterate(seat, way, state, image, floor, tolerance, options.max_steps, record=record)
            value, samples = run.value.reshape(seat.full), seat.samples
            code, residual = run.code.reshape(samples), run.residual.reshape(samples)
            trace = run.trace.reshape(run.steps, *samples).movedim(0, len(seat.sizes))
            steps, distance = torch.tensor(run.steps), torch.zeros_like(residual)
            if options.throw:
                Solution(value, code, residual, steps, distance).or_raise()
        if follow and value.numel():
            strict = options.throw if options.strict is None else options.strict
            x = attach(seat, value, run.tape, order=options.order, tolerance=tolerance, strict=strict)
        else:
            x = seat.wrap(value.clone())  # it may be the start itself, or what f keeps
    return Solution(
        x.to(precision.given),
        seat.wrap(code),
        seat.wrap(residual),
        steps,
        seat.wrap(distance),
        seat.wrap(trace),
    )


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
    floor: Tensor | None,
    tolerance: float,
    max_steps: int,
    *,
    record: bool,
) -> _Run:
    """Step until every sample has ended, on flat plain states ``(S, n)`` and scales ``(S,)``. `record` keeps the graph of the last f."""
    finfo = torch.finfo(x.dtype)
    tiny, size = finfo.tiny / finfo.eps, torch.linalg.vector_norm(x, dim=-1)
    extent = size + torch.linalg.vector_norm(image, dim=-1)
    bound, floor = finfo.eps**-0.5 * (1 + extent), finfo.eps * extent if floor is None else floor
    value, least = x, torch.full_like(bound, torch.inf)
    moving, all_move = torch.ones_like(bound, dtype=torch.bool), True
    trace: list[Tensor] = []
    tape: Tape | None = None
    for step in range(1, max_steps + 1):
        residual = image - x
        norm = torch.linalg.vector_norm(residual, dim=-1)
        now = norm / (torch.maximum(size, floor) + tiny)
        trace.append(now)
        last, least = least, torch.fmin(now, least)
        value = x if torch.equal(now, least) else torch.where((now <= last).unsqueeze(-1), x, value)
        still = (now > tolerance) & (size <= bound)  # NaN is neither
        if not all_move:
            moving = moving & still
        elif not torch.equal(still, moving):
            moving, all_move = still, False
        if step == max_steps or not (all_move or bool(moving.any())) or not moving.numel():
            break
        following = way.step(x, image, residual, norm)
        before, x = x, following if all_move else torch.where(moving.unsqueeze(-1), following, x)
        size = torch.linalg.vector_norm(x, dim=-1)
        if not math.isfinite(float(size.sum())):
            lost = moving & ~size.isfinite()  # by the solver: f was finite where a sample moves
            x = torch.where(lost.unsqueeze(-1), damped(before, image, way.damping), x)
            size = torch.linalg.vector_norm(x, dim=-1)
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


def _scale(scale: float | Tensor, start: Tensor, event_dims: int) -> Tensor:
    """The scale of every sample ``(...)``."""
    samples = start.shape[: start.ndim - event_dims]
    value = torch.as_tensor(scale, dtype=start.dtype, device=start.device).detach()
    try:
        return value.expand(samples)
    except RuntimeError:
        got = tuple(value.shape)
        raise ArgumentError(
            f"fixed_point: scale has shape {got}, which does not broadcast to the samples {tuple(samples)}."
        ) from None


def _sit(
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    first: Tensor,
    scale: Tensor | None,
    event_dims: int,
    stack: object,
) -> tuple[Seat, Tensor, Tensor, Tensor | None]:
    """The seat, and the flat plain start, its image and its scale."""
    found = [bare(tensor) for tensor in (start, first, scale) if tensor is not None]
    sizes = {level: size for raw, levels in found for level, size in zip(levels, raw.shape, strict=False)}
    wanted = tuple(sorted(sizes))
    seat = Seat(function, start.shape, event_dims, wanted, tuple(sizes[level] for level in wanted), stack)
    samples = math.prod(seat.samples)
    x, y, *floors = (spread(raw.detach(), levels, wanted, seat.sizes) for raw, levels in found)
    floor = floors[0].reshape(samples) if floors else None
    return seat, x.reshape(samples, seat.event), y.reshape(samples, seat.event), floor


def _way(seat: Seat, options: Options, eps: float) -> Solver:
    damping = 1.0 if options.damping is None else options.damping
    window = (6 if options.solver == "anderson" else 30) if options.window is None else options.window
    if options.solver == "picard":
        return Picard(damping)
    if options.solver == "anderson":
        return Anderson(
            window, damping, 10 * eps if options.regularization is None else options.regularization
        )
    return Broyden(window) if options.solver == "broyden" else NewtonKrylov(seat, window)


def check_state(caller: str, name: str, state: Tensor, event_dims: int) -> None:
    """Refuse what is no point to begin from."""
    if not isinstance(state, Tensor):
        raise ArgumentError(
            f"{caller}: {name} is a {type(state).__name__}. Pass a tensor: torch.as_tensor({name})."
        )
    if state.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(
            f"{caller}: {name} has dtype {state.dtype}, in which nothing can converge. Pass floating point: {known}."
        )
    if event_dims > state.ndim:
        raise ArgumentError(
            f"{caller}: event_dims is {event_dims}, {name} has shape {tuple(state.shape)}. Pass 0 to {state.ndim}."
        )


def check_image(caller: str, image: Tensor, start: Tensor, precision: Precision) -> None:
    """Refuse what f must not return. With autocast, any floating point dtype may come out."""
    if not isinstance(image, Tensor):
        raise ArgumentError(
            f"{caller}: function returned {type(image).__name__}; it must return a tensor like its argument."
        )
    alike = image.dtype == start.dtype or (precision.autocast is not None and image.is_floating_point())
    if image.shape != start.shape or not alike or image.device != start.device:
        raise ArgumentError(
            f"{caller}: function turned {tuple(start.shape)}, {start.dtype}, {start.device} into {tuple(image.shape)}, {image.dtype}, "
            f"{image.device}. It must return the shape, dtype and device that it was given."
        )
