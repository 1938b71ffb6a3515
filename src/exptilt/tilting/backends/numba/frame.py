"""The frame: everything a sweep is told, by name, in one block of memory that its threads share.

An *operand* is a tensor of vectors (..., heads, length, dim): the address of its first number, the address of
a table that says where each head's block begins (in numbers, from the first), the numbers from one vector to
the next, and their kind (`KINDS` of ``packing.py``). So a slice of a longer cache, a broadcast batch axis and
half precision are read where they are.

A *plane* is a tensor that belongs to pairs of a query and a key (..., heads, queries or 1, keys or 1):
address, table, and the numbers from one query and from one key to the next, 0 along an axis that is shared. A
log-weight is a plane with one row.

What is absent has address 0.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

_OPERANDS = (
    "query",
    "key",
    "value",
    "cotangent",
    "attended",
    "attended_dot",
    "query_dot",
    "key_dot",
    "value_dot",
)
_PLANES = ("bias", "weight", "mask", "bias_dot", "weight_dot")
_NUMBERS = (
    "next",  # the first unit of work that nobody has taken yet
    "units",
    "chunk",  # units taken at a time
    "bad",  # set to 1 where a query's sum of weights is NaN
    "blind",  # set to 1 where a query has keys to see, and all of their scores are −inf
    "blocks",  # batch items times key heads
    "group",  # query heads that share a key head
    *("Q", "K", "D", "Dv", "causal"),
    "window",  # −1 for none
    "thin",  # few queries: nothing is packed
    *("tile_rows", "tile_keys"),
    "strip",  # rows that are carried from scores to sums together
    "shelf_slots",  # packed tiles that a thread keeps
    *("row_parts", "key_parts"),
    *("row_tile_from", "row_tile_to"),  # the rows of every block that a backward sweep goes over
    "keys_outside",  # whether a backward sweep goes over the keys once, and over the rows for each tile
    *("order", "bounds"),  # an owner's blocks are order[bounds[owner]] … , and are done by one thread
    *("output", "statistics", "best"),  # results
    "rows",  # what is known of each query, one line of numbers after another
    *("query_grad", "key_grad", "value_grad", "column_sum", "row_sum"),
    *("bias_grad", "bias_grad_at", "bias_grad_row"),
    *("need_query", "need_key", "need_value"),
    "only_mass",  # nothing but the column sums of the weights is wanted
    "second",  # whether a backward sweep is that of second derivatives
    "whole",  # whether the output of a backward sweep is that over these keys, and not over more
    "joint",  # tiles of scores that it keeps while it finds the tangents by itself; 0 where they are given
)
_WORD = ir.IntType(64)


class Operand(ctypes.Structure):
    """A tensor of vectors."""

    _fields_ = [(name, ctypes.c_int64) for name in ("address", "table", "step", "kind")]


class Plane(ctypes.Structure):
    """A tensor of numbers that belong to pairs of a query and a key."""

    _fields_ = [(name, ctypes.c_int64) for name in ("address", "table", "row", "column")]


class Frame(ctypes.Structure):
    """All of it, in 64-bit fields."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        ("cap", ctypes.c_double),
        *((name, Operand) for name in _OPERANDS),
        *((name, Plane) for name in _PLANES),
    ]


FRAME = from_dtype(np.dtype(Frame))


@intrinsic
def take(typing_context, frame, count):
    """Add count to frame.next at once, and return what it was: the threads' way to share out units."""

    def generate(context, builder, signature, arguments):
        place = builder.bitcast(arguments[0], _WORD.as_pointer())  # `next` comes first
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.int64(frame, types.int64), generate


def _place(builder, address, index):
    return builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [index])


@intrinsic
def whole_at(typing_context, address, index):
    """The 64-bit integer at that place of a table."""

    def generate(context, builder, signature, arguments):
        return builder.load(_place(builder, *arguments))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def set_whole_at(typing_context, address, index, value):
    """Write an integer to that place of a table."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _place(builder, *arguments[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
