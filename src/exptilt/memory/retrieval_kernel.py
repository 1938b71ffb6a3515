"""Steps and retrievals of one state after another, compiled."""

import numpy as np

from exptilt._support.elementary import FAST, exp_of_negative
from exptilt._support.kernels import kernel

CONVERGED, MAX_STEPS, NOT_FINITE = 0, 1, 2


@kernel("the kernel of retrieval", fastmath=FAST)
def step(query, patterns, offset, beta, output):  # type: ignore[no-untyped-def]
    """One step from each query (Q, D) on patterns (N, D), into output (Q, D), on this thread.

    offset (N,) is β times what is added to the scores, or empty.
    """
    N, D = patterns.shape
    s, part = np.empty(N, query.dtype), np.empty(D, query.dtype)
    for i in range(query.shape[0]):
        q = query[i]
        top = beta * 0 - np.inf
        for j in range(N):
            x = patterns[j]
            t = beta * 0
            for d in range(D):
                t += q[d] * x[d]
            s[j] = beta * t + (offset[j] if offset.size > 0 else beta * 0)
            top = s[j] if s[j] > top else top
        z = top * 0.0  # NaN where a score is not finite
        out = output[i]
        out[:] = 0
        for start in range(0, N, 256):  # sums in parts, which keeps them exact
            w = s[start : min(N, start + 256)]
            total = beta * 0
            for j in range(w.size):
                w[j] = exp_of_negative(w[j] - top)  # type: ignore[no-untyped-call]
                total += w[j]
            z += total
            part[:] = 0
            for j in range(w.size):
                x = patterns[start + j]
                for d in range(D):
                    part[d] += w[j] * x[d]
            for d in range(D):
                out[d] += part[d]
        for d in range(D):
            out[d] /= z


@kernel("the kernel of retrieval")
def settle(patterns, offset, beta, reach, most, value, residual, ended):  # type: ignore[no-untyped-def]
    """Steps from value (S, D), in place, until ‖step(ξ) − ξ‖ <= reach, one is not finite, or `most` are made.

    Writes residual (S,), the length of the step that was not made, and how each state ended (S,), one of the
    numbers above. Returns the lengths of the steps (steps, S).
    """
    S, D = value.shape
    new = np.empty((1, D), value.dtype)
    trace, taken = np.empty((min(most, 16), S), value.dtype), np.zeros(S, np.int64)
    for i in range(S):
        current = value[i : i + 1]
        steps = 0
        while True:  # one sweep more than steps, as in the general way
            step(current, patterns, offset, beta, new)
            change = beta * 0
            finite = True
            for d in range(D):
                finite &= np.isfinite(new[0, d])
                change += (new[0, d] - current[0, d]) ** 2
            residual[i] = np.sqrt(change) if finite else np.inf
            ended[i] = NOT_FINITE if not finite else CONVERGED if residual[i] <= reach else MAX_STEPS
            if steps == most:
                break
            if steps == trace.shape[0]:
                longer = np.empty((2 * steps, S), value.dtype)
                longer[:steps] = trace
                trace = longer
            trace[steps, i] = residual[i]
            steps += 1
            if ended[i] != MAX_STEPS:
                break
            current[:] = new
        taken[i] = steps
    for i in range(S):
        trace[taken[i] : taken.max(), i] = residual[i]
    return trace[: taken.max()]
