r"""The gradient sweep: a cotangent on the outputs of attention, carried back to query, key, value, log_weight and bias.

Every derivative of every output by a score is p_ij times a polynomial in the centred score c = s − mean (derived in ``rules.py``):

    ds_ij = p_ij t_ij,    t_ij = <ō_i, v_j> + a0_i + a1_i c_ij + a2_i c_ij²,    p_ij = e^{s_ij − G_i},

so the sweep is told only G, the mean and a0, a1, a2 of each query. With the slope σ' of the softcap,

    q̄_i = scale Σ_j ds σ' k_j,    k̄_j = scale Σ_i ds σ' q_i,    v̄_j = Σ_i p_ij ō_i,    column and row sums of ds for log_weight and bias.

A unit is one key block (a batch item and key head, with all query heads that share it): its k̄ and v̄ are written by one thread only. Where there are
fewer blocks than threads, each block's queries are dealt out to `splits` units with a copy of k̄, v̄ each, summed at the end.
"""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.rows import FAR, FAST, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def _row(s, t, lo, hi, G, centre, a0, a1, a2, columns, j0):  # type: ignore[no-untyped-def]
    """s → p and t → ds in place on lo..hi; ds summed into columns (if any); returns Σ ds."""
    far = s.dtype.type(FAR)
    total = s.dtype.type(0)
    for j in range(lo, hi):
        p = exp_of_negative(s[j] - G)
        c = s[j] - centre
        c = c if c > far else far
        d = p * (t[j] + a0 + c * (a1 + a2 * c))
        s[j] = p
        t[j] = d
        total += d
    if columns.size > 0:
        for j in range(lo, hi):
            columns[j0 + j] += t[j]
    return total


@njit(fastmath=FAST, error_model="numpy")
def add_bias_gradient(target, t, lo, hi, j0, i):  # type: ignore[no-untyped-def]
    """Add t[lo:hi] to row i of a bias gradient that is (Q, K)."""
    row = target[i]
    for j in range(lo, hi):
        row[j0 + j] += t[j]


@njit(fastmath=FAST, error_model="numpy")
def add_to(target, part):  # type: ignore[no-untyped-def]
    """target += part, both (rows, columns)."""
    for i in range(target.shape[0]):
        a, b = target[i], part[i]
        for d in range(a.size):
            a[d] += b[d]


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def gradient_sweep(
    start, stop, units, bounds, splits, group, tile_q, tile_k, scale, causal, window, cap, need_query, need_key, need_value,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    cotangent, cotangent_at, rows, work, lines,
    query_grad, key_grad, value_grad, column_sum, row_sum, bias_grad, grad_at,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units units[bounds[start]:bounds[stop]], each `block · splits + part`. Inputs as in ``forward_sweep``; cotangent (·, Q, Dv) of the output.

    rows (5, B·Hq, Q): G, mean, a0, a1, a2. work: 2 tile_q tile_k + tile_q D + max(tile_q, tile_k) max(D, Dv) + tile_q D. lines (2, tile_k).
    Writes query_grad (B·Hq, Q, D), key_grad (splits, B·Hkv, K, D), value_grad (splits, B·Hkv, K, Dv), column_sum (splits, B·Hq, K),
    row_sum (B·Hq, Q), bias_grad (·, Q, K); those of size 0 are not wanted. All but query_grad and row_sum must come in as zeros.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    tiles = (Q + tile_q - 1) // tile_q
    size = tile_q * tile_k
    slope, bend = lines[0], lines[1]
    scaled_all = work[2 * size : 2 * size + tile_q * D].reshape(tile_q, D)
    total_all = work[2 * size + tile_q * D : 2 * size + 2 * tile_q * D].reshape(tile_q, D)
    spare = work[2 * size + 2 * tile_q * D :]
    for u in range(bounds[start], bounds[stop]):
        block, part = units[u] // splits, units[u] % splits
        for turn in range(part, group * tiles, splits):
            n, i0 = block * group + turn // tiles, (turn % tiles) * tile_q
            i1 = min(i0 + tile_q, Q)
            h = i1 - i0
            q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
            b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
            out = cotangent[cotangent_at[n], i0:i1]
            scaled, total = scaled_all[:h], total_all[:h]
            columns = column_sum[part, n] if column_sum.size > 0 else column_sum[0, 0]
            for i in range(h):
                row_sum[n, i0 + i] = 0
                for d in range(D):
                    scaled[i, d] = q[i0 + i, d] * scale
                    total[i, d] = 0
            first, last = tile_range(i0, i1, Q, K, causal, window)
            for j0 in range(first, last, tile_k):
                j1 = min(j0 + tile_k, last)
                w = j1 - j0
                S = work[: h * w].reshape(h, w)
                T = work[size : size + h * w].reshape(h, w)
                np.dot(scaled, k[j0:j1].T, S)
                if Dv > 0:
                    np.dot(out, v[j0:j1].T, T)
                else:
                    T[:] = 0
                for i in range(h):
                    s, t = S[i], T[i]
                    lo, hi = visible(i0 + i, Q, K, causal, window)
                    lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                    to_scores(s, slope, bend, lo, hi, j0, i0 + i, cap, b, lw, mk)
                    G, centre = rows[0, n, i0 + i], rows[1, n, i0 + i]
                    a0, a1, a2 = rows[2, n, i0 + i], rows[3, n, i0 + i], rows[4, n, i0 + i]
                    row_sum[n, i0 + i] += _row(s, t, lo, hi, G, centre, a0, a1, a2, columns, j0)
                    if bias_grad.size > 0:
                        add_bias_gradient(bias_grad[grad_at[n]], t, lo, hi, j0, i0 + i)
                    if cap > 0:
                        for j in range(lo, hi):
                            t[j] *= slope[j]
                    for j in range(lo):
                        s[j] = 0
                        t[j] = 0
                    for j in range(hi, w):
                        s[j] = 0
                        t[j] = 0
                if need_value and Dv > 0:
                    rest = spare[: w * Dv].reshape(w, Dv)
                    np.dot(S.T, out, rest)
                    add_to(value_grad[part, block, j0:j1], rest)
                if need_query:
                    rest = spare[: h * D].reshape(h, D)
                    np.dot(T, k[j0:j1], rest)
                    add_to(total, rest)
                if need_key:
                    rest = spare[: w * D].reshape(w, D)
                    np.dot(T.T, scaled, rest)
                    add_to(key_grad[part, block, j0:j1], rest)
            if need_query:
                for i in range(h):
                    for d in range(D):
                        query_grad[n, i0 + i, d] = total[i, d] * scale
