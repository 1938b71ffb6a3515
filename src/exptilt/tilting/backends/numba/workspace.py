"""What the sweeps share besides scores: memory of a thread's own, the rows of a tile, and sums over rows."""

import numpy as np

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.frame import whole_at
from exptilt.tilting.backends.numba.packing import bytes_of, copy_row, lanes_in, number, read, size_of, write
from exptilt.tilting.backends.numba.score_row import add_plane, fill_row, to_scores
from exptilt.tilting.backends.numba.vector_math import exp, row_loop

# A score that weighs nothing may be −inf; its distance to the mean is taken as this, so that weight 0 times
# its square is 0 and not NaN.
FAR = -1e15
# Tiles after which a running sum is put away in float64: a sum over a million keys is then as exact as one
# over a few thousand.
FLUSH = 16


@row_loop(1, writes=(0,))
def scale_row(x, factor):
    """A row times a number, in place."""
    return x * factor


@row_loop(2, writes=(0,))
def times_row(x, y):
    """A row times another, in place."""
    return x * y


@row_loop(2, writes=(0,))
def add_row(x, y):
    """A row plus another, in place."""
    return x + y


@helper()
def arena(zero, counts):
    """Memory for so many numbers each: the array that holds it, and where each piece begins (cache lines)."""
    size = size_of(zero)
    room = 64
    for count in counts:
        room += (count * size + 63) // 64 * 64
    memory, places = np.empty(room, np.uint8), np.empty(len(counts), np.int64)
    at = (memory.ctypes.data + 63) // 64 * 64
    for i, count in enumerate(counts):
        places[i] = at
        at += (count * size + 63) // 64 * 64
    return memory, places


@helper()
def copy_rows(zero, target, operand, dim, where, count):
    """The rows of an operand that belongs to queries, one after another, widened."""
    for r in range(count):
        at = whole_at(operand.table, where[0, r]) + where[1, r] * operand.step
        place = operand.address + at * bytes_of(zero, operand.kind)
        copy_row(zero, operand.kind, target.at + r * target.step * size_of(zero), place, dim, dim, False)


@helper()
def clear_outside(zero, row, first, left, vectors, last):
    """Zero a row from first to last, but for the vectors from left on; all but last are at whole vectors."""
    size, lanes = size_of(zero), lanes_in(zero)
    if left > first:
        fill_row(zero, (row + first * size,), (left - first) // lanes, (zero,))
    right = left + vectors * lanes
    if right < last:
        fill_row(zero, (row + right * size,), (last - right + lanes - 1) // lanes, (zero,))


@helper()
def flush(zero, summed, rows, dim, total, flushed):
    """Put sums away in total (rows, dim), which holds sums already if `flushed`."""
    for r in range(rows):
        for d in range(dim):
            x = read(zero, summed.at, r * summed.step + d)
            total[r, d] = total[r, d] + x if flushed else x
            write(summed.at, r * summed.step + d, zero)


@row_loop(5, writes=(4,))
def _mass_of_four(s0, s1, s2, s3, columns, m0, m1, m2, m3, z0, z1, z2, z3):
    """Columns += the weights of four rows."""
    return columns + ((exp(s0 - m0) * z0 + exp(s1 - m1) * z1) + (exp(s2 - m2) * z2 + exp(s3 - m3) * z3))


@row_loop(2, writes=(1,))
def _mass_of_one(s, columns, shift, inverse):
    return columns + exp(s - shift) * inverse


@helper()
def put_columns(f, zero, columns, part, head, j0):
    """Add a tile's column sums to those of a head, and clear them."""
    size, lanes = size_of(zero), lanes_in(zero)
    heads, count = f.blocks * f.group, min(f.tile_keys, f.K - j0)
    add_plane(zero, f.column_sum + ((part * heads + head) * f.K + j0) * size, columns, 1, count)
    fill_row(zero, (columns,), (count + lanes - 1) // lanes, (zero,))


@helper()
def add_mass(f, zero, S, where, strip, s0, columns, part):
    """Add the weights of a strip's rows s0 … to the columns, four rows of one head at a time."""
    size, lanes = size_of(zero), lanes_in(zero)
    minus = number(zero, -np.inf)
    j0, w0, w = strip.tile * f.tile_keys, strip.first, strip.last
    r, s1 = s0, s0 + strip.rows
    while r < s1:
        n = 4 if r + 4 <= s1 and where[0, r] == where[0, r + 3] else 1
        first, last = w, w0
        for x in range(r, r + n):
            s = S.at + x * S.step * size
            lo, hi = max(where[2, x] - j0, w0), min(where[3, x] - j0, w)
            if hi > lo:
                left, vectors = to_scores(f, zero, s, s, s, where[0, x], where[1, x], j0, lo, hi, False)
                first, last = min(first, left), max(last, left + vectors * lanes)
        if last > first:
            for x in range(r, r + n):
                s = S.at + x * S.step * size
                lo, hi = max(where[2, x] - j0, w0), min(where[3, x] - j0, w)
                left, right = last, last
                if hi > lo:
                    left, right = lo // lanes * lanes, (hi + lanes - 1) // lanes * lanes
                if left > first:
                    fill_row(zero, (s + first * size,), (left - first) // lanes, (minus,))
                if right < last:
                    fill_row(zero, (s + right * size,), (last - right) // lanes, (minus,))
            at, count = S.at + (r * S.step + first) * size, (last - first) // lanes
            row, step = where[0, r] * f.Q + where[1, r], S.step * size
            m, z = f.rows + row * size, f.rows + (f.blocks * f.group * f.Q + row) * size
            if n == 4:
                places = (at, at + step, at + 2 * step, at + 3 * step, columns + first * size)
                shifts = (read(zero, m, 0), read(zero, m, 1), read(zero, m, 2), read(zero, m, 3))
                inverses = (read(zero, z, 0), read(zero, z, 1), read(zero, z, 2), read(zero, z, 3))
                _mass_of_four(zero, places, count, shifts + inverses)
            else:
                _mass_of_one(zero, (at, columns + first * size), count, (read(zero, m, 0), read(zero, z, 0)))
        if r + n == s1 or where[0, r + n] != where[0, r]:
            put_columns(f, zero, columns, part, where[0, r], j0)
        r += n


@row_loop(2, sums=("sum",))
def mean_of(s, t, shift, inverse):
    """Σ p t."""
    p = exp(s - shift) * inverse
    return (p * t).where(p.differs(0.0), 0.0)


@row_loop(4, sums=("sum",))
def mean_dot_of(s, t, u, v, shift, inverse, pushed):
    """Σ p (ṡ' t + v)."""
    p = exp(s - shift) * inverse
    return (p * ((u - pushed) * t + v)).where(p.differs(0.0), 0.0)
