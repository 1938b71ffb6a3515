"""The likelihood of a hidden Markov chain and all its derivatives: one pass forwards, one backwards.

K modes, each of a regime and an age; from each of them M modes can be reached, one for each regime that comes
next. `P[t, i, d, r]` is the probability that regime r comes after regime i of age d.
"""

import numpy as np

from .kalman import Buffer, kernel


@kernel
def chain_pass(
    logs: Buffer,
    P: Buffer,
    regime: Buffer,
    age: Buffer,
    after: Buffer,
    initial: Buffer,
    share: Buffer,
    P_bar: Buffer,
    initial_bar: Buffer,
) -> float:
    """Return log p(y), from log-densities ``(T, K)``; `after` ``(K, M)`` says where each regime leads.

    Its derivatives are added: `share` ``(T, K)`` P(mode_t | y), that of the log-densities; `P_bar` and
    `initial_bar`.
    """
    T, K = logs.shape
    M, still = P.shape[3], P.shape[0] == 1
    density, filtered, scale = np.empty((T, K)), np.empty((T, K)), np.empty(T)
    now, total = initial.copy(), 0.0
    for t in range(T):
        top = logs[t].max()
        s = 0.0
        for k in range(K):
            density[t, k] = np.exp(logs[t, k] - top)
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
                for r in range(M):
                    now[after[k, r]] += filtered[t, k] * P[at, regime[k], age[k], r]
    later, before = np.ones(K), np.ones(K)
    for back in range(T):
        t = T - 1 - back
        at = 0 if still else t
        for k in range(K):
            share[t, k] += filtered[t, k] * later[k]
            later[k] *= density[t, k] / scale[t]
        if t == 0:
            break
        for k in range(K):
            s = 0.0
            for r in range(M):
                w = later[after[k, r]]
                s += P[at, regime[k], age[k], r] * w
                P_bar[at, regime[k], age[k], r] += filtered[t - 1, k] * w
            before[k] = s
        later[:] = before
    initial_bar += later
    return total
