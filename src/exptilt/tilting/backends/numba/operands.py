"""Operands of the keys (keys, values, tangents of those), as one thread sees them, tile by tile.

An operand is used in two ways, `against` for dot products with rows, `gather` for weighted sums of its
vectors. Each way has its own packed form, on a shelf of its own, where tiles are kept for the next queries of
the same head. A shelf belongs to one thread. With few queries nothing is packed, and the operand is read
where it is.
"""

from collections import namedtuple

import numpy as np

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.frame import whole_at
from exptilt.tilting.backends.numba.packing import (
    NATIVE,
    Rows,
    bytes_of,
    copy_row,
    lanes_in,
    number,
    pack_columns,
    pack_rows,
    size_of,
)
from exptilt.tilting.backends.numba.product import dot_products, long_product, thin_dots, thin_sum

# Some rows of a block against the vectors first … last of a tile of its keys; first is at a whole panel.
Strip = namedtuple("Strip", ("rows", "block", "tile", "first", "last"))
# Address of the first slot, numbers in a slot, and what each slot holds (an array).
Shelf = namedtuple("Shelf", ("at", "slot", "tags"))
# Numbers from one vector to the next, their kind, dimension, how many vectors there are, where a tile is
# widened if it is of half precision, what changes (an array: the address of the block's first number, and
# which tile is widened), and the shelves for dot products and for sums.
Keys = namedtuple("Keys", ("step", "kind", "dim", "length", "wide", "now", "for_dots", "for_sums"))


@helper()
def panels(zero, columns):
    """Columns rounded up to whole panels."""
    width = 2 * lanes_in(zero)
    return (columns + width - 1) // width * width


@helper()
def _rooms(f, zero, operand, dim):
    """Numbers for a widened tile of an operand, and for its shelves for dot products and for sums."""
    wide = 0 if operand.kind == NATIVE else f.tile_keys * dim
    packed = 0 if f.thin else f.shelf_slots * f.tile_keys
    return wide, packed * dim, packed * panels(zero, dim)


@helper()
def keys_room(f, zero, operand, dim, dots, sums):
    """Numbers for what is widened and packed of an operand used for dot products, for sums, or both."""
    wide, for_dots, for_sums = _rooms(f, zero, operand, dim)
    return 0 if operand.address == 0 else wide + for_dots * dots + for_sums * sums


@helper()
def keys_of(f, zero, operand, dim, at, dots):
    """An operand of the keys, with `keys_room` numbers of memory at that address."""
    wide, for_dots, _ = _rooms(f, zero, operand, dim)
    packed, slots = at + wide * size_of(zero), max(f.shelf_slots, 1)
    after = packed + for_dots * dots * size_of(zero)
    first = Shelf(packed, f.tile_keys * dim, np.full(slots, -1))
    second = Shelf(after, f.tile_keys * panels(zero, dim), np.full(slots, -1))
    return Keys(operand.step, operand.kind, dim, f.K, at, np.full(2, -1), first, second)


@helper()
def strip_of(f, where, s0, s1, block, tile, width):
    """Rows s0..s1 against those keys of a tile that some of them sees, begun at a whole panel."""
    j0 = tile * f.tile_keys
    whole = min(f.tile_keys, f.K - j0)
    first, last = whole, 0
    for r in range(s0, s1):
        lo, hi = max(where[2, r] - j0, 0), min(where[3, r] - j0, whole)
        if hi > lo:
            first, last = min(first, lo), max(last, hi)
    return Strip(s1 - s0, block, tile, min(first, last) // width * width, last)


@helper()
def enter(zero, x, operand, block):
    """Let x be the operand's vectors of a block."""
    if operand.address != 0:
        x.now[0] = operand.address + whole_at(operand.table, block) * bytes_of(zero, operand.kind)
        x.now[1] = -1


@helper()
def _slot(shelf, strip):
    """Number of the slot where a tile belongs, and whether it is there."""
    slot = strip.tile % shelf.tags.size
    tag = (strip.block << 32) + strip.tile
    there = shelf.tags[slot] == tag
    shelf.tags[slot] = tag
    return slot, there


@helper()
def _tile(f, zero, x, tile):
    """A tile's vectors, of the problem's own kind of number, and how many there are."""
    start = tile * f.tile_keys
    place, count = x.now[0] + start * x.step * bytes_of(zero, x.kind), min(f.tile_keys, x.length - start)
    if x.kind == NATIVE:
        return Rows(place, x.step), count
    if x.now[1] != tile:
        for j in range(count):
            target = x.wide + j * x.dim * size_of(zero)
            copy_row(zero, x.kind, target, place + j * x.step * bytes_of(zero, x.kind), x.dim, x.dim, False)
        x.now[1] = tile
    return Rows(x.wide, x.dim), count


@helper()
def against(f, alpha, C, A, x, strip, add):
    """C (+)= alpha A xᵀ: products of a strip's rows with its vectors of x."""
    zero = number(alpha, 0.0)
    size, count = size_of(alpha), strip.last - strip.first
    target = C.at + strip.first * size
    if f.thin:
        tile, _ = _tile(f, zero, x, strip.tile)
        place = tile.at + strip.first * tile.step * size
        thin_dots(alpha, target, C.step, A.at, A.step, strip.rows, place, tile.step, count, x.dim, add)
        return
    slot, there = _slot(x.for_dots, strip)
    at = x.for_dots.at + slot * x.for_dots.slot * size
    if not there:
        tile, length = _tile(f, zero, x, strip.tile)
        pack_columns(zero, at, tile.at, tile.step, length, x.dim)
    panel, place = 2 * lanes_in(alpha) * x.dim, at + strip.first * x.dim * size
    dot_products(alpha, target, C.step, A.at, A.step, place, panel, strip.rows, count, x.dim, add)


@helper()
def gather(f, zero, C, A, x, strip, clean):
    """C += A x: sums of a strip's vectors of x; where `clean`, NaN and infinities in x count as 0."""
    size, width, count = size_of(zero), 2 * lanes_in(zero), strip.last - strip.first
    weights = A.at + strip.first * size
    if f.thin:
        tile, _ = _tile(f, zero, x, strip.tile)
        place = tile.at + strip.first * tile.step * size
        thin_sum(zero, C.at, C.step, weights, A.step, strip.rows, place, tile.step, count, x.dim, clean)
        return
    slot, there = _slot(x.for_sums, strip)
    at, panel = x.for_sums.at + slot * x.for_sums.slot * size, f.tile_keys * width
    if not there:
        tile, length = _tile(f, zero, x, strip.tile)
        pack_rows(zero, at, panel, tile.at, tile.step, length, x.dim, clean)
    one, place = number(zero, 1.0), at + strip.first * width * size
    long_product(one, C.at, C.step, weights, A.step, 1, place, panel, strip.rows, x.dim, count)
