"""Numbers in memory: read, written, widened from half precision, copied, and packed for products.

Matrices are given by the address of their first number and the numbers from one row to the next. Those of the
caller may be bfloat16 or float16 in a float32 problem (`KINDS`): `copy_row` widens them, a tile at a time.
The right-hand side of a product is packed into panels of two vectors: `pack_rows` packs a matrix as it is,
`pack_columns` its transpose, which it turns in registers.
"""

from collections import namedtuple
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.vector_math import (
    I16,
    I32,
    Lanes,
    constant,
    element_of,
    lanes_of,
    load,
    pointer,
    store,
)

NATIVE, BFLOAT16, FLOAT16 = 0, 1, 2
# Rows of numbers in memory: address of the first number, numbers from one row to the next.
Rows = namedtuple("Rows", ("at", "step"))
KINDS = {torch.float32: NATIVE, torch.float64: NATIVE, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


@intrinsic
def once(typing_context):
    """Keep the function that this is called in out of line: it is large, and called from several places."""

    def generate(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def size_of(typing_context, number):
    """Bytes of a number of that kind."""

    def generate(context, builder, signature, arguments):
        return constant(4 if signature.args[0] == types.float32 else 8)

    return types.int64(number), generate


@intrinsic
def lanes_in(typing_context, number):
    """How many numbers of that kind a vector holds."""

    def generate(context, builder, signature, arguments):
        return constant(lanes_of(signature.args[0]))

    return types.int64(number), generate


@intrinsic
def number(typing_context, zero, x):
    """x as a number like zero."""

    def generate(context, builder, signature, arguments):
        single = signature.args[0] == types.float32
        return builder.fptrunc(arguments[1], ir.FloatType()) if single else arguments[1]

    return zero(zero, types.float64), generate


def _widened(builder: Any, halves: Any, kind: int) -> Any:
    """A vector of 16-bit numbers as float32."""
    count = halves.type.count
    bits, single = ir.VectorType(I32, count), ir.VectorType(ir.FloatType(), count)

    def whole(x: int) -> Any:
        return ir.Constant(bits, [x] * count)

    x = builder.zext(halves, bits)
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(x, whole(16)), single)
    # float16: exponent and fraction moved into place and rescaled, which is right for small numbers too; 31
    # is infinity or NaN
    size = builder.shl(builder.and_(x, whole(0x7FFF)), whole(13))
    scaled = builder.fmul(
        builder.bitcast(size, single), ir.Constant(single, [2.0**112] * count), flags=("contract",)
    )
    special = builder.icmp_unsigned(">=", size, whole(0x0F800000))
    size = builder.select(special, builder.or_(size, whole(0x7F800000)), builder.bitcast(scaled, bits))
    return builder.bitcast(builder.or_(size, builder.shl(builder.and_(x, whole(0x8000)), whole(16))), single)


def _load_any(builder: Any, vector: Any, address: Any, index: Any, kind: int) -> Any:
    """The vector that begins at number `index` from the address, widened."""
    if kind == NATIVE:
        return load(builder, vector, address, index)
    halves = ir.VectorType(I16, vector.count)
    place = builder.bitcast(pointer(builder, I16, address, index), halves.as_pointer())
    single = _widened(builder, builder.load(place, align=2), kind)
    return single if isinstance(vector.element, ir.FloatType) else builder.fpext(single, vector)


def _load_one(builder: Any, element: Any, address: Any, index: Any, kind: int) -> Any:
    """The number at `index` from the address, widened."""
    if kind == NATIVE:
        return builder.load(pointer(builder, element, address, index))
    one = builder.load(pointer(builder, I16, address, index))
    halves = builder.insert_element(ir.Constant(ir.VectorType(I16, 1), [0]), one, ir.Constant(I32, 0))
    single = builder.extract_element(_widened(builder, halves, kind), ir.Constant(I32, 0))
    return single if isinstance(element, ir.FloatType) else builder.fpext(single, element)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """As many vectors as lanes, transposed: pairs of rows are interleaved, again and again."""
    count = len(rows)
    low = [k // 2 + (k % 2) * count for k in range(count)]
    masks = [
        ir.Constant(ir.VectorType(I32, count), [x + half * (count // 2) for x in low]) for half in (0, 1)
    ]
    span = count
    while span > 1:
        span //= 2
        made: list[Any] = [None] * count
        for r in range(count // 2):
            for half in (0, 1):
                made[2 * r + half] = builder.shuffle_vector(rows[r], rows[r + count // 2], masks[half])
        rows = made
    return rows


@intrinsic
def _transpose(typing_context, zero, target, line, source, step, last):
    """target[l line + c] = source[min(c, last) step + l] for c, l < lanes."""

    def generate(context, builder, signature, arguments):
        element, lanes = element_of(signature.args[0]), lanes_of(signature.args[0])
        vector = ir.VectorType(element, lanes)
        _, target, line, source, step, last = arguments
        rows = []
        for c in range(lanes):
            inside = builder.icmp_signed("<", constant(c), last)
            row = builder.select(inside, constant(c), last)
            rows.append(load(builder, vector, source, builder.mul(row, step)))
        for l, column in enumerate(transposed(builder, rows)):
            store(builder, column, target, builder.mul(line, constant(l)))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(zero, whole, whole, whole, whole, whole), generate


def _copy(kind):
    """Rows copied and widened, for one kind of number."""

    @intrinsic
    def copy(typing_context, zero, target, source, vectors, clean):
        """target[0..vectors·lanes] = source; where `clean`, NaN and infinities become 0."""

        def generate(context, builder, signature, arguments):
            element, lanes = element_of(signature.args[0]), lanes_of(signature.args[0])
            vector = ir.VectorType(element, lanes)
            _, target, source, vectors, clean = arguments
            with cgutils.for_range(builder, vectors) as loop:
                index = builder.mul(loop.index, constant(lanes))
                x = Lanes(builder, _load_any(builder, vector, source, index, kind))
                bad = (x - x).differs(0.0)
                zeros = ir.Constant(vector, None)
                cleaned = builder.select(bad, zeros, x.value)
                store(builder, builder.select(clean, cleaned, x.value), target, index)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(zero, whole, whole, whole, types.boolean), generate

    return copy


def _number(kind):
    """One number read and widened, for one kind."""

    @intrinsic
    def read_one(typing_context, zero, source, index):
        """source[index]."""

        def generate(context, builder, signature, arguments):
            return _load_one(builder, element_of(signature.args[0]), arguments[1], arguments[2], kind)

        return zero(zero, types.int64, types.int64), generate

    return read_one


_copy0, _copy1, _copy2 = _copy(NATIVE), _copy(BFLOAT16), _copy(FLOAT16)
read, _number1, _number2 = _number(NATIVE), _number(BFLOAT16), _number(FLOAT16)


@intrinsic
def write(typing_context, target, index, x):
    """target[index] = x."""

    def generate(context, builder, signature, arguments):
        target, index, x = arguments
        builder.store(x, pointer(builder, element_of(signature.args[2]), target, index))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, x), generate


@helper()
def read_any(zero, kind, source, index):
    """source[index] of that kind."""
    if kind == NATIVE:
        return read(zero, source, index)
    return _number1(zero, source, index) if kind == BFLOAT16 else _number2(zero, source, index)


@helper()
def bytes_of(zero, kind):
    """Bytes of a number of that kind in a problem of numbers like zero."""
    return size_of(zero) if kind == NATIVE else 2


@helper()
def copy_row(zero, kind, target, source, columns, padded, clean):
    """target[0..columns] = source, widened; 0 up to `padded`. Where `clean`, NaN and infinities become 0."""
    vectors = columns // lanes_in(zero)
    if kind == NATIVE:
        _copy0(zero, target, source, vectors, clean)
    elif kind == BFLOAT16:
        _copy1(zero, target, source, vectors, clean)
    else:
        _copy2(zero, target, source, vectors, clean)
    for c in range(vectors * lanes_in(zero), columns):
        x = read_any(zero, kind, source, c)
        write(target, c, zero if clean and x - x != 0 else x)
    for c in range(columns, padded):
        write(target, c, zero)


@helper()
def pack_rows(zero, target, panel, source, step, inner, columns, clean):
    """Pack B = source (inner, columns): a panel of `panel` numbers holds two vectors of columns, 0 beyond."""
    once()
    size, width = size_of(zero), 2 * lanes_in(zero)
    for start in range(0, columns, width):
        n = min(width, columns - start)
        for i in range(inner):
            place = source + (i * step + start) * size
            if n == width:
                _copy0(zero, target + i * width * size, place, 2, clean)
            else:
                copy_row(zero, NATIVE, target + i * width * size, place, n, width, clean)
        target += panel * size


@helper()
def pack_columns(zero, target, source, step, columns, inner):
    """Pack B = sourceᵀ, source (columns, inner), panel after panel; what fills up repeats the last row."""
    once()
    size, lanes = size_of(zero), lanes_in(zero)
    width = 2 * lanes
    whole = inner // lanes * lanes
    for start in range(0, columns, lanes):
        last = min(lanes, columns - start) - 1
        place = target + (start // width * inner * width + start % width) * size
        rows = source + start * step * size
        for l in range(0, whole, lanes):
            _transpose(zero, place + l * width * size, width, rows + l * size, step, last)
        for l in range(whole, inner):
            for c in range(lanes):
                write(place, l * width + c, read(zero, rows, min(c, last) * step + l))
