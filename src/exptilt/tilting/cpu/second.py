r"""The second sweep: the gradient of a forward derivative, which is also the forward derivative of a gradient.

Let Φ = Σ_i <ō_i, ȯ_i> + Ḡ_i Ġ_i + … be a cotangent applied to a tangent. Its derivative by a score is p_ij r_ij (derived in ``rules.py``),

    r = (t + b1 + b2 c) ṡ' + <ō, v̇_j> + e0 + e1 c,      ṡ' = ṡ − Ġ,   t as in ``gradient.py``,

and through ṡ it also depends on q, k directly. With slope σ' and curvature σ'' of the softcap (0 without one),

    M1 = p (r σ' + t σ'' ż),   M2 = p t σ',
    q̂ = scale (M1 k + M2 k̇),   k̂ = scale (M1ᵀ q + M2ᵀ q̇),   v̂ = (p ṡ')ᵀ ō,   column and row sums of p r for log_weight and bias.

Joined vectors (q̇,q), (k,k̇) as in ``tangent.py`` make two products of each pair.
"""

from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.product import pack_rows, product, shelve
from exptilt.tilting.cpu.rows import FAR, FAST, add_row, clear_outside, part_of, tile_part, tile_range, to_scores, visible
from exptilt.tilting.cpu.tangent import to_score_tangents


@njit(fastmath=FAST, error_model="numpy")
def _row(s, t, u, g, G, centre, pushed, a, b1, b2, e0, e1):  # type: ignore[no-untyped-def]
    """S → p ṡ', t → p t, u: ṡ → p r, in place; g holds <ō, v̇> on the way in. Returns Σ p r."""
    far = s.dtype.type(FAR)
    total = s.dtype.type(0)
    a0, a1, a2 = a
    for j in range(s.size):
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
    return total


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def second_sweep(
    start, stop, units, bounds, splits, group, tile_q, tile_k, width, scale, causal, window, cap, need_query, need_key, need_value,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at, cotangent, cotangent_at, rows,
    query_tangent, key_tangent, joined_query, joined_key, value_tangent, bias_tangent, bias_tangent_at, weight_tangent, weight_tangent_at,
    tile, scaled, summed, lines, packed_query, packed_out, packed_tangent, keys, key_tags, key_rows, row_tags, values, value_tags,
    joined, joined_tags, moved, moved_tags, moved_rows, moved_row_tags,
    query_grad, key_grad, value_grad, column_sum, row_sum, bias_grad, grad_at,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units, inputs and outputs as in ``gradient_sweep``, tangents as in ``tangent_sweep``; query_tangent (times scale) and key_tangent once
    more on their own, of size 0 when absent.

    rows (10, B·Hq, Q): G, mean, a0, a1, a2, Ġ, b1, b2, e0, e1. A thread's own as in ``gradient_sweep`` with four tiles, and shelves for the tangents.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    E = joined_query.shape[2]
    tiles = (Q + tile_q - 1) // tile_q
    slope, bend = lines[0], lines[1]
    S, T, U, V = tile[0], tile[1], tile[2], tile[3]
    flat_S, flat_T, flat_U, flat_V = S.reshape(S.size), T.reshape(T.size), U.reshape(U.size), V.reshape(V.size)
    flat_scaled, flat_sum, flat_out = scaled.reshape(scaled.size), summed.reshape(summed.size), cotangent.reshape(cotangent.size)
    flat_query = joined_query.reshape(joined_query.size)
    flat_keys, flat_rows, flat_values = keys.reshape(keys.size), key_rows.reshape(key_rows.size), values.reshape(values.size)
    flat_joined, flat_moved, flat_moved_rows = joined.reshape(joined.size), moved.reshape(moved.size), moved_rows.reshape(moved_rows.size)
    flat_key_grad, flat_value_grad = key_grad.reshape(key_grad.size), value_grad.reshape(value_grad.size)
    long, wide, wide_v = tile.shape[2], key_grad.shape[3], value_grad.shape[3]
    for x in range(bounds[start], bounds[stop]):
        block, part = units[x] // splits, units[x] % splits
        for turn in range(part, group * tiles, splits):
            n, i0 = block * group + turn // tiles, (turn % tiles) * tile_q
            h = min(tile_q, Q - i0)
            q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
            b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
            plain = cap <= 0 and b.size == 0 and lw.size == 0 and mk.size == 0
            bt = bias_tangent[bias_tangent_at[n]] if bias_tangent.size > 0 else bias_tangent[0]
            wt = weight_tangent[weight_tangent_at[n]] if weight_tangent.size > 0 else weight_tangent[0]
            out = cotangent[cotangent_at[n], i0 : i0 + h]
            start_out = (cotangent_at[n] * Q + i0) * Dv
            columns = column_sum[part, n] if column_sum.size > 0 else column_sum[0, 0]
            summed[:h] = 0
            for i in range(h):
                row_sum[n, i0 + i] = 0
                for d in range(D):
                    scaled[i, d] = q[i0 + i, d] * scale
            if need_key:
                pack_rows(packed_query, 0, scaled[:h], tile_q * width, width)
                if query_tangent.size > 0:
                    pack_rows(packed_tangent, 0, query_tangent[n, i0 : i0 + h], tile_q * width, width)
            if need_value:
                pack_rows(packed_out, 0, out, tile_q * width, width)
            first, last = tile_range(i0, i0 + h, Q, K, causal, window)
            for t in range(first // tile_k, (last + tile_k - 1) // tile_k):
                j0, skip, w = tile_part(t, tile_k, first, last, width)
                begin, end = t * tile_k, (t + 1) * tile_k
                at = shelve(keys, key_tags, key_at[n], t, k[begin:end], D * width, width, True) + skip * D
                product(flat_S, 0, long, flat_scaled, 0, D, 1, flat_keys, at, D * width, h, w, D, width, False)
                if Dv > 0:
                    at = shelve(values, value_tags, value_at[n], t, v[begin:end], Dv * width, width, True) + skip * Dv
                    product(flat_T, 0, long, flat_out, start_out, Dv, 1, flat_values, at, Dv * width, h, w, Dv, width, False)
                else:
                    T[:h, :w] = 0
                if E > 0:
                    at = shelve(joined, joined_tags, block, t, joined_key[block, begin:end], E * width, width, True) + skip * E
                    product(flat_U, 0, long, flat_query, (n * Q + i0) * E, E, 1, flat_joined, at, E * width, h, w, E, width, False)
                else:
                    U[:h, :w] = 0
                if value_tangent.size > 0:
                    at = shelve(moved, moved_tags, block, t, value_tangent[block, begin:end], Dv * width, width, True) + skip * Dv
                    product(flat_V, 0, long, flat_out, start_out, Dv, 1, flat_moved, at, Dv * width, h, w, Dv, width, False)
                else:
                    V[:h, :w] = 0
                for i in range(h):
                    lo, hi = visible(i0 + i, Q, K, causal, window)
                    lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                    if hi - lo < w:
                        clear_outside(S[i, :w], lo, hi)
                        clear_outside(T[i, :w], lo, hi)
                        clear_outside(U[i, :w], lo, hi)
                    s, y, z = S[i, lo:hi], T[i, lo:hi], U[i, lo:hi]
                    if not plain:
                        b_row = part_of(b, i0 + i, j0 + lo, j0 + hi)
                        m_row = part_of(mk, i0 + i, j0 + lo, j0 + hi)
                        to_scores(s, slope, bend, cap, b_row, lw[j0 + lo : j0 + hi], m_row)
                    if cap > 0:
                        for j in range(z.size):
                            bend[j] *= z[j]  # σ'' ż
                    if cap > 0 or bt.size > 0 or wt.size > 0:
                        to_score_tangents(z, slope, cap, part_of(bt, i0 + i, j0 + lo, j0 + hi), wt[j0 + lo : j0 + hi])
                    a = (rows[2, n, i0 + i], rows[3, n, i0 + i], rows[4, n, i0 + i])
                    row_sum[n, i0 + i] += _row(
                        s, y, z, V[i, lo:hi], rows[0, n, i0 + i], rows[1, n, i0 + i], rows[5, n, i0 + i], a,
                        rows[6, n, i0 + i], rows[7, n, i0 + i], rows[8, n, i0 + i], rows[9, n, i0 + i],
                    )  # fmt: skip
                    if columns.size > 0:
                        add_row(columns[j0 + lo : j0 + hi], z)
                    if bias_grad.size > 0:
                        add_row(bias_grad[grad_at[n], i0 + i, j0 + lo : j0 + hi], z)
                    if cap > 0:
                        for j in range(z.size):
                            z[j] = z[j] * slope[j] + y[j] * bend[j]
                            y[j] *= slope[j]
                if need_value:
                    place = ((part * value_grad.shape[1] + block) * K + j0) * wide_v
                    product(flat_value_grad, place, wide_v, flat_S, 0, 1, long, packed_out, 0, tile_q * width, w, Dv, h, width, True)
                if need_query:
                    at = shelve(key_rows, row_tags, key_at[n], t, k[begin:end], tile_k * width, width, False) + skip * width
                    product(flat_sum, 0, summed.shape[1], flat_U, 0, long, 1, flat_rows, at, tile_k * width, h, D, w, width, True)
                    if key_tangent.size > 0:
                        at = (
                            shelve(moved_rows, moved_row_tags, block, t, key_tangent[block, begin:end], tile_k * width, width, False)
                            + skip * width
                        )
                        product(flat_sum, 0, summed.shape[1], flat_T, 0, long, 1, flat_moved_rows, at, tile_k * width, h, D, w, width, True)
                if need_key:
                    place = ((part * key_grad.shape[1] + block) * K + j0) * wide
                    product(flat_key_grad, place, wide, flat_U, 0, 1, long, packed_query, 0, tile_q * width, w, D, h, width, True)
                    if query_tangent.size > 0:
                        product(flat_key_grad, place, wide, flat_T, 0, 1, long, packed_tangent, 0, tile_q * width, w, D, h, width, True)
            if need_query:
                for i in range(h):
                    for d in range(D):
                        query_grad[n, i0 + i, d] = summed[i, d] * scale
