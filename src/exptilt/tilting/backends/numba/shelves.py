"""Shelves: tiles of keys and values, packed for products and kept for the next queries of the same head.

An operand of a tile (its keys, values, or tangents of those) is used in two ways, `against` for dot products with rows, `gather` for
weighted sums of its vectors; each way has its own packed form, on a shelf of its own. A shelf belongs to one thread. With few queries
nothing is packed, and the operand is read where it is.
"""

from collections import namedtuple

from numba import njit

from exptilt.tilting.backends.numba.frame import whole_at
from exptilt.tilting.backends.numba.packing import (
    NATIVE,
    bytes_of,
    copy_row,
    lanes_in,
    number,
    pack_columns,
    pack_rows,
    size_of,
)
from exptilt.tilting.backends.numba.product import dot_products, long_product, thin_dots, thin_sum

# One operand of a block: address, numbers from one vector to the next, kind, dimension, how many vectors there are; and, for half
# precision, where a tile of it is widened, and which tile is there (an array of one).
Source = namedtuple("Source", ("address", "step", "kind", "dim", "length", "wide", "held"))
# Address of the first slot, numbers in a slot, and the tags (an array: what each slot holds).
Shelf = namedtuple("Shelf", ("address", "slot", "tags"))


@njit(error_model="numpy")
def source(zero, address, table, step, kind, dim, length, block, wide, held):
    """The operand's vectors for one block."""
    held[0] = -1
    return Source(
        address + whole_at(table, block) * bytes_of(zero, kind), step, kind, dim, length, wide, held
    )


@njit(error_model="numpy")
def panels(zero, columns):
    """Columns rounded up to whole panels."""
    width = 2 * lanes_in(zero)
    return (columns + width - 1) // width * width


@njit(error_model="numpy")
def _slot(shelf, block, tile):
    """Number of the slot where a tile belongs, and whether it is there."""
    slot = tile % shelf.tags.size
    tag = (block << 32) + tile
    there = shelf.tags[slot] == tag
    shelf.tags[slot] = tag
    return slot, there


@njit(error_model="numpy")
def _tile(f, zero, x, tile):
    """Address of a tile's first vector and the numbers from one to the next, of the problem's own kind of number."""
    start = tile * f.tile_keys
    place = x.address + start * x.step * bytes_of(zero, x.kind)
    if x.kind == NATIVE:
        return place, x.step
    if x.held[0] != tile:
        for j in range(min(f.tile_keys, x.length - start)):
            target = x.wide + j * x.dim * size_of(zero)
            copy_row(zero, x.kind, target, place + j * x.step * bytes_of(zero, x.kind), x.dim, x.dim, False)
        x.held[0] = tile
    return x.wide, x.dim


@njit(error_model="numpy")
def against(f, alpha, zero, C, c_row, A, a_row, rows, x, shelf, block, tile, first, last, add):
    """C[:, first..last] (+)= alpha A xᵀ: products of rows with the vectors first … last of a tile of x; first is at a whole panel."""
    size = size_of(zero)
    C += first * size
    if f.thin:
        place, step = _tile(f, zero, x, tile)
        thin_dots(
            alpha, C, c_row, A, a_row, rows, place + first * step * size, step, last - first, x.dim, add
        )
        return
    slot, there = _slot(shelf, block, tile)
    at = shelf.address + slot * shelf.slot * size
    if not there:
        place, step = _tile(f, zero, x, tile)
        pack_columns(zero, at, place, step, min(f.tile_keys, x.length - tile * f.tile_keys), x.dim)
    panel = 2 * lanes_in(zero) * x.dim
    dot_products(alpha, C, c_row, A, a_row, at + first * x.dim * size, panel, rows, last - first, x.dim, add)


@njit(error_model="numpy")
def gather(f, zero, C, c_row, A, a_row, rows, x, shelf, block, tile, first, last, clean):
    """C += A[:, first..last] x: sums of the vectors first … last of a tile of x; where `clean`, NaN and infinities in x count as 0."""
    size, width = size_of(zero), 2 * lanes_in(zero)
    A += first * size
    if f.thin:
        place, step = _tile(f, zero, x, tile)
        thin_sum(
            zero, C, c_row, A, a_row, rows, place + first * step * size, step, last - first, x.dim, clean
        )
        return
    slot, there = _slot(shelf, block, tile)
    at = shelf.address + slot * shelf.slot * size
    if not there:
        place, step = _tile(f, zero, x, tile)
        n = min(f.tile_keys, x.length - tile * f.tile_keys)
        pack_rows(zero, at, f.tile_keys * width, place, step, n, x.dim, clean)
    place = at + first * width * size
    long_product(
        number(zero, 1.0), C, c_row, A, a_row, 1, place, f.tile_keys * width, rows, x.dim, last - first
    )
