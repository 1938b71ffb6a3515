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

from .buffers import Place, Run, gather, keep, law_before, layout, lift, load, work_buffer
from .filters import mixing_weights
from .kalman import (
    ROUNDING,
    Buffer,
    clear,
    collapse,
    copy,
    count,
    factor,
    joseph,
    kernel,
    multiply,
    predict,
    solve,
    turn,
)
from .numbers import get, get_lane, groups_of, inlined, put, put_lane, rolled, width, zero


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
def rauch(w: Buffer, at: Place, move: int, filtered: int, later: int, target: int, gain: int) -> None:
    """Write the law at `filtered` given that of the next step, at `later`, to which `move` leads.

    `gain` holds J' (which is left), four more matrices (n·n) and a vector.
    """
    rolled(0)
    n, nn = at.n, at.n * at.n
    FP = gain + nn
    S = FP + nn
    size = S + nn
    joint = size + n
    predict(n, w, move, filtered, at.ahead, FP)
    copy(nn, w, FP, w, gain)
    copy(nn, w, at.ahead + n, w, S)
    for i in range(n):
        put(w, size + i, get(w, S + i * n + i))
    factor(n, w, S, size, ROUNDING * n, np.inf)
    solve(n, n, w, S, gain)
    for i in range(n):
        put(w, size + i, get(w, later + i) - get(w, at.ahead + i))
    for i in range(nn):
        put(w, S + i, get(w, later + n + i) + get(w, move + nn + n + i))
    multiply(w, 1, n, n, 1.0, (size, 0, 1), gain, filtered, target)
    joseph(n, n, w, move, S, gain, FP, filtered + n, target + n, joint)


@inlined
def through(w: Buffer, at: Place, own: int, maps: int, g: int, k: int, link: int, room: int) -> None:
    """Write the move to mode k from the modes of group g through their maps: W · map, Q + W · spread · W'."""
    rolled(0)
    n, nn = at.n, at.n * at.n
    across = room + at.law
    for j in range(g * width(w), min(at.M, (g + 1) * width(w))):
        place = maps + (j * at.groups + k // width(w)) * at.move
        for i in range(nn):
            put_lane(w, across + i, j % width(w), get_lane(w, place + i, k % width(w)))
            spread = get_lane(w, place + nn + n + i, k % width(w))
            put_lane(w, room + n + i, j % width(w), spread)
    clear(n, w, room, 0, 0.0)
    predict(n, w, own, room, link + nn, across + nn)
    clear(nn, w, link, 0, 0.0)
    multiply(w, n, n, n, 1.0, (own, n, 1), across, link, link)
    turn(n, w, link)


@inlined
def add_pair(
    w: Buffer,
    n: int,
    weight: int,
    move: int,
    part: int,
    later: int,
    gain: int,
    known: Buffer,
    row: int,
    sums: int,
) -> None:
    """Add a pair of modes to the sums for EM: the earlier state x at `part`, the later x', the move between.

    Cov(x', x) = P̂ J', Cov(r, x) = Cov(x', x) − W P, and Var r = P' − W Cov(x, x') − Cov(r, x) W'. `gain`
    is as `rauch` leaves it; the sums are one number, then zz, rz and rr.
    """
    rolled(0)
    nn, q = n * n, n + known.shape[1]
    cross, cross_r, spread = gain + nn, gain + 2 * nn, gain + 3 * nn + n
    r = gain + 3 * nn
    zz = sums + 1
    rz = zz + q * q
    rr = rz + n * q
    clear(nn, w, cross, 0, 0.0)
    multiply(w, n, n, n, 1.0, (later + n, n, 1), gain, cross, cross)
    multiply(w, n, n, n, -1.0, (move, n, 1), part + n, cross, cross_r)
    multiply(w, n, n, n, -1.0, (cross_r, n, 1), move + 2 * nn + n, later + n, spread)
    for i in range(n):
        s = get(w, later + i) - get(w, move + nn + i)
        for k in range(n):
            s = s - get(w, move + i * n + k) * get(w, part + k)
        put(w, r + i, s)
    share = get(w, weight)
    put(w, sums, get(w, sums) + share)
    for i in range(n):
        xi, ri = get(w, part + i), get(w, r + i)
        for l in range(n):
            s = get(w, spread + i * n + l) + ri * get(w, r + l)
            for k in range(n):
                s = s - get(w, move + i * n + k) * get(w, cross + l * n + k)
            at = rr + i * n + l
            put(w, at, get(w, at) + share * s)
            at = rz + i * q + l
            put(w, at, get(w, at) + share * (get(w, cross_r + i * n + l) + ri * get(w, part + l)))
            at = zz + i * q + l
            put(w, at, get(w, at) + share * (get(w, part + n + i * n + l) + xi * get(w, part + l)))
        for l in range(known.shape[1]):
            at = zz + i * q + n + l
            value = get(w, at) + share * known[row, l] * xi
            put(w, at, value)
            put(w, zz + (n + l) * q + i, value)
            at = rz + i * q + n + l
            put(w, at, get(w, at) + share * known[row, l] * ri)
    for i in range(known.shape[1]):
        for l in range(known.shape[1]):
            at = zz + (n + i) * q + n + l
            put(w, at, get(w, at) + share * (known[row, i] * known[row, l]))


@inlined
def add_lanes(w: Buffer, at: int, table: Buffer) -> int:
    """Add sums over lanes to a table of them; return where the next sums are."""
    rolled(0)
    flat = table.reshape(-1)
    for i in range(flat.size):
        for lane in range(width(w)):
            flat[i] += get_lane(w, at + i, lane)
    return at + flat.size


@kernel
def smooth_back(
    run: Run, begin: int, end: int, s: Smoothing, regressors: Buffer, sums: bool, sizes: tuple[Any, Any]
) -> None:
    """Run backwards over series `begin` to `end`; `regressors` is (rows, q); `sums`: EM wants its sums.

    Earlier modes lie in lanes, later ones come one after the other. Where steps were done before, the pass
    ends at the last of them, whose law is left as the initial one.
    """
    rolled(sizes[0])
    p, _, starts, _, lead = run
    M = p.initial_log_probability.shape[1]
    G = groups_of(M, sizes[0])
    at = layout(M, count(sizes[0]), count(sizes[1]), G)
    n, law, nn = at.n, at.law, at.n * at.n
    gain = at.end
    own = gain + 5 * nn + n  # the move of one later mode, in all lanes, and its law
    link = own + at.move  # the same move, through maps
    later = link + at.move
    state = later + law
    log_mode = state + G * law
    hat = log_mode + G  # smoothed laws and mode probabilities of the later step
    hat_mode = hat + G * law
    new = hat_mode + G  # and of this one
    parts = new + G * law  # by later mode, of one group
    score = parts + M * law
    weight = score + M * G
    prior = weight + M * G
    pair = prior + G  # [k · G + group of j]
    share = pair + M * G
    total = share + M * G
    added = total + G  # for each later mode, the sums for EM
    size = 1 + (n + regressors.shape[1]) ** 2 + n * (n + regressors.shape[1]) + nn
    maps = added + M * size
    w = work_buffer(p, at, maps, sizes[0])
    L = width(w)
    for series in range(begin, end):
        length = starts[series + 1] - starts[series]
        law_before(run, series, length, w, at, hat, hat_mode)
        for j in range(M):
            put_lane(w, hat_mode + j // L, j % L, np.exp(get_lane(w, hat_mode + j // L, j % L)))
        for back in range(length - lead[series]):
            t = length - 1 - back
            row = starts[series] + t
            gather(M, 1, w, hat_mode, 1, s.probability, row, 0)
            keep(w, at, hat, s.mean, s.covariance, row)
            if t == 0 and p.first == 1:
                for i in range(M * M):
                    s.pairs[row, i] = s.probability[row, i // M] if i % (M + 1) == 0 else 0.0
                break
            load(p, series, t, back == 0, w, at, maps)
            law_before(run, series, t, w, at, state, log_mode)
            mixing_weights(w, at, log_mode, False, score, weight, prior)
            for j in range(M):
                for k in range(M):
                    value = get_lane(w, weight + j * G + k // L, k % L) * s.probability[row, k]
                    s.pairs[row, j * M + k] = value
                    put_lane(w, pair + k * G + j // L, j % L, value)
            for g in range(G):
                mine = zero(w)
                for k in range(M):
                    mine = mine + get(w, pair + k * G + g)
                put(w, total + g, mine)
                for k in range(M):
                    put(w, share + k * G + g, get(w, pair + k * G + g) / mine)
            for j in range(G * L):
                if not get_lane(w, total + j // L, j % L) > 0.0:
                    for k in range(M):
                        put_lane(w, share + k * G + j // L, j % L, 0.0)
            for g in range(G):
                filtered = state + g * law
                for k in range(M):
                    target = parts + k * law
                    copy(law, w, filtered, w, target)
                    if not s.probability[row, k] > 0.0:
                        continue
                    lift(at.move, w, k, at.moves, at.move, own)
                    lift(law, w, k, hat, law, later)
                    move = own
                    if p.maps.size > 0:
                        move = link
                        through(w, at, own, maps, g, k, link, gain)
                    rauch(w, at, move, filtered, later, target, gain)
                    if sums:
                        both, place = pair + k * G + g, added + k * size
                        add_pair(w, n, both, move, target, later, gain, regressors, row, place)
                collapse(n, M, w, share + g, G, parts, law, new + g * law)
            for j in range(M):
                place, lane = j // L, j % L
                if not get_lane(w, total + place, lane) > 0.0:
                    # a mode the series cannot have been in keeps its filtered moments
                    for i in range(law):
                        put_lane(w, new + place * law + i, lane, get_lane(w, state + place * law + i, lane))
            copy(G, w, total, w, hat_mode)
            copy(G * law, w, new, w, hat)
        gather(M, 1, w, hat_mode, 1, s.initial_probability, series, 0)
        keep(w, at, hat, s.initial_mean, s.initial_covariance, series)
    for k in range(M):
        place = add_lanes(w, added + k * size, s.total[k : k + 1])
        for table in (s.zz, s.rz, s.rr):
            place = add_lanes(w, place, table[k])
