"""Retrieval of one state after another, compiled."""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.forward import few

CONVERGED, MAX_STEPS, NOT_FINITE = 0, 1, 2


@njit(nogil=True, cache=True, error_model="numpy")
def settle(patterns, offset, beta, reach, most, value, residual, ended):  # type: ignore[no-untyped-def]
    """Steps from value (S, D), in place, each state until ‖step(ξ) − ξ‖ <= reach, a step is not finite, or `most` of them.

    patterns (N, D); offset (N,), β times what is added to their scores, or empty. Writes residual (S,), the length of the step that was
    not made, and how each state ended (S,), one of the numbers above. Returns the lengths of the steps (steps, S).
    """
    S, D = value.shape
    new, statistics = np.empty((1, D), value.dtype), np.empty((5, 1), value.dtype)
    trace, taken = np.empty((min(most, 16), S), value.dtype), np.zeros(S, np.int64)
    for s in range(S):
        current = value[s : s + 1]
        steps = 0
        while True:  # one sweep more than steps, as in the general way
            few(current, patterns, patterns, offset, beta, new, statistics)
            change = beta * 0
            finite = True
            for d in range(D):
                finite &= np.isfinite(new[0, d])
                change += (new[0, d] - current[0, d]) ** 2
            residual[s] = np.sqrt(change) if finite else np.inf
            ended[s] = NOT_FINITE if not finite else CONVERGED if residual[s] <= reach else MAX_STEPS
            if steps == most:
                break
            if steps == trace.shape[0]:
                longer = np.empty((2 * steps, S), value.dtype)
                longer[:steps] = trace
                trace = longer
            trace[steps, s] = residual[s]
            steps += 1
            if ended[s] != MAX_STEPS:
                break
            current[:] = new
        taken[s] = steps
    for s in range(S):
        trace[taken[s] : taken.max(), s] = residual[s]
    return trace[: taken.max()]
