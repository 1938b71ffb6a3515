"""The most likely sequence of modes.

"exact" weighs every path. "viterbi" keeps, for each mode j, only the best way into it:

    score_j = max_i  score_i + log π_ij + log p_j(y_t | the Kalman filter along the path kept for i)

It is GPB2 with the collapse replaced by a choice. With no continuous state to remember (a hidden Markov model) that is Viterbi's
algorithm and exact.
"""

import numpy as np

from .buffers import Parameters, load, look, places
from .filters import begin_series
from .kalman import Buffer, copy, kernel, predict_some, update_room, update_some


@kernel
def viterbi(
    p: Parameters, y: Buffer, starts: Buffer, path: Buffer, failure: Buffer, sizes: tuple[int, int, int]
) -> None:
    """Write the best path of every series to `path` (rows,)."""
    M, n, m = sizes
    nn = n * n
    at = places(M, n, m)
    state = at.end
    cov = state + M * n
    score = cov + M * nn
    new = score + M
    new_cov = new + M * n
    new_score = new_cov + M * nn
    read_mean = new_score + M
    read_cov = read_mean + n
    ahead = read_cov + nn
    ahead_cov = ahead + n
    after = ahead_cov + nn
    after_cov = after + n
    scratch = after_cov + nn
    maps = scratch + update_room(n, m)
    w = np.zeros(maps + 2 * p.maps.size)
    index = np.empty(m, np.int64)
    come_from = np.empty((y.shape[0], M), np.int64)
    for series in range(len(starts) - 1):
        begin_series(M, n, p, w, state, cov, score)
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(M, n, m, p, series, t, t == 0, w, at, maps)
            seen = look(M, n, m, y, row, w, at, index)
            begun = t == 0 and p.first == 1
            some = seen < m
            for j in range(M):
                w[new_score + j] = -np.inf
                come_from[row, j] = -1
                for i in range(M):
                    if begun and i != j:
                        continue
                    source, source_cov = state + i * n, cov + i * nn
                    if begun:
                        copy(n, w, source, w, ahead)
                        copy(nn, w, source_cov, w, ahead_cov)
                        prior = w[score + j]
                    else:
                        if p.maps.size > 0:
                            ij = (i * M + j) * nn
                            predict_some(
                                n,
                                w,
                                maps + ij,
                                at.zero,
                                maps + p.maps.size + ij,
                                source,
                                source_cov,
                                read_mean,
                                read_cov,
                                scratch,
                            )
                            source, source_cov = read_mean, read_cov
                        predict_some(
                            n,
                            w,
                            at.W + j * nn,
                            at.c + j * n,
                            at.Q + j * nn,
                            source,
                            source_cov,
                            ahead,
                            ahead_cov,
                            scratch,
                        )
                        prior = w[score + i] + w[at.log_transition + i * M + j]
                    value = update_some(
                        n,
                        seen,
                        w,
                        at.y,
                        at.H_seen + j * seen * n if some else at.H + j * m * n,
                        at.d_seen + j * seen if some else at.d + j * m,
                        at.R_seen + j * seen * seen if some else at.R + j * m * m,
                        ahead,
                        ahead_cov,
                        after,
                        after_cov,
                        scratch,
                    )
                    if np.isnan(value):
                        failure[series, 0], failure[series, 1] = t, j
                        return
                    if come_from[row, j] < 0 or prior + value > w[new_score + j]:
                        w[new_score + j] = prior + value
                        come_from[row, j] = i
                        copy(n, w, after, w, new + j * n)
                        copy(nn, w, after_cov, w, new_cov + j * nn)
            copy(M * n, w, new, w, state)
            copy(M * nn, w, new_cov, w, cov)
            copy(M, w, new_score, w, score)
        best = 0
        for j in range(M):
            if w[score + j] > w[score + best]:
                best = j
        for back in range(starts[series + 1] - starts[series]):
            row = starts[series + 1] - 1 - back
            path[row] = best
            best = come_from[row, best]
