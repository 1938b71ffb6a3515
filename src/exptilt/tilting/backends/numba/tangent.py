r"""The tangent sweep: the forward derivative of attention, a covariance with the tangent of the scores.

Given ṡ_ij (from tangents of query, key, bias, log_weight) and v̇_j, it sums, under the weights p of the forward sweep,

    Σ_j p ṡ'   Σ_j p c ṡ'   Σ_j p c² ṡ'   Σ_j p (ṡ' v_j + v̇_j),        ṡ' = ṡ − r,  c = s − mean,

from which ``derivatives/identities.py`` makes the tangents of all results. r is the mean of ṡ over the first keys that the query sees:
near the mean over all of them, so that no difference of large numbers occurs.
"""

import numpy as np
from numba import carray, njit

from exptilt.tilting.backends.numba.frame import take
from exptilt.tilting.backends.numba.packing import lanes_in, number, read, size_of, write
from exptilt.tilting.backends.numba.score_row import (
    add_plane,
    fill_row,
    place_in,
    place_rows,
    strip_range,
    to_scores,
)
from exptilt.tilting.backends.numba.shelves import Shelf, against, gather, panels, source
from exptilt.tilting.backends.numba.vector_math import exp, row_loop
from exptilt.tilting.backends.numba.workspace import (
    FAR,
    FLUSH,
    arena,
    clear_outside,
    copy_rows,
    flush,
    times_row,
    widening,
)

ROWS = ("shift", "inverse", "gap")
_FEW = 8  # vectors


@row_loop(2, sums=("sum", "sum"))
def _means(s, t, shift):
    """Σ e^{s − shift} and Σ e^{s − shift} ṡ."""
    e = exp(s - shift)
    return e, (e * t).where(e.differs(0.0), 0.0)


@row_loop(2, writes=(0, 1), sums=("sum", "sum", "sum"))
def _sums(s, t, shift, inverse, gap, r):
    """s → p, ṡ → p ṡ'; the sums of p ṡ', p c ṡ', p c² ṡ'."""
    d = s - shift
    p = exp(d) * inverse
    c = (d - gap).at_least(FAR)
    x = (p * (t - r)).where(p.differs(0.0), 0.0)
    xc = x * c
    return p, x, x, xc, xc * c


@njit(error_model="numpy")
def push_scores(f, zero, t, slope, left, vectors, head, i, j0, lo, hi):
    """Turn a row at address t from ż, the tangent of scale <q,k>, into ṡ, in place."""
    size = size_of(zero)
    if f.cap > 0:
        times_row(zero, (t + left * size, slope + left * size), vectors, ())
    if f.bias_dot != 0:
        at = place_in(zero, f.bias_dot, f.bias_dot_at, f.bias_dot_row, f.bias_dot_column, head, i, j0 + lo)
        add_plane(zero, t + lo * size, at, f.bias_dot_column, hi - lo)
    if f.weight_dot != 0:
        at = place_in(zero, f.weight_dot, f.weight_dot_at, 0, f.weight_dot_column, head, i, j0 + lo)
        add_plane(zero, t + lo * size, at, f.weight_dot_column, hi - lo)


@njit(error_model="numpy")
def tangent_sweep(f, zero):
    """Take units until there are none; a unit is a tile of a block's rows against all its keys.

    rows (3, rows) holds `ROWS`. Writes output (rows, Dv): Σ p (ṡ' v + v̇), and statistics (4, rows): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'.
    """
    size, lanes = size_of(zero), lanes_in(zero)
    width = 2 * lanes
    D, Dv, K = f.D, f.Dv, f.K
    rows_of_block = f.group * f.Q
    tiles = (rows_of_block + f.tile_rows - 1) // f.tile_rows
    total_rows = f.blocks * rows_of_block
    wide_q, wide_v = panels(zero, D), panels(zero, Dv)
    long = f.tile_keys + width
    slots = 0 if f.thin else f.shelf_slots
    key_slot, value_slot = f.tile_keys * D, f.tile_keys * wide_v
    moved_key, moved_value = 1 if f.key_dot != 0 else 0, 1 if f.value_dot != 0 else 0
    memory, at = arena(
        zero,
        (
            f.tile_rows * wide_q,
            f.tile_rows * wide_q,
            f.tile_rows * wide_v,
            f.strip * long,
            f.strip * long,
            2 * long,
            slots * key_slot,
            slots * key_slot * moved_key,
            slots * value_slot,
            slots * value_slot * moved_value,
            widening(f, f.key_kind, D),
            widening(f, f.key_dot_kind, D),
            widening(f, f.value_kind, Dv),
            widening(f, f.value_dot_kind, Dv),
        ),
    )
    queries, pushed, summed, S, T, slope = at[0], at[1], at[2], at[3], at[4], at[5]
    bend = slope + long * size
    some = max(slots, 1)
    keys, moved_keys = Shelf(at[6], key_slot, np.full(some, -1)), Shelf(at[7], key_slot, np.full(some, -1))
    values, moved_values = (
        Shelf(at[8], value_slot, np.full(some, -1)),
        Shelf(at[9], value_slot, np.full(some, -1)),
    )
    held = np.empty((4, 1), np.int64)
    where = np.empty((4, f.tile_rows), np.int64)
    settled, sums = np.empty(f.tile_rows, np.bool_), np.empty((4, f.tile_rows))
    total = np.empty((f.tile_rows, Dv))
    scale = number(zero, f.scale)
    while True:
        start = take(f, f.chunk)
        if start >= f.units:
            break
        for unit in range(start, min(start + f.chunk, f.units)):
            block, r0 = unit // tiles, unit % tiles * f.tile_rows
            h = min(f.tile_rows, rows_of_block - r0)
            first, last = place_rows(f, block, r0, h, where)
            k = source(zero, f.key, f.key_at, f.key_step, f.key_kind, D, K, block, at[10], held[0])
            v = source(zero, f.value, f.value_at, f.value_step, f.value_kind, Dv, K, block, at[12], held[2])
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
                    at[11],
                    held[1],
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
                    at[13],
                    held[3],
                )
            copy_rows(zero, queries, wide_q, f.query, f.query_at, f.query_step, f.query_kind, D, where, h)
            if f.query_dot != 0:
                copy_rows(
                    zero,
                    pushed,
                    wide_q,
                    f.query_dot,
                    f.query_dot_at,
                    f.query_dot_step,
                    f.query_dot_kind,
                    D,
                    where,
                    h,
                )
            settled[:h], sums[:, :h] = False, 0.0
            fill_row(zero, (summed,), h * wide_v // lanes, (zero,))
            done, flushed = 0, False
            for tile in range(first // f.tile_keys, (last + f.tile_keys - 1) // f.tile_keys):
                j0 = tile * f.tile_keys
                w_tile = min(f.tile_keys, K - j0)
                for s0 in range(0, h, f.strip):
                    s1 = min(h, s0 + f.strip)
                    w0, w = strip_range(where, s0, s1, j0, w_tile, width)
                    if w <= w0:
                        continue
                    mine = s0 * wide_q * size
                    against(
                        f,
                        scale,
                        zero,
                        S,
                        long,
                        queries + mine,
                        wide_q,
                        s1 - s0,
                        k,
                        keys,
                        block,
                        tile,
                        w0,
                        w,
                        False,
                    )
                    if f.query_dot != 0:
                        against(
                            f,
                            scale,
                            zero,
                            T,
                            long,
                            pushed + mine,
                            wide_q,
                            s1 - s0,
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
                            T,
                            long,
                            queries + mine,
                            wide_q,
                            s1 - s0,
                            k_dot,
                            moved_keys,
                            block,
                            tile,
                            w0,
                            w,
                            both,
                        )
                    for r in range(s0, s1):
                        s, t = S + (r - s0) * long * size, T + (r - s0) * long * size
                        lo, hi = max(where[2, r] - j0, w0), min(where[3, r] - j0, w)
                        if f.query_dot == 0 and f.key_dot == 0:
                            fill_row(zero, (t + w0 * size,), (w - w0 + lanes - 1) // lanes, (zero,))
                        if hi <= lo:
                            clear_outside(zero, lanes, s, w0, w0, 0, w)
                            clear_outside(zero, lanes, t, w0, w0, 0, w)
                            continue
                        head, i = where[0, r], where[1, r]
                        left, n = to_scores(f, zero, s, slope, bend, head, i, j0, lo, hi, True)
                        push_scores(f, zero, t, slope, left, n, head, i, j0, lo, hi)
                        row = head * f.Q + i
                        shift, inverse = read(zero, f.rows, row), read(zero, f.rows, total_rows + row)
                        both_at = (s + left * size, t + left * size)
                        if not settled[r]:
                            weight, mean = _means(
                                zero, both_at, min(n, _FEW), (shift,)
                            )  # some keys are enough, if they weigh anything
                            if weight == 0:
                                weight, mean = _means(zero, both_at, n, (shift,))
                            if weight > 0:
                                settled[r] = True
                                sums[0, r] = number(zero, mean / weight)
                        gap = read(zero, f.rows, 2 * total_rows + row)
                        x0, x1, x2 = _sums(zero, both_at, n, (shift, inverse, gap, number(zero, sums[0, r])))
                        sums[1, r] += x0
                        sums[2, r] += x1
                        sums[3, r] += x2
                        clear_outside(zero, lanes, s, w0, left, n, w)
                        clear_outside(zero, lanes, t, w0, left, n, w)
                    if Dv > 0:
                        target = summed + s0 * wide_v * size
                        gather(
                            f, zero, target, wide_v, T, long, s1 - s0, v, values, block, tile, w0, w, False
                        )
                        if f.value_dot != 0:
                            gather(
                                f,
                                zero,
                                target,
                                wide_v,
                                S,
                                long,
                                s1 - s0,
                                v_dot,
                                moved_values,
                                block,
                                tile,
                                w0,
                                w,
                                False,
                            )
                done += 1
                if done % FLUSH == 0:
                    flush(zero, summed, wide_v, h, Dv, total, flushed)
                    flushed = True
            for r in range(h):
                row = where[0, r] * f.Q + where[1, r]
                for d in range(Dv):
                    x = read(zero, summed, r * wide_v + d)
                    write(f.output, row * Dv + d, number(zero, total[r, d] + x if flushed else x))
                for line in range(4):
                    write(f.statistics, line * total_rows + row, number(zero, sums[line, r]))
    return memory.size


def tangent_float32(pointer):
    """The sweep as a C function of a frame."""
    tangent_sweep(carray(pointer, 1)[0], np.float32(0))


def tangent_float64(pointer):
    """The sweep as a C function of a frame."""
    tangent_sweep(carray(pointer, 1)[0], np.float64(0))
