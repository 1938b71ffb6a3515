r"""The continuous limit of a flow (THEORY B6).

One step of size h takes x to RN(x + h g(x)). Where x satisfies the constraint already, RN(x) = x, and as h → 0

    dx/dt = d/dh RN(x + h g(x)) at h = 0  =  D RN(x) g(x),

the forward derivative of the renormaliser along g. Every renormaliser of the folder is the nearest point of its constraint, so D RN(x) is
the orthogonal projection on its tangent space. Written out, with r the length of x and v = g(x):

    Sphere    v − x<x,v>/r²                          Layer    v − mean_d v − x<x,v>/D
    RMS       v − x<x,v>/D                           Batch    per coordinate: v − mean_n v − x·mean_n(x v)
    Whiten    v − mean_n v − B(x − m),     B symmetric with  B S + S B = Cov(v,x) + Cov(x,v)

(the last because Cov(x + h v) = S + h(Cov(v,x) + Cov(x,v)), and A = 1 − hB undoes it to first order). The derivative is taken
by forward mode, so a renormaliser of the user's own needs no more than its function; it must be idempotent, RN(RN(x)) = RN(x).

The solver is `torchdiffeq`'s ``dopri5``: Dormand–Prince of order 5 with an adaptive step, the best-known such solver for torch tensors.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ConvergenceError, MissingExtraError
from exptilt._support.progress import track
from exptilt.dynamics.ascent import Slope
from exptilt.dynamics.observe.points import full_precision
from exptilt.dynamics.renormalizers import Renormalizer
from exptilt.dynamics.trajectory import Recorder, Trajectory, kept_steps

_TICKS = 100  # of the bar, evenly spread over the time
_HELD = 1 << 26  # bytes of states that the solver may hold at once


def velocity(slope: Callable[[Tensor], Slope], renormalize: Renormalizer | None, points: Tensor) -> Tensor:
    """dx/dt at points ``(..., N, D)`` of the constraint, ``(..., N, D)``."""
    gradient = slope(points).gradient
    if renormalize is None:
        return gradient
    tangent: Tensor = torch.func.jvp(renormalize, (points,), (gradient,))[1]
    return tangent


def on_constraint(renormalize: Renormalizer | None, points: Tensor) -> Tensor:
    """The renormalised start, once it is known that renormalising it again changes nothing."""
    if renormalize is None:
        return points
    start = renormalize(points)
    gap = float(
        (renormalize(start) - start).abs().max() / start.abs().max().clamp_min(torch.finfo(start.dtype).tiny)
    )
    if not gap <= 1e3 * torch.finfo(start.dtype).eps:
        raise ArgumentError(
            f"Flow.ode: renormalising twice is not renormalising once (they differ by {gap:.3g}), so there is no constraint to flow on. "
            "Pass a renormaliser with epsilon=0, or one that leaves its own results alone."
        )
    return start


def solve(
    slope: Callable[[Tensor], Slope], renormalize: Renormalizer | None, points: Tensor, time: float, *, samples: int,
    keep: Literal["all", "last"] | int, rtol: float, atol: float, tolerance: float, max_evaluations: int, progress: bool | None,
) -> Trajectory:  # fmt: skip
    """Solve from points ``(..., N, D)`` to a time, measured at evenly spread times; see `Flow.ode`."""
    if not (isinstance(time, int | float) and 0 < time < math.inf):
        raise ArgumentError(f"Flow.ode: time is {time!r}. Pass a finite number > 0.")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ArgumentError(
            f"Flow.ode: samples is {samples!r}. Pass an integer ≥ 2: the start and the end at least."
        )
    tolerances = [
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        for value in (rtol, atol)
    ]
    if not all(tolerances) or rtol == atol == 0:
        raise ArgumentError(
            f"Flow.ode: rtol is {rtol!r} and atol is {atol!r}. Pass finite numbers ≥ 0, not both 0."
        )
    if points.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"Flow.ode: points are {points.dtype}, too coarse for steps of adaptive size. Pass float32 or float64."
        )
    kept = kept_steps(keep, samples - 1)
    try:
        from torchdiffeq import odeint
    except ImportError as problem:
        raise MissingExtraError("torchdiffeq", "ode") from problem
    evaluations, reached = 0, 0.0
    bar = track(range(_TICKS + 1), "flow, continuous", show=progress)
    ticks = next(bar)

    def rate(t: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations, reached, ticks
        evaluations, reached = evaluations + 1, max(reached, float(t))
        if evaluations > max_evaluations:
            raise ConvergenceError(
                f"Flow.ode: {max_evaluations} evaluations did not reach time {time}. Loosen rtol and atol, or go less far."
            )
        while ticks < min(_TICKS, int(_TICKS * reached / time)):
            ticks = next(bar)
        return velocity(slope, renormalize, x)

    recorder = Recorder(tolerance)
    times = torch.linspace(0.0, float(time), samples, dtype=torch.float64)
    with torch.no_grad(), full_precision(points):
        state = on_constraint(renormalize, points.detach())
        recorder.add(0, 0.0, state, slope(state).log_normalizer, None, 0 in kept, True)
        # Some samples at a time: each new start of the solver costs a dozen evaluations, all samples at once may not fit.
        length = max(1, _HELD // (state.numel() * state.element_size()))
        for first in range(0, samples - 1, length):
            part = times[first : first + length + 1]
            try:
                found = odeint(rate, state, part.to(state.device), rtol=rtol, atol=atol, method="dopri5")
            except (
                AssertionError
            ) as problem:  # torchdiffeq's way to say that its step has become 0, or a state infinite
                raise ConvergenceError(
                    f"Flow.ode: the solver could not go on near time {reached:.6g} ({problem}). Without a renormaliser points run off: "
                    "pass renormalize=, or go less far; else loosen rtol and atol, or pass float64."
                ) from problem
            for count, state in enumerate(found[1:], start=first + 1):
                if not bool(state.isfinite().all()):
                    index = tuple((~state.isfinite().all(-1)).nonzero()[0].tolist())
                    raise ConvergenceError(
                        f"Flow.ode: the point at index {index} is not finite at time {float(times[count]):.6g}."
                    )
                recorder.add(
                    count, float(times[count]), state, slope(state).log_normalizer, None, count in kept, True
                )
        for _ in bar:
            pass
    return recorder.trajectory()
