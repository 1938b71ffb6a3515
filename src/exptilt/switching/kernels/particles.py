r"""The Rao–Blackwellised particle filter (THEORY E9): sample the modes, keep the state Gaussian.

Particle i holds a mode path, of which only the last mode counts, and the Kalman moments along it. At each step it looks at all M modes it
could go to,
with log weights log π_{s_i j} + log p_j(y); its own weight is multiplied by their sum, and it moves to one of them drawn in proportion
(the optimal
proposal). The log-sum of the weights is the log of an unbiased estimate of the marginal likelihood. Where the effective sample size
1 / Σ W_i² falls below half the number of particles they are resampled systematically: one uniform number, N equally spaced pointers.
"""

import numpy as np

from .buffers import Parameters, Stored, load, look, places
from .kalman import Buffer, collapse_some, copy, kernel, log_sum, predict_some, update_room, update_some


@kernel
def swarm(p: Parameters, y: Buffer, starts: Buffer, N: int, uniform: Buffer, chosen: Buffer, everything: int, out: Stored, ess: Buffer,
          sizes: tuple[int, int, int]) -> None:  # fmt: skip
    """`uniform` is (rows, N + 1): one number per particle and one to resample with; `chosen` (series, N) the modes the particles start
    in.
    """
    M, n, m = sizes
    nn = n * n
    at = places(M, n, m)
    read = at.end
    read_cov = read + n
    ahead = read_cov + nn
    ahead_cov = ahead + n
    option = ahead_cov + nn
    option_cov = option + M * n
    score = option_cov + M * nn
    state = score + M
    cov = state + N * n
    spare = cov + N * nn
    spare_cov = spare + N * n
    log_weight = spare_cov + N * nn
    weight = log_weight + N
    mode_weight = weight + N
    result = mode_weight + N
    result_cov = result + M * n
    scratch = result_cov + M * nn
    maps = scratch + update_room(n, m)
    w = np.zeros(maps + 2 * p.maps.size)
    index = np.empty(m, np.int64)
    mode, before, kept = np.empty(N, np.int64), np.empty(N, np.int64), np.empty(N, np.int64)
    pair, log_mode = np.empty(M * M), np.empty(M)
    for series in range(len(starts) - 1):
        for i in range(N):
            mode[i] = chosen[series, i]
            copy(n, p.initial_mean, mode[i] * n, w, state + i * n)
            copy(nn, p.initial_covariance, mode[i] * nn, w, cov + i * nn)
            w[log_weight + i] = -np.log(N)
        total = 0.0
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(M, n, m, p, series, t, t == 0, w, at, maps)
            seen = look(M, n, m, y, row, w, at, index)
            begun = t == 0 and p.first == 1
            for i in range(N):
                for j in range(M):
                    if begun:
                        copy(n, p.initial_mean, j * n, w, ahead)
                        copy(nn, p.initial_covariance, j * nn, w, ahead_cov)
                        prior = p.initial_log_probability[j]
                    else:
                        prior = w[at.log_transition + mode[i] * M + j]
                        source, source_cov = state + i * n, cov + i * nn
                        if p.maps.size > 0:
                            ij = (mode[i] * M + j) * nn
                            predict_some(
                                n,
                                w,
                                maps + ij,
                                at.zero,
                                maps + p.maps.size + ij,
                                source,
                                source_cov,
                                read,
                                read_cov,
                                scratch,
                            )
                            source, source_cov = read, read_cov
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
                    some = seen < m
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
                        option + j * n,
                        option_cov + j * nn,
                        scratch,
                    )
                    if np.isnan(value):
                        out.failure[series, 0], out.failure[series, 1] = t, j
                        return
                    w[score + j] = prior + value
                gain = log_sum(M, w, score, 1)
                before[i] = mode[i]
                if gain > -np.inf:
                    rest = uniform[row, i]
                    pick = -1
                    for j in range(M):
                        share = np.exp(w[score + j] - gain)
                        if share > 0.0:
                            pick = j
                            rest -= share
                            if rest < 0.0:
                                break
                    mode[i] = pick
                    copy(n, w, option + pick * n, w, state + i * n)
                    copy(nn, w, option_cov + pick * nn, w, cov + i * nn)
                w[log_weight + i] += gain
            term = log_sum(N, w, log_weight, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            total += term
            square = 0.0
            for i in range(N):
                w[log_weight + i] -= term
                w[weight + i] = np.exp(w[log_weight + i])
                square += w[weight + i] * w[weight + i]
            ess[row] = 1.0 / square
            if everything == 1 or t == starts[series + 1] - starts[series] - 1:
                pair[:] = 0.0
                log_mode[:] = 0.0
                for i in range(N):
                    pair[before[i] * M + mode[i]] += w[weight + i]
                    log_mode[mode[i]] += w[weight + i]
                target = row if everything == 1 else series
                for j in range(M):
                    for i in range(N):
                        alone = log_mode[j] > 0.0
                        w[mode_weight + i] = (
                            (w[weight + i] / log_mode[j] if mode[i] == j else 0.0) if alone else w[weight + i]
                        )
                    collapse_some(
                        n, N, w, mode_weight, 1, state, n, cov, nn, result + j * n, result_cov + j * nn
                    )
                    for i in range(M):
                        if begun:
                            out.mixing[target, i * M + j] = 1.0 if i == j else 0.0
                        else:
                            out.mixing[target, i * M + j] = (
                                pair[i * M + j] / log_mode[j] if log_mode[j] > 0.0 else 1.0 / M
                            )
                    out.log_mode[target, j] = np.log(log_mode[j])
                out.terms[target] = term if everything == 1 else total
                for i in range(M * n):
                    out.mode_mean[target, i] = w[result + i]
                for i in range(M * nn):
                    out.mode_covariance[target, i] = w[result_cov + i]
            if 1.0 / square < 0.5 * N:
                copy(N * n + N * nn, w, state, w, spare)
                kept[:] = mode
                pointer, cumulative, source = uniform[row, N] / N, w[weight], 0
                for i in range(N):
                    while cumulative < pointer and source < N - 1:
                        source += 1
                        cumulative += w[weight + source]
                    copy(n, w, spare + source * n, w, state + i * n)
                    copy(nn, w, spare_cov + source * nn, w, cov + i * nn)
                    mode[i] = kept[source]
                    w[log_weight + i] = -np.log(N)
                    pointer += 1.0 / N
        out.log_likelihood[series] = total
