r"""The Rao–Blackwellised particle filter (THEORY E9): sample the modes, keep the state Gaussian.

Particle i holds a mode path, of which only the last mode counts, and the Kalman moments along it. At each
step it looks at all M modes it could go to, with log weights log π_{s_i j} + log p_j(y); its own weight is
multiplied by their sum, and it moves to one of them drawn in proportion (the optimal proposal). The log-sum
of the weights is the log of an unbiased estimate of the marginal likelihood. Where the effective sample size
1 / Σ W_i² falls below half the number of particles they are resampled systematically, by `sampling`'s loop.
"""

from typing import NamedTuple

import numpy as np

from exptilt.sampling.resampling import point

from .buffers import Run, Sizes, keep, layout, load, look, step_of, work_buffer, write_row
from .filters import carry_some
from .kalman import Buffer, collapse_some, copy, kernel, log_sum, predict_some


class Cloud(NamedTuple):
    """The particles after each step, before they are resampled: modes, log weights, laws of the state."""

    mode: Buffer  # (rows, N), whole numbers
    log_weight: Buffer  # (rows, N)
    mean: Buffer  # (rows, N·n)
    covariance: Buffer  # (rows, N·n·n)


@kernel
def swarm(run: Run, uniform: Buffer, chosen: Buffer, ess: Buffer, cloud: Cloud, sizes: Sizes) -> None:
    """Filter all series with the N particles whose first modes are `chosen` (series, N).

    `uniform` is (rows, N + 1): one number per particle and one to resample with. The particles of each step
    go to `cloud`, if it has rows.
    """
    p, y, starts, out, _ = run
    at = layout(sizes[0], sizes[1], sizes[2], sizes[0])
    M, n, law, N = at.M, at.n, at.law, chosen.shape[1]
    option = at.end
    score = option + M * law
    state = score + M
    spare = state + N * law
    log_weight = spare + N * law
    weight = log_weight + N
    mode_weight = weight + N
    result = mode_weight + N
    maps = result + M * law
    w, index = work_buffer(p, at, maps), np.empty(at.m, np.int64)
    mode, before, kept = np.empty(N, np.int64), np.empty(N, np.int64), np.empty(N, np.int64)
    pair, share = np.empty((M, M)), np.empty(M)
    for series in range(len(starts) - 1):
        own = step_of(p.initial_mean.shape[0], series)
        mean, cov = p.initial_mean[own], p.initial_covariance[own]
        for i in range(N):
            mode[i] = chosen[series, i]
            copy(n, mean, mode[i] * n, w, state + i * law)
            copy(n * n, cov, mode[i] * n * n, w, state + i * law + n)
            w[log_weight + i] = -np.log(N)
        total = 0.0
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(p, series, t, t == 0, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            for i in range(N):
                for j in range(M):
                    if begun:  # all modes may still be chosen
                        source, prior = at.read, p.initial_log_probability[own, j]
                        copy(n, mean, j * n, w, source)
                        copy(n * n, cov, j * n * n, w, source + n)
                    else:
                        source, prior = state + i * law, w[at.log_transition + mode[i] * M + j]
                        if p.maps.size > 0:
                            move, source = maps + (mode[i] * M + j) * at.move, at.read
                            predict_some(n, w, move, state + i * law, source, at.scratch)
                    value = carry_some(w, at, seen, begun, j, source, option + j * law)
                    if np.isnan(value):
                        out.failure[series, 0], out.failure[series, 1] = t, j
                        return
                    w[score + j] = prior + value
                gain = log_sum(M, w, score, 1)
                before[i] = mode[i]
                if gain > -np.inf:
                    rest, pick = uniform[row, i], -1
                    for j in range(M):
                        part = np.exp(w[score + j] - gain)
                        if part > 0.0:
                            pick = j
                            rest -= part
                            if rest < 0.0:
                                break
                    mode[i] = pick
                    copy(law, w, option + pick * law, w, state + i * law)
                w[log_weight + i] += gain
            term = log_sum(N, w, log_weight, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            total += term
            square = 0.0
            pair[:] = 0.0
            share[:] = 0.0
            for i in range(N):
                w[log_weight + i] -= term
                w[weight + i] = np.exp(w[log_weight + i])
                square += w[weight + i] * w[weight + i]
                pair[before[i], mode[i]] += w[weight + i]
                share[mode[i]] += w[weight + i]
            ess[row] = 1.0 / square
            out.terms[row] = term
            for j in range(M):
                for i in range(N):
                    if share[j] > 0.0:
                        w[mode_weight + i] = w[weight + i] / share[j] if mode[i] == j else 0.0
                    else:
                        w[mode_weight + i] = w[weight + i]
                collapse_some(n, N, w, mode_weight, 1, state, law, result + j * law)
                out.log_mode[row, j] = np.log(share[j])
                for i in range(M):
                    if begun:
                        out.mixing[row, i * M + j] = 1.0 if i == j else 0.0
                    else:
                        out.mixing[row, i * M + j] = pair[i, j] / share[j] if share[j] > 0.0 else 1.0 / M
            keep(w, at, result, out.mode_mean, out.mode_covariance, row)
            for i in range(N if cloud.mode.shape[0] > 0 else 0):
                cloud.mode[row, i], cloud.log_weight[row, i] = mode[i], w[log_weight + i]
                write_row(n, w, state + i * law, cloud.mean, row, i * n)
                write_row(n * n, w, state + i * law + n, cloud.covariance, row, i * n * n)
            if 1.0 / square < 0.5 * N:
                copy(N * law, w, state, w, spare)
                kept[:] = mode
                point(w[weight : weight + N], uniform[row, N], before)
                for i in range(N):
                    copy(law, w, spare + before[i] * law, w, state + i * law)
                    mode[i] = kept[before[i]]
                    w[log_weight + i] = -np.log(N)
        out.log_likelihood[series] = total
