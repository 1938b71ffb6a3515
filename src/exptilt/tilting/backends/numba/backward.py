r"""The backward sweeps: a cotangent carried back to the inputs (gradient), and the gradient of a forward derivative (second).

Every derivative of every result by a score is p_ij times a polynomial in the centred score c = s − mean (``derivatives/rules.py``):

    ds_ij = p_ij t_ij,    t_ij = <ō_i, v_j> + a0_i + a1_i c_ij + a2_i c_ij²,

so the sweep is told only the shift, the inverse weight and the gap that make p and c, and a0, a1, a2 of each query. With the slope σ' of
the softcap,

    q̄_i = scale Σ_j ds σ' k_j,    k̄_j = scale Σ_i ds σ' q_i,    v̄_j = Σ_i p_ij ō_i,    column and row sums of ds for log_weight and bias.

For **second** derivatives let Φ = Σ_i <ō_i, ȯ_i> + Ḡ_i Ġ_i + … be a cotangent applied to a tangent. Its derivative by a score is p_ij r_ij,

    r = (t + a1 + 2 a2 c) ṡ' + <ō, v̇_j> + e0 + e1 c,      ṡ' = ṡ − Ġ,

and through ṡ it also depends on q, k directly. With slope σ' and curvature σ'' of the softcap (0 without one),

    M1 = p (r σ' + t σ'' ż),   M2 = p t σ',
    q̂ = scale (M1 k + M2 k̇),   k̂ = scale (M1ᵀ q + M2ᵀ q̇),   v̂ = (p ṡ')ᵀ ō,   column and row sums of p r for log_weight and bias.

A unit is an owner (blocks that write to one place of the bias's gradient; else one block), a part of its keys and a part of its rows.
k̄ and v̄ are written in place, a copy for each part of the rows; q̄ and the row sums have a copy for each part of the keys. So what is
long, keys or rows, is cut into parts, and what is short is copied.
"""

import numpy as np
from numba import carray, njit

from exptilt.tilting.backends.numba.frame import take, whole_at
from exptilt.tilting.backends.numba.packing import (
    bytes_of,
    copy_row,
    lanes_in,
    number,
    pack_rows,
    read,
    size_of,
    write,
)
from exptilt.tilting.backends.numba.product import CHAIN, DOTS, product, thin_dots
from exptilt.tilting.backends.numba.score_row import add_plane, fill_row, place_rows, strip_range, to_scores
from exptilt.tilting.backends.numba.shelves import Shelf, against, gather, panels, source
from exptilt.tilting.backends.numba.tangent import push_scores
from exptilt.tilting.backends.numba.vector_math import exp, row_loop
from exptilt.tilting.backends.numba.workspace import (
    FAR,
    add_row,
    arena,
    clear_outside,
    copy_rows,
    times_row,
    widening,
)

GRADIENT_ROWS = ("shift", "inverse", "gap", "a0", "a1", "a2")
SECOND_ROWS = (*GRADIENT_ROWS, "pushed", "e0", "e1")
_KEY_STRIP = 48  # keys for which the rows that see them are looked for together


@row_loop(2, writes=(0, 1), sums=("sum",))
def _gradient_row(s, t, shift, inverse, gap, met, a0, a1, a2):
    """s → p, t → ds."""
    d = s - shift
    p = exp(d) * inverse
    c = (d - gap).at_least(FAR)
    ds = (p * (t - met + a0 + c * (c * a2 + a1))).where(p.differs(0.0), 0.0)
    return p, ds, ds


@row_loop(4, writes=(0, 1, 2), sums=("sum",))
def _second_row(s, t, u, v, shift, inverse, gap, met, a0, a1, a2, pushed, met_dot, e0, e1):
    """s → p ṡ', t → p t, u: ṡ → p r; v holds <ō, v̇>."""
    d = s - shift
    p = exp(d) * inverse
    c = (d - gap).at_least(FAR)
    alive = p.differs(0.0)
    y = t - met + a0 + c * (c * a2 + a1)
    x = u - pushed
    ds = (p * ((y + a1 + c * (a2 + a2)) * x + (v - met_dot) + e0 + c * e1)).where(alive, 0.0)
    return (p * x).where(alive, 0.0), (p * y).where(alive, 0.0), ds, ds


@row_loop(4, writes=(0, 1))
def _through_softcap(u, t, slope, bend):
    """u → u σ' + t σ'' ż, t → t σ'; bend holds σ'' ż."""
    return u * slope + t * bend, t * slope


@row_loop(5, writes=(4,))
def _mass_of_four(s0, s1, s2, s3, columns, m0, m1, m2, m3, z0, z1, z2, z3):
    """Columns += the weights of four rows."""
    return columns + ((exp(s0 - m0) * z0 + exp(s1 - m1) * z1) + (exp(s2 - m2) * z2 + exp(s3 - m3) * z3))


@row_loop(2, writes=(1,))
def _mass_of_one(s, columns, shift, inverse):
    return columns + exp(s - shift) * inverse


@njit(fastmath={"contract"}, error_model="numpy")
def _chain(zero, a, b, dim):
    """<a, b>, by the same chains of multiply-adds as a product."""
    whole = zero
    for start in range(0, dim, DOTS):
        total = zero
        for d in range(start, min(start + DOTS, dim)):
            total += read(zero, a, d) * read(zero, b, d)
        whole = total if start == 0 else whole + total
    return whole


@njit(error_model="numpy")
def _products(f, zero, outs, step, address, table, row_step, kind, dim, where, count, line, found):
    """found[r] = <ō, x> of each row with its own vector x of an operand, with the bits that <ō, v_j> has if v_j is that vector."""
    size, one = size_of(zero), number(zero, 1.0)
    for r in range(count):
        at = whole_at(table, where[0, r]) + where[1, r] * row_step
        copy_row(zero, kind, line, address + at * bytes_of(zero, kind), dim, dim, False)
        if f.thin:
            target = line + step * size
            thin_dots(one, target, 0, outs + r * step * size, 0, 1, line, dim, 1, dim, False)
            found[r] = read(zero, target, 0)
        else:
            found[r] = _chain(zero, outs + r * step * size, line, dim)


@njit(error_model="numpy")
def _put_columns(f, zero, columns, part, head, j0, count):
    """Add a tile's column sums to those of a head, and clear them."""
    size, lanes = size_of(zero), lanes_in(zero)
    heads = f.blocks * f.group
    add_plane(zero, f.column_sum + ((part * heads + head) * f.K + j0) * size, columns, 1, count)
    fill_row(zero, (columns,), (count + lanes - 1) // lanes, (zero,))


@njit(error_model="numpy")
def _mass(f, zero, S, long, where, s0, s1, j0, w0, w, columns, part, w_tile, total_rows):
    """Add the weights of a strip's rows to the columns, four rows of one head at a time."""
    size, lanes = size_of(zero), lanes_in(zero)
    minus = number(zero, -np.inf)
    r = s0
    while r < s1:
        n = 4 if r + 4 <= s1 and where[0, r] == where[0, r + 3] else 1
        first, last = w, w0
        for x in range(r, r + n):
            s = S + (x - s0) * long * size
            lo, hi = max(where[2, x] - j0, w0), min(where[3, x] - j0, w)
            if hi > lo:
                left, vectors = to_scores(f, zero, s, s, s, where[0, x], where[1, x], j0, lo, hi, False)
                first, last = min(first, left), max(last, left + vectors * lanes)
        if last > first:
            for x in range(r, r + n):
                s = S + (x - s0) * long * size
                lo, hi = max(where[2, x] - j0, w0), min(where[3, x] - j0, w)
                left, right = (
                    (lo // lanes * lanes, (hi + lanes - 1) // lanes * lanes) if hi > lo else (last, last)
                )
                if left > first:
                    fill_row(zero, (s + first * size,), (left - first) // lanes, (minus,))
                if right < last:
                    fill_row(zero, (s + right * size,), (last - right) // lanes, (minus,))
            at, count = S + (r - s0) * long * size + first * size, (last - first) // lanes
            row, step = where[0, r] * f.Q + where[1, r], long * size
            m, z = f.rows + row * size, f.rows + (total_rows + row) * size
            if n == 4:
                places = (at, at + step, at + 2 * step, at + 3 * step, columns + first * size)
                shifts = (read(zero, m, 0), read(zero, m, 1), read(zero, m, 2), read(zero, m, 3))
                inverses = (read(zero, z, 0), read(zero, z, 1), read(zero, z, 2), read(zero, z, 3))
                _mass_of_four(zero, places, count, shifts + inverses)
            else:
                _mass_of_one(zero, (at, columns + first * size), count, (read(zero, m, 0), read(zero, z, 0)))
        if r + n == s1 or where[0, r + n] != where[0, r]:
            _put_columns(f, zero, columns, part, where[0, r], j0, w_tile)
        r += n


@njit(error_model="numpy")
def _seeing(where, h, first, last):
    """The first and last-plus-one of h rows that see some key first..last; all rows where they belong to several heads."""
    if where[0, 0] != where[0, h - 1]:
        return 0, h
    a, b = h, 0
    for r in range(h):
        if where[2, r] < last and where[3, r] > first:
            a, b = min(a, r), r + 1
    return a, b


@njit(error_model="numpy")
def _to_keys(zero, alpha, target, step, M, long, packed, panel, dim, where, h, j0, w):
    """target[j] += alpha Σ_r M[r, j] packed[r], for the keys j of a tile, by the rows that see them."""
    size, width = size_of(zero), 2 * lanes_in(zero)
    for c0 in range(0, w, _KEY_STRIP):
        c1 = min(w, c0 + _KEY_STRIP)
        a, b = _seeing(where, h, j0 + c0, j0 + c1)
        for start in range(a, b, CHAIN):
            n = min(CHAIN, b - start)
            A, B = M + (start * long + c0) * size, packed + start * width * size
            product(alpha, target + c0 * step * size, step, A, 1, long, B, panel, c1 - c0, dim, n, True)


@njit(error_model="numpy")
def backward_sweep(f, zero):
    """Take units until there are none.

    rows (6 or 9, rows) holds `GRADIENT_ROWS` or `SECOND_ROWS`. Adds to query_grad (key_parts, rows, D), key_grad (row_parts, blocks, K, D
    rounded up to whole panels), value_grad likewise, column_sum (row_parts, heads, K), row_sum (key_parts, rows) and bias_grad, which come
    in as zeros; an address of 0 means not wanted.
    """
    size, lanes = size_of(zero), lanes_in(zero)
    width = 2 * lanes
    D, Dv, K, Q = f.D, f.Dv, f.K, f.Q
    rows_of_block = f.group * Q
    row_tiles, key_tiles = (
        (rows_of_block + f.tile_rows - 1) // f.tile_rows,
        (K + f.tile_keys - 1) // f.tile_keys,
    )
    total_rows = f.blocks * rows_of_block
    wide_q, wide_v = panels(zero, D), panels(zero, Dv)
    long = f.tile_keys + width
    slots = 0 if f.thin else f.shelf_slots
    key_slot, row_slot, value_slot = f.tile_keys * D, f.tile_keys * wide_q, f.tile_keys * Dv
    second = f.second != 0
    twice = 1 if second else 0
    moved_query, moved_key, moved_value = (
        1 if f.query_dot != 0 else 0,
        1 if f.key_dot != 0 else 0,
        1 if f.value_dot != 0 else 0,
    )
    cells = f.tile_rows * long
    memory, at = arena(
        zero,
        (
            cells,
            cells * (1 - f.only_mass),
            cells * twice,
            cells * twice,
            f.tile_rows * wide_q,
            f.tile_rows * wide_q * moved_query,
            f.tile_rows * wide_v,
            f.tile_rows * wide_q,
            f.tile_rows * wide_q,
            f.tile_rows * wide_q * moved_query,
            f.tile_rows * wide_v,
            3 * long,
            slots * key_slot,
            slots * row_slot * f.need_query,
            slots * value_slot,
            slots * key_slot * moved_key,
            slots * row_slot * moved_key * f.need_query,
            slots * value_slot * moved_value,
            widening(f, f.key_kind, D),
            widening(f, f.value_kind, Dv),
            widening(f, f.key_dot_kind, D),
            widening(f, f.value_dot_kind, Dv),
            wide_v + width,
        ),
    )
    line = at[22]
    S, T, U, V, queries, moved, outs = at[0], at[1], at[2], at[3], at[4], at[5], at[6]
    summed, packed, packed_dot, packed_out, slope = at[7], at[8], at[9], at[10], at[11]
    bend, columns = slope + long * size, slope + 2 * long * size
    some = max(slots, 1)
    keys, key_rows = Shelf(at[12], key_slot, np.full(some, -1)), Shelf(at[13], row_slot, np.full(some, -1))
    values, dot_keys = (
        Shelf(at[14], value_slot, np.full(some, -1)),
        Shelf(at[15], key_slot, np.full(some, -1)),
    )
    dot_rows, dot_values = (
        Shelf(at[16], row_slot, np.full(some, -1)),
        Shelf(at[17], value_slot, np.full(some, -1)),
    )
    held = np.empty((4, 1), np.int64)
    where = np.empty((4, f.tile_rows), np.int64)
    scale, one = number(zero, f.scale), number(zero, 1.0)
    panel = f.tile_rows * width
    met, met_dot = np.zeros(f.tile_rows, np.float64), np.zeros(f.tile_rows, np.float64)
    fill_row(zero, (columns,), long // lanes, (zero,))
    while True:
        start = take(f, f.chunk)
        if start >= f.units:
            break
        for unit in range(start, min(start + f.chunk, f.units)):
            key_part, row_part, owner = (
                unit % f.key_parts,
                unit // f.key_parts % f.row_parts,
                unit // f.key_parts // f.row_parts,
            )
            for turn in range(whole_at(f.bounds, owner), whole_at(f.bounds, owner + 1)):
                block = whole_at(f.order, turn)
                k = source(zero, f.key, f.key_at, f.key_step, f.key_kind, D, K, block, at[18], held[0])
                v = source(
                    zero, f.value, f.value_at, f.value_step, f.value_kind, Dv, K, block, at[19], held[1]
                )
                k_dot, v_dot = k, v
                if f.key_dot != 0:
                    k_dot = source(
                        zero,
                        f.key_dot,
                        f.key_dot_at,
                        f.key_dot_step,
                        f.key_dot_kind,
                        D,
                        K,
                        block,
                        at[20],
                        held[2],
                    )
                if f.value_dot != 0:
                    v_dot = source(
                        zero,
                        f.value_dot,
                        f.value_dot_at,
                        f.value_dot_step,
                        f.value_dot_kind,
                        Dv,
                        K,
                        block,
                        at[21],
                        held[3],
                    )
                row_from, row_to = (
                    row_tiles * row_part // f.row_parts,
                    row_tiles * (row_part + 1) // f.row_parts,
                )
                key_from, key_to = (
                    key_tiles * key_part // f.key_parts,
                    key_tiles * (key_part + 1) // f.key_parts,
                )
                outer = key_to - key_from if f.keys_outside else 1
                for outside in range(outer):
                    some_from = key_from + outside if f.keys_outside else key_from
                    some_to = some_from + 1 if f.keys_outside else key_to
                    for row_tile in range(row_from, row_to):
                        r0 = row_tile * f.tile_rows
                        h = min(f.tile_rows, rows_of_block - r0)
                        first, last = place_rows(f, block, r0, h, where)
                        tile_from = max(some_from, first // f.tile_keys)
                        tile_to = min(some_to, (last + f.tile_keys - 1) // f.tile_keys)
                        if tile_from >= tile_to:
                            continue
                        copy_rows(
                            zero,
                            queries,
                            wide_q,
                            f.query,
                            f.query_at,
                            f.query_step,
                            f.query_kind,
                            D,
                            where,
                            h,
                        )
                        if f.need_key:
                            pack_rows(zero, packed, panel, queries, wide_q, h, D, False)
                        if f.query_dot != 0:
                            copy_rows(
                                zero,
                                moved,
                                wide_q,
                                f.query_dot,
                                f.query_dot_at,
                                f.query_dot_step,
                                f.query_dot_kind,
                                D,
                                where,
                                h,
                            )
                            if f.need_key:
                                pack_rows(zero, packed_dot, panel, moved, wide_q, h, D, False)
                        if Dv > 0:
                            copy_rows(
                                zero,
                                outs,
                                wide_v,
                                f.cotangent,
                                f.cotangent_at,
                                f.cotangent_step,
                                f.cotangent_kind,
                                Dv,
                                where,
                                h,
                            )
                            if f.need_value:
                                pack_rows(zero, packed_out, panel, outs, wide_v, h, Dv, False)
                            _products(
                                f,
                                zero,
                                outs,
                                wide_v,
                                f.attended,
                                f.attended_at,
                                f.attended_step,
                                f.attended_kind,
                                Dv,
                                where,
                                h,
                                line,
                                met,
                            )
                            if second:
                                _products(
                                    f, zero, outs, wide_v, f.attended_dot, f.attended_dot_at, f.attended_dot_step, f.attended_dot_kind, Dv,
                                    where, h, line, met_dot,
                                )  # fmt: skip
                        if f.need_query:
                            fill_row(zero, (summed,), h * wide_q // lanes, (zero,))
                        for tile in range(tile_from, tile_to):
                            j0 = tile * f.tile_keys
                            w_tile = min(f.tile_keys, K - j0)
                            for s0 in range(0, h, f.strip):
                                s1 = min(h, s0 + f.strip)
                                n = s1 - s0
                                w0, w = strip_range(where, s0, s1, j0, w_tile, width)
                                here = s0 * long * size
                                q, o = queries + s0 * wide_q * size, outs + s0 * wide_v * size
                                if w > w0:
                                    against(
                                        f,
                                        scale,
                                        zero,
                                        S + here,
                                        long,
                                        q,
                                        wide_q,
                                        n,
                                        k,
                                        keys,
                                        block,
                                        tile,
                                        w0,
                                        w,
                                        False,
                                    )
                                    if f.only_mass:
                                        _mass(
                                            f,
                                            zero,
                                            S + here,
                                            long,
                                            where,
                                            s0,
                                            s1,
                                            j0,
                                            w0,
                                            w,
                                            columns,
                                            row_part,
                                            w_tile,
                                            total_rows,
                                        )
                                        continue
                                    if Dv > 0:
                                        against(
                                            f,
                                            one,
                                            zero,
                                            T + here,
                                            long,
                                            o,
                                            wide_v,
                                            n,
                                            v,
                                            values,
                                            block,
                                            tile,
                                            w0,
                                            w,
                                            False,
                                        )
                                    if f.query_dot != 0:
                                        d = moved + s0 * wide_q * size
                                        against(
                                            f,
                                            scale,
                                            zero,
                                            U + here,
                                            long,
                                            d,
                                            wide_q,
                                            n,
                                            k,
                                            keys,
                                            block,
                                            tile,
                                            w0,
                                            w,
                                            False,
                                        )
                                    if f.key_dot != 0:
                                        both = f.query_dot != 0
                                        against(
                                            f,
                                            scale,
                                            zero,
                                            U + here,
                                            long,
                                            q,
                                            wide_q,
                                            n,
                                            k_dot,
                                            dot_keys,
                                            block,
                                            tile,
                                            w0,
                                            w,
                                            both,
                                        )
                                    if f.value_dot != 0:
                                        against(
                                            f,
                                            one,
                                            zero,
                                            V + here,
                                            long,
                                            o,
                                            wide_v,
                                            n,
                                            v_dot,
                                            dot_values,
                                            block,
                                            tile,
                                            w0,
                                            w,
                                            False,
                                        )
                                elif f.only_mass:
                                    continue
                                for r in range(s0, s1):
                                    s, t = S + r * long * size, T + r * long * size
                                    u, x = U + r * long * size, V + r * long * size
                                    lo, hi = max(where[2, r] - j0, w0), min(where[3, r] - j0, w)
                                    if hi <= lo:
                                        clear_outside(zero, lanes, s, 0, 0, 0, w_tile)
                                        clear_outside(zero, lanes, t, 0, 0, 0, w_tile)
                                        if second:
                                            clear_outside(zero, lanes, u, 0, 0, 0, w_tile)
                                        continue
                                    head, i = where[0, r], where[1, r]
                                    row = head * Q + i
                                    left, vectors = to_scores(
                                        f, zero, s, slope, bend, head, i, j0, lo, hi, True
                                    )
                                    s_at, t_at, u_at = s + left * size, t + left * size, u + left * size
                                    slope_at, bend_at = slope + left * size, bend + left * size
                                    if Dv == 0:
                                        fill_row(zero, (t_at,), vectors, (zero,))
                                    rows = f.rows + row * size
                                    step = total_rows
                                    shift, inverse, gap = (
                                        read(zero, rows, 0),
                                        read(zero, rows, step),
                                        read(zero, rows, 2 * step),
                                    )
                                    a1, a2 = read(zero, rows, 4 * step), read(zero, rows, 5 * step)
                                    met_here, a0 = number(zero, met[r]), read(zero, rows, 3 * step)
                                    if second:
                                        if f.query_dot == 0 and f.key_dot == 0:
                                            fill_row(zero, (u_at,), vectors, (zero,))
                                        if f.value_dot == 0:
                                            fill_row(zero, (x + left * size,), vectors, (zero,))
                                        if f.cap > 0:
                                            times_row(zero, (bend_at, u_at), vectors, ())
                                        push_scores(f, zero, u, slope, left, vectors, head, i, j0, lo, hi)
                                        pushed = read(zero, rows, 6 * step)
                                        e0, e1 = read(zero, rows, 7 * step), read(zero, rows, 8 * step)
                                        numbers = (
                                            shift,
                                            inverse,
                                            gap,
                                            met_here,
                                            a0,
                                            a1,
                                            a2,
                                            pushed,
                                            number(zero, met_dot[r]),
                                            e0,
                                            e1,
                                        )
                                        found = _second_row(
                                            zero, (s_at, t_at, u_at, x + left * size), vectors, numbers
                                        )[0]
                                        ds = u
                                    else:
                                        found = _gradient_row(
                                            zero,
                                            (s_at, t_at),
                                            vectors,
                                            (shift, inverse, gap, met_here, a0, a1, a2),
                                        )[0]
                                        ds = t
                                    if f.row_sum != 0:
                                        place = key_part * total_rows + row
                                        write(f.row_sum, place, read(zero, f.row_sum, place) + found)
                                    if f.column_sum != 0:
                                        add_row(zero, (columns + left * size, ds + left * size), vectors, ())
                                        if r == h - 1 or where[0, r + 1] != head:
                                            _put_columns(f, zero, columns, row_part, head, j0, w_tile)
                                    if f.bias_grad != 0:
                                        place = whole_at(f.bias_grad_at, head) + i * f.bias_grad_row + j0 + lo
                                        add_plane(
                                            zero, f.bias_grad + place * size, ds + lo * size, 1, hi - lo
                                        )
                                    if f.cap > 0:
                                        if second:
                                            _through_softcap(
                                                zero, (u_at, t_at, slope_at, bend_at), vectors, ()
                                            )
                                        else:
                                            times_row(zero, (t_at, slope_at), vectors, ())
                                    clear_outside(zero, lanes, s, 0, left, vectors, w_tile)
                                    clear_outside(zero, lanes, t, 0, left, vectors, w_tile)
                                    if second:
                                        clear_outside(zero, lanes, u, 0, left, vectors, w_tile)
                                if f.need_query and w > w0:
                                    target, D1 = summed + s0 * wide_q * size, (U if second else T) + here
                                    gather(
                                        f,
                                        zero,
                                        target,
                                        wide_q,
                                        D1,
                                        long,
                                        n,
                                        k,
                                        key_rows,
                                        block,
                                        tile,
                                        w0,
                                        w,
                                        True,
                                    )
                                    if second and f.key_dot != 0:
                                        gather(
                                            f,
                                            zero,
                                            target,
                                            wide_q,
                                            T + here,
                                            long,
                                            n,
                                            k_dot,
                                            dot_rows,
                                            block,
                                            tile,
                                            w0,
                                            w,
                                            True,
                                        )
                            if f.only_mass:
                                continue
                            if f.need_value:
                                place = (
                                    f.value_grad + ((row_part * f.blocks + block) * K + j0) * wide_v * size
                                )
                                _to_keys(
                                    zero,
                                    one,
                                    place,
                                    wide_v,
                                    S,
                                    long,
                                    packed_out,
                                    panel,
                                    Dv,
                                    where,
                                    h,
                                    j0,
                                    w_tile,
                                )
                            if f.need_key:
                                place = f.key_grad + ((row_part * f.blocks + block) * K + j0) * wide_q * size
                                D1 = U if second else T
                                _to_keys(
                                    zero,
                                    scale,
                                    place,
                                    wide_q,
                                    D1,
                                    long,
                                    packed,
                                    panel,
                                    D,
                                    where,
                                    h,
                                    j0,
                                    w_tile,
                                )
                                if second and f.query_dot != 0:
                                    _to_keys(
                                        zero,
                                        scale,
                                        place,
                                        wide_q,
                                        T,
                                        long,
                                        packed_dot,
                                        panel,
                                        D,
                                        where,
                                        h,
                                        j0,
                                        w_tile,
                                    )
                        if f.need_query:
                            for r in range(h):
                                place = (
                                    f.query_grad
                                    + (key_part * total_rows + where[0, r] * Q + where[1, r]) * D * size
                                )
                                for d in range(D):
                                    write(
                                        place,
                                        d,
                                        read(zero, place, d) + read(zero, summed, r * wide_q + d) * scale,
                                    )
    return memory.size


def backward_float32(pointer):
    """The sweep as a C function of a frame."""
    backward_sweep(carray(pointer, 1)[0], np.float32(0))


def backward_float64(pointer):
    """The sweep as a C function of a frame."""
    backward_sweep(carray(pointer, 1)[0], np.float64(0))
