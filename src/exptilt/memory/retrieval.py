r"""Retrieval: steps until each state stands still.

States step in place, and those that have settled are left out of the next sweep. Where a derivative is
wanted, the point they settled at then passes through `exptilt.dynamics.fixed_point`, which differentiates the
fixed point ξ = T(ξ; x, β) by the implicit function theorem,

    dξ = (1 − ∂T/∂ξ)^{-1} (∂T/∂x dx + ∂T/∂β dβ),

in the memory of one step, however many were taken. Under `torch.func` and `torch.compile`, where values
cannot be looked at, `fixed_point` does the stepping as well. Residuals are of the state that is returned, in
units of M (with `fixed_point`, of its norm where that is larger). Row k of the trace is the length of step
k + 1; for a state that has ended, of the step it would take.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.progress import track
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete
from exptilt.dynamics import fixed_point
from exptilt.memory.patterns import check_state, laid_out

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield


def retrieve(
    self: "Hopfield",
    state: Tensor,
    *,
    tolerance: float | None = None,
    max_steps: int = 1000,
    throw: bool = True,
) -> Solution[Tensor]:
    """The fixed points at which states settle, each stepped until it stands still.

    Where a derivative is wanted it is that of the fixed point, by the implicit function theorem, in
    patterns and beta; the start has none, since the fixed point does not depend on it.

    Args:
        state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.
        tolerance: of the residual ‖step(ξ) − ξ‖/M; None is 1e-5 in float32, 1e-10 in float64.
        max_steps: most steps.
        throw: raise a `ConvergenceError` where some state has not settled; False reports it in the status.

    Returns:
        `Solution`: value as state, residual ``(...)``, trace ``(steps, ...)`` of the length of each step.
        A state whose step is not finite (β times a score overflows) stays, and its status says so.
    """
    check_state(self, state)
    whole("Hopfield.retrieve", "max_steps", max_steps)
    if tolerance is None:
        tolerance = 1e-10 if self.dtype == torch.float64 else 1e-5
    number("Hopfield.retrieve", "tolerance", tolerance, above=0, otherwise=", or None")

    def attached(start: Tensor, most: int, throws: bool) -> Solution[Tensor]:
        """The fixed point from `start` on, with its derivatives; with most=1, the start itself."""
        return fixed_point(
            self.step,
            start.detach(),
            solver="picard",
            tolerance=tolerance,
            max_steps=most,
            scale=_unit(self),
            throw=throws,
            strict=throw,
        )

    learnt = (self.patterns, self.beta)
    if not is_concrete(state, *learnt):
        return attached(state, max_steps, throw)
    solution = settle(self, state, tolerance, max_steps)
    if throw:
        solution.or_raise()
    if torch.is_grad_enabled() and any(x.requires_grad for x in learnt):
        return replace(solution, value=attached(solution.value, 1, False).value)
    return solution


def advance(memory: "Hopfield", rows: Tensor) -> Tensor:
    """One step of states ``(..., heads, Q, D)``, unchecked."""
    query = memory.similarity.query(rows)
    return memory.similarity.settle(memory.rule.read(memory.keys, query, memory.head_beta).average, query)


def _unit(memory: "Hopfield") -> Tensor:
    """M, as it broadcasts against residuals ``(..., Q)``."""
    return memory.size[..., None] if memory.lead else memory.size


@torch.no_grad()
def settle(
    memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int, *, show: bool | None = None
) -> Solution[Tensor]:
    """The states stepped until they settle, without derivatives; each sweep takes only those that still move.

    A state whose step is NaN or infinite (β times a score overflows) ends where it stands. A progress bar
    counts the states that have ended.
    """
    value, size = laid_out(memory, state).clone(), _unit(memory)
    residual = value.new_full(value.shape[:-1], torch.inf)
    code = torch.full_like(residual, Status.MAX_STEPS.code, dtype=torch.int8)
    trace: list[Tensor] = []

    def sweeps() -> Iterator[int]:
        """Sweep until all states have ended; yields the index of each state as it ends."""
        moving = torch.arange(residual.shape[-1] if residual.numel() else 0, device=value.device)
        while moving.numel():
            current, last, before = value[..., moving, :], residual[..., moving], code[..., moving]
            live = before == Status.MAX_STEPS.code  # a state may have ended in one memory and move in another
            new = advance(memory, current)
            change = torch.where(new.isfinite().all(-1), (new - current).norm(dim=-1) / size, torch.nan)
            now = torch.where(change <= tolerance, Status.CONVERGED.code, before)
            now = torch.where(live, torch.where(change.isnan(), Status.NOT_FINITE.code, now), before)
            residual[..., moving] = torch.where(live, change.nan_to_num(torch.inf, torch.inf), last)
            code[..., moving] = now
            if len(trace) == max_steps:  # the last sweep only measures the residuals
                return
            trace.append(residual.clone())
            go = now == Status.MAX_STEPS.code
            value[..., moving, :] = torch.where(go[..., None], new, current)
            some = go.flatten(0, -2).any(0)
            yield from moving[~some].tolist()
            moving = moving[some]

    for _ in track(sweeps(), "states settled", total=residual.shape[-1], show=show):
        pass
    shape = state.shape[:-1]
    by_step = torch.stack(trace).reshape(-1, *shape) if trace else residual.new_zeros(0, *shape)
    code, residual = code.reshape(shape), residual.reshape(shape)
    value = value.reshape(state.shape).to(state.dtype)
    return Solution(value, code, residual, torch.tensor(len(trace)), torch.zeros_like(residual), by_step)
