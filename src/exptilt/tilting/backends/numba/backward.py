r"""The backward sweeps: a cotangent carried back to the inputs (gradient), and the gradient of a forward
derivative (second).

Every derivative of every result by a score is p_ij times a polynomial in the centred score c = s − mean
(``derivatives/rules.py``):

    ds_ij = p_ij t_ij,    t_ij = <ō_i, v_j> + a0_i + a1_i c_ij + a2_i c_ij²,

so the sweep is told only the shift, the inverse weight and the gap that make p and c, and a0, a1, a2 of each
query. With the slope σ' of the softcap,

    q̄_i = scale Σ_j ds σ' k_j,    k̄_j = scale Σ_i ds σ' q_i,    v̄_j = Σ_i p_ij ō_i,

and log_weight and bias get the column and row sums of ds.

For **second** derivatives let Φ = Σ_i <ō_i, ȯ_i> + Ḡ_i Ġ_i + … be a cotangent applied to a tangent. Its
derivative by a score is p_ij r_ij,

    r = (t + a1 + 2 a2 c) ṡ' + <ō, v̇_j> + e0 + e1 c,      ṡ' = ṡ − Ġ,

and through ṡ it also depends on q, k directly. With slope σ' and curvature σ'' of the softcap (0 without
one),

    M1 = p (r σ' + t σ'' ż),   M2 = p t σ',
    q̂ = scale (M1 k + M2 k̇),   k̂ = scale (M1ᵀ q + M2ᵀ q̇),   v̂ = (p ṡ')ᵀ ō,

and log_weight and bias get the column and row sums of p r. The tangents that r needs
of each row are given (`SECOND_ROWS`), or the sweep finds them first (`JOINT_ROWS`): it then goes over a
tile's rows twice, and keeps their scores s and ṡ in between, which saves three products of fifteen.

A unit is an owner (blocks that write to one place of the bias's gradient; else one block), a part of its keys
and a part of its rows. k̄ and v̄ are written in place, a copy for each part of the rows; q̄ and the row sums
have a copy for each part of the keys. Keys are cut into parts wherever there are enough of them, and rows are
swept in turns (``launch.py``), so that copies stay small.
"""

from collections import namedtuple

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.frame import take, whole_at
from exptilt.tilting.backends.numba.operands import (
    against,
    enter,
    gather,
    keys_of,
    keys_room,
    panels,
    strip_of,
)
from exptilt.tilting.backends.numba.packing import (
    Rows,
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
from exptilt.tilting.backends.numba.score_row import add_plane, fill_row, place_rows, to_scores
from exptilt.tilting.backends.numba.tangent import SUMS, push_rows, push_scores
from exptilt.tilting.backends.numba.vector_math import exp, row_loop
from exptilt.tilting.backends.numba.workspace import (
    FAR,
    add_mass,
    add_row,
    arena,
    clear_outside,
    copy_rows,
    mean_dot_of,
    mean_of,
    put_columns,
    times_row,
)

GRADIENT_ROWS = ("shift", "inverse", "gap", "a0", "a1", "a2")
SECOND_ROWS = (*GRADIENT_ROWS, "pushed", "e0", "e1")
JOINT_ROWS = (*GRADIENT_ROWS, "variance")
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


@helper(fastmath={"contract"})
def _chain(zero, a, b, dim):
    """<a, b>, by the same chains of multiply-adds as a product."""
    whole = zero
    for start in range(0, dim, DOTS):
        total = zero
        for d in range(start, min(start + DOTS, dim)):
            total += read(zero, a, d) * read(zero, b, d)
        whole = total if start == 0 else whole + total
    return whole


@helper()
def _products(f, zero, outs, operand, where, count, line, found):
    """found[r] = <ō, x>, x a row's own vector of an operand; the same bits as <ō, v_j> if v_j is x."""
    size, one = size_of(zero), number(zero, 1.0)
    for r in range(count):
        at = whole_at(operand.table, where[0, r]) + where[1, r] * operand.step
        place, mine = operand.address + at * bytes_of(zero, operand.kind), outs.at + r * outs.step * size
        copy_row(zero, operand.kind, line, place, f.Dv, f.Dv, False)
        if f.thin:
            target = line + outs.step * size
            thin_dots(one, target, 0, mine, 0, 1, line, f.Dv, 1, f.Dv, False)
            found[r] = read(zero, target, 0)
        else:
            found[r] = _chain(zero, mine, line, f.Dv)


@helper()
def _seeing(where, h, first, last):
    """The first and last-plus-one of h rows that see some key first..last; all rows if of several heads."""
    if where[0, 0] != where[0, h - 1]:
        return 0, h
    a, b = h, 0
    for r in range(h):
        if where[2, r] < last and where[3, r] > first:
            a, b = min(a, r), r + 1
    return a, b


@helper()
def _to_keys(f, zero, alpha, target, M, packed, dim, where, h, tile):
    """target[j] += alpha Σ_r M[r, j] packed[r], for the keys j of a tile, by the rows that see them."""
    size, width = size_of(zero), 2 * lanes_in(zero)
    j0 = tile * f.tile_keys
    w = min(f.tile_keys, f.K - j0)
    for c0 in range(0, w, _KEY_STRIP):
        c1 = min(w, c0 + _KEY_STRIP)
        a, b = _seeing(where, h, j0 + c0, j0 + c1)
        for start in range(a, b, CHAIN):
            n = min(CHAIN, b - start)
            C, A, B = target.at + c0 * target.step * size, M.at + (start * M.step + c0) * size, packed
            B += start * width * size
            product(alpha, C, target.step, A, 1, M.step, B, f.tile_rows * width, c1 - c0, dim, n, True)


# A thread's own memory: S, T, U, V hold a number for each pair of a row and a key, the others a vector for
# each row (packed, packed_dot, packed_out: as the right-hand side of a product), or a number for each key or
# each row; `late` holds pushed, e0 and e1.
_NAMES = (
    "S T U V queries moved outs summed packed packed_dot packed_out pushed means slope bend columns line "
    "where met met_dot late settled sums"
)
Desk = namedtuple("Desk", _NAMES)  # type: ignore[misc]


@helper()
def _bring_rows(f, zero, d, h):
    """The vectors of h rows: copied, packed where they go to keys, and <ō, o> of each row."""
    panel = f.tile_rows * 2 * lanes_in(zero)
    copy_rows(zero, d.queries, f.query, f.D, d.where, h)
    if f.need_key:
        pack_rows(zero, d.packed, panel, d.queries.at, d.queries.step, h, f.D, False)
    if f.query_dot.address != 0:
        copy_rows(zero, d.moved, f.query_dot, f.D, d.where, h)
        if f.need_key:
            pack_rows(zero, d.packed_dot, panel, d.moved.at, d.moved.step, h, f.D, False)
    if f.Dv > 0:
        copy_rows(zero, d.outs, f.cotangent, f.Dv, d.where, h)
        if f.need_value:
            pack_rows(zero, d.packed_out, panel, d.outs.at, d.outs.step, h, f.Dv, False)
        _products(f, zero, d.outs, f.attended, d.where, h, d.line, d.met)
        if f.second and not f.joint:
            _products(f, zero, d.outs, f.attended_dot, d.where, h, d.line, d.met_dot)
    if f.second and not f.joint:
        for line in range(3):
            for r in range(h):
                row = d.where[0, r] * f.Q + d.where[1, r]
                d.late[line, r] = read(zero, f.rows, (6 + line) * f.blocks * f.group * f.Q + row)
    if f.need_query:
        fill_row(zero, (d.summed.at,), h * d.summed.step // lanes_in(zero), (zero,))


@helper()
def _held(f, zero, d, place):
    """The desk with the scores of the tile that is held in that place, where tiles are held."""
    at = place * f.tile_rows * d.S.step * size_of(zero) if f.joint else 0
    S, U = Rows(d.S.at + at, d.S.step), Rows(d.U.at + at, d.U.step)
    vectors = (d.queries, d.moved, d.outs, d.summed, d.packed, d.packed_dot, d.packed_out, d.pushed, d.means)
    numbers = (d.slope, d.bend, d.columns, d.line, d.where, d.met, d.met_dot, d.late, d.settled, d.sums)
    return Desk(S, d.T, U, d.V, *vectors, *numbers)


@helper()
def _strip_products(f, zero, d, s0, strip, k, v, k_dot, v_dot):
    """Products of a strip's rows s0 … with the keys: S = scale <q,k>, T = <ō,v>, U = Ṡ, V = <ō,v̇>."""
    size, scale, one = size_of(zero), number(zero, f.scale), number(zero, 1.0)
    here = s0 * d.S.step * size
    q = Rows(d.queries.at + s0 * d.queries.step * size, d.queries.step)
    o = Rows(d.outs.at + s0 * d.outs.step * size, d.outs.step)
    if not f.joint:
        against(f, scale, Rows(d.S.at + here, d.S.step), q, k, strip, False)
    if f.only_mass:
        return
    if f.Dv > 0:
        against(f, one, Rows(d.T.at + here, d.T.step), o, v, strip, False)
    U, query_moves = Rows(d.U.at + here, d.U.step), f.query_dot.address != 0
    if query_moves and not f.joint:
        moved = Rows(d.moved.at + s0 * d.moved.step * size, d.moved.step)
        against(f, scale, U, moved, k, strip, False)
    if f.key_dot.address != 0 and not f.joint:
        against(f, scale, U, q, k_dot, strip, query_moves)
    if f.value_dot.address != 0:
        against(f, one, Rows(d.V.at + here, d.V.step), o, v_dot, strip, False)


@helper()
def _strip_rows(f, zero, d, h, s0, strip, key_part, row_part):
    """From products to derivatives: S → p (or p ṡ'), T → ds (or M2), U → M1; adds up row and column sums."""
    size, lanes, second = size_of(zero), lanes_in(zero), f.second != 0
    total_rows, j0 = f.blocks * f.group * f.Q, strip.tile * f.tile_keys
    w_tile, long = min(f.tile_keys, f.K - j0), d.S.step
    for r in range(s0, s0 + strip.rows):
        at = r * long * size
        s, t, u, x = d.S.at + at, d.T.at + at, d.U.at + at, d.V.at + at
        lo, hi = max(d.where[2, r] - j0, strip.first), min(d.where[3, r] - j0, strip.last)
        left, vectors = 0, 0
        if hi > lo:
            head, i = d.where[0, r], d.where[1, r]
            row = head * f.Q + i
            if f.joint:
                left, vectors = lo // lanes * lanes, (hi + lanes - 1) // lanes - lo // lanes
            else:
                left, vectors = to_scores(f, zero, s, d.slope, d.bend, head, i, j0, lo, hi, True)
            skip = left * size
            s_at, t_at, u_at, slope_at, bend_at = s + skip, t + skip, u + skip, d.slope + skip, d.bend + skip
            if f.Dv == 0:
                fill_row(zero, (t_at,), vectors, (zero,))
            rows, step = f.rows + row * size, total_rows
            weighing = (read(zero, rows, 0), read(zero, rows, step), read(zero, rows, 2 * step))
            polynomial = (read(zero, rows, 3 * step), read(zero, rows, 4 * step), read(zero, rows, 5 * step))
            met, met_dot = number(zero, d.met[r]), number(zero, d.met_dot[r])
            alone = f.whole and f.Dv > 0 and d.where[2, r] >= j0 and d.where[3, r] <= j0 + w_tile
            if alone:  # all keys are here: <ō,o> from the very terms that it is subtracted from
                met = mean_of(zero, (s_at, t_at), vectors, weighing[:2])[0]
            known = (*weighing, met, *polynomial)
            if second:
                if f.value_dot.address == 0:
                    fill_row(zero, (x + skip,), vectors, (zero,))
                if not f.joint:
                    if f.query_dot.address == 0 and f.key_dot.address == 0:
                        fill_row(zero, (u_at,), vectors, (zero,))
                    if f.cap > 0:
                        times_row(zero, (bend_at, u_at), vectors, ())
                    push_scores(f, zero, u, d.slope, left, vectors, head, i, j0, lo, hi)
                pushed = number(zero, d.late[0, r])
                if alone:
                    places = (s_at, t_at, u_at, x + skip)
                    met_dot = mean_dot_of(zero, places, vectors, (*weighing[:2], pushed))[0]
                late = (pushed, met_dot, number(zero, d.late[1, r]))
                numbers = (*known, *late, number(zero, d.late[2, r]))
                found = _second_row(zero, (s_at, t_at, u_at, x + skip), vectors, numbers)[0]
                ds = u
            else:
                found = _gradient_row(zero, (s_at, t_at), vectors, known)[0]
                ds = t
            if f.row_sum != 0:
                place = key_part * total_rows + row
                write(f.row_sum, place, read(zero, f.row_sum, place) + found)
            if f.column_sum != 0:
                add_row(zero, (d.columns + skip, ds + skip), vectors, ())
            if f.bias_grad != 0:
                place = whole_at(f.bias_grad_at, head) + i * f.bias_grad_row + j0 + lo
                add_plane(zero, f.bias_grad + place * size, ds + lo * size, 1, hi - lo)
            if f.cap > 0:
                if second:
                    _through_softcap(zero, (u_at, t_at, slope_at, bend_at), vectors, ())
                else:
                    times_row(zero, (t_at, slope_at), vectors, ())
        if f.column_sum != 0 and (r == h - 1 or d.where[0, r + 1] != d.where[0, r]):
            put_columns(f, zero, d.columns, row_part, d.where[0, r], j0)
        clear_outside(zero, s, 0, left, vectors, w_tile)
        clear_outside(zero, t, 0, left, vectors, w_tile)
        if second:
            clear_outside(zero, u, 0, left, vectors, w_tile)


@helper()
def _sweep_tile(f, zero, d, h, tile, block, key_part, row_part, k, v, k_dot, v_dot):
    """One tile of rows against one tile of keys."""
    size, width = size_of(zero), 2 * lanes_in(zero)
    scale, second = number(zero, f.scale), f.second != 0
    D1 = d.U if second else d.T
    for s0 in range(0, h, f.strip):
        strip = strip_of(f, d.where, s0, min(h, s0 + f.strip), block, tile, width)
        if strip.last > strip.first:
            _strip_products(f, zero, d, s0, strip, k, v, k_dot, v_dot)
        if f.only_mass:
            if strip.last > strip.first:
                add_mass(f, zero, d.S, d.where, strip, s0, d.columns, row_part)
            continue
        _strip_rows(f, zero, d, h, s0, strip, key_part, row_part)
        if f.need_query and strip.last > strip.first:
            here, step = s0 * D1.step * size, d.summed.step
            target = Rows(d.summed.at + s0 * step * size, step)
            gather(f, zero, target, Rows(D1.at + here, D1.step), k, strip, True)
            if second and f.key_dot.address != 0:
                gather(f, zero, target, Rows(d.T.at + here, D1.step), k_dot, strip, True)
    if f.only_mass:
        return
    key = (row_part * f.blocks + block) * f.K + tile * f.tile_keys
    if f.need_value:
        place = Rows(f.value_grad + key * d.outs.step * size, d.outs.step)
        _to_keys(f, zero, number(zero, 1.0), place, d.S, d.packed_out, f.Dv, d.where, h, tile)
    if f.need_key:
        place = Rows(f.key_grad + key * d.queries.step * size, d.queries.step)
        _to_keys(f, zero, scale, place, D1, d.packed, f.D, d.where, h, tile)
        if second and f.query_dot.address != 0:
            _to_keys(f, zero, scale, place, d.T, d.packed_dot, f.D, d.where, h, tile)


@helper()
def _desk(f, zero, places):
    """The desk, with memory at these addresses."""
    size, lanes = size_of(zero), lanes_in(zero)
    wide_q, wide_v, long = panels(zero, f.D), panels(zero, f.Dv), f.tile_keys + 2 * lanes
    S, T, U, V, queries, moved, outs, summed, pushed, means, packed, packed_dot, packed_out, slope, line = (
        places
    )
    columns = slope + 2 * long * size
    fill_row(zero, (columns,), long // lanes, (zero,))
    where, met, met_dot = np.empty((4, f.tile_rows), np.int64), np.zeros(f.tile_rows), np.zeros(f.tile_rows)
    S, T, U, V = Rows(S, long), Rows(T, long), Rows(U, long), Rows(V, long)
    by_query = (Rows(queries, wide_q), Rows(moved, wide_q), Rows(outs, wide_v), Rows(summed, wide_q))
    packs, pushes = (packed, packed_dot, packed_out), (Rows(pushed, wide_v), Rows(means, wide_v))
    late, settled, sums = np.empty((3, f.tile_rows)), where[0] == 0, np.empty((SUMS, f.tile_rows))
    known = (slope, slope + long * size, columns, line, where, met, met_dot, late, settled, sums)
    return Desk(S, T, U, V, *by_query, *packs, *pushes, *known)


@helper()
def backward_sweep(f, zero):
    """Take units until there are none.

    rows (lines, rows) holds `GRADIENT_ROWS`, `SECOND_ROWS` or `JOINT_ROWS`. Adds to query_grad (key_parts,
    blocks, rows of a block from row_tile_from to row_tile_to, D),
    key_grad (row_parts, blocks, K, D rounded up to whole panels), value_grad likewise, column_sum (row_parts,
    heads, K), row_sum (key_parts, rows) and bias_grad, which come in as zeros; an address of 0 means not
    wanted. With `JOINT_ROWS` it also writes output (rows, Dv), the tangent of the output, and statistics (3,
    rows), those of log-normalizer, gap and variance.
    """
    size, width, D, Dv = size_of(zero), 2 * lanes_in(zero), f.D, f.Dv
    rows_of_block, tile_rows = f.group * f.Q, f.tile_rows
    row_tiles, row_begin = f.row_tile_to - f.row_tile_from, f.row_tile_from * tile_rows
    swept_rows = min(f.row_tile_to * tile_rows, rows_of_block) - row_begin
    long, rows_q, rows_v = f.tile_keys + width, tile_rows * panels(zero, D), tile_rows * panels(zero, Dv)
    cells, twice, moved = tile_rows * long, 1 if f.second else 0, 1 if f.query_dot.address != 0 else 0
    kept, joint = cells * max(f.joint, 1), min(f.joint, 1)
    pairs = (kept, cells * (1 - f.only_mass), kept * twice, cells * twice)
    by_query = (rows_q, rows_q * moved, rows_v, rows_q, rows_v * joint, rows_v * joint)
    vectors = (*by_query, rows_q, rows_q * moved, rows_v)
    key_rooms = keys_room(f, zero, f.key, D, 1, f.need_query), keys_room(f, zero, f.value, Dv, 1, joint)
    dot_rooms = (
        keys_room(f, zero, f.key_dot, D, 1, f.need_query),
        keys_room(f, zero, f.value_dot, Dv, 1, joint),
    )
    memory, places = arena(
        zero, pairs + vectors + (3 * long, panels(zero, Dv) + width) + key_rooms + dot_rooms
    )
    d = _desk(f, zero, to_fixed_tuple(places[:15], 15))
    at_k, at_v, at_k_dot, at_v_dot = to_fixed_tuple(places[15:], 4)
    k, v = keys_of(f, zero, f.key, D, at_k, 1), keys_of(f, zero, f.value, Dv, at_v, 1)
    k_dot, v_dot = keys_of(f, zero, f.key_dot, D, at_k_dot, 1), keys_of(f, zero, f.value_dot, Dv, at_v_dot, 1)
    scale = number(zero, f.scale)
    while True:
        start = take(f, f.chunk)
        if start >= f.units:
            break
        for unit in range(start, min(start + f.chunk, f.units)):
            key_part, rest = unit % f.key_parts, unit // f.key_parts
            row_part, owner = rest % f.row_parts, rest // f.row_parts
            row_from = f.row_tile_from + row_tiles * row_part // f.row_parts
            row_to = f.row_tile_from + row_tiles * (row_part + 1) // f.row_parts
            seen_from, seen_to = f.K, 0  # what these rows see is divided among the parts
            for row_tile in range(row_from, row_to):
                r0 = row_tile * tile_rows
                first, last = place_rows(f, 0, r0, min(tile_rows, rows_of_block - r0), d.where)
                if last > first:
                    seen_from, seen_to = min(seen_from, first), max(seen_to, last)
            key_begin = seen_from // f.tile_keys
            key_tiles = max(0, (seen_to + f.tile_keys - 1) // f.tile_keys - key_begin)
            key_from = key_begin + key_tiles * key_part // f.key_parts
            key_to = key_begin + key_tiles * (key_part + 1) // f.key_parts
            stride = 1 if f.keys_outside else max(key_to - key_from, 1)
            for turn in range(whole_at(f.bounds, owner), whole_at(f.bounds, owner + 1)):
                block = whole_at(f.order, turn)
                enter(zero, k, f.key, block)
                enter(zero, v, f.value, block)
                enter(zero, k_dot, f.key_dot, block)
                enter(zero, v_dot, f.value_dot, block)
                for some_from in range(key_from, key_to, stride):
                    for row_tile in range(row_from, row_to):
                        r0 = row_tile * tile_rows
                        h = min(tile_rows, rows_of_block - r0)
                        first, last = place_rows(f, block, r0, h, d.where)
                        tile_from = max(some_from, first // f.tile_keys)
                        tile_to = min(some_from + stride, (last + f.tile_keys - 1) // f.tile_keys)
                        if tile_from >= tile_to:
                            continue
                        _bring_rows(f, zero, d, h)
                        if f.joint:
                            push_rows(f, zero, d, h, block, tile_from, tile_to, (k, v, k_dot, v_dot))
                            if f.Dv > 0:
                                _products(f, zero, d.outs, f.attended_dot, d.where, h, d.line, d.met_dot)
                        for tile in range(tile_from, tile_to):
                            held = _held(f, zero, d, tile - tile_from)
                            _sweep_tile(f, zero, held, h, tile, block, key_part, row_part, k, v, k_dot, v_dot)
                        if f.need_query:
                            first_row = (key_part * f.blocks + block) * swept_rows + r0 - row_begin
                            for r in range(h):
                                row = first_row + r
                                place, mine = (
                                    f.query_grad + row * D * size,
                                    d.summed.at + r * d.summed.step * size,
                                )
                                for c in range(D):
                                    write(place, c, read(zero, place, c) + read(zero, mine, c) * scale)
    return memory.size


def backward_float32(pointer):
    """The sweep as a C function of a frame."""
    backward_sweep(carray(pointer, 1)[0], np.float32(0))


def backward_float64(pointer):
    """The sweep as a C function of a frame."""
    backward_sweep(carray(pointer, 1)[0], np.float64(0))
