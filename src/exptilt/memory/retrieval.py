r"""Retrieval: steps until each state stands still.

States step in place, and those that have settled are left out of the next sweep. Where a derivative is wanted, the point they settled
at then passes through `exptilt.dynamics.fixed_point`, which differentiates the fixed point ξ = T(ξ; x, β) by the implicit function theorem,

    dξ = (1 − ∂T/∂ξ)^{-1} (∂T/∂x dx + ∂T/∂β dβ),

in the memory of one step, however many were taken. Under `torch.func` and `torch.compile`, where values cannot be looked at, `fixed_point`
does the stepping as well. Residuals are of the state that is returned, in units of M (of its norm, where that is larger, there); row k of
the trace is how far step k + 1 led, or would have led from where a state ended.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete
from exptilt.dynamics import fixed_point
from exptilt.memory import few
from exptilt.memory.checks import check_count

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield


def retrieve(
    memory: "Hopfield", state: Tensor, *, tolerance: float | None, max_steps: int, throw: bool
) -> Solution[Tensor]:
    """See `Hopfield.retrieve`."""
    check_count("Hopfield.retrieve", "max_steps", max_steps)
    if tolerance is None:
        tolerance = 1e-10 if memory.measure.dtype == torch.float64 else 1e-5
    if not tolerance > 0:
        raise ArgumentError(f"Hopfield.retrieve: tolerance is {tolerance}. Pass a number > 0, or None.")
    tracked = (memory.patterns, memory.beta, state)
    if not is_concrete(*tracked):
        return _attached(memory, state, tolerance, max_steps, throw=throw, strict=throw)
    solution = settle(memory, state, tolerance, max_steps)
    if throw:
        solution.or_raise()
    if torch.is_grad_enabled() and (memory.patterns.requires_grad or memory.beta.requires_grad):
        return replace(
            solution, value=_attached(memory, solution.value, tolerance, 1, throw=False, strict=throw).value
        )
    return solution


def _unit(memory: "Hopfield") -> Tensor:
    """M, as it broadcasts against residuals ``(..., Q)``."""
    return memory.size[..., None] if memory.patterns.ndim > 2 else memory.size


def _attached(
    memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int, *, throw: bool, strict: bool
) -> Solution[Tensor]:
    """The fixed point from this state on, with its derivatives; with max_steps 1, the state itself with those of the fixed point it is.

    With `strict` a derivative that does not exist is an error when it is asked for, as in `fixed_point`.
    """
    return fixed_point(
        memory.step, state.detach(), solver="picard", tolerance=tolerance, max_steps=max_steps, scale=_unit(memory), throw=throw,
        strict=strict,
    )  # fmt: skip


@torch.no_grad()
def settle(
    memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int, *, show: bool | None = None
) -> Solution[Tensor]:
    """Steps in place; only states that still move in some memory are swept again. A bar counts those that have ended.

    A state whose step is NaN or infinite (β times a score overflows) ends where it stands.
    """
    if few.suits(memory, state):
        return few.settle(memory, state, tolerance, max_steps)
    value, size = memory.rows(state).clone(), _unit(memory)
    residual = value.new_full(value.shape[:-1], torch.inf)
    code = torch.full_like(residual, Status.MAX_STEPS.code, dtype=torch.int8)
    trace: list[Tensor] = []

    def sweeps() -> Iterator[int]:
        """Sweep until all have ended; yields the number of each state as it ends."""
        moving = torch.arange(residual.shape[-1] if residual.numel() else 0, device=value.device)
        while moving.numel():
            current, last, before = value[..., moving, :], residual[..., moving], code[..., moving]
            live = (
                before == Status.MAX_STEPS.code
            )  # what has ended in one memory stays while it still moves in another
            new = memory.advance(current)
            change = torch.where(new.isfinite().all(-1), (new - current).norm(dim=-1) / size, torch.nan)
            now = torch.where(change <= tolerance, Status.CONVERGED.code, before)
            now = torch.where(live, torch.where(change.isnan(), Status.NOT_FINITE.code, now), before)
            residual[..., moving] = torch.where(live, change.nan_to_num(torch.inf, torch.inf), last)
            code[..., moving] = now
            if (
                len(trace) == max_steps
            ):  # one sweep more than steps: it says how far from settled the states are that it leaves there
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
    residual = residual.reshape(shape)
    value = value.reshape(state.shape).to(state.dtype)
    return Solution(
        value, code.reshape(shape), residual, torch.tensor(len(trace)), torch.zeros_like(residual), by_step
    )
