"""The likelihood of a hidden Markov chain and all its derivatives: one pass forwards, one backwards.

K modes, each of a regime and an age; from each of them M modes can be reached, one for each regime that comes
next. `P[t, i, d, r]` is the probability that regime r comes after regime i of age d.
"""

import numpy as np

from .kalman import LOG_TWO_PI, Buffer, kernel


@kernel
def chain_pass(
    y: Buffer,
    inputs: Buffer,
    laws: tuple[Buffer, Buffer, Buffer],
    P: Buffer,
    regime: Buffer,
    age: Buffer,
    after: Buffer,
    initial: Buffer,
    laws_bar: tuple[Buffer, Buffer, Buffer],
    P_bar: Buffer,
    initial_bar: Buffer,
) -> float:
    """Return log p(y); `after` ``(K, M)`` says where each regime leads, NaN in y ``(T,)`` is missing.

    `laws` are offset ``(K,)``, input matrix ``(K, r)`` and deviation ``(K,)`` of each mode. The derivatives
    are added to what ends in `bar`: that in a log-density is the smoothed probability of its mode, that in a
    transition the expected number of times it was made, divided by its probability.
    """
    offset, matrix, deviation = laws
    offset_bar, matrix_bar, deviation_bar = laws_bar
    T, K, r = len(y), len(offset), inputs.shape[1]
    M, still = P.shape[3], P.shape[0] == 1
    z, density, filtered, scale = np.empty((T, K)), np.empty((T, K)), np.empty((T, K)), np.empty(T)
    logs, sizes = np.empty(K), np.log(deviation)
    now, total = initial.copy(), 0.0
    for t in range(T):
        missing, top = np.isnan(y[t]), -np.inf
        for k in range(K):
            s = y[t] - offset[k]
            for i in range(r):
                s -= inputs[t, i] * matrix[k, i]
            z[t, k] = s / deviation[k]
            logs[k] = 0.0 if missing else -0.5 * (z[t, k] * z[t, k] + LOG_TWO_PI) - sizes[k]
            top = max(top, logs[k])
        s = 0.0
        for k in range(K):
            density[t, k] = np.exp(logs[k] - top)
            now[k] *= density[t, k]
            s += now[k]
        scale[t] = s
        total += np.log(s) + top
        for k in range(K):
            filtered[t, k] = now[k] / s
            now[k] = 0.0
        if t + 1 < T:
            at = 0 if still else t + 1
            for k in range(K):
                for j in range(M):
                    now[after[k, j]] += filtered[t, k] * P[at, regime[k], age[k], j]
    later, before = np.ones(K), np.ones(K)
    for back in range(T):
        t = T - 1 - back
        at = 0 if still else t
        for k in range(K):
            share = filtered[t, k] * later[k]
            later[k] *= density[t, k] / scale[t]
            if not np.isnan(y[t]):
                slope = share * z[t, k] / deviation[k]
                offset_bar[k] += slope
                deviation_bar[k] += share * (z[t, k] * z[t, k] - 1) / deviation[k]
                for i in range(r):
                    matrix_bar[k, i] += slope * inputs[t, i]
        if t == 0:
            break
        for k in range(K):
            s = 0.0
            for j in range(M):
                w = later[after[k, j]]
                s += P[at, regime[k], age[k], j] * w
                P_bar[at, regime[k], age[k], j] += filtered[t - 1, k] * w
            before[k] = s
        later[:] = before
    initial_bar += later
    return total
