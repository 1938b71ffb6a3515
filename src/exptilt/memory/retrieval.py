r"""Retrieval: steps until each state stands still.

States step in place, and those that have settled are left out of the next sweep. Where a derivative is wanted, the point they settled
at then passes through `exptilt.dynamics.fixed_point`, which differentiates the fixed point ξ = T(ξ; x, β) by the implicit function theorem,

    dξ = (1 − ∂T/∂ξ)^{-1} (∂T/∂x dx + ∂T/∂β dβ),

in the memory of one step, however many were taken. Under `torch.func` and `torch.compile`, where values cannot be looked at, `fixed_point`
does the stepping as well. Residuals are of the state that is returned, in units of M (of its norm, where that is larger, there).
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import is_concrete
from exptilt._support.solution import Solution, Status
from exptilt.dynamics import fixed_point
from exptilt.memory import few

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield


def retrieve(memory: "Hopfield", state: Tensor, *, tolerance: float | None, max_steps: int, throw: bool) -> Solution[Tensor]:
    """See `Hopfield.retrieve`."""
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise ArgumentError(f"Hopfield.retrieve: max_steps is {max_steps!r}. Pass an integer >= 1.")
    if tolerance is None:
        tolerance = 1e-10 if memory.square_norm.dtype == torch.float64 else 1e-5
    if not tolerance > 0:
        raise ArgumentError(f"Hopfield.retrieve: tolerance is {tolerance}. Pass a number > 0, or None.")
    tracked = (memory.patterns, memory.beta, state)
    if not is_concrete(*tracked):
        return _attached(memory, state, tolerance, max_steps, throw=throw, strict=throw)
    solution = settle(memory, state, tolerance, max_steps)
    if throw:
        solution.or_raise()
    if torch.is_grad_enabled() and (memory.patterns.requires_grad or memory.beta.requires_grad):
        return replace(solution, value=_attached(memory, solution.value, tolerance, 1, throw=False, strict=throw).value)
    return solution


def _unit(memory: "Hopfield") -> Tensor:
    """M, as it broadcasts against residuals ``(..., Q)``."""
    return memory.size[..., None] if memory.patterns.ndim > 2 else memory.size


def _attached(memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int, *, throw: bool, strict: bool) -> Solution[Tensor]:
    """The fixed point from this state on, with its derivatives; with max_steps 1, the state itself with those of the fixed point it is.

    With `strict` a derivative that does not exist is an error when it is asked for, as in `fixed_point`.
    """
    return fixed_point(
        memory.step, state.detach(), solver="picard", tolerance=tolerance, max_steps=max_steps, scale=_unit(memory), throw=throw,
        strict=strict,
    )  # fmt: skip


@torch.no_grad()
def settle(memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int) -> Solution[Tensor]:
    """Steps in place; only states that still move in some memory are swept again."""
    if few.suits(memory, state):
        return few.settle(memory, state, tolerance, max_steps)
    value = memory.rows(state).clone()
    unit = _unit(memory)
    residual = value.new_full(value.shape[:-1], torch.inf)
    flat = residual.view(math.prod(residual.shape[:-1]), residual.shape[-1])
    moving = torch.arange(residual.shape[-1] if flat.numel() else 0, device=value.device)
    steps = 0
    while moving.numel():  # one sweep more than steps: the last says how far from settled the states are that it leaves where they are
        current, last = value[..., moving, :], residual[..., moving]
        new = memory.advance(current)
        change = (new - current).norm(dim=-1) / unit
        change = torch.where(last <= tolerance, last, change)  # what has settled in one memory stays while it still moves in another
        residual[..., moving] = change
        if steps == max_steps:
            break
        steps += 1
        value[..., moving, :] = torch.where((change <= tolerance)[..., None], current, new)
        moving = moving[~(flat[:, moving] <= tolerance).all(0)]
    ended = torch.where(residual <= tolerance, Status.CONVERGED.code, Status.MAX_STEPS.code).to(torch.int8)
    shape = state.shape[:-1]
    residual = residual.reshape(shape)
    return Solution(
        value.reshape(state.shape).to(state.dtype), ended.reshape(shape), residual, torch.tensor(steps), torch.zeros_like(residual)
    )
