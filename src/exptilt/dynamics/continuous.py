r"""The continuous limit of a flow (THEORY B6).

One step of size h takes x to RN(x + h g(x)). Where x satisfies the constraint already, RN(x) = x, and as h
→ 0

    dx/dt = d/dh RN(x + h g(x)) at h = 0  =  D RN(x) g(x),

the forward derivative of the renormaliser along g. Every renormaliser of the folder is the nearest point of
its constraint, so D RN(x) is the orthogonal projection on its tangent space. Written out, with r the length
of x and v = g(x):

    Sphere    v − x⟨x,v⟩/r²                          Layer    v − mean_d v − x⟨x,v⟩/D
    RMS       v − x⟨x,v⟩/D                           Batch    per coordinate: v − mean_n v − x·mean_n(x v)
    Whiten    v − mean_n v − B(x − m),     B symmetric with  B S + S B = Cov(v,x) + Cov(x,v)

(the last because Cov(x + h v) = S + h(Cov(v,x) + Cov(x,v)), and A = 1 − hB undoes it to first order). The
derivative is taken by forward mode, so a user's own renormaliser may be any function; it
must be idempotent, RN(RN(x)) = RN(x).

The solver is `torchdiffeq`'s ``dopri5``: Dormand–Prince of order 5 with an adaptive step.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ConvergenceError, needed
from exptilt.dynamics.ascent import Slope
from exptilt.dynamics.renormalizers import Renormalizer

_HELD = 1 << 26  # bytes of states that the solver may hold at once


def velocity(slope: Callable[[Tensor], Slope], renormalize: Renormalizer | None, points: Tensor) -> Tensor:
    """dx/dt ``(..., N, D)`` at points ``(..., N, D)`` that satisfy the constraint."""
    gradient = slope(points).gradient
    if renormalize is None:
        return gradient
    tangent: Tensor = torch.func.jvp(renormalize, (points,), (gradient,))[1]
    return tangent


def on_constraint(renormalize: Renormalizer | None, points: Tensor) -> Tensor:
    """The renormalised points; an error unless renormalising them again changes nothing."""
    if renormalize is None:
        return points
    start = renormalize(points)
    finfo = torch.finfo(start.dtype)
    gap = float((renormalize(start) - start).abs().max() / start.abs().max().clamp_min(finfo.tiny))
    if not gap <= 1e3 * finfo.eps:
        raise ArgumentError(
            f"Flow.ode: renormalising twice is not renormalising once (they differ by {gap:.3g}): there is "
            "no constraint to flow on. Pass a renormaliser with epsilon=0, or one that keeps its own results."
        )
    return start


def integrate(
    rate: Callable[[Tensor], Tensor],
    state: Tensor,
    times: Tensor,
    *,
    rtol: float,
    atol: float,
    max_evaluations: int,
) -> Iterator[Tensor]:
    """Yield the state ``(..., N, D)`` of dx/dt = rate(x) at each time after the first."""
    odeint = needed("torchdiffeq", "ode").odeint
    time, evaluations, reached = float(times[-1]), 0, 0.0

    def watched(t: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations, reached
        evaluations, reached = evaluations + 1, max(reached, float(t))
        if evaluations > max_evaluations:
            raise ConvergenceError(
                f"Flow.ode: {max_evaluations} evaluations did not reach time {time:g}. "
                "Loosen rtol and atol, or go less far."
            )
        return rate(x)

    # In parts: each start of the solver costs a dozen evaluations, but all states may not fit in memory.
    length = max(1, _HELD // (state.numel() * state.element_size()))
    for first in range(0, len(times) - 1, length):
        part = times[first : first + length + 1].to(state.device)
        try:
            found = odeint(watched, state, part, rtol=rtol, atol=atol, method="dopri5")
        except AssertionError as problem:  # torchdiffeq: its step has become 0, or a state infinite
            raise ConvergenceError(
                f"Flow.ode: the solver could not go on near time {reached:.6g} ({problem}). Without a "
                "renormaliser points diverge: pass renormalize=, or go less far; else loosen rtol and atol, "
                "or pass float64."
            ) from problem
        for t, state in zip(part[1:].tolist(), found[1:], strict=True):
            good = state.isfinite().all(-1)
            if not bool(good.all()):
                index = tuple((~good).nonzero()[0].tolist())
                raise ConvergenceError(f"Flow.ode: the point at index {index} is not finite at time {t:.6g}.")
            yield state
