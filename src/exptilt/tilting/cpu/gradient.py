r"""The gradient sweep: a cotangent on the outputs of attention, carried back to query, key, value, log_weight and bias.

Every derivative of every output by a score is p_ij times a polynomial in the centred score c = s − mean (derived in ``rules.py``):

    ds_ij = p_ij t_ij,    t_ij = <ō_i, v_j> + a0_i + a1_i c_ij + a2_i c_ij²,    p_ij = e^{s_ij − G_i},

so the sweep is told only G, the mean and a0, a1, a2 of each query. With the slope σ' of the softcap,

    q̄_i = scale Σ_j ds σ' k_j,    k̄_j = scale Σ_i ds σ' q_i,    v̄_j = Σ_i p_ij ō_i,    column and row sums of ds for log_weight and bias.

A unit is one key block (a batch item and key head, with all query heads that share it): its k̄ and v̄ are written by one thread only. Where there are
fewer blocks than threads, each block's queries are dealt out to `splits` units with a copy of k̄, v̄ each, summed at the end.
"""

from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative
from exptilt.tilting.cpu.product import pack_rows, product, shelve
from exptilt.tilting.cpu.rows import FAR, FAST, add_row, clear_outside, part_of, tile_part, tile_range, to_scores, visible


@njit(fastmath=FAST, error_model="numpy")
def _row(s, t, G, centre, a0, a1, a2):  # type: ignore[no-untyped-def]
    """S → p and t → ds in place; returns Σ ds."""
    far = s.dtype.type(FAR)
    total = s.dtype.type(0)
    for j in range(s.size):
        p = exp_of_negative(s[j] - G)
        c = s[j] - centre
        c = c if c > far else far
        d = p * (t[j] + a0 + c * (a1 + a2 * c))
        s[j] = p
        t[j] = d
        total += d
    return total


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def gradient_sweep(
    start, stop, units, bounds, splits, group, tile_q, tile_k, width, scale, causal, window, cap, need_query, need_key, need_value,
    query, key, value, bias, log_weight, mask, query_at, key_at, value_at, bias_at, weight_at, mask_at, cotangent, cotangent_at, rows,
    tile, scaled, summed, lines, packed_query, packed_out, keys, key_tags, key_rows, row_tags, values, value_tags,
    query_grad, key_grad, value_grad, column_sum, row_sum, bias_grad, grad_at,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Units units[bounds[start]:bounds[stop]], each `block · splits + part`. Inputs as in ``forward_sweep``; cotangent (·, Q, Dv) of the output.

    rows (5, B·Hq, Q): G, mean, a0, a1, a2. A thread's own: tile (2, tile_q, tile_k + width), scaled (tile_q, D), summed (tile_q, D padded), lines
    (2, tile_k), the packed queries and cotangents of a tile, and shelves of keys (both ways) and values.
    Writes query_grad (B·Hq, Q, D), key_grad (splits, B·Hkv, K, D padded), value_grad (splits, B·Hkv, K, Dv padded), column_sum (splits, B·Hq, K),
    row_sum (B·Hq, Q), bias_grad (·, Q, K); those of size 0 are not wanted. All but query_grad and row_sum must come in as zeros.
    """
    Q, D = query.shape[1], query.shape[2]
    K, Dv = key.shape[1], value.shape[2]
    tiles = (Q + tile_q - 1) // tile_q
    slope, bend = lines[0], lines[1]
    S, T, flat_S, flat_T = tile[0], tile[1], tile[0].reshape(tile[0].size), tile[1].reshape(tile[1].size)
    flat_scaled, flat_sum, flat_out = scaled.reshape(scaled.size), summed.reshape(summed.size), cotangent.reshape(cotangent.size)
    flat_keys, flat_rows, flat_values = keys.reshape(keys.size), key_rows.reshape(key_rows.size), values.reshape(values.size)
    flat_key_grad, flat_value_grad = key_grad.reshape(key_grad.size), value_grad.reshape(value_grad.size)
    long, wide, wide_v = tile.shape[2], key_grad.shape[3], value_grad.shape[3]
    for u in range(bounds[start], bounds[stop]):
        block, part = units[u] // splits, units[u] % splits
        for turn in range(part, group * tiles, splits):
            n, i0 = block * group + turn // tiles, (turn % tiles) * tile_q
            h = min(tile_q, Q - i0)
            q, k, v = query[query_at[n]], key[key_at[n]], value[value_at[n]]
            b, lw, mk = bias[bias_at[n]], log_weight[weight_at[n]], mask[mask_at[n]]
            plain = cap <= 0 and b.size == 0 and lw.size == 0 and mk.size == 0
            out = cotangent[cotangent_at[n], i0 : i0 + h]
            columns = column_sum[part, n] if column_sum.size > 0 else column_sum[0, 0]
            summed[:h] = 0
            for i in range(h):
                row_sum[n, i0 + i] = 0
                for d in range(D):
                    scaled[i, d] = q[i0 + i, d] * scale
            if need_key:
                pack_rows(packed_query, 0, scaled[:h], tile_q * width, width)
            if need_value:
                pack_rows(packed_out, 0, out, tile_q * width, width)
            first, last = tile_range(i0, i0 + h, Q, K, causal, window)
            for t in range(first // tile_k, (last + tile_k - 1) // tile_k):
                j0, skip, w = tile_part(t, tile_k, first, last, width)
                k_tile = k[t * tile_k : (t + 1) * tile_k]
                at = shelve(keys, key_tags, key_at[n], t, k_tile, D * width, width, True) + skip * D
                product(flat_S, 0, long, flat_scaled, 0, D, 1, flat_keys, at, D * width, h, w, D, width, False)
                if Dv > 0:
                    at = shelve(values, value_tags, value_at[n], t, v[t * tile_k : (t + 1) * tile_k], Dv * width, width, True) + skip * Dv
                    start_out = (cotangent_at[n] * Q + i0) * Dv
                    product(flat_T, 0, long, flat_out, start_out, Dv, 1, flat_values, at, Dv * width, h, w, Dv, width, False)
                else:
                    T[:h, :w] = 0
                for i in range(h):
                    lo, hi = visible(i0 + i, Q, K, causal, window)
                    lo, hi = min(max(lo - j0, 0), w), min(max(hi - j0, 0), w)
                    if hi - lo < w:
                        clear_outside(S[i, :w], lo, hi)
                        clear_outside(T[i, :w], lo, hi)
                    s, y = S[i, lo:hi], T[i, lo:hi]
                    if not plain:
                        b_row = part_of(b, i0 + i, j0 + lo, j0 + hi)
                        m_row = part_of(mk, i0 + i, j0 + lo, j0 + hi)
                        to_scores(s, slope, bend, cap, b_row, lw[j0 + lo : j0 + hi], m_row)
                    G, centre = rows[0, n, i0 + i], rows[1, n, i0 + i]
                    a0, a1, a2 = rows[2, n, i0 + i], rows[3, n, i0 + i], rows[4, n, i0 + i]
                    row_sum[n, i0 + i] += _row(s, y, G, centre, a0, a1, a2)
                    if columns.size > 0:
                        add_row(columns[j0 + lo : j0 + hi], y)
                    if bias_grad.size > 0:
                        add_row(bias_grad[grad_at[n], i0 + i, j0 + lo : j0 + hi], y)
                    if cap > 0:
                        for j in range(y.size):
                            y[j] *= slope[j]
                place = (part * key_grad.shape[1] + block) * K + j0
                if need_value:
                    place_v = (part * value_grad.shape[1] + block) * K + j0
                    product(
                        flat_value_grad, place_v * wide_v, wide_v, flat_S, 0, 1, long, packed_out, 0, tile_q * width, w, Dv, h, width, True
                    )
                if need_query:
                    at = shelve(key_rows, row_tags, key_at[n], t, k_tile, tile_k * width, width, False) + skip * width
                    product(flat_sum, 0, summed.shape[1], flat_T, 0, long, 1, flat_rows, at, tile_k * width, h, D, w, width, True)
                if need_key:
                    product(flat_key_grad, place * wide, wide, flat_T, 0, 1, long, packed_query, 0, tile_q * width, w, D, h, width, True)
            if need_query:
                for i in range(h):
                    for d in range(D):
                        query_grad[n, i0 + i, d] = summed[i, d] * scale
