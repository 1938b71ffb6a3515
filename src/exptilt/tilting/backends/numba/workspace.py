"""What the sweeps share besides scores: memory of a thread's own, and the rows of a tile brought into it."""

import numpy as np
from numba import njit

from exptilt.tilting.backends.numba.frame import whole_at
from exptilt.tilting.backends.numba.packing import bytes_of, copy_row, lanes_in, read, size_of, write
from exptilt.tilting.backends.numba.score_row import fill_row
from exptilt.tilting.backends.numba.vector_math import row_loop

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


@njit(error_model="numpy")
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


@njit(error_model="numpy")
def copy_rows(zero, target, operand, dim, where, count):
    """The rows of an operand that belongs to queries, one after another, widened."""
    for r in range(count):
        at = whole_at(operand.table, where[0, r]) + where[1, r] * operand.step
        place = operand.address + at * bytes_of(zero, operand.kind)
        copy_row(zero, operand.kind, target.at + r * target.step * size_of(zero), place, dim, dim, False)


@njit(error_model="numpy")
def clear_outside(zero, row, first, left, vectors, last):
    """Zero a row from first to last, but for the vectors from left on; all but last are at whole vectors."""
    size, lanes = size_of(zero), lanes_in(zero)
    if left > first:
        fill_row(zero, (row + first * size,), (left - first) // lanes, (zero,))
    right = left + vectors * lanes
    if right < last:
        fill_row(zero, (row + right * size,), (last - right + lanes - 1) // lanes, (zero,))


@njit(error_model="numpy")
def flush(zero, summed, rows, dim, total, flushed):
    """Put sums away in total (rows, dim), which holds sums already if `flushed`."""
    for r in range(rows):
        for d in range(dim):
            x = read(zero, summed.at, r * summed.step + d)
            total[r, d] = total[r, d] + x if flushed else x
            write(summed.at, r * summed.step + d, zero)
