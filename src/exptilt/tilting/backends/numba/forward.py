r"""The forward sweep: output, log-normalizer, entropy, score mean, variance and maximum, in one pass over the
keys.

For a query with scores s_j, keys taken tile by tile, a row holds

    m  the largest score so far            z  Σ e^{s_j − m}
    c  the mean score under the weights, less m    M  Σ e^{s_j − m} (s_j − m − c)²       o  Σ e^{s_j − m} v_j

A tile yields the same five numbers for its own keys, and two such summaries join by the parallel formula
(Chan, Golub, LeVeque): weights are rebased to the larger m, then

    z = z₁ + z₂,   c = c₁ + (c₂ − c₁) z₂/z,   M = M₁ + M₂ + (c₂ − c₁)² z₁ z₂/z.

No difference of large numbers occurs: the variance M/z is a sum of squares about the tile's own mean, and the
entropy is taken as log z − c, where both terms are of the entropy's own size even when the scores are of size
10⁴. The numbers of a row are float64, whatever the scores are, and so is what becomes of o every few tiles
(``workspace.py``).
"""

import math
from collections import namedtuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from exptilt._support.kernels import helper, kernel
from exptilt.tilting.backends.numba.frame import set_whole_at, take
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
from exptilt.tilting.backends.numba.score_row import fill_row, place_rows, to_scores
from exptilt.tilting.backends.numba.vector_math import (
    I64,
    element_of,
    exp_of_limited,
    lanes_of,
    load,
    no_lower,
    row_loop,
    splat,
)
from exptilt.tilting.backends.numba.workspace import (
    FAR,
    FLUSH,
    arena,
    clear_outside,
    copy_rows,
    flush,
    scale_row,
)

STATISTICS = ("log_normalizer", "entropy", "mean", "variance", "maximum", "weight", "gap")


@row_loop(1, sums=("max",))
def largest(s):
    """The largest number of a row."""
    return s


@row_loop(1, writes=(1,), sums=("sum", "sum"))
def _weights(s, shift):
    """e^{s − shift}, and the sums of that and of that times s − shift."""
    d = no_lower(s - shift)
    e = exp_of_limited(d)
    return e, e, e * d


@row_loop(1, writes=(1,))
def _share(x, factor):
    return x * factor


@row_loop(2, sums=("sum",))
def _spread(s, e, shift, centre):
    d = (s - shift - centre).at_least(FAR)
    return e * d * d


@intrinsic
def find(typing_context, zero, s, vectors, x):
    """Index of the first number of a row that equals x; 0 if there is none."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(element_of(signature.args[0]), lanes_of(signature.args[0]))
        _, s, vectors, x = arguments
        wanted, bits = splat(builder, vector, x), ir.IntType(vector.count)
        found = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))
        builder.store(ir.Constant(I64, 0), found)
        with cgutils.for_range(builder, vectors) as loop:
            index = builder.mul(loop.index, ir.Constant(I64, vector.count))
            same = builder.bitcast(builder.fcmp_ordered("==", load(builder, vector, s, index), wanted), bits)
            with builder.if_then(builder.icmp_unsigned("!=", same, ir.Constant(bits, 0)), likely=False):
                first = builder.cttz(builder.zext(same, I64), ir.Constant(ir.IntType(1), 1))
                builder.store(builder.add(index, first), found)
                loop.do_break()
        return builder.load(found)

    return types.int64(zero, types.int64, types.int64, zero), generate


Found = namedtuple(
    "Found", ("top", "z", "gap", "square", "best", "total")
)  # the numbers of each row, as above


@helper()
def _weigh(f, zero, found, where, S, E, summed, strip, s0, plain, fresh, flushed):
    """Turn the scores S of rows s0 … into weights E, and join their summaries to those of the rows."""
    size, lanes = size_of(zero), lanes_in(zero)
    top, z, gap, square, best, total = found
    j0, w0, w = strip.tile * f.tile_keys, strip.first, strip.last
    for r in range(s0, s0 + strip.rows):
        s, e = S.at + (r - s0) * S.step * size, E.at + (r - s0) * E.step * size
        lo, hi = max(where[2, r] - j0, w0), min(where[3, r] - j0, w)
        if hi <= lo:
            fill_row(zero, (e + w0 * size,), (w - w0 + lanes - 1) // lanes, (zero,))
            continue
        if plain and lo == w0:
            left, n = lo, (hi - lo + lanes - 1) // lanes
            for j in range(hi, left + n * lanes):
                write(s, j, number(zero, -np.inf))
        else:
            left, n = to_scores(f, zero, s, s, s, where[0, r], where[1, r], j0, lo, hi, False)
        high = largest(zero, (s + left * size,), n, ())[0]
        if high > top[r]:
            best[r] = j0 + left + find(zero, s + left * size, n, high)
            rebase = math.exp(top[r] - high)
            z[r] *= rebase
            square[r] *= rebase
            gap[r] = gap[r] + (top[r] - high) if z[r] > 0 else 0.0
            if not fresh:
                mine = summed.at + r * summed.step * size
                scale_row(zero, (mine,), summed.step // lanes, (number(zero, rebase),))
            if flushed:
                for d in range(total.shape[1]):
                    total[r, d] *= rebase
            top[r] = high
        clear_outside(zero, e, w0, left, n, w)
        shift = number(zero, top[r] if top[r] != -np.inf else 0.0)
        weight, mean = _weights(zero, (s + left * size, e + left * size), n, (shift,))
        if weight != 0:
            centre = mean / weight
            M = _spread(zero, (s + left * size, e + left * size), n, (shift, centre))[0]
            joined = z[r] + weight
            apart = centre - gap[r]
            square[r] += M + apart * apart * (z[r] * (weight / joined))
            # from the side that weighs more, so that a share near 0 costs no digits
            gap[r] = centre - apart * (z[r] / joined) if weight > z[r] else gap[r] + apart * (weight / joined)
            z[r] = joined


@helper()
def _put_row(f, zero, found, r, sees, row, count, summed, flushed):
    """Write the results of a row; `row` of `count` is its place."""
    size, lanes, Dv = size_of(zero), lanes_in(zero), f.Dv
    top, z, gap, square, best, total = found
    out, mine = f.output + row * Dv * size, summed.at + r * summed.step * size
    if z[r] != 0:
        inverse, log_z = 1 / z[r], math.log(z[r])
        if z[r] != z[r]:
            f.bad = 1
        if flushed:
            for d in range(Dv):
                write(out, d, number(zero, (total[r, d] + read(zero, mine, d)) * inverse))
        else:
            factor = number(zero, inverse)
            _share(zero, (mine, out), Dv // lanes, (factor,))
            for d in range(Dv // lanes * lanes, Dv):
                write(out, d, read(zero, mine, d) * factor)
        lines = (top[r] + log_z, log_z - gap[r], top[r] + gap[r], square[r] * inverse, top[r], z[r], gap[r])
    else:
        if sees:
            f.blind = 1
        for d in range(Dv):
            write(out, d, zero)
        lines = (-np.inf, 0.0, 0.0, 0.0, top[r], z[r], gap[r])
    for line, x in enumerate(lines):
        write(f.statistics, line * count + row, number(zero, x))
    set_whole_at(f.best, row, best[r])


@helper()
def forward_sweep(f, zero):
    """Take units until there are none; a unit is a tile of a block's rows against one part of its keys.

    Writes output (parts · rows, Dv), statistics (7, parts · rows) of `STATISTICS`, and best (parts · rows),
    where the maximum is; the parts of a row are joined by `join`.
    """
    size, lanes = size_of(zero), lanes_in(zero)
    width = 2 * lanes
    rows_of_block, tile_rows = f.group * f.Q, f.tile_rows
    tiles = (rows_of_block + tile_rows - 1) // tile_rows
    wide_q, wide_v = panels(zero, f.D), panels(zero, f.Dv)
    long = f.tile_keys + width
    rooms = (
        tile_rows * wide_q,
        tile_rows * wide_v,
        f.strip * long,
        f.strip * long,
        keys_room(f, zero, f.key, f.D, 1, 0),
        keys_room(f, zero, f.value, f.Dv, 0, 1),
    )
    memory, places = arena(zero, rooms)
    queries_at, summed_at, S_at, E_at, keys_at, values_at = to_fixed_tuple(places, 6)
    queries, summed, S, E = (
        Rows(queries_at, wide_q),
        Rows(summed_at, wide_v),
        Rows(S_at, long),
        Rows(E_at, long),
    )
    k, v = keys_of(f, zero, f.key, f.D, keys_at, 1), keys_of(f, zero, f.value, f.Dv, values_at, 0)
    where = np.empty((4, tile_rows), np.int64)
    found = Found(
        np.empty(tile_rows),
        np.empty(tile_rows),
        np.empty(tile_rows),
        np.empty(tile_rows),
        np.empty(tile_rows, np.int64),
        np.empty((tile_rows, f.Dv)),
    )
    scale = number(zero, f.scale)
    plain = f.cap <= 0 and f.bias.address == 0 and f.weight.address == 0 and f.mask.address == 0
    while True:
        start = take(f, f.chunk)
        if start >= f.units:
            break
        for unit in range(start, min(start + f.chunk, f.units)):
            part, rest = unit % f.key_parts, unit // f.key_parts
            block, r0 = rest // tiles, rest % tiles * tile_rows
            h = min(tile_rows, rows_of_block - r0)
            first, last = place_rows(f, block, r0, h, where)
            enter(zero, k, f.key, block)
            enter(zero, v, f.value, block)
            found.top[:h], found.z[:h], found.gap[:h], found.square[:h], found.best[:h] = -np.inf, 0, 0, 0, 0
            copy_rows(zero, queries, f.query, f.D, where, h)
            fill_row(zero, (summed.at,), h * wide_v // lanes, (zero,))
            done, flushed = 0, False
            from_tile, to_tile = first // f.tile_keys, (last + f.tile_keys - 1) // f.tile_keys
            span = to_tile - from_tile
            to_tile = from_tile + span * (part + 1) // f.key_parts
            for tile in range(from_tile + span * part // f.key_parts, to_tile):
                for s0 in range(0, h, f.strip):
                    s1 = min(h, s0 + f.strip)
                    strip = strip_of(f, where, s0, s1, block, tile, width)
                    if strip.last <= strip.first:
                        continue
                    against(f, scale, S, Rows(queries.at + s0 * wide_q * size, wide_q), k, strip, False)
                    _weigh(f, zero, found, where, S, E, summed, strip, s0, plain, done == 0, flushed)
                    if f.Dv > 0:
                        gather(f, zero, Rows(summed.at + s0 * wide_v * size, wide_v), E, v, strip, False)
                done += 1
                if done % FLUSH == 0:
                    flush(zero, summed, h, f.Dv, found.total, flushed)
                    flushed = True
            for r in range(h):
                row = (part * f.blocks * f.group + where[0, r]) * f.Q + where[1, r]
                count = f.key_parts * f.blocks * rows_of_block
                _put_row(f, zero, found, r, where[3, r] > where[2, r], row, count, summed, flushed)
    return memory.size


@kernel("the kernel of attention that joins parts of the keys")
def join(parts, part_output, part_statistics, part_best, output, statistics, best):
    """Join the parts of each row (axis 1 of statistics, else 0), as in ``tilted.py``."""
    rows, Dv = output.shape
    shares, mean = np.empty(parts), np.empty(Dv)
    for row in range(rows):
        top, at = -np.inf, 0
        for part in range(parts):
            high = part_statistics[4, part, row]
            if high > top:
                top, at = high, part
        z, gap = 0.0, 0.0
        for part in range(parts):
            weight = part_statistics[5, part, row]
            shift = part_statistics[4, part, row] - top if weight != 0 else 0.0
            shares[part] = weight * math.exp(shift) if weight != 0 else 0.0
            z += shares[part]
            gap += shares[part] * (part_statistics[6, part, row] + shift)
        best[row] = part_best[at, row]
        mean[:] = 0
        square = 0.0
        if z != 0:
            gap /= z
            for part in range(parts):
                if shares[part] != 0:
                    share = shares[part] / z
                    apart = part_statistics[6, part, row] + (part_statistics[4, part, row] - top) - gap
                    square += share * (part_statistics[3, part, row] + apart * apart)
                    for d in range(Dv):
                        mean[d] += share * part_output[part, row, d]
        for d in range(Dv):
            output[row, d] = mean[d]
        log_z = math.log(z) if z != 0 else -np.inf
        statistics[0, row] = top + log_z if z != 0 else -np.inf
        statistics[1, row] = log_z - gap if z != 0 else 0.0
        statistics[2, row] = top + gap if z != 0 else 0.0
        statistics[3, row] = square
        statistics[4, row], statistics[5, row], statistics[6, row] = top, z, gap


def forward_float32(pointer):
    """The sweep as a C function of a frame."""
    forward_sweep(carray(pointer, 1)[0], np.float32(0))


def forward_float64(pointer):
    """The sweep as a C function of a frame."""
    forward_sweep(carray(pointer, 1)[0], np.float64(0))
