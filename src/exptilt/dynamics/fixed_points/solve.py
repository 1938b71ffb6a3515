r"""Fixed points x = f(x), each sample to its own tolerance, with their derivatives.

    residual of a sample = ‖f(x) − x‖ / (max(‖x‖, scale) + ε)

where ‖·‖ is Euclidean over the event axes, scale is eps (‖x₀‖ + ‖f(x₀)‖) unless given, and ε the smallest
normal number over eps. The scale is there for fixed points at 0: near them ‖x‖ falls along with ‖f(x) −
x‖, so without it the ratio would never fall. A sample is solved once its residual is within the tolerance;
from then on it stands still while others go on. A sample has diverged when

    ‖x‖ > eps^(−1/2) (1 + ‖x₀‖ + ‖f(x₀)‖),

and its value is then, as after NaN or at max_steps, the point on its way with the least residual. No residual
can tell a fixed point from infinity: x + 1/x has none, but x = 1e8 is one to the last bit of float64. The
last move tells: with Δx and the change Δr of the residual, the fixed point is about ‖r‖ ‖Δx‖ / ‖Δr‖
away. If that is more than a hundredth of ‖x‖ and of the start, while ‖Δr‖ ≤ 16 √eps ‖Δx‖, so that 1 − J is as
good as singular, the sample has diverged as well. Where Anderson's step is not finite, though f was, Picard's
step is taken instead.

Half precision and autocast are for f; the solver keeps its state in float32 (``precision.py``). eps above
is that of the solver's state. The solvers are in ``solvers.py``, the derivatives in ``implicit.py``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import forward_derivatives, full_precision, in_forward_mode
from exptilt.dynamics.fixed_points.implicit import attach, known_orders
from exptilt.dynamics.fixed_points.options import Options
from exptilt.dynamics.fixed_points.precision import lifted
from exptilt.dynamics.fixed_points.problem import Problem, bare, differentiated, plain
from exptilt.dynamics.fixed_points.solvers import Anderson, Picard, damped


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
    order: int = 2,
    scale: float | Tensor | None = None,
    throw: bool = True,
    strict: bool | None = None,
) -> Solution[Tensor]:
    r"""Solve x = f(x) for x, with derivatives of the solution.

    Derivatives flow to every tensor that `function` uses, parameters of modules included, backwards and
    forwards, and through all `torch.func` transforms; none flow to `start`. They are the implicit ones,
    exact at the fixed point whatever the solver did, and cost one linear solve each. Where a sample did not
    converge (``throw=False``) they belong to the point where it stopped.

    Args:
        function: f, from ``(..., *event)`` to the same shape and dtype. Samples along the leading axes must
            not influence each other.
        start: ``(..., *event)``, floating point. In half precision f and the answer have that dtype; the
            solver works in float32.
        solver: ``"anderson"`` or ``"picard"``.
        tolerance: of the residual ‖f(x) − x‖ / (max(‖x‖, scale) + ε); default 256 eps of float64 (6e-14) or
            float32 (3e-5), and 4 eps of half precision, be it the dtype of `start` or of autocast: 0.03 for
            bfloat16, 0.004 for float16.
        max_steps: most evaluations of f.
        event_dims: how many of the last axes make up one sample.
        damping: ω, in (0, 1]; default 1.
        window: how many past steps Anderson keeps; default 6.
        order: derivatives up to this order are exact, those beyond are an error; each order after the first
            costs an evaluation of f.
        scale: a number ≥ 0 or a tensor that broadcasts to ``(...)``; where ‖x‖ is smaller, the residual is
            measured in this instead. Default: eps (‖x₀‖ + ‖f(x₀)‖), so that fixed points at 0 are found. A
            larger one ends sooner near 0.
        throw: raise a `ConvergenceError` where a sample did not converge.
        strict: raise a `ConvergenceError` where a derivative does not exist because 1 − J is singular; False
            returns NaN or huge numbers there. Default: as throw.

    Returns:
        A `Solution`: value ``(..., *event)``, code and residual ``(...)``, trace ``(steps, ...)`` of
        residuals.

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
        *("fixed_point", solver, tolerance, max_steps, event_dims, damping, window),
        *(order, scale, throw, strict),
    )
    return solve(function, start, options)


def solve(function: Callable[[Tensor], Tensor], start: Tensor, options: Options) -> Solution[Tensor]:
    """`fixed_point` with all settings in one object."""
    if torch.compiler.is_compiling():
        # A loop whose length depends on values is no graph: it runs eagerly between the compiled parts.
        eager: Callable[..., Solution[Tensor]] = torch.compiler.disable(_solve)
        return eager(function, start, options)
    return _solve(function, start, options)


def _solve(function: Callable[[Tensor], Tensor], start: Tensor, options: Options) -> Solution[Tensor]:
    caller = options.caller
    function, start, first, precision = lifted(caller, "start", function, start, options.event_dims)
    tolerance = precision.tolerance if options.tolerance is None else options.tolerance
    with full_precision(start.device):
        scale = None if options.scale is None else _scale(options, start)
        follow = differentiated(first)
        known = known_orders(first) if follow else 0
        with plain() as stack, torch.no_grad(), forward_derivatives(False):
            # The Jacobian's evaluation serves the first order too, unless transforms or tangents follow f.
            shared = not (stack or in_forward_mode()) and first.requires_grad
            problem, state, image, floor = _laid_out(function, start, first, scale, options.event_dims, stack)
            del first  # and its graph
            omega, window = options.damping or 1.0, options.window or 6
            way = Anderson(window, omega) if options.solver == "anderson" else Picard(omega)
            run = _iterate(problem, way, state, image, floor, tolerance, options.max_steps)
            value, samples = run.value.reshape(problem.full), problem.samples
            code, residual = run.code.reshape(samples), run.residual.reshape(samples)
            trace = run.trace.reshape(run.steps, *samples).movedim(0, len(problem.sizes))
            steps, distance = torch.tensor(run.steps), torch.zeros_like(residual)
            if options.throw:
                Solution(value, code, residual, steps, distance).or_raise()
        if not follow or not value.numel():
            x = problem.wrap(value.clone())  # value may be the start itself, or a tensor that f keeps
        else:
            strict = options.throw if options.strict is None else options.strict
            x = attach(
                *(problem, value),
                caller=caller,
                order=options.order,
                known=known,
                tolerance=tolerance,
                strict=strict,
                shared=shared,
            )
    parts = (problem.wrap(code), problem.wrap(residual), steps, problem.wrap(distance), problem.wrap(trace))
    return Solution(x.to(precision.given), *parts)


class _Run(NamedTuple):
    value: Tensor
    code: Tensor
    residual: Tensor
    trace: Tensor
    steps: int


def _iterate(
    problem: Problem,
    way: Anderson | Picard,
    x: Tensor,
    image: Tensor,
    floor: Tensor | None,
    tolerance: float,
    max_steps: int,
) -> _Run:
    """Step until every sample has ended, on flat plain states ``(S, n)`` and scales ``(S,)``."""
    finfo = torch.finfo(x.dtype)
    tiny, size = finfo.tiny / finfo.eps, torch.linalg.vector_norm(x, dim=-1)
    extent = size + torch.linalg.vector_norm(image, dim=-1)
    bound, floor = finfo.eps**-0.5 * (1 + extent), finfo.eps * extent if floor is None else floor
    value, least = x, torch.full_like(bound, torch.inf)
    moving, all_move = torch.ones_like(bound, dtype=torch.bool), True
    earlier: tuple[Tensor, Tensor] | None = None
    drifting = torch.zeros_like(moving)
    trace: list[Tensor] = []
    for step in range(1, max_steps + 1):
        residual = image - x
        norm = torch.linalg.vector_norm(residual, dim=-1)
        now = norm / (torch.maximum(size, floor) + tiny)
        trace.append(now)
        last, least = least, torch.fmin(now, least)
        value = x if torch.equal(now, least) else torch.where((now <= last).unsqueeze(-1), x, value)
        still = (now > tolerance) & (size <= bound)  # False for NaN
        if not all_move or not torch.equal(still, moving):
            if earlier is not None:
                far = _far(x - earlier[0], residual - earlier[1], norm, 0.01 * torch.maximum(size, extent))
                drifting = drifting | (moving & ~still & far)
            moving, all_move = moving & still, False
        if step == max_steps or not (all_move or bool(moving.any())) or not moving.numel():
            break
        earlier = x, residual
        following = way.step(x, image, residual, norm)
        before, x = x, following if all_move else torch.where(moving.unsqueeze(-1), following, x)
        size = torch.linalg.vector_norm(x, dim=-1)
        if not math.isfinite(float(size.sum())):
            lost = moving & ~size.isfinite()  # the solver's step is not finite, though f was
            x = torch.where(lost.unsqueeze(-1), damped(before, image, way.damping), x)
            size = torch.linalg.vector_norm(x, dim=-1)
        image = problem(x)
    solved = (least <= tolerance) & ~drifting
    code = torch.full_like(solved, Status.CONVERGED.code, dtype=torch.int8)
    if not bool(solved.all()):  # an ended sample stands still, so the last step shows how it ended
        ended = torch.where(norm.isfinite(), Status.DIVERGED.code, Status.NOT_FINITE.code)
        lost = torch.where(moving, Status.MAX_STEPS.code, ended)
        code = torch.where(solved, code, lost.to(torch.int8))
    return _Run(value, code, least, torch.stack(trace), step)


def _far(move: Tensor, change: Tensor, norm: Tensor, most: Tensor) -> Tensor:
    """``(S,)``: whether the last move shows 1 − J nearly singular and the fixed point beyond `most`."""
    length, slope = (torch.linalg.vector_norm(y, dim=-1) for y in (move, change))
    far: Tensor = (slope <= 16 * torch.finfo(norm.dtype).eps ** 0.5 * length) & (norm * length > most * slope)
    return far


def _scale(options: Options, start: Tensor) -> Tensor:
    """The scale given in the options, expanded to all samples ``(...)``."""
    samples = start.shape[: start.ndim - options.event_dims]
    value = torch.as_tensor(options.scale, dtype=start.dtype, device=start.device).detach()
    try:
        return value.expand(samples)
    except RuntimeError:
        raise ArgumentError(
            f"{options.caller}: scale has shape {tuple(value.shape)}, which does not broadcast to the "
            f"samples {tuple(samples)}."
        ) from None


def _laid_out(
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    first: Tensor,
    scale: Tensor | None,
    event_dims: int,
    stack: object,
) -> tuple[Problem, Tensor, Tensor, Tensor | None]:
    """The problem, and the flat plain start, its image and its scale."""
    found = [bare(tensor) for tensor in (start, first, scale) if tensor is not None]
    sizes = {level: size for raw, levels in found for level, size in zip(levels, raw.shape, strict=False)}
    wanted = tuple(sorted(sizes))
    problem = Problem(
        function, start.shape, event_dims, wanted, tuple(sizes[level] for level in wanted), stack
    )
    samples = math.prod(problem.samples)
    x, y, *floors = (problem.spread(raw.detach(), levels) for raw, levels in found)
    floor = floors[0].reshape(samples) if floors else None
    return problem, x.reshape(samples, problem.event), y.reshape(samples, problem.event), floor
