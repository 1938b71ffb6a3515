r"""The forward sweep: output, log-normalizer, entropy, score mean, variance and maximum, in one pass over the keys.

For a query with scores s_j, keys taken tile by tile, a row holds

    m  the largest score so far            z  Σ e^{s_j − m}
    c  the mean score under the weights    M  Σ e^{s_j − m} (s_j − c)²       o  Σ e^{s_j − m} v_j

A tile yields the same five numbers for its own keys, and two such summaries join by the parallel formula (Chan, Golub, LeVeque):
weights are rebased to the larger m, then

    z = z₁ + z₂,   c = c₁ + (c₂ − c₁) z₂/z,   M = M₁ + M₂ + (c₂ − c₁)² z₁ z₂/z.

No difference of large numbers occurs: the variance M/z is a sum of squares about the tile's own mean, and the entropy is taken as
log z − (c − m), where both terms are of the entropy's own size even when the scores are of size 10⁴.
"""

import math

import numpy as np
from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.rows import FAR, FAST, largest, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def _summarise(s, e, lo, hi, m):  # type: ignore[no-untyped-def]
    """Weights of s[lo:hi] relative to the maximum m, written back into s; their sum, mean score (relative to m) and squared deviation."""
    far = s.dtype.type(FAR)
    z = s.dtype.type(0)
    a = s.dtype.type(0)
    for j in range(lo, hi):
        d = s[j] - m
        d = d if d > far else far
        x = exp_of_negative(d)
        e[j] = x
        z += x
        a += x * d
    c = a / z
    centre = m + c
    M = s.dtype.type(0)
    for j in range(lo, hi):
        d = s[j] - centre
        d = d if d > far else far
        x = e[j]
        M += x * d * d
        s[j] = x
    return z, c, M


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def forward_sweep(
    start, stop, tile_q, tile_k, scale, causal, window, cap,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    work, lines, output, statistics, best,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units start..stop; a unit is one tile of queries of one (batch, head), against all its keys.

    query (·, Q, D), key (·, K, D), value (·, K, Dv), bias (·, Qb, Kb), log_weight (·, K), mask (·, Qm, Km); ``*_at`` (units,) says which
    block of each belongs to a (batch, head). work: tile_q·(tile_k + D + Dv). lines (7, max(tile_q, tile_k)).
    Writes output (B·Hq, Q, Dv), statistics (5, B·Hq, Q): G, entropy, mean, variance, maximum, and best (B·Hq, Q): where the maximum is.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    tiles = (Q + tile_q - 1) // tile_q
    zero = scale * 0
    top, weight, mean, square = lines[0], lines[1], lines[2], lines[3]
    e, slope, bend = lines[4], lines[5], lines[6]
    scaled_all = work[tile_q * tile_k : tile_q * (tile_k + D)].reshape(tile_q, D)
    part_all = work[tile_q * (tile_k + D) : tile_q * (tile_k + D + Dv)].reshape(tile_q, Dv)
    for unit in range(start, stop):
        n, i0 = unit // tiles, (unit % tiles) * tile_q
        i1 = min(i0 + tile_q, Q)
        h = i1 - i0
        q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
        b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
        scaled, part = scaled_all[:h], part_all[:h]
        o = output[n, i0:i1]
        for i in range(h):
            top[i], weight[i], mean[i], square[i] = -np.inf, 0, 0, 0
            best[n, i0 + i] = 0
            for d in range(D):
                scaled[i, d] = q[i0 + i, d] * scale
            for d in range(Dv):
                o[i, d] = 0
        first, last = tile_range(i0, i1, Q, K, causal, window)
        for j0 in range(first, last, tile_k):
            j1 = min(j0 + tile_k, last)
            w = j1 - j0
            S = work[: h * w].reshape(h, w)
            np.dot(scaled, k[j0:j1].T, S)
            for i in range(h):
                s = S[i]
                lo, hi = visible(i0 + i, Q, K, causal, window)
                lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                to_scores(s, slope, bend, lo, hi, j0, i0 + i, cap, b, lw, mk)
                high = largest(s, lo, hi)
                if high == -np.inf:
                    for j in range(w):
                        s[j] = 0
                    continue
                m = top[i]
                if high > m:
                    for j in range(lo, hi):
                        if s[j] == high:
                            best[n, i0 + i] = j0 + j
                            break
                    rebase = exp_of_negative(m - high)
                    weight[i] *= rebase
                    mean[i] = mean[i] + (m - high) if weight[i] > 0 else zero
                    square[i] *= rebase
                    for d in range(Dv):
                        o[i, d] *= rebase
                    top[i] = high
                    m = high
                for j in range(lo):
                    s[j] = 0
                for j in range(hi, w):
                    s[j] = 0
                z, c, M = _summarise(s, e, lo, hi, m)
                if z > 0:
                    total = weight[i] + z
                    gap = c - mean[i]
                    square[i] += M + gap * gap * (weight[i] * (z / total))
                    mean[i] += gap * (z / total)
                    weight[i] = total
            if Dv > 0:
                np.dot(S, v[j0:j1], part)
                for i in range(h):
                    for d in range(Dv):
                        o[i, d] += part[i, d]
        for i in range(h):
            z = weight[i]
            if z > 0:
                inverse = 1 / z
                log_z = math.log(z)
                for d in range(Dv):
                    o[i, d] *= inverse
                statistics[0, n, i0 + i] = top[i] + log_z
                statistics[1, n, i0 + i] = log_z - mean[i]
                statistics[2, n, i0 + i] = top[i] + mean[i]
                statistics[3, n, i0 + i] = square[i] * inverse
            else:
                statistics[0, n, i0 + i] = -np.inf
                statistics[1, n, i0 + i] = 0
                statistics[2, n, i0 + i] = 0
                statistics[3, n, i0 + i] = 0
            statistics[4, n, i0 + i] = top[i]
