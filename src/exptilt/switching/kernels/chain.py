"""The scaled forward and backward recursions of a hidden Markov chain with K modes, from its densities."""

import numpy as np

from .kalman import Buffer, kernel


@kernel
def chain_forward(density: Buffer, P: Buffer, initial: Buffer, filtered: Buffer, scale: Buffer) -> None:
    """Write P(mode_t | y_1 … y_t) ``(T, K)`` and the scales ``(T,)``, whose product is the likelihood."""
    T, K = density.shape
    now = initial.copy()
    for t in range(T):
        total = 0.0
        for j in range(K):
            now[j] *= density[t, j]
            total += now[j]
        scale[t] = total
        for j in range(K):
            filtered[t, j] = now[j] / total
            now[j] = 0.0
        for i in range(K):
            for j in range(K):
                now[j] += filtered[t, i] * P[i, j]


@kernel
def chain_backward(ahead: Buffer, P: Buffer, later: Buffer) -> None:
    """Write p(y_{t+1} … | mode_t) / p(y_{t+1} … | y_1 … y_t) ``(T, K)``; `ahead` is density over scale."""
    T, K = ahead.shape
    later[T - 1] = 1.0
    weight = np.empty(K)
    for back in range(T - 1):
        t = T - 2 - back
        for j in range(K):
            weight[j] = ahead[t + 1, j] * later[t + 1, j]
        for i in range(K):
            s = 0.0
            for j in range(K):
                s += P[i, j] * weight[j]
            later[t, i] = s
