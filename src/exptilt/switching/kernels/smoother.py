r"""Kim's backward pass: Rauch's recursion for each pair of successive modes, collapsed.

From the filtered law of mode j at t, carried to mode k at t + 1 by F = W_k (times the map from j to k, if
any) with noise Q:

    P(s_t = j, s_{t+1} = k | y) = P(s_{t+1} = k | y) · μ_j π_jk / Σ_j μ_j π_jk
    J = P_j F' (F P_j F' + Q)^{-1},   x_jk = x_j + J (x̂_k − F x_j − c_k),
    P_jk = (I − J F) P_j (I − J F)' + J (P̂_k + Q) J'

and x̂_j, P̂_j are the collapse of x_jk, P_jk over k. With GPB2's filtered moments this is Kim's smoother
(1994); with IMM's or GPB1's it is a fixed-interval smoother for those. The covariance is a sum of positive
terms. Where F P_j F' + Q is singular (exact observations, padded states) a generalised inverse is used:
directions without variance are left alone.

On the way the pass adds up what EM needs, for each mode k with z_t = (x_{t−1}, g_t), g_t the known regressors
(1 and the inputs), and r_t = x_t − W_k x_{t−1} − c_k what the present parameters leave over:

    count_k = Σ P(s_t = k | y),    zz_k = Σ E[z z'; s_t = k],
    rz_k = Σ E[r z'; s_t = k],     rr_k = Σ E[r r'; s_t = k]
"""

from typing import Any, NamedTuple

import numpy as np

from .buffers import Place, Run, begin_series, keep, load, places, recall, work_buffer, write_row
from .kalman import (
    ROUNDING,
    Buffer,
    add_product,
    choose,
    clear,
    collapse,
    collapse_some,
    copy,
    count,
    factor,
    inlined,
    kernel,
    log_sum,
    predict,
    predict_some,
    product,
    solve,
    turn,
)


class Smoothing(NamedTuple):
    """What the backward pass writes; the last four fields are sums over steps, for EM."""

    probability: Buffer  # (rows, M)
    mean: Buffer  # (rows, M·n)
    covariance: Buffer  # (rows, M·n·n)
    pairs: Buffer  # (rows, M·M), [i, j] = P(s_{t−1} = i, s_t = j | y)
    initial_probability: Buffer  # (series, M): the step before the data, or the first one
    initial_mean: Buffer  # (series, M·n)
    initial_covariance: Buffer  # (series, M·n·n)
    total: Buffer  # (M,)
    zz: Buffer  # (M, n + q, n + q)
    rz: Buffer  # (M, n, n + q)
    rr: Buffer  # (M, n, n)


@inlined
def rauch(
    w: Buffer, at: Place, move: int, filtered: int, later: int, target: int, gain: int, work: int
) -> None:
    """Write the law at `filtered` given that of the next step, at `later`, to which `move` leads.

    `gain` is left with J (as the W of a move); `work` holds a move and two laws.
    """
    n, nn = at.n, at.n * at.n
    rest = work  # I − J F, as a move without offset and noise
    ahead = rest + at.move
    gap = ahead + at.law
    predict(n, w, move, filtered, ahead, rest)
    product(w, n, n, n, (move, n, 1), (filtered + n, n, 1), rest)
    copy(nn, w, ahead + n, w, gap + n)
    for i in range(n):
        w[gap + i] = w[gap + n + i * n + i]
    factor(n, w, gap + n, gap, ROUNDING * n, False)
    solve(n, n, w, gap + n, rest)
    for i in range(n):
        for k in range(n):
            w[gain + i * n + k] = w[rest + k * n + i]
        w[gap + i] = w[later + i] - w[ahead + i]
    for i in range(nn):
        w[gap + n + i] = w[later + n + i] + w[move + nn + n + i]
    clear(at.move, w, rest, 0, 0.0)
    clear(nn, w, rest, n, 1.0)
    add_product(w, n, n, n, -1.0, (gain, n, 1), (move, n, 1), w, rest)
    turn(n, w, rest)
    predict(n, w, rest, filtered, ahead, target)
    # what is left is a move too: J (later − ahead) + x, of covariance J (P̂ + Q) J' + (I − J F) P (I − J F)'
    copy(n, w, filtered, w, gain + nn)
    copy(nn, w, ahead + n, w, gain + nn + n)
    turn(n, w, gain)
    predict(n, w, gain, gap, target, rest)


@kernel
def rauch_some(
    w: Buffer, at: Place, move: int, filtered: int, later: int, target: int, gain: int, work: int
) -> None:
    """`rauch` for sizes known only at run time."""
    rauch(w, at, move, filtered, later, target, gain, work)


@inlined
def add_pair(
    s: Smoothing,
    k: int,
    weight: float,
    w: Buffer,
    n: int,
    move: int,
    part: int,
    later: int,
    work: int,
    known: Buffer,
) -> None:
    """Add a pair of modes to the sums for EM: the earlier state x at `part`, the later x', the move between.

    Cov(x', x) is at `work`. Cov(r, x) = Cov(x', x) − W P, and Var r = P' − W Cov(x, x') − Cov(r, x) W'.
    """
    nn, cross = n * n, work
    cross_r = cross + nn
    r = cross_r + nn
    spread = r + n
    for i in range(n):
        w[r + i] = w[later + i] - w[move + nn + i]
    add_product(w, n, n, 1, -1.0, (move, n, 1), (part, 1, 1), w, r)
    copy(nn, w, cross, w, cross_r)
    add_product(w, n, n, n, -1.0, (move, n, 1), (part + n, n, 1), w, cross_r)
    copy(nn, w, later + n, w, spread)
    add_product(w, n, n, n, -1.0, (move, n, 1), (cross, 1, n), w, spread)
    add_product(w, n, n, n, -1.0, (cross_r, n, 1), (move, 1, n), w, spread)
    s.total[k] += weight
    for i in range(n):
        xi, ri = w[part + i], w[r + i]
        for l in range(n):
            s.zz[k, i, l] += weight * (w[part + n + i * n + l] + xi * w[part + l])
            s.rz[k, i, l] += weight * (w[cross_r + i * n + l] + ri * w[part + l])
            s.rr[k, i, l] += weight * (w[spread + i * n + l] + ri * w[r + l])
        for l in range(len(known)):
            s.zz[k, i, n + l] += weight * xi * known[l]
            s.zz[k, n + l, i] += weight * xi * known[l]
            s.rz[k, i, n + l] += weight * ri * known[l]
    for i in range(len(known)):
        for l in range(len(known)):
            s.zz[k, n + i, n + l] += weight * known[i] * known[l]


@kernel
def smooth_back(
    run: Run, begin: int, end: int, s: Smoothing, regressors: Buffer, sums: bool, sizes: tuple[Any, Any, Any]
) -> None:
    """Run backwards over series `begin` to `end`; `regressors` is (rows, q); `sums`: EM wants its sums.

    Where steps were done before, the pass ends at the last of them, whose law is left as the initial one.
    """
    p, _, starts, out, lead = run
    at = places(count(sizes[0]), count(sizes[1]), count(sizes[2]), p)
    back_step, merge = choose(sizes[1], rauch, rauch_some), choose(sizes[1], collapse, collapse_some)
    M, n, law, nn = at.M, at.n, at.law, at.n * at.n
    state = at.end
    log_mode = state + M * law
    hat = log_mode + M  # smoothed laws and mode probabilities of the later step
    hat_mode = hat + M * law
    new = hat_mode + M  # and of this one
    part = new + M * law
    weight = part + M * law
    score = weight + M
    pair = score + M
    link = pair + M * M  # the move from mode j to mode k, through a map
    gain = link + at.move
    work = gain + at.move
    maps = work + at.move + 2 * law
    w = work_buffer(p, at, maps)
    for series in range(begin, end):
        length = starts[series + 1] - starts[series]
        recall(out, starts[series + 1] - 1, w, at, hat, hat_mode)
        for j in range(M):
            w[hat_mode + j] = np.exp(w[hat_mode + j])
        for back in range(length - lead[series]):
            t = length - 1 - back
            row = starts[series] + t
            write_row(M, w, hat_mode, s.probability, row, 0)
            keep(w, at, hat, s.mean, s.covariance, row)
            if t == 0 and p.first == 1:
                for i in range(M * M):
                    s.pairs[row, i] = w[hat_mode + i // M] if i % (M + 1) == 0 else 0.0
                break
            load(p, series, t, back == 0, w, at, maps)
            if t == 0:
                begin_series(p, series, w, at, state, log_mode)
            else:
                recall(out, row - 1, w, at, state, log_mode)
            for k in range(M):
                for j in range(M):
                    w[score + j] = w[log_mode + j] + w[at.log_transition + j * M + k]
                total = log_sum(M, w, score, 1)
                for j in range(M):
                    share = np.exp(w[score + j] - total) if total > -np.inf else 0.0
                    w[pair + j * M + k] = w[hat_mode + k] * share
            write_row(M * M, w, pair, s.pairs, row, 0)
            for j in range(M):
                mine = 0.0
                for k in range(M):
                    mine += w[pair + j * M + k]
                for k in range(M):
                    w[weight + k] = w[pair + j * M + k] / mine if mine > 0.0 else 0.0
                    target = part + k * law
                    copy(law, w, state + j * law, w, target)
                    if not w[weight + k] > 0.0:
                        continue
                    move = at.moves + k * at.move
                    if p.maps.size > 0:
                        across = maps + (j * M + k) * at.move
                        # W · map, and Q + W · (covariance of the map) · W'
                        product(w, n, n, n, (move, n, 1), (across, n, 1), link)
                        copy(nn, w, across + nn + n, w, work + n)
                        predict_some(n, w, move, work, work + law, gain)
                        copy(n, w, move + nn, w, link + nn)
                        copy(nn, w, work + law + n, w, link + nn + n)
                        turn(n, w, link)
                        move = link
                    back_step(w, at, move, state + j * law, hat + k * law, target, gain, work)
                    if sums:
                        # Cov(later, earlier) = P̂_k J'
                        product(w, n, n, n, (hat + k * law + n, n, 1), (gain, 1, n), work)
                        known, later = regressors[row], hat + k * law
                        add_pair(s, k, w[pair + j * M + k], w, n, move, target, later, work, known)
                if mine > 0.0:
                    merge(n, M, w, weight, 1, part, law, new + j * law)
                else:  # a mode the series cannot have been in keeps its filtered moments
                    copy(law, w, state + j * law, w, new + j * law)
            for j in range(M):
                w[hat_mode + j] = 0.0
                for k in range(M):
                    w[hat_mode + j] += w[pair + j * M + k]
            copy(M * law, w, new, w, hat)
        write_row(M, w, hat_mode, s.initial_probability, series, 0)
        keep(w, at, hat, s.initial_mean, s.initial_covariance, series)
