"""The most likely sequence of modes.

For each mode j only the best way into it is kept:

    score_j = max_i  score_i + log π_ij + log p_j(y_t | the Kalman filter along the path kept for i)

It is GPB2 with the collapse replaced by a choice. With no continuous state to remember (a hidden Markov
model) that is Viterbi's algorithm and exact.
"""

import numpy as np

from .buffers import Run, Sizes, begin_series, layout, load, look, recall, work_buffer
from .filters import carry_some, read_as
from .kalman import Buffer, copy, kernel


@kernel
def viterbi(run: Run, path: Buffer, come_from: Buffer, sizes: Sizes) -> None:
    """Write the best path of every series to `path` (rows,).

    `come_from` (rows, M) is the mode before on the best way into each; that of steps done before is given.
    """
    p, y, starts, out, lead = run
    at = layout(sizes[0], sizes[1], sizes[2], sizes[0])
    M, law = at.M, at.law
    state = at.end
    score = state + M * law
    new = score + M
    new_score = new + M * law
    after = new_score + M
    maps = after + law
    w, index = work_buffer(p, at, maps), np.empty(at.m, np.int64)
    for series in range(len(starts) - 1):
        done = lead[series]
        if done > 0:
            recall(out, starts[series] + done - 1, w, at, state, score)
        else:
            begin_series(p, series, w, at, state, score)
        for t in range(done, starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(p, series, t, t == done, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            for j in range(M):
                come_from[row, j] = -1
                for i in range(M):
                    if begun and i != j:
                        continue
                    source, value = state + i * law, w[score + i]
                    if not begun:
                        source = at.read
                        read_as(p, w, at, maps, i, j, state, source)
                        value += w[at.log_transition + i * M + j]
                    density = carry_some(w, at, seen, begun, j, source, after)
                    if np.isnan(density):
                        out.failure[series, 0], out.failure[series, 1] = t, j
                        return
                    value += density
                    if come_from[row, j] < 0 or value > w[new_score + j]:
                        w[new_score + j] = value
                        come_from[row, j] = i
                        copy(law, w, after, w, new + j * law)
            copy(M * law, w, new, w, state)
            copy(M, w, new_score, w, score)
        best = 0
        for j in range(M):
            if w[score + j] > w[score + best]:
                best = j
        for back in range(starts[series + 1] - starts[series]):
            row = starts[series + 1] - 1 - back
            path[row] = best
            best = come_from[row, best]
