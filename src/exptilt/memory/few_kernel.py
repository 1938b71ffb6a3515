"""Retrieval of one state after another, compiled."""

import numpy as np

from exptilt._support.elementary import FAST, exp_of_negative
from exptilt._support.kernels import kernel

CONVERGED, MAX_STEPS, NOT_FINITE = 0, 1, 2


@kernel("the kernel of retrieval", fastmath=FAST)
def few(query, key, value, log_weight, scale, output, statistics):  # type: ignore[no-untyped-def]
    """Attention of a few queries (Q, D) on keys (K, D) and values (K, Dv), on this thread.

    log_weight (K,) or empty. Writes output (Q, Dv) and the log-normalizer to statistics[0].
    """
    (Q, D), (K, Dv) = query.shape, value.shape
    s = np.empty(K, query.dtype)
    part = np.empty(Dv, query.dtype)
    for i in range(Q):
        q = query[i]
        top = scale * 0 - np.inf
        for j in range(K):
            k = key[j]
            t = scale * 0
            for d in range(D):
                t += q[d] * k[d]
            s[j] = scale * t + (log_weight[j] if log_weight.size > 0 else scale * 0)
            top = s[j] if s[j] > top else top
        z = 0.0
        out = output[i]
        out[:] = 0
        for start in range(0, K, 256):  # sums in parts, which keeps them exact
            stop = min(K, start + 256)
            total = scale * 0
            w = s[start:stop]
            for j in range(w.size):
                w[j] = exp_of_negative(w[j] - top)
                total += w[j]
            z += total
            part[:] = 0
            for j in range(w.size):
                v = value[start + j]
                for d in range(Dv):
                    part[d] += w[j] * v[d]
            for d in range(Dv):
                out[d] += part[d]
        for d in range(Dv):
            out[d] /= z
        statistics[0, i] = top + np.log(z)


@kernel("the kernel of retrieval")
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
