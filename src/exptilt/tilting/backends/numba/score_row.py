r"""Scores: the one place where the compiled sweeps know what a score is and who sees whom.

A sweep takes the rows of a block (the queries of all heads that share a key head, one after another) tile by
tile, fills a strip of rows with z = scale <q_i, k_j> (``product.py``), and each row then passes here:

    place_rows   which head and query each row is, and the run of keys lo..hi that rule and window leave it
    to_scores    z → s = softcap(z) + bias + log_weight, −inf where masked or outside of lo..hi, in place;
                 slope ds/dz = 1 − tanh² and bend d²s/dz² = −2 tanh (1 − tanh²)/cap are kept for derivatives

All sweeps come here, so the same score has the same bits in all of them, and e^{s − max} <= 1 holds in the
derivatives as it does in the forward sweep. Rows are worked on in whole vectors: what a row holds beyond its
keys is −inf, and weighs nothing.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.frame import whole_at
from exptilt.tilting.backends.numba.packing import lanes_in, number, read, size_of, write
from exptilt.tilting.backends.numba.vector_math import (
    I64,
    Lanes,
    element_of,
    lanes_of,
    load,
    pointer,
    row_loop,
    store,
    tanh,
)


@helper()
def visible(i, length_q, length_k, causal, window):
    """First and last-plus-one key that query i sees; query and key sequences end together (bottom-right)."""
    own = i + length_k - length_q
    lo, hi = 0, length_k
    if causal:
        hi = min(hi, own + 1)
    if window >= 0:
        lo = max(lo, own - window + 1)
        if not causal:
            hi = min(hi, own + window)
    lo = min(lo, length_k)
    return lo, max(hi, lo)


@helper()
def place_rows(f, block, r0, count, where):
    """Fill where (4, count): head, query, lo, hi of rows r0 …; returns the run of keys that some row sees."""
    first, last = f.K, 0
    for r in range(count):
        head, i = (r0 + r) // f.Q, (r0 + r) % f.Q
        lo, hi = visible(i, f.Q, f.K, f.causal != 0, f.window)
        where[0, r], where[1, r], where[2, r], where[3, r] = block * f.group + head, i, lo, hi
        if hi > lo:
            first, last = min(first, lo), max(last, hi)
    return min(first, last), last


@row_loop(1, writes=(0, 1, 2))
def _soften(z, cap, inverse):
    """c·tanh(z/c), slope and bend."""
    t, slope = tanh(z / cap)
    return t * cap, slope, -(t + t) * slope * inverse


@row_loop(1, writes=(0,))
def _soften_only(z, cap):
    return tanh(z / cap)[0] * cap


@row_loop(2, writes=(0,))
def _add(x, y):
    return x + y


@row_loop(1, writes=(0,))
def _shift(x, y):
    return x + y


@row_loop(0, writes=(0,))
def fill_row(value):
    """Write one number to whole vectors."""
    return value


@intrinsic
def _hide(typing_context, zero, target, mask, vectors):
    """target = −inf where mask, a byte for each number, is 0."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(element_of(signature.args[0]), lanes_of(signature.args[0]))
        bytes_ = ir.VectorType(ir.IntType(8), vector.count)
        _, target, mask, vectors = arguments
        with cgutils.for_range(builder, vectors) as loop:
            index = builder.mul(loop.index, ir.Constant(I64, vector.count))
            place = builder.bitcast(pointer(builder, ir.IntType(8), mask, index), bytes_.as_pointer())
            seen = builder.icmp_unsigned("!=", builder.load(place, align=1), ir.Constant(bytes_, None))
            x = Lanes(builder, load(builder, vector, target, index)).where(seen, float("-inf"))
            store(builder, x.value, target, index)
        return context.get_dummy_value()

    return types.void(zero, types.int64, types.int64, types.int64), generate


@intrinsic
def _byte_at(typing_context, address, index):
    def generate(context, builder, signature, arguments):
        return builder.load(pointer(builder, ir.IntType(8), arguments[0], arguments[1]))

    return types.uint8(types.int64, types.int64), generate


@helper()
def add_plane(zero, target, plane, column, count):
    """target[0..count] += plane[0, column, 2 column, …]."""
    if column == 0:
        x = read(zero, plane, 0)
        vectors = count // lanes_in(zero)
        _shift(zero, (target,), vectors, (x,))
        for j in range(vectors * lanes_in(zero), count):
            write(target, j, read(zero, target, j) + x)
    elif column == 1:
        vectors = count // lanes_in(zero)
        _add(zero, (target, plane), vectors, ())
        for j in range(vectors * lanes_in(zero), count):
            write(target, j, read(zero, target, j) + read(zero, plane, j))
    else:
        for j in range(count):
            write(target, j, read(zero, target, j) + read(zero, plane, j * column))


@helper()
def add_from(zero, target, plane, head, i, j, count):
    """target[0..count] += a plane's numbers for a head, a query and the keys j …; nothing if it is absent."""
    if plane.address != 0:
        at = whole_at(plane.table, head) + i * plane.row + j * plane.column
        add_plane(zero, target, plane.address + at * size_of(zero), plane.column, count)


@helper()
def to_scores(f, zero, s, slope, bend, head, i, j0, lo, hi, bent):
    """Turn a row at address s from scale <q,k> into scores, in place; keys j0 + lo … j0 + hi are visible, lo
    < hi.

    With a softcap, slope and bend are filled where `bent`. Outside of lo..hi the row is −inf to the ends of
    its first and last vector. Returns the first of those vectors (as a number of numbers) and how many there
    are.
    """
    size, lanes = size_of(zero), lanes_in(zero)
    left = lo // lanes * lanes
    vectors = (hi + lanes - 1) // lanes - lo // lanes
    if f.cap > 0:
        cap = number(zero, f.cap)
        if bent:
            places = (s + left * size, slope + left * size, bend + left * size)
            _soften(zero, places, vectors, (cap, number(zero, 1 / f.cap)))
        else:
            _soften_only(zero, (s + left * size,), vectors, (cap,))
    target = s + lo * size
    add_from(zero, target, f.bias, head, i, j0 + lo, hi - lo)
    add_from(zero, target, f.weight, head, i, j0 + lo, hi - lo)
    minus = number(zero, -np.inf)
    if f.mask.address != 0:
        step = f.mask.column
        at = f.mask.address + whole_at(f.mask.table, head) + i * f.mask.row + (j0 + lo) * step
        if step == 1:
            whole = (hi - lo) // lanes
            _hide(zero, target, at, whole)
            for j in range(whole * lanes, hi - lo):
                if _byte_at(at, j) == 0:
                    write(target, j, minus)
        else:
            for j in range(hi - lo):
                if _byte_at(at, j * step) == 0:
                    write(target, j, minus)
    for j in range(left, lo):
        write(s, j, minus)
    for j in range(hi, left + vectors * lanes):
        write(s, j, minus)
    return left, vectors
