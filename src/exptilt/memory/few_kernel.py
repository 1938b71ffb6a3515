"""Retrieval of one state after another, compiled."""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.forward import few


@njit(nogil=True, cache=True, error_model="numpy")
def settle(patterns, offset, beta, reach, most, value, residual):  # type: ignore[no-untyped-def]
    """Steps from value (S, D), in place, each state until ‖step(ξ) − ξ‖ <= reach (which is written to residual (S,)), or `most` of them.

    patterns (N, D); offset (N,), β times what is added to their scores, or empty. Returns the largest number of steps.
    """
    new, statistics = np.empty((1, value.shape[1]), value.dtype), np.empty((5, 1), value.dtype)
    longest = 0
    for s in range(value.shape[0]):
        current = value[s : s + 1]
        steps = 0
        while True:  # one sweep more than steps, as in the general way
            few(current, patterns, patterns, offset, beta, new, statistics)
            change = beta * 0
            for d in range(new.size):
                change += (new[0, d] - current[0, d]) ** 2
            residual[s] = np.sqrt(change)
            if steps == most:
                break
            steps += 1
            if residual[s] <= reach:
                break
            current[:] = new
        longest = max(longest, steps)
    return longest
