r"""The tangent sweep: the forward derivative of attention, a covariance under the attention distribution.

With ż = scale (<q̇,k> + <q,k̇>), the score's tangent is ṡ = σ' ż + bias tangent + log_weight tangent, and all tangents of a query are sums over p_j ṡ_j:

    Σ p ṡ',   Σ p c ṡ',   Σ p c² ṡ',   Σ p (ṡ' v + v̇),        c = s − mean,  ṡ' = ṡ − r.

Covariances do not change when a constant r is taken off ṡ; r is the mean of ṡ over the first visible tile, so that Cov(v, ṡ) = Σ p ṡ' v − … does not
come out as the difference of two large numbers. ``rules.py`` finishes the tangents from these sums.

The two inner products of ż are one: <(q̇,q), (k,k̇)>; the caller hands in the joined vectors, shorter where q̇ or k̇ is absent.
"""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.gradient import add_to
from exptilt.tilting.cpu.rows import FAR, FAST, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def add_score_tangents(t, slope, lo, hi, j0, i, cap, bias, log_weight):  # type: ignore[no-untyped-def]
    """t[lo:hi]: ż → ṡ, in place; bias (Qb, Kb) and log_weight (K,) are tangents, of size 0 when absent."""
    if cap > 0:
        for j in range(lo, hi):
            t[j] *= slope[j]
    if bias.size > 0:
        row = bias[i if bias.shape[0] > 1 else 0]
        if row.size > 1:
            for j in range(lo, hi):
                t[j] += row[j0 + j]
        else:
            b = row[0]
            for j in range(lo, hi):
                t[j] += b
    if log_weight.size > 0:
        for j in range(lo, hi):
            t[j] += log_weight[j0 + j]


@njit(fastmath=FAST, error_model="numpy")
def _weigh(s, t, c, lo, hi, G, centre):  # type: ignore[no-untyped-def]
    """s → p, c → s − mean; returns Σ p and Σ p ṡ."""
    far = s.dtype.type(FAR)
    z = s.dtype.type(0)
    a = s.dtype.type(0)
    for j in range(lo, hi):
        d = s[j] - centre
        c[j] = d if d > far else far
        p = exp_of_negative(s[j] - G)
        s[j] = p
        z += p
        a += p * t[j]
    return z, a


@njit(fastmath=FAST, error_model="numpy")
def _sums(s, t, c, lo, hi, r):  # type: ignore[no-untyped-def]
    """t: ṡ → p (ṡ − r); returns its sums against 1, c, c²."""
    x0 = s.dtype.type(0)
    x1 = s.dtype.type(0)
    x2 = s.dtype.type(0)
    for j in range(lo, hi):
        x = s[j] * (t[j] - r)
        t[j] = x
        d = c[j]
        x0 += x
        x1 += x * d
        x2 += x * d * d
    return x0, x1, x2


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def tangent_sweep(
    start, stop, tile_q, tile_k, scale, causal, window, cap,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    joined_query, joined_key, value_tangent, bias_tangent, bias_tangent_at, weight_tangent, weight_tangent_at, rows, work, lines, output, sums,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units start..stop as in ``forward_sweep``. Every tangent has one block for each (batch, head) of its primal.

    joined_query (B·Hq, Q, E), joined_key (B·Hkv, K, E) of ż (E = 0: no ż), value_tangent (B·Hkv, K, Dv), bias_tangent
    (·, Qb, Kb) and weight_tangent (·, K) with blocks of their own: size 0 when absent. rows (2, B·Hq, Q): G, mean. work: 2 tile_q tile_k + tile_q (D + Dv). lines (4, max(tile_q, tile_k)).
    Writes output (B·Hq, Q, Dv): Σ p (ṡ' v + v̇), and sums (4, B·Hq, Q): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    E = joined_query.shape[2]
    group = query_at.size // max(joined_key.shape[0], 1)
    tiles = (Q + tile_q - 1) // tile_q
    size = tile_q * tile_k
    slope, bend, c, settled = lines[0], lines[1], lines[2], lines[3]
    scaled_all = work[2 * size : 2 * size + tile_q * D].reshape(tile_q, D)
    part_all = work[2 * size + tile_q * D : 2 * size + tile_q * (D + Dv)].reshape(tile_q, Dv)
    for unit in range(start, stop):
        n, i0 = unit // tiles, (unit % tiles) * tile_q
        i1 = min(i0 + tile_q, Q)
        h = i1 - i0
        m = n // group
        q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
        b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
        bt = bias_tangent[bias_tangent_at[n]] if bias_tangent.size > 0 else bias_tangent[0]
        wt = weight_tangent[weight_tangent_at[n]] if weight_tangent.size > 0 else weight_tangent[0]
        scaled, part = scaled_all[:h], part_all[:h]
        o = output[n, i0:i1]
        for i in range(h):
            for a in range(4):
                sums[a, n, i0 + i] = 0
            for d in range(D):
                scaled[i, d] = q[i0 + i, d] * scale
            for d in range(Dv):
                o[i, d] = 0
        first, last = tile_range(i0, i1, Q, K, causal, window)
        for i in range(h):
            settled[i] = 0
        for j0 in range(first, last, tile_k):
            j1 = min(j0 + tile_k, last)
            w = j1 - j0
            S = work[: h * w].reshape(h, w)
            T = work[size : size + h * w].reshape(h, w)
            np.dot(scaled, k[j0:j1].T, S)
            if E > 0:
                np.dot(joined_query[n, i0:i1], joined_key[m, j0:j1].T, T)
            else:
                T[:] = 0
            for i in range(h):
                s, t = S[i], T[i]
                lo, hi = visible(i0 + i, Q, K, causal, window)
                lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                to_scores(s, slope, bend, lo, hi, j0, i0 + i, cap, b, lw, mk)
                add_score_tangents(t, slope, lo, hi, j0, i0 + i, cap, bt, wt)
                z, a = _weigh(s, t, c, lo, hi, rows[0, n, i0 + i], rows[1, n, i0 + i])
                if settled[i] == 0 and z > 0:
                    settled[i] = 1
                    sums[0, n, i0 + i] = a / z
                x0, x1, x2 = _sums(s, t, c, lo, hi, sums[0, n, i0 + i])
                sums[1, n, i0 + i] += x0
                sums[2, n, i0 + i] += x1
                sums[3, n, i0 + i] += x2
                for j in range(lo):
                    s[j] = 0
                    t[j] = 0
                for j in range(hi, w):
                    s[j] = 0
                    t[j] = 0
            if Dv > 0:
                np.dot(T, v[j0:j1], part)
                add_to(o, part)
                if value_tangent.size > 0:
                    np.dot(S, value_tangent[m, j0:j1], part)
                    add_to(o, part)
