r"""The tangent sweep: the forward derivative of attention, a covariance with the tangent of the scores.

Given ṡ_ij (from tangents of query, key, bias, log_weight) and v̇_j, it sums, under the weights p of the
forward sweep,

    Σ_j p ṡ'   Σ_j p c ṡ'   Σ_j p c² ṡ'   Σ_j p (ṡ' v_j + v̇_j),        ṡ' = ṡ − r,  c = s − mean,

from which ``derivatives/identities.py`` makes the tangents of all results. r is at first the mean of ṡ over a
few keys, beside the heaviest of the first tile, or over several tiles if they are small. Each tile's Σ p ṡ',
which should be near 0, is taken off Σ p ṡ' v at once, times the output o = Σ p v, and in the end r is moved
to Σ p ṡ, by

    δ = Σ p ṡ − r:    Σ p ṡ' f − δ Σ p f  for f = 1, c, c², v,

so that no difference of large numbers occurs, in particular none of values that are far from 0.
"""

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.forward import find, largest
from exptilt.tilting.backends.numba.frame import take
from exptilt.tilting.backends.numba.operands import (
    against,
    enter,
    gather,
    keys_of,
    keys_room,
    panels,
    strip_of,
)
from exptilt.tilting.backends.numba.packing import Rows, lanes_in, number, read, size_of, write
from exptilt.tilting.backends.numba.score_row import add_from, fill_row, place_rows, to_scores
from exptilt.tilting.backends.numba.vector_math import exp, row_loop
from exptilt.tilting.backends.numba.workspace import (
    FAR,
    FLUSH,
    arena,
    clear_outside,
    copy_rows,
    flush,
    times_row,
)

ROWS = ("shift", "inverse", "gap")
_FEW = 32  # vectors
_SOME = 256  # keys, if a tile has fewer
# What is summed of each row: r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ', Σ p, Σ p c, Σ p c², and how often o was taken
# off Σ p ṡ' v.
SUMS = 8


@row_loop(2, sums=("sum", "sum"))
def _means(s, t, shift):
    """Σ e^{s − shift} and Σ e^{s − shift} ṡ."""
    e = exp(s - shift)
    return e, (e * t).where(e.differs(0.0), 0.0)


@row_loop(2, writes=(0,))
def _less(x, y, factor):
    return x - y * factor


@row_loop(2, writes=(2, 3), sums=("sum",) * 6)
def _sums(s, t, shift, inverse, gap, r):
    """p and p ṡ' from s and ṡ, to the third and fourth place; the sums of p ṡ' and p times 1, c, c²."""
    d = s - shift
    p = exp(d) * inverse
    c = (d - gap).at_least(FAR)
    x = (p * (t - r)).where(p.differs(0.0), 0.0)
    xc, pc = x * c, p * c
    return p, x, x, xc, xc * c, p, pc, pc * c


@helper()
def push_scores(f, zero, t, slope, left, vectors, head, i, j0, lo, hi):
    """Turn a row at address t from ż, the tangent of scale <q,k>, into ṡ, in place."""
    size = size_of(zero)
    if f.cap > 0:
        times_row(zero, (t + left * size, slope + left * size), vectors, ())
    add_from(zero, t + lo * size, f.bias_dot, head, i, j0 + lo, hi - lo)
    add_from(zero, t + lo * size, f.weight_dot, head, i, j0 + lo, hi - lo)


@helper()
def _sum_up(f, zero, settled, sums, where, S, T, P, X, slope, strip, s0, guess):
    """Make P = p and X = p ṡ' of scores S and tangents T of rows s0 …, and add to the sums of the rows.

    Where `guess`, add only what r is made of, to the first and the fifth sum.
    """
    size, lanes = size_of(zero), lanes_in(zero)
    total_rows = f.blocks * f.group * f.Q
    j0, w0, w = strip.tile * f.tile_keys, strip.first, strip.last
    for r in range(s0, s0 + strip.rows):
        at = (r - s0) * S.step * size
        s, t, p, x = S.at + at, T.at + at, P.at + at, X.at + at
        lo, hi = max(where[2, r] - j0, w0), min(where[3, r] - j0, w)
        if f.query_dot.address == 0 and f.key_dot.address == 0:
            fill_row(zero, (t + w0 * size,), (w - w0 + lanes - 1) // lanes, (zero,))
        if hi <= lo:
            clear_outside(zero, p, w0, w0, 0, w)
            clear_outside(zero, x, w0, w0, 0, w)
            continue
        head, i = where[0, r], where[1, r]
        left, n = to_scores(f, zero, s, slope, slope + S.step * size, head, i, j0, lo, hi, True)
        push_scores(f, zero, t, slope, left, n, head, i, j0, lo, hi)
        row = head * f.Q + i
        shift, inverse = read(zero, f.rows, row), read(zero, f.rows, total_rows + row)
        gap, both = read(zero, f.rows, 2 * total_rows + row), (s + left * size, t + left * size)
        if guess:
            weight, mean = _means(zero, both, n, (shift,))
            sums[4, r] += weight
            sums[0, r] += mean
            continue
        if not settled[r]:
            at = find(zero, both[0], n, largest(zero, (both[0],), n, ())[0]) // lanes
            at = max(0, min(at - _FEW // 2, n - _FEW)) * lanes * size
            weight, mean = _means(zero, (both[0] + at, both[1] + at), min(n, _FEW), (shift,))
            if weight > 0:
                settled[r] = True
                sums[0, r] = number(zero, mean / weight)
        places = (*both, p + left * size, x + left * size)
        x0, x1, x2, m0, m1, m2 = _sums(zero, places, n, (shift, inverse, gap, number(zero, sums[0, r])))
        for line, more in enumerate((x0, x1, x2, m0, m1, m2)):
            sums[1 + line, r] += more
        clear_outside(zero, p, w0, left, n, w)
        clear_outside(zero, x, w0, left, n, w)


@helper()
def push_strip(f, zero, rows, known, keys, S, T, P, X, slope, strip, s0, guess):
    """Scores S and their tangents T of a strip's rows s0 …, and what they add to the sums of the rows.

    rows: queries, their tangents, outputs, and where Σ p (ṡ' v + v̇) goes; known: `where`, `settled`, `sums`;
    keys: keys, values and the tangents of both. P and X may be S and T.
    """
    size, scale = size_of(zero), number(zero, f.scale)
    (queries, moved, means, summed), (where, settled, sums), (k, v, k_dot, v_dot) = rows, known, keys
    q = Rows(queries.at + s0 * queries.step * size, queries.step)
    against(f, scale, S, q, k, strip, False)
    query_moves = f.query_dot.address != 0
    if query_moves:
        against(f, scale, T, Rows(moved.at + s0 * moved.step * size, moved.step), k, strip, False)
    if f.key_dot.address != 0:
        against(f, scale, T, q, k_dot, strip, query_moves)
    _sum_up(f, zero, settled, sums, where, S, T, P, X, slope, strip, s0, guess)
    if f.Dv > 0 and not guess:
        target = Rows(summed.at + s0 * summed.step * size, summed.step)
        gather(f, zero, target, X, v, strip, False)
        if f.value_dot.address != 0:
            gather(f, zero, target, P, v_dot, strip, False)
        if f.attended.address != 0:
            for r in range(s0, s0 + strip.rows):
                extra = number(zero, sums[1, r] - sums[7, r])
                sums[7, r] += extra
                places = (summed.at + r * summed.step * size, means.at + r * means.step * size)
                _less(zero, places, summed.step // lanes_in(zero), (extra,))


@helper()
def _begin(f, zero, rows, known, keys, S, T, slope, h, block, tile_from, tile_to):
    """Clear the sums of h rows; where tiles are small, r is the mean of ṡ over the first `_SOME` keys."""
    where, settled, sums = known
    settled[:h], sums[:, :h] = False, 0.0
    if f.tile_keys >= _SOME or tile_to - tile_from < 2:
        return
    for tile in range(tile_from, min(tile_to, tile_from + _SOME // f.tile_keys)):
        for s0 in range(0, h, f.strip):
            strip = strip_of(f, where, s0, min(h, s0 + f.strip), block, tile, 2 * lanes_in(zero))
            if strip.last > strip.first:
                push_strip(f, zero, rows, known, keys, S, T, S, T, slope, strip, s0, True)
    for r in range(h):
        settled[r] = sums[4, r] > 0
        sums[0, r] = number(zero, sums[0, r] / sums[4, r]) if settled[r] else 0.0
        sums[4, r] = 0.0


@helper()
def settle(f, zero, sums, r):
    """The first four sums of a row with r moved to Σ p ṡ, and how much of o is still to be taken off."""
    start, x0, x1, x2 = sums[0, r], sums[1, r], sums[2, r], sums[3, r]
    end = np.float64(number(zero, x0 + start * sums[4, r])) if f.attended.address != 0 else start
    by = end - start
    return end, x0 - by * sums[4, r], x1 - by * sums[5, r], x2 - by * sums[6, r], by - sums[7, r]


@helper()
def push_rows(f, zero, d, h, block, tile_from, tile_to, keys):
    """The tangents of h rows at the desk of a second sweep, written out; what it needs of them is kept."""
    size, total_rows, long = size_of(zero), f.blocks * f.group * f.Q, d.S.step
    fill_row(zero, (d.pushed.at,), h * d.pushed.step // lanes_in(zero), (zero,))
    copy_rows(zero, d.means, f.attended, f.Dv, d.where, h)
    rows, known = (d.queries, d.moved, d.means, d.pushed), (d.where, d.settled, d.sums)
    P, X = Rows(d.T.at, long), Rows(d.V.at, long)
    _begin(f, zero, rows, known, keys, P, X, d.slope, h, block, tile_from, tile_to)
    for tile in range(tile_from, tile_to):
        held = (tile - tile_from) * f.tile_rows * long * size
        for s0 in range(0, h, f.strip):
            strip = strip_of(f, d.where, s0, min(h, s0 + f.strip), block, tile, 2 * lanes_in(zero))
            if strip.last > strip.first:
                at = held + s0 * long * size
                S, U = Rows(d.S.at + at, long), Rows(d.U.at + at, long)
                push_strip(f, zero, rows, known, keys, S, U, P, X, d.slope, strip, s0, False)
    for r in range(h):
        head, i = d.where[0, r], d.where[1, r]
        start, x0, x1, x2, left = settle(f, zero, d.sums, r)
        row = head * f.Q + i
        a1, a2 = read(zero, f.rows, 4 * total_rows + row), read(zero, f.rows, 5 * total_rows + row)
        G, V = start + x0, x2 - read(zero, f.rows, 6 * total_rows + row) * x0 + 2 * x1
        d.late[0, r], d.late[1, r], d.late[2, r] = G, -a1 * x1 - a2 * V, -2 * a2 * x1
        for line, x in enumerate((G, x1, V)):
            write(f.statistics, line * total_rows + row, number(zero, x))
        for c in range(f.Dv):
            at = r * d.pushed.step + c
            x = read(zero, d.pushed.at, at) - (left + x0) * read(zero, d.means.at, at)
            write(f.output, row * f.Dv + c, number(zero, x))


@helper()
def tangent_sweep(f, zero):
    """Take units until there are none; a unit is a tile of a block's rows against all its keys.

    rows (3, rows) holds `ROWS`. attended, the outputs, may be absent: r then stays as it is. Writes output
    (rows, Dv): Σ p (ṡ' v + v̇), and statistics (4, rows): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'.
    """
    lanes = lanes_in(zero)
    width = 2 * lanes
    rows_of_block, tile_rows = f.group * f.Q, f.tile_rows
    tiles = (rows_of_block + tile_rows - 1) // tile_rows
    total_rows = f.blocks * rows_of_block
    wide_q, wide_v = panels(zero, f.D), panels(zero, f.Dv)
    long = f.tile_keys + width
    rooms = (
        tile_rows * wide_q,
        tile_rows * wide_q,
        tile_rows * wide_v,
        tile_rows * wide_v,
        f.strip * long,
        f.strip * long,
        2 * long,
        keys_room(f, zero, f.key, f.D, 1, 0),
        keys_room(f, zero, f.value, f.Dv, 0, 1),
        keys_room(f, zero, f.key_dot, f.D, 1, 0),
        keys_room(f, zero, f.value_dot, f.Dv, 0, 1),
    )
    memory, places = arena(zero, rooms)
    queries_at, moved_at, means_at, summed_at, S_at, T_at, slope = to_fixed_tuple(places[:7], 7)
    at_k, at_v, at_k_dot, at_v_dot = to_fixed_tuple(places[7:], 4)
    queries, moved, summed = Rows(queries_at, wide_q), Rows(moved_at, wide_q), Rows(summed_at, wide_v)
    means, S, T = Rows(means_at, wide_v), Rows(S_at, long), Rows(T_at, long)
    k, v = keys_of(f, zero, f.key, f.D, at_k, 1), keys_of(f, zero, f.value, f.Dv, at_v, 0)
    k_dot, v_dot = (
        keys_of(f, zero, f.key_dot, f.D, at_k_dot, 1),
        keys_of(f, zero, f.value_dot, f.Dv, at_v_dot, 0),
    )
    where = np.empty((4, tile_rows), np.int64)
    settled, sums = np.empty(tile_rows, np.bool_), np.empty((SUMS, tile_rows))
    total = np.empty((tile_rows, f.Dv))
    rows, known, keys = (queries, moved, means, summed), (where, settled, sums), (k, v, k_dot, v_dot)
    while True:
        start = take(f, f.chunk)
        if start >= f.units:
            break
        for unit in range(start, min(start + f.chunk, f.units)):
            block, r0 = unit // tiles, unit % tiles * tile_rows
            h = min(tile_rows, rows_of_block - r0)
            first, last = place_rows(f, block, r0, h, where)
            enter(zero, k, f.key, block)
            enter(zero, v, f.value, block)
            enter(zero, k_dot, f.key_dot, block)
            enter(zero, v_dot, f.value_dot, block)
            copy_rows(zero, queries, f.query, f.D, where, h)
            if f.query_dot.address != 0:
                copy_rows(zero, moved, f.query_dot, f.D, where, h)
            if f.attended.address != 0:
                copy_rows(zero, means, f.attended, f.Dv, where, h)
            begin, end = first // f.tile_keys, (last + f.tile_keys - 1) // f.tile_keys
            _begin(f, zero, rows, known, keys, S, T, slope, h, block, begin, end)
            fill_row(zero, (summed.at,), h * wide_v // lanes, (zero,))
            flushed = False
            for tile in range(begin, end):
                for s0 in range(0, h, f.strip):
                    s1 = min(h, s0 + f.strip)
                    strip = strip_of(f, where, s0, s1, block, tile, width)
                    if strip.last > strip.first:
                        push_strip(f, zero, rows, known, keys, S, T, S, T, slope, strip, s0, False)
                if (tile - begin + 1) % FLUSH == 0:
                    flush(zero, summed, h, f.Dv, total, flushed)
                    flushed = True
            for r in range(h):
                row = where[0, r] * f.Q + where[1, r]
                start, x0, x1, x2, left = settle(f, zero, sums, r)
                for d in range(f.Dv):
                    x = np.float64(read(zero, summed.at, r * wide_v + d))
                    x = total[r, d] + x if flushed else x
                    if f.attended.address != 0:
                        x -= left * read(zero, means.at, r * wide_v + d)
                    write(f.output, row * f.Dv + d, number(zero, x))
                for line, x in enumerate((start, x0, x1, x2)):
                    write(f.statistics, line * total_rows + row, number(zero, x))
    return memory.size


def tangent_float32(pointer):
    """The sweep as a C function of a frame."""
    tangent_sweep(carray(pointer, 1)[0], np.float32(0))


def tangent_float64(pointer):
    """The sweep as a C function of a frame."""
    tangent_sweep(carray(pointer, 1)[0], np.float64(0))
