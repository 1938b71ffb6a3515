r"""The tangent sweep: the forward derivative of attention, a covariance under the attention distribution.

With ż = scale (<q̇,k> + <q,k̇>), the score's tangent is ṡ = σ' ż + bias tangent + log_weight tangent, and all tangents of a query are sums over p_j ṡ_j:

    Σ p ṡ',   Σ p c ṡ',   Σ p c² ṡ',   Σ p (ṡ' v + v̇),        c = s − mean,  ṡ' = ṡ − r.

Covariances do not change when a constant r is taken off ṡ; r is the mean of ṡ over the first visible tile, so that Cov(v, ṡ) = Σ p ṡ' v − … does not
come out as the difference of two large numbers. ``rules.py`` finishes the tangents from these sums.

The two inner products of ż are one: <(q̇,q), (k,k̇)>; the caller hands in the joined vectors, shorter where q̇ or k̇ is absent.
"""

from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.product import product, shelve
from exptilt.tilting.cpu.rows import FAR, FAST, add_row, clear_outside, part_of, tile_part, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def to_score_tangents(t, slope, cap, bias, log_weight):  # type: ignore[no-untyped-def]
    """t: ż → ṡ, in place; bias and log_weight are rows of tangents, empty when absent."""
    if cap > 0:
        for j in range(t.size):
            t[j] *= slope[j]
    add_row(t, bias)
    add_row(t, log_weight)


@njit(fastmath=FAST, error_model="numpy")
def _weigh(s, t, c, G, centre):  # type: ignore[no-untyped-def]
    """S → p, c → s − mean; returns Σ p and Σ p ṡ."""
    far = s.dtype.type(FAR)
    z = s.dtype.type(0)
    a = s.dtype.type(0)
    for j in range(s.size):
        d = s[j] - centre
        c[j] = d if d > far else far
        p = exp_of_negative(s[j] - G)
        s[j] = p
        z += p
        a += p * t[j]
    return z, a


@njit(fastmath=FAST, error_model="numpy")
def _sums(s, t, c, r):  # type: ignore[no-untyped-def]
    """t: ṡ → p (ṡ − r); returns its sums against 1, c, c²."""
    x0 = s.dtype.type(0)
    x1 = s.dtype.type(0)
    x2 = s.dtype.type(0)
    for j in range(s.size):
        x = s[j] * (t[j] - r)
        t[j] = x
        d = c[j]
        x0 += x
        x1 += x * d
        x2 += x * d * d
    return x0, x1, x2


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def tangent_sweep(
    start, stop, tile_q, tile_k, width, scale, causal, window, cap,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    joined_query, joined_key, value_tangent, bias_tangent, bias_tangent_at, weight_tangent, weight_tangent_at, rows,
    tile, scaled, summed, lines, keys, key_tags, joined, joined_tags, values, value_tags, moved, moved_tags, output, sums,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units start..stop as in ``forward_sweep``. Tangents of query, key and value have one block for each (batch, head) of their own.

    joined_query (B·Hq, Q, E), joined_key (B·Hkv, K, E) of ż (E = 0: no ż), value_tangent (B·Hkv, K, Dv), bias_tangent
    (·, Qb, Kb) and weight_tangent (·, K) with blocks of their own: size 0 when absent. rows (2, B·Hq, Q): G, mean. A thread's own: tile (2, tile_q, tile_k +
    width), scaled (tile_q, D), summed (tile_q, Dv padded), lines (4, max(tile_q, tile_k)), shelves of keys, joined keys, values and their tangents.
    Writes output (B·Hq, Q, Dv): Σ p (ṡ' v + v̇), and sums (4, B·Hq, Q): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    E = joined_query.shape[2]
    group = query_at.size // max(joined_key.shape[0], 1)
    tiles = (Q + tile_q - 1) // tile_q
    slope, bend, c, settled = lines[0], lines[1], lines[2], lines[3]
    S, T, flat_S, flat_T = tile[0], tile[1], tile[0].reshape(tile[0].size), tile[1].reshape(tile[1].size)
    flat_scaled, flat_sum, flat_query = scaled.reshape(scaled.size), summed.reshape(summed.size), joined_query.reshape(joined_query.size)
    flat_keys, flat_joined, flat_values, flat_moved = (
        keys.reshape(keys.size),
        joined.reshape(joined.size),
        values.reshape(values.size),
        moved.reshape(moved.size),
    )
    long, wide = tile.shape[2], summed.shape[1]
    for unit in range(start, stop):
        n, i0 = unit // tiles, (unit % tiles) * tile_q
        h = min(tile_q, Q - i0)
        m = n // group
        q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
        b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
        plain = cap <= 0 and b.size == 0 and lw.size == 0 and mk.size == 0
        bt = bias_tangent[bias_tangent_at[n]] if bias_tangent.size > 0 else bias_tangent[0]
        wt = weight_tangent[weight_tangent_at[n]] if weight_tangent.size > 0 else weight_tangent[0]
        summed[:h] = 0
        for i in range(h):
            settled[i] = 0
            for a in range(4):
                sums[a, n, i0 + i] = 0
            for d in range(D):
                scaled[i, d] = q[i0 + i, d] * scale
        first, last = tile_range(i0, i0 + h, Q, K, causal, window)
        for u in range(first // tile_k, (last + tile_k - 1) // tile_k):
            j0, skip, w = tile_part(u, tile_k, first, last, width)
            begin, end = u * tile_k, (u + 1) * tile_k
            at = shelve(keys, key_tags, key_at[n], u, k[begin:end], D * width, width, True) + skip * D
            product(flat_S, 0, long, flat_scaled, 0, D, 1, flat_keys, at, D * width, h, w, D, width, False)
            if E > 0:
                at = shelve(joined, joined_tags, m, u, joined_key[m, begin:end], E * width, width, True) + skip * E
                product(flat_T, 0, long, flat_query, (n * Q + i0) * E, E, 1, flat_joined, at, E * width, h, w, E, width, False)
            else:
                T[:h, :w] = 0
            for i in range(h):
                lo, hi = visible(i0 + i, Q, K, causal, window)
                lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                if hi - lo < w:
                    clear_outside(S[i, :w], lo, hi)
                    clear_outside(T[i, :w], lo, hi)
                s, t = S[i, lo:hi], T[i, lo:hi]
                if not plain:
                    x = part_of(b, i0 + i, j0 + lo, j0 + hi)
                    y = part_of(mk, i0 + i, j0 + lo, j0 + hi)
                    to_scores(s, slope, bend, cap, x, lw[j0 + lo : j0 + hi], y)
                if cap > 0 or bt.size > 0 or wt.size > 0:
                    to_score_tangents(t, slope, cap, part_of(bt, i0 + i, j0 + lo, j0 + hi), wt[j0 + lo : j0 + hi])
                z, a = _weigh(s, t, c, rows[0, n, i0 + i], rows[1, n, i0 + i])
                if settled[i] == 0 and z > 0:
                    settled[i] = 1
                    sums[0, n, i0 + i] = a / z
                x0, x1, x2 = _sums(s, t, c, sums[0, n, i0 + i])
                sums[1, n, i0 + i] += x0
                sums[2, n, i0 + i] += x1
                sums[3, n, i0 + i] += x2
            if Dv > 0:
                at = shelve(values, value_tags, value_at[n], u, v[begin:end], tile_k * width, width, False) + skip * width
                product(flat_sum, 0, wide, flat_T, 0, long, 1, flat_values, at, tile_k * width, h, Dv, w, width, True)
                if value_tangent.size > 0:
                    at = shelve(moved, moved_tags, m, u, value_tangent[m, begin:end], tile_k * width, width, False) + skip * width
                    product(flat_sum, 0, wide, flat_S, 0, long, 1, flat_moved, at, tile_k * width, h, Dv, w, width, True)
        for i in range(h):
            for d in range(Dv):
                output[n, i0 + i, d] = summed[i, d]
