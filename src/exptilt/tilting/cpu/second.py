r"""The second sweep: the gradient of a forward derivative, which is also the forward derivative of a gradient.

Let Φ = Σ_i <ō_i, ȯ_i> + Ḡ_i Ġ_i + … be a cotangent applied to a tangent. Its derivative by a score is p_ij r_ij (derived in ``rules.py``),

    r = (t + b1 + b2 c) ṡ' + <ō, v̇_j> + e0 + e1 c,      ṡ' = ṡ − Ġ,   t as in ``gradient.py``,

and through ṡ it also depends on q, k directly. With slope σ' and curvature σ'' of the softcap (0 without one),

    M1 = p (r σ' + t σ'' ż),   M2 = p t σ',
    q̂ = scale (M1 k + M2 k̇),   k̂ = scale (M1ᵀ q + M2ᵀ q̇),   v̂ = (p ṡ')ᵀ ō,   column and row sums of p r for log_weight and bias.

Joined vectors (q̇,q), (k,k̇) as in ``tangent.py`` make two products of each pair.
"""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.gradient import add_bias_gradient, add_to
from exptilt.tilting.cpu.rows import FAR, FAST, tile_range, to_scores, visible
from exptilt.tilting.cpu.tangent import add_score_tangents


@njit(fastmath=FAST, error_model="numpy")
def _row(s, t, u, g, lo, hi, G, centre, pushed, a, b1, b2, e0, e1, columns, j0):  # type: ignore[no-untyped-def]
    """s → p ṡ', t → p t, u: ṡ → p r, in place; g holds <ō, v̇> on the way in. Returns Σ p r."""
    far = s.dtype.type(FAR)
    total = s.dtype.type(0)
    a0, a1, a2 = a
    for j in range(lo, hi):
        p = exp_of_negative(s[j] - G)
        c = s[j] - centre
        c = c if c > far else far
        y = t[j] + a0 + c * (a1 + a2 * c)
        x = u[j] - pushed
        d = p * ((y + b1 + b2 * c) * x + g[j] + e0 + e1 * c)
        s[j] = p * x
        t[j] = p * y
        u[j] = d
        total += d
    if columns.size > 0:
        for j in range(lo, hi):
            columns[j0 + j] += u[j]
    return total


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def second_sweep(
    start, stop, units, bounds, splits, group, tile_q, tile_k, scale, causal, window, cap, need_query, need_key, need_value,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at,
    cotangent, cotangent_at, rows, query_tangent, key_tangent, joined_query, joined_key, value_tangent, bias_tangent, bias_tangent_at, weight_tangent, weight_tangent_at,
    work, lines, query_grad, key_grad, value_grad, column_sum, row_sum, bias_grad, grad_at,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units, inputs and outputs as in ``gradient_sweep``, tangents as in ``tangent_sweep``; query_tangent and key_tangent (already scaled
    and plain, each of size 0 when absent) once more on their own.

    rows (10, B·Hq, Q): G, mean, a0, a1, a2, Ġ, b1, b2, e0, e1. work: 4 tile_q tile_k + 2 tile_q D + max(tile_q, tile_k) max(D, Dv). lines (2, tile_k).
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    E = joined_query.shape[2]
    tiles = (Q + tile_q - 1) // tile_q
    size = tile_q * tile_k
    slope, bend = lines[0], lines[1]
    scaled_all = work[4 * size : 4 * size + tile_q * D].reshape(tile_q, D)
    total_all = work[4 * size + tile_q * D : 4 * size + 2 * tile_q * D].reshape(tile_q, D)
    spare = work[4 * size + 2 * tile_q * D :]
    for x in range(bounds[start], bounds[stop]):
        block, part = units[x] // splits, units[x] % splits
        for turn in range(part, group * tiles, splits):
            n, i0 = block * group + turn // tiles, (turn % tiles) * tile_q
            i1 = min(i0 + tile_q, Q)
            h = i1 - i0
            q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
            b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
            bt = bias_tangent[bias_tangent_at[n]] if bias_tangent.size > 0 else bias_tangent[0]
            wt = weight_tangent[weight_tangent_at[n]] if weight_tangent.size > 0 else weight_tangent[0]
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
                U = work[2 * size : 2 * size + h * w].reshape(h, w)
                V = work[3 * size : 3 * size + h * w].reshape(h, w)
                np.dot(scaled, k[j0:j1].T, S)
                if Dv > 0:
                    np.dot(out, v[j0:j1].T, T)
                else:
                    T[:] = 0
                if E > 0:
                    np.dot(joined_query[n, i0:i1], joined_key[block, j0:j1].T, U)
                else:
                    U[:] = 0
                if value_tangent.size > 0:
                    np.dot(out, value_tangent[block, j0:j1].T, V)
                else:
                    V[:] = 0
                for i in range(h):
                    s, t, u = S[i], T[i], U[i]
                    lo, hi = visible(i0 + i, Q, K, causal, window)
                    lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                    to_scores(s, slope, bend, lo, hi, j0, i0 + i, cap, b, lw, mk)
                    if cap > 0:
                        for j in range(lo, hi):
                            bend[j] *= u[j]  # σ'' ż
                    add_score_tangents(u, slope, lo, hi, j0, i0 + i, cap, bt, wt)
                    a = (rows[2, n, i0 + i], rows[3, n, i0 + i], rows[4, n, i0 + i])
                    row_sum[n, i0 + i] += _row(
                        s, t, u, V[i], lo, hi, rows[0, n, i0 + i], rows[1, n, i0 + i], rows[5, n, i0 + i], a,
                        rows[6, n, i0 + i], rows[7, n, i0 + i], rows[8, n, i0 + i], rows[9, n, i0 + i], columns, j0,
                    )  # fmt: skip
                    if bias_grad.size > 0:
                        add_bias_gradient(bias_grad[grad_at[n]], u, lo, hi, j0, i0 + i)
                    if cap > 0:
                        for j in range(lo, hi):
                            u[j] = u[j] * slope[j] + t[j] * bend[j]
                            t[j] *= slope[j]
                    for j in range(lo):
                        s[j], t[j], u[j] = 0, 0, 0
                    for j in range(hi, w):
                        s[j], t[j], u[j] = 0, 0, 0
                if need_value and Dv > 0:
                    rest = spare[: w * Dv].reshape(w, Dv)
                    np.dot(S.T, out, rest)
                    add_to(value_grad[part, block, j0:j1], rest)
                if need_query:
                    rest = spare[: h * D].reshape(h, D)
                    np.dot(U, k[j0:j1], rest)
                    add_to(total, rest)
                    if key_tangent.size > 0:
                        np.dot(T, key_tangent[block, j0:j1], rest)
                        add_to(total, rest)
                if need_key:
                    rest = spare[: w * D].reshape(w, D)
                    np.dot(U.T, scaled, rest)
                    add_to(key_grad[part, block, j0:j1], rest)
                    if query_tangent.size > 0:
                        np.dot(T.T, query_tangent[n, i0:i1], rest)
                        add_to(key_grad[part, block, j0:j1], rest)
            if need_query:
                for i in range(h):
                    for d in range(D):
                        query_grad[n, i0 + i, d] = total[i, d] * scale
