"""Few states on not so many patterns: one call of compiled code, since torch's calls would cost more than the work.

A step of one state on 4096 patterns takes as long as a dozen calls of torch. So where the answer is a plain number (softmax, no
derivative asked for, one memory in float32 or float64 on the CPU) and the work is small, a step, and a whole retrieval, is compiled as
one. Everything else goes the general way, to the same results but for rounding.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import derivatives_wanted
from exptilt.memory.separation import Softmax

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_CODES = np.array(
    [Status.CONVERGED.code, Status.MAX_STEPS.code, Status.NOT_FINITE.code], np.int8
)  # as ``few_kernel.py`` numbers them
_STATES = 8
_PRODUCTS = 1 << 21  # beyond, two threads are faster


def suits(memory: "Hopfield", state: Any) -> bool:
    """Whether states may go this way: of the right shape, dtype and number, though they may hold anything."""
    patterns = memory.patterns
    return (
        type(state) is Tensor
        and type(patterns) is Tensor
        and state.ndim > 0
        and patterns.ndim == 2
        and state.shape[-1] == patterns.shape[1]
        and 0 < state.numel() <= _STATES * patterns.shape[1]
        and patterns.dtype == state.dtype == memory.measure.dtype
        and state.numel() * patterns.shape[0] <= _PRODUCTS
        and isinstance(memory.rule, Softmax)
        and not memory.similarity.sphere
        and state.device.type == patterns.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not derivatives_wanted((patterns, memory.beta, state))
        and patterns.is_contiguous()
    )


def _arguments(memory: "Hopfield") -> tuple[np.ndarray, np.ndarray, Any]:
    """Patterns, β times the offsets of their scores, β."""
    patterns, beta = memory.patterns.detach().numpy(), memory.beta.item()
    offset = memory.similarity.offset
    weight = (
        np.empty(0, patterns.dtype) if offset is None else (beta * offset(memory.measure.detach())).numpy()
    )
    return patterns, weight, patterns.dtype.type(beta)


def step(memory: "Hopfield", state: Tensor) -> Tensor | None:
    """One step, or None where a score is not finite."""
    from exptilt.memory.few_kernel import few

    patterns, weight, beta = _arguments(memory)
    query = np.ascontiguousarray(state.detach().numpy()).reshape(-1, patterns.shape[1])
    output, statistics = np.empty_like(query), np.empty((5, query.shape[0]), query.dtype)
    few(query, patterns, patterns, weight, beta, output, statistics)
    return torch.from_numpy(output.reshape(state.shape)) if np.isfinite(statistics[0]).all() else None


def settle(memory: "Hopfield", state: Tensor, tolerance: float, max_steps: int) -> Solution[Tensor]:
    """Steps until each state stands still, as ``retrieval.settle``."""
    from exptilt.memory.few_kernel import settle as run

    patterns, weight, beta = _arguments(memory)
    rows = np.array(state.detach().numpy(), order="C").reshape(-1, patterns.shape[1])
    residual, ended = np.empty(len(rows), rows.dtype), np.empty(len(rows), np.int8)
    unit = memory.measure.max().item() ** 0.5 or 1.0  # `memory.size`, for the similarities that come here
    trace = run(patterns, weight, beta, tolerance * unit, max_steps, rows, residual, ended)
    shape = state.shape[:-1]
    made = (rows.reshape(state.shape), _CODES[ended].reshape(shape), (residual / unit).reshape(shape))
    value, code, residuals, distance, by_step = map(
        torch.from_numpy, (*made, np.zeros(shape, rows.dtype), (trace / unit).reshape(len(trace), *shape))
    )
    return Solution(value, code, residuals, torch.tensor(len(trace)), distance, by_step)
