r"""Matrix products for tiles, in registers.

Every sweep is a chain of products C += A B of small matrices. B is first packed into panels of two vectors,
so that the innermost step reads one line of B and one number from each of a few rows of A:

    acc[r] += A[r, l] · B[l, panel]      for l = 0 … inner − 1,

where acc is a block of numbers that never leaves the registers.

Each number of C is one chain of multiply-adds in the order of l, however the rows are cut into blocks: the
same product has the same bits in every sweep. Sums over keys or queries are cut into chains of `CHAIN` and
those over dimensions into chains of `DOTS`, which keeps them as exact as a library's.

A BLAS would do the same, but packs B anew at every call and runs threads of its own; here a packed tile of
keys serves all queries of a head, and a sweep on one thread is on one thread.

With few queries (`THIN`) packing would cost more than the product. `thin_dots` and `thin_sum` then read keys
and values where they are.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exptilt._support.kernels import helper
from exptilt.tilting.backends.numba.machine import machine
from exptilt.tilting.backends.numba.packing import lanes_in, once, read, size_of, transposed, write
from exptilt.tilting.backends.numba.vector_math import (
    I32,
    Lanes,
    constant,
    element_of,
    lanes_of,
    load,
    pointer,
    splat,
    store,
)

ROWS = machine().block_rows
CHAIN = 128
DOTS = 128
THIN = 8


def _prefetch(builder: Any, place: Any) -> None:
    """Ask for a line of memory; any address may be asked for."""
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    )
    builder.call(function, [builder.bitcast(place, byte), *(ir.Constant(I32, x) for x in (0, 3, 1))])


def _block(rows):
    """The innermost step for a fixed number of rows."""

    @intrinsic
    def block(typing_context, alpha, C, c_row, A, a_row, a_step, B, inner, add):
        """C[r, 0..width] = (C if add else 0) + alpha Σ_l A[r a_row + l a_step] B[l width + 0..width]."""

        def generate(context, builder, signature, arguments):
            element, lanes = element_of(signature.args[0]), lanes_of(signature.args[0])
            size = 4 if isinstance(element, ir.FloatType) else 8
            vector = ir.VectorType(element, lanes)
            alpha, C, c_row, A, a_row, a_step, B, inner, add = arguments
            none = ir.Constant(vector, None)
            sums = [[cgutils.alloca_once_value(builder, none) for _ in range(2)] for _ in range(rows)]
            for line in sums:
                for place in line:
                    builder.store(none, place)
            starts = [
                builder.add(A, builder.mul(builder.mul(a_row, constant(r)), constant(size)))
                for r in range(rows)
            ]
            with cgutils.for_range(builder, inner) as loop:
                line = builder.mul(loop.index, constant(2 * lanes))
                halves = [
                    Lanes(builder, load(builder, vector, B, builder.add(line, constant(h * lanes))))
                    for h in range(2)
                ]
                step = builder.mul(loop.index, a_step)
                if machine().prefetch:
                    ahead = builder.add(line, constant(2 * lanes * machine().prefetch))
                    _prefetch(builder, pointer(builder, element, B, ahead))
                for r in range(rows):
                    a = Lanes(
                        builder,
                        splat(builder, vector, builder.load(pointer(builder, element, starts[r], step))),
                    )
                    for h in range(2):
                        total = Lanes(builder, builder.load(sums[r][h]))
                        builder.store((total + a * halves[h]).value, sums[r][h])
            factor = Lanes(builder, splat(builder, vector, alpha))
            places = [
                [builder.add(builder.mul(c_row, constant(r)), constant(h * lanes)) for h in range(2)]
                for r in range(rows)
            ]
            with builder.if_else(add) as (then, otherwise):
                with then:
                    for r in range(rows):
                        for h in range(2):
                            made = Lanes(builder, builder.load(sums[r][h])) * factor
                            there = Lanes(builder, load(builder, vector, C, places[r][h]))
                            store(builder, (there + made).value, C, places[r][h])
                with otherwise:
                    for r in range(rows):
                        for h in range(2):
                            store(
                                builder,
                                (Lanes(builder, builder.load(sums[r][h])) * factor).value,
                                C,
                                places[r][h],
                            )
            return context.get_dummy_value()

        whole = types.int64
        return types.void(alpha, whole, whole, whole, whole, whole, whole, whole, types.boolean), generate

    return block


_block12, _block6, _block4, _block2, _block1 = (_block(rows) for rows in (12, 6, 4, 2, 1))


@helper()
def product(alpha, C, c_row, A, a_row, a_step, B, panel, rows, columns, inner, add):
    """C (+)= alpha A B: C rows × columns, A[r, l] at A + r a_row + l a_step, B packed with `panel` numbers to
    a panel.

    columns is rounded up to whole panels: each row of C must have room for them.
    """
    once()
    size, width = size_of(alpha), 2 * lanes_in(alpha)
    for column in range(0, columns, width):
        c, a = C + column * size, A
        left = rows
        if ROWS == 12:
            while left >= 12:
                _block12(alpha, c, c_row, a, a_row, a_step, B, inner, add)
                c, a, left = c + 12 * c_row * size, a + 12 * a_row * size, left - 12
        while left >= 6:
            _block6(alpha, c, c_row, a, a_row, a_step, B, inner, add)
            c, a, left = c + 6 * c_row * size, a + 6 * a_row * size, left - 6
        if left >= 4:
            _block4(alpha, c, c_row, a, a_row, a_step, B, inner, add)
            c, a, left = c + 4 * c_row * size, a + 4 * a_row * size, left - 4
        if left >= 2:
            _block2(alpha, c, c_row, a, a_row, a_step, B, inner, add)
            c, a, left = c + 2 * c_row * size, a + 2 * a_row * size, left - 2
        if left >= 1:
            _block1(alpha, c, c_row, a, a_row, a_step, B, inner, add)
        B += panel * size


@helper()
def dot_products(alpha, C, c_row, A, a_row, B, panel, rows, columns, inner, add):
    """C (+)= alpha A B, in chains of `DOTS`: dot products of long vectors."""
    size, width = size_of(alpha), 2 * lanes_in(alpha)
    for start in range(0, max(inner, 1), DOTS):  # a sum of nothing is 0, which must be written too
        n = min(DOTS, inner - start)
        a, b = A + start * size, B + start * width * size
        product(alpha, C, c_row, a, a_row, 1, b, panel, rows, columns, n, add or start > 0)


@helper()
def long_product(alpha, C, c_row, A, a_row, a_step, B, panel, rows, columns, inner):
    """C += alpha A B, in chains of `CHAIN`."""
    size, width = size_of(alpha), 2 * lanes_in(alpha)
    for start in range(0, inner, CHAIN):
        n = min(CHAIN, inner - start)
        a, b = A + start * a_step * size, B + start * width * size
        product(alpha, C, c_row, a, a_row, a_step, b, panel, rows, columns, n, True)


@intrinsic
def _dots(typing_context, alpha, target, row, source, step, last, inner, add):
    """target[c] = (target if add else 0) + alpha Σ_l row[l] source[min(c, last) step + l] for c < lanes."""

    def generate(context, builder, signature, arguments):
        element, lanes = element_of(signature.args[0]), lanes_of(signature.args[0])
        vector = ir.VectorType(element, lanes)
        alpha, target, row, source, step, last, inner, add = arguments
        none = ir.Constant(vector, None)
        sums = [cgutils.alloca_once_value(builder, none) for _ in range(lanes)]
        places = []
        for c, total in enumerate(sums):
            builder.store(none, total)
            inside = builder.icmp_signed("<", constant(c), last)
            places.append(builder.mul(builder.select(inside, constant(c), last), step))
        whole = builder.udiv(inner, constant(lanes))
        with cgutils.for_range(builder, whole) as loop:
            index = builder.mul(loop.index, constant(lanes))
            a = Lanes(builder, load(builder, vector, row, index))
            for place, total in zip(places, sums, strict=True):
                b = Lanes(builder, load(builder, vector, source, builder.add(place, index)))
                builder.store((Lanes(builder, builder.load(total)) + a * b).value, total)
        columns = [Lanes(builder, x) for x in transposed(builder, [builder.load(total) for total in sums])]
        while len(columns) > 1:  # neighbours first, so that the order does not depend on how LLVM sees it
            columns = [columns[k] + columns[k + 1] for k in range(0, len(columns), 2)]
        found = cgutils.alloca_once_value(builder, columns[0].value)
        builder.store(columns[0].value, found)
        done = builder.mul(whole, constant(lanes))
        with cgutils.for_range(builder, builder.sub(inner, done)) as loop:
            index = builder.add(done, loop.index)
            others = none
            for c, place in enumerate(places):
                one = builder.load(pointer(builder, element, source, builder.add(place, index)))
                others = builder.insert_element(others, one, ir.Constant(I32, c))
            a = Lanes(builder, splat(builder, vector, builder.load(pointer(builder, element, row, index))))
            builder.store((Lanes(builder, builder.load(found)) + a * Lanes(builder, others)).value, found)
        made = Lanes(builder, builder.load(found)) * Lanes(builder, splat(builder, vector, alpha))
        there = Lanes(builder, load(builder, vector, target))
        store(builder, builder.select(add, (there + made).value, made.value), target)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(alpha, whole, whole, whole, whole, whole, whole, types.boolean), generate


@helper()
def thin_dots(alpha, C, c_row, A, a_row, rows, source, step, columns, inner, add):
    """C (+)= alpha A sourceᵀ for few rows of A and an unpacked source; C has room for whole vectors."""
    once()
    size, lanes = size_of(alpha), lanes_in(alpha)
    for r in range(rows):
        c, a = C + r * c_row * size, A + r * a_row * size
        for start in range(0, columns, lanes):
            last = min(lanes, columns - start) - 1
            _dots(alpha, c + start * size, a, source + start * step * size, step, last, inner, add)


def _sum_rows(vectors, unroll):
    """A weighted sum of many rows, a few vectors wide; `unroll` rows at a time hide the latency of a sum."""

    @intrinsic
    def sum_rows(typing_context, zero, target, weights, source, step, rows, clean):
        """target[0..vectors·lanes] += Σ_j weights[j] source[j step + …]."""

        def generate(context, builder, signature, arguments):
            element, lanes = element_of(signature.args[0]), lanes_of(signature.args[0])
            vector = ir.VectorType(element, lanes)
            _, target, weights, source, step, rows, clean = arguments
            none = ir.Constant(vector, None)
            sums = [[cgutils.alloca_once_value(builder, none) for _ in range(vectors)] for _ in range(unroll)]
            for line in sums:
                for place in line:
                    builder.store(none, place)

            def add(j: Any, line: list[Any]) -> None:
                weight = Lanes(
                    builder, splat(builder, vector, builder.load(pointer(builder, element, weights, j)))
                )
                start = builder.mul(j, step)
                for h, place in enumerate(line):
                    x = Lanes(builder, load(builder, vector, source, builder.add(start, constant(h * lanes))))
                    bad = builder.and_(
                        (x - x).differs(0.0), splat(builder, ir.VectorType(ir.IntType(1), lanes), clean)
                    )
                    x = Lanes(builder, builder.select(bad, none, x.value))
                    builder.store((Lanes(builder, builder.load(place)) + weight * x).value, place)

            whole = builder.udiv(rows, constant(unroll))
            with cgutils.for_range(builder, whole) as loop:
                for k in range(unroll):
                    add(builder.add(builder.mul(loop.index, constant(unroll)), constant(k)), sums[k])
            done = builder.mul(whole, constant(unroll))
            with cgutils.for_range(builder, builder.sub(rows, done)) as loop:
                add(builder.add(done, loop.index), sums[0])
            for h in range(vectors):
                total = Lanes(builder, builder.load(sums[0][h]))
                for k in range(1, unroll):
                    total = total + Lanes(builder, builder.load(sums[k][h]))
                there = Lanes(builder, load(builder, vector, target, constant(h * lanes)))
                store(builder, (there + total).value, target, constant(h * lanes))
            return context.get_dummy_value()

        whole = types.int64
        return types.void(zero, whole, whole, whole, whole, whole, types.boolean), generate

    return sum_rows


_wide, _four, _one = _sum_rows(8, 1), _sum_rows(4, 2), _sum_rows(1, 4)


@helper()
def thin_sum(zero, C, c_row, A, a_row, rows, source, step, inner, columns, clean):
    """C += A source for few rows of A and an unpacked source (inner, columns); in chains of `CHAIN`."""
    once()
    size, lanes = size_of(zero), lanes_in(zero)
    for start in range(0, inner, CHAIN):
        n = min(CHAIN, inner - start)
        for r in range(rows):
            c, a = C + r * c_row * size, A + (r * a_row + start) * size
            column = 0
            while column + lanes <= columns:
                place, target = source + (start * step + column) * size, c + column * size
                if column + 8 * lanes <= columns:
                    _wide(zero, target, a, place, step, n, clean)
                    column += 8 * lanes
                elif column + 4 * lanes <= columns:
                    _four(zero, target, a, place, step, n, clean)
                    column += 4 * lanes
                else:
                    _one(zero, target, a, place, step, n, clean)
                    column += lanes
            for d in range(column, columns):
                total = zero
                for j in range(n):
                    x = read(zero, source, (start + j) * step + d)
                    total += read(zero, a, j) * (zero if clean and x - x != 0 else x)
                write(c, d, read(zero, c, d) + total)
