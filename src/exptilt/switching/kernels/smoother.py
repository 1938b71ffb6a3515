r"""Kim's backward pass: Rauch's recursion for each pair of successive modes, collapsed.

From the filtered law of mode j at t, carried to mode k at t + 1 by F = W_k (times the map from j to k, if any) with noise Q:

    P(s_t = j, s_{t+1} = k | y) = P(s_{t+1} = k | y) · μ_j π_jk / Σ_j μ_j π_jk
    J = P_j F' (F P_j F' + Q)^{-1},   m_jk = m_j + J (m̂_k − F m_j − c_k),   P_jk = (I − J F) P_j (I − J F)' + J (P̂_k + Q) J'

and m̂_j, P̂_j are the collapse of m_jk, P_jk over k. With GPB2's filtered moments this is Kim's smoother (1994); with IMM's or GPB1's it
is a fixed-interval
smoother for those. The covariance is a sum of positive terms. Where F P_j F' + Q is singular (exact observations, padded states) a
generalised inverse is used: directions without variance are left alone.

On the way the pass adds up what EM needs, for each mode k with z_t = (x_{t−1}, g_t) and g_t the known regressors (1 and the inputs):

    count_k = Σ P(s_t = k | y),   zz_k = Σ E[z z'; s_t = k],   xz_k = Σ E[x_t z'; s_t = k],   xx_k = Σ E[x_t x_t'; s_t = k]
"""

from typing import NamedTuple

import numpy as np

from .buffers import Parameters, Stored, load, places
from .filters import begin_series
from .kalman import Buffer, collapse_some, copy, count, kernel, log_sum, predict_some


class Smoothing(NamedTuple):
    """What the backward pass writes; the last four fields are sums over all steps that follow another, for EM."""

    probability: Buffer  # (rows, M)
    mean: Buffer  # (rows, M·n)
    covariance: Buffer  # (rows, M·n·n)
    pairs: Buffer  # (rows, M·M), [i, j] = P(s_{t−1} = i, s_t = j | y)
    initial_probability: Buffer  # (series, M): the step before the data, or the first one
    initial_mean: Buffer  # (series, M·n)
    initial_covariance: Buffer  # (series, M·n·n)
    total: Buffer  # (M,)
    zz: Buffer  # (M, n + q, n + q)
    xz: Buffer  # (M, n, n + q)
    xx: Buffer  # (M, n, n)


@kernel
def solve_singular(n: int, w: Buffer, S: int, C: int, L: int) -> None:
    """Overwrite C (n, n) with C S^{-1} for a positive semi-definite S; pivots below 1e-12 of their diagonal count as zero and are left
    out.
    """
    for a in range(n):
        for b in range(a):
            s = w[S + a * n + b]
            for k in range(b):
                s -= w[L + a * n + k] * w[L + b * n + k]
            w[L + a * n + b] = s * w[L + b * n + b]
        s = w[S + a * n + a]
        for k in range(a):
            s -= w[L + a * n + k] * w[L + a * n + k]
        w[L + a * n + a] = 1.0 / np.sqrt(s) if s > 1e-12 * w[S + a * n + a] else 0.0
    for i in range(n):
        for a in range(n):
            s = w[C + i * n + a]
            for b in range(a):
                s -= w[L + a * n + b] * w[C + i * n + b]
            w[C + i * n + a] = s * w[L + a * n + a]
        for back in range(n):
            a = n - 1 - back
            s = w[C + i * n + a]
            for b in range(a + 1, n):
                s -= w[L + b * n + a] * w[C + i * n + b]
            w[C + i * n + a] = s * w[L + a * n + a]


@kernel
def multiply(n: int, w: Buffer, A: int, B: int, out: int, across: int) -> None:
    """A B, or A B' where `across` is 1."""
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += w[A + i * n + k] * (w[B + j * n + k] if across == 1 else w[B + k * n + j])
            w[out + i * n + j] = s


@kernel
def smooth_back(p: Parameters, starts: Buffer, begin: int, end: int, out: Stored, s: Smoothing, regressors: Buffer,
                sizes: tuple) -> None:  # fmt: skip
    """Run backwards over series `begin` to `end`; `regressors` is (rows, q)."""
    M, n, m = count(sizes[0]), count(sizes[1]), count(sizes[2])
    nn, q = n * n, regressors.shape[1]
    at = places(M, n, m)
    state = at.end
    cov = state + M * n
    log_mode = cov + M * nn
    hat = log_mode + M
    hat_cov = hat + M * n
    part = hat_cov + M * nn
    part_cov = part + M * n
    weight = part_cov + M * nn
    score = weight + M
    hat_mode = score + M
    pair = hat_mode + M
    ahead = pair + M * M
    ahead_cov = ahead + n
    F = ahead_cov + nn
    noise = F + nn
    J = noise + nn
    A = J + nn
    extra = A + nn
    new = extra + nn
    new_cov = new + M * n
    scratch = new_cov + M * nn
    zero_cov = scratch + nn
    back_weight = zero_cov + nn
    maps = back_weight + M * M
    w = np.zeros(maps + 2 * p.maps.size)
    for series in range(begin, end):
        length = starts[series + 1] - starts[series]
        last = starts[series + 1] - 1
        copy(M * n, out.mode_mean[last], 0, w, hat)
        copy(M * nn, out.mode_covariance[last], 0, w, hat_cov)
        for j in range(M):
            w[hat_mode + j] = np.exp(out.log_mode[last, j])
        for back in range(length):
            t = length - 1 - back
            row = starts[series] + t
            for j in range(M):
                s.probability[row, j] = w[hat_mode + j]
            for i in range(M * n):
                s.mean[row, i] = w[hat + i]
            for i in range(M * nn):
                s.covariance[row, i] = w[hat_cov + i]
            if t == 0 and p.first == 1:
                for i in range(M * M):
                    s.pairs[row, i] = w[hat_mode + i // M] if i % (M + 1) == 0 else 0.0
                break
            load(M, n, m, p, series, t, back == 0, w, at, maps)
            if t == 0:
                begin_series(M, n, p, w, state, cov, log_mode)
            else:
                copy(M * n, out.mode_mean[row - 1], 0, w, state)
                copy(M * nn, out.mode_covariance[row - 1], 0, w, cov)
                copy(M, out.log_mode[row - 1], 0, w, log_mode)
            for k in range(M):
                for j in range(M):
                    w[score + j] = w[log_mode + j] + w[at.log_transition + j * M + k]
                total = log_sum(M, w, score, 1)
                for j in range(M):
                    w[back_weight + j * M + k] = np.exp(w[score + j] - total) if total > -np.inf else 0.0
                    w[pair + j * M + k] = w[hat_mode + k] * w[back_weight + j * M + k]
            for j in range(M):
                mine = 0.0
                for k in range(M):
                    mine += w[pair + j * M + k]
                for k in range(M):
                    s.pairs[row, j * M + k] = w[pair + j * M + k]
                    w[weight + k] = w[pair + j * M + k] / mine if mine > 0.0 else 0.0
                    copy(n, w, state + j * n, w, part + k * n)
                    copy(nn, w, cov + j * nn, w, part_cov + k * nn)
                    if not w[weight + k] > 0.0:
                        continue
                    W = at.W + k * nn
                    if p.maps.size > 0:
                        jk = (j * M + k) * nn
                        multiply(n, w, W, maps + jk, F, 0)
                        predict_some(
                            n,
                            w,
                            W,
                            at.zero,
                            at.Q + k * nn,
                            at.zero,
                            maps + p.maps.size + jk,
                            scratch,
                            noise,
                            extra,
                        )
                    else:
                        copy(nn, w, W, w, F)
                        copy(nn, w, at.Q + k * nn, w, noise)
                    predict_some(
                        n, w, F, at.c + k * n, noise, state + j * n, cov + j * nn, ahead, ahead_cov, scratch
                    )
                    multiply(n, w, cov + j * nn, F, J, 1)
                    solve_singular(n, w, ahead_cov, J, scratch)
                    for i in range(n):
                        v = w[state + j * n + i]
                        for l in range(n):
                            v += w[J + i * n + l] * (w[hat + k * n + l] - w[ahead + l])
                        w[part + k * n + i] = v
                    multiply(n, w, J, F, A, 0)
                    for i in range(nn):
                        w[A + i] = (1.0 if i % (n + 1) == 0 else 0.0) - w[A + i]
                        w[noise + i] += w[hat_cov + k * nn + i]
                    predict_some(n, w, A, at.zero, zero_cov, at.zero, cov + j * nn, ahead, extra, scratch)
                    predict_some(n, w, J, at.zero, extra, at.zero, noise, ahead, part_cov + k * nn, scratch)
                    # sums for EM: x' is the later state, x the earlier one, cov(x', x) = P̂_k J'
                    weight_jk = w[pair + j * M + k]
                    multiply(n, w, hat_cov + k * nn, J, extra, 1)
                    s.total[k] += weight_jk
                    for i in range(n):
                        xi, hi = w[part + k * n + i], w[hat + k * n + i]
                        for l in range(n):
                            s.zz[k, i, l] += weight_jk * (
                                w[part_cov + k * nn + i * n + l] + xi * w[part + k * n + l]
                            )
                            s.xz[k, i, l] += weight_jk * (w[extra + i * n + l] + hi * w[part + k * n + l])
                            s.xx[k, i, l] += weight_jk * (
                                w[hat_cov + k * nn + i * n + l] + hi * w[hat + k * n + l]
                            )
                        for l in range(q):
                            s.zz[k, i, n + l] += weight_jk * xi * regressors[row, l]
                            s.zz[k, n + l, i] += weight_jk * xi * regressors[row, l]
                            s.xz[k, i, n + l] += weight_jk * hi * regressors[row, l]
                    for i in range(q):
                        for l in range(q):
                            s.zz[k, n + i, n + l] += weight_jk * regressors[row, i] * regressors[row, l]
                if mine > 0.0:
                    collapse_some(n, M, w, weight, 1, part, n, part_cov, nn, new + j * n, new_cov + j * nn)
                else:  # a mode the series cannot have been in keeps its filtered moments
                    copy(n, w, state + j * n, w, new + j * n)
                    copy(nn, w, cov + j * nn, w, new_cov + j * nn)
            for j in range(M):
                w[hat_mode + j] = 0.0
                for k in range(M):
                    w[hat_mode + j] += w[pair + j * M + k]
            copy(M * n, w, new, w, hat)
            copy(M * nn, w, new_cov, w, hat_cov)
        for j in range(M):
            s.initial_probability[series, j] = w[hat_mode + j]
        for i in range(M * n):
            s.initial_mean[series, i] = w[hat + i]
        for i in range(M * nn):
            s.initial_covariance[series, i] = w[hat_cov + i]
