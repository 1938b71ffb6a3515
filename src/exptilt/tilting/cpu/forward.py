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
from exptilt.tilting.cpu.product import THIN, product, shelve, thin_scores, thin_sum
from exptilt.tilting.cpu.rows import FAR, FAST, LOW, clear_outside, largest, part_of, tile_part, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def _summarise(s, e, m):
    """Weights of s relative to the maximum m, written back into s; their sum, mean score (relative to m) and squared deviation."""
    far = s.dtype.type(FAR)
    low = s.dtype.type(LOW)  # the weight is 0 here and below
    z = s.dtype.type(0)
    a = s.dtype.type(0)
    for j in range(s.size):
        d = s[j] - m
        d = low if d < low else d
        x = exp_of_negative(d)
        e[j] = x
        z += x
        a += x * d
    c = a / z
    centre = m + c
    M = s.dtype.type(0)
    for j in range(s.size):
        d = s[j] - centre
        d = d if d > far else far
        x = e[j]
        M += x * d * d
        s[j] = x
    return z, c, M


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def forward_sweep(
    start, stop, parts, tile_q, tile_k, width, scale, causal, window, cap,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    tile, scaled, summed, lines, keys, key_tags, values, value_tags, output, statistics, best,
):  # fmt: skip
    """Units start..stop; a unit is one tile of queries of one (batch, head) against one part of its keys.

    query (·, Q, D), key (·, K, D), value (·, K, Dv), bias (·, Qb, Kb), log_weight (·, K), mask (·, Qm, Km); ``*_at`` (units,) says which
    block of each belongs to a (batch, head). A thread's own: tile (tile_q, tile_k + width), scaled (tile_q, D),
    summed (tile_q, Dv padded), lines (7, max(tile_q, tile_k)), and shelves of packed keys and values with their tags.
    Writes output (parts·B·Hq, Q, Dv), statistics (5, parts·B·Hq, Q): G, entropy, mean, variance, maximum, and best (parts·B·Hq, Q): where
    the maximum is. Keys come in parts only where queries are too few to keep the threads busy; `join` puts them together.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    tiles, heads = (Q + tile_q - 1) // tile_q, query_at.size
    zero = scale * 0
    top, weight, mean, square = lines[0], lines[1], lines[2], lines[3]
    e, slope, bend = lines[4], lines[5], lines[6]
    S, flat_S, flat_scaled, flat_sum = tile, tile.reshape(tile.size), scaled.reshape(scaled.size), summed.reshape(summed.size)
    flat_keys, flat_values = keys.reshape(keys.size), values.reshape(values.size)
    long, wide = tile.shape[1], summed.shape[1]
    for unit in range(start, stop):
        part, n, i0 = unit // (tiles * heads), unit // tiles % heads, unit % tiles * tile_q
        row = part * heads + n
        h = min(tile_q, Q - i0)
        q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
        b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
        plain = cap <= 0 and b.size == 0 and lw.size == 0 and mk.size == 0
        summed[:h] = 0
        for i in range(h):
            top[i], weight[i], mean[i], square[i] = -np.inf, 0, 0, 0
            best[row, i0 + i] = 0
            for d in range(D):
                scaled[i, d] = q[i0 + i, d] * scale
        first, last = tile_range(i0, i0 + h, Q, K, causal, window)
        begin, end = first // tile_k, (last + tile_k - 1) // tile_k
        begin, end = begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts
        for t in range(begin, end):
            j0, skip, w = tile_part(t, tile_k, first, last, width)
            if h <= THIN:
                thin_scores(flat_S, long, scaled, k[j0 : j0 + w], h)
            else:
                at = shelve(keys, key_tags, key_at[n], t, k[t * tile_k : (t + 1) * tile_k], D * width, width, True) + skip * D
                product(flat_S, 0, long, flat_scaled, 0, D, 1, flat_keys, at, D * width, h, w, D, width, False)
            for i in range(h):
                lo, hi = visible(i0 + i, Q, K, causal, window)
                lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                if hi - lo < w:
                    clear_outside(S[i, :w], lo, hi)
                s = S[i, lo:hi]
                if not plain:
                    x = part_of(b, i0 + i, j0 + lo, j0 + hi)
                    y = part_of(mk, i0 + i, j0 + lo, j0 + hi)
                    to_scores(s, slope, bend, cap, x, lw[j0 + lo : j0 + hi], y)
                high = largest(s)
                if high == -np.inf:  # nothing to see, or nothing but NaN
                    if np.isnan(s).any():
                        weight[i] = np.nan
                    s[:] = 0
                    continue
                m = top[i]
                if high > m:
                    for j in range(s.size):
                        if s[j] == high:
                            best[row, i0 + i] = j0 + lo + j
                            break
                    rebase = exp_of_negative(m - high)
                    weight[i] *= rebase
                    mean[i] = mean[i] + (m - high) if weight[i] > 0 else zero
                    square[i] *= rebase
                    for d in range(Dv):
                        summed[i, d] *= rebase
                    top[i] = high
                    m = high
                z, c, M = _summarise(s, e, m)
                if z != 0:
                    total = weight[i] + z
                    gap = c - mean[i]
                    square[i] += M + gap * gap * (weight[i] * (z / total))
                    mean[i] += gap * (z / total)
                    weight[i] = total
            if Dv > 0 and h <= THIN:
                thin_sum(flat_sum, wide, flat_S, long, v[j0 : j0 + w], h)
            elif Dv > 0:
                v_tile = v[t * tile_k : (t + 1) * tile_k]
                at = shelve(values, value_tags, value_at[n], t, v_tile, tile_k * width, width, False) + skip * width
                product(flat_sum, 0, wide, flat_S, 0, long, 1, flat_values, at, tile_k * width, h, Dv, w, width, True)
        for i in range(h):
            z = weight[i]
            if z != 0:
                inverse = 1 / z
                log_z = math.log(z)
                for d in range(Dv):
                    output[row, i0 + i, d] = summed[i, d] * inverse
                statistics[0, row, i0 + i] = top[i] + log_z
                statistics[1, row, i0 + i] = log_z - mean[i]
                statistics[2, row, i0 + i] = top[i] + mean[i]
                statistics[3, row, i0 + i] = square[i] * inverse
            else:
                for d in range(Dv):
                    output[row, i0 + i, d] = 0
                statistics[0, row, i0 + i] = -np.inf
                statistics[1, row, i0 + i] = 0
                statistics[2, row, i0 + i] = 0
                statistics[3, row, i0 + i] = 0
            statistics[4, row, i0 + i] = top[i]


@njit(nogil=True, cache=True, error_model="numpy")
def join(parts, part_output, part_statistics, part_best, output, statistics, best):
    """The results of parts of the keys, joined as in ``merge.py``: of shapes as the sweep writes them, with parts and without."""
    count, Q, Dv = output.shape
    for n in range(count):
        for i in range(Q):
            top = part_statistics[0, n, i]
            best[n, i] = part_best[n, i]
            high = part_statistics[4, n, i]
            for part in range(1, parts):
                row = part * count + n
                G = part_statistics[0, row, i]
                top = G if top < G or np.isnan(G) else top
                if part_statistics[4, row, i] > high:
                    high, best[n, i] = part_statistics[4, row, i], part_best[row, i]
            output[n, i, :] = 0
            statistics[:, n, i] = 0
            statistics[0, n, i], statistics[4, n, i] = top, high
            if top == -np.inf:
                continue
            z = top * 0
            for part in range(parts):
                z += math.exp(part_statistics[0, part * count + n, i] - top)
            statistics[0, n, i] = top + math.log(z)
            for part in range(parts):
                row = part * count + n
                log_w = part_statistics[0, row, i] - top - math.log(z)
                w = math.exp(log_w)
                if w == 0:
                    continue
                statistics[1, n, i] += w * (part_statistics[1, row, i] - log_w)
                statistics[2, n, i] += w * part_statistics[2, row, i]
                for d in range(Dv):
                    output[n, i, d] += w * part_output[row, i, d]
            for part in range(parts):
                row = part * count + n
                w = math.exp(part_statistics[0, row, i] - top) / z
                if w != 0:
                    gap = part_statistics[2, row, i] - statistics[2, n, i]
                    statistics[3, n, i] += w * (part_statistics[3, row, i] + gap * gap)


@njit(nogil=True, cache=True, error_model="numpy")
def few(query, key, value, log_weight, scale, output, statistics):
    """A few queries (Q <= THIN, D) on keys (K, D) and values (K, Dv) of one head, on this thread, without any ado.

    log_weight (K,) or empty. Writes output (Q, Dv) and statistics (5, Q) as `forward_sweep` does.
    """
    (Q, D), (K, Dv) = query.shape, value.shape
    tile_k = min(1024, K)
    width = 64 // query.itemsize
    none, no_mask, at = np.empty((1, 1, 0), query.dtype), np.empty((1, 1, 0), np.uint8), np.zeros(1, np.int64)
    weight = log_weight.reshape(1, log_weight.size)
    shelf, tags = np.empty((1, 0), query.dtype), np.zeros(1, np.int64)
    tile, scaled, summed = np.empty((Q, tile_k + width), query.dtype), np.empty((Q, D), query.dtype), np.empty((Q, Dv), query.dtype)
    lines, best = np.empty((7, max(Q, tile_k)), query.dtype), np.empty((1, Q), np.int64)
    forward_sweep(
        0, 1, 1, Q, tile_k, width, scale, False, -1, scale * 0,
        query.reshape(1, Q, D), key.reshape(1, K, D), value.reshape(1, K, Dv), none, weight, no_mask, at, at, at, at, at, at,
        tile, scaled, summed, lines, shelf, tags, shelf, tags, output.reshape(1, Q, Dv), statistics.reshape(5, 1, Q), best,
    )  # fmt: skip
