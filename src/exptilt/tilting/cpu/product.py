r"""Matrix products for tiles, in registers.

Every sweep is a chain of products C += A B of small matrices. B is first packed into panels of `width` columns (two vector registers), so
that the innermost step reads one line of B and one number from each of a few rows of A, and feeds rows × 2 multiply-adds:

    acc[r] += A[r, l] · B[l, panel]      for l = 0 … inner − 1,    acc a block of `rows` × `width` numbers that never leaves the registers.

That step is written as vector code (LLVM's vector type, which becomes AVX, SSE or NEON as the machine has it); loops around it are plain
numba. A BLAS would do the same, but packs B anew at every call and runs threads of its own; here a packed tile of keys serves all queries
of a head, and a sweep on one thread is on one thread. On the machine it was written on, a tile of 256 × 384 × 64 in float32 ran at 81 to
91 Gflop/s on one core, against some 80 for OpenBLAS, which has to pack as well.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: dict[type, int] = {np.float32: 8, np.float64: 4}  # numbers in a 256-bit register


def width_of(number: type) -> int:
    """Columns of a panel."""
    return 2 * LANES[number]


def padded(columns: int, number: type) -> int:
    """Columns rounded up to whole panels."""
    width = width_of(number)
    return -(-columns // width) * width


def _block(rows):
    """The innermost step for a fixed number of rows."""

    @intrinsic
    def block(typing_context, C, c0, c_row, A, a0, a_row, a_step, B, b0, inner, add):
        """C[c0 + r c_row + (0..width)] = (C if add else 0) + Σ_l A[a0 + r a_row + l a_step] B[b0 + l width + (0..width)]; flat arrays."""

        def generate(context, builder, signature, arguments):
            number = np.float32 if signature.args[0].dtype == types.float32 else np.float64
            element = ir.FloatType() if number is np.float32 else ir.DoubleType()
            lanes = LANES[number]
            vector = ir.VectorType(element, lanes)
            bytes_each = 4 if number is np.float32 else 8
            _, c0, c_row, _, a0, a_row, a_step, _, b0, inner, add = arguments
            pointers = [
                context.make_array(t)(context, builder, x).data
                for t, x in zip(signature.args, arguments, strict=True)
                if t.__class__ is types.Array
            ]
            to_c, to_a, to_b = pointers
            to_vector = vector.as_pointer()
            integer = ir.IntType(64)
            none = ir.Constant(vector, None)
            spread = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)

            def constant(n):
                return ir.Constant(integer, n)

            def load(pointer, index):
                return builder.load(builder.bitcast(builder.gep(pointer, [index]), to_vector), align=bytes_each)

            sums = [[cgutils.alloca_once_value(builder, none) for _ in range(2)] for _ in range(rows)]
            targets = [
                [builder.add(c0, builder.add(builder.mul(c_row, constant(r)), constant(h * lanes))) for h in range(2)] for r in range(rows)
            ]
            with builder.if_then(add):
                for r in range(rows):
                    for h in range(2):
                        builder.store(load(to_c, targets[r][h]), sums[r][h])
            starts = [builder.gep(to_a, [builder.add(a0, builder.mul(a_row, constant(r)))]) for r in range(rows)]
            with cgutils.for_range(builder, inner) as loop:
                line = builder.add(b0, builder.mul(loop.index, constant(2 * lanes)))
                halves = [load(to_b, builder.add(line, constant(h * lanes))) for h in range(2)]
                step = builder.mul(loop.index, a_step)
                for r in range(rows):
                    a = builder.load(builder.gep(starts[r], [step]))
                    all_a = builder.shuffle_vector(builder.insert_element(none, a, ir.Constant(ir.IntType(32), 0)), none, spread)
                    for h in range(2):
                        product = builder.fmul(all_a, halves[h], flags=("contract",))
                        builder.store(builder.fadd(builder.load(sums[r][h]), product, flags=("contract",)), sums[r][h])
            for r in range(rows):
                for h in range(2):
                    place = builder.bitcast(builder.gep(to_c, [targets[r][h]]), to_vector)
                    builder.store(builder.load(sums[r][h]), place, align=bytes_each)
            return context.get_dummy_value()

        index = types.intp
        signature = types.void(C, index, index, A, index, index, index, B, index, index, types.boolean)
        return signature, generate

    return block


_block6, _block4, _block2, _block1 = _block(6), _block(4), _block(2), _block(1)


@njit(error_model="numpy")
def product(C, c0, c_row, A, a0, a_row, a_step, B, b0, panel, rows, columns, inner, width, add):
    """C (+)= A B: C rows × columns from c0, A[r, l] at a0 + r a_row + l a_step, B packed from b0 with `panel` numbers to a panel.

    All flat arrays. columns is rounded up to whole panels: C must have room for them in each row.
    """
    at_b = b0
    for column in range(0, columns, width):
        at_c, at_a = c0 + column, a0
        left = rows
        while left >= 6:
            _block6(C, at_c, c_row, A, at_a, a_row, a_step, B, at_b, inner, add)
            at_c, at_a, left = at_c + 6 * c_row, at_a + 6 * a_row, left - 6
        if left >= 4:
            _block4(C, at_c, c_row, A, at_a, a_row, a_step, B, at_b, inner, add)
            at_c, at_a, left = at_c + 4 * c_row, at_a + 4 * a_row, left - 4
        if left >= 2:
            _block2(C, at_c, c_row, A, at_a, a_row, a_step, B, at_b, inner, add)
            at_c, at_a, left = at_c + 2 * c_row, at_a + 2 * a_row, left - 2
        if left >= 1:
            _block1(C, at_c, c_row, A, at_a, a_row, a_step, B, at_b, inner, add)
        at_b += panel


# With this few rows, packing would cost more than the product: a decoding step, or one query against a large memory.
THIN = 8


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def thin_scores(C, c_row, A, rows, h):
    """C = A rowsᵀ for h rows of A (·, D) and many of `rows` (w, D); four of them at a time, so that their sums do not wait in line.

    C is flat, with c_row numbers from one row to the next: rows taken from it are seen to be contiguous, and loops over them vectorise.
    """
    whole = rows.shape[0] // 4 * 4
    for i in range(h):
        a, c = A[i], C[i * c_row : (i + 1) * c_row]
        for j in range(0, whole, 4):
            b0, b1, b2, b3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
            t0 = C.dtype.type(0)
            t1, t2, t3 = t0, t0, t0
            for d in range(a.size):
                x = a[d]
                t0 += x * b0[d]
                t1 += x * b1[d]
                t2 += x * b2[d]
                t3 += x * b3[d]
            c[j], c[j + 1], c[j + 2], c[j + 3] = t0, t1, t2, t3
        for j in range(whole, rows.shape[0]):
            b = rows[j]
            total = C.dtype.type(0)
            for d in range(a.size):
                total += a[d] * b[d]
            c[j] = total


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def thin_sum(C, c_row, A, a_row, rows, h):
    """C += A rows for h rows of A (·, w) and rows (w, Dv), both flat; four rows at a time, so that C is written once for four."""
    whole = rows.shape[0] // 4 * 4
    for i in range(h):
        c, a = C[i * c_row : i * c_row + rows.shape[1]], A[i * a_row : i * a_row + rows.shape[0]]
        for j in range(0, whole, 4):
            b0, b1, b2, b3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
            a0, a1, a2, a3 = a[j], a[j + 1], a[j + 2], a[j + 3]
            for d in range(c.size):
                c[d] += (a0 * b0[d] + a1 * b1[d]) + (a2 * b2[d] + a3 * b3[d])
        for j in range(whole, rows.shape[0]):
            b, x = rows[j], a[j]
            for d in range(c.size):
                c[d] += x * b[d]


@njit(error_model="numpy")
def pack_rows(target, at, source, panel, width):
    """Pack B = source (inner, columns): panel p holds columns p·width …, filled up with 0; `panel` numbers from one to the next."""
    inner, columns = source.shape
    for start in range(0, columns, width):
        n = min(width, columns - start)
        into, part = target[at : at + inner * width].reshape(inner, width), source[:, start : start + n]
        for i in range(inner):
            for c in range(n):
                into[i, c] = part[i, c]
            for c in range(n, width):
                into[i, c] = 0
        at += panel


@njit(error_model="numpy")
def pack_columns(target, at, source, panel, width):
    """Pack B = sourceᵀ, source (columns, inner), in the same way."""
    columns, inner = source.shape
    for start in range(0, columns, width):
        n = min(width, columns - start)
        into, part = target[at : at + inner * width].reshape(inner, width), source[start : start + n]
        for i in range(inner):
            for c in range(n):
                into[i, c] = part[c, i]
            for c in range(n, width):
                into[i, c] = 0
        at += panel


@njit(error_model="numpy")
def shelve(shelf, tags, block, tile, source, panel, width, transposed):
    """Where on the shelf (slots, numbers) the packed tile of that block stands, as an index into the flat shelf.

    It is packed now if it is not there. tags (slots,) says what stands in each slot, −1 at first. Rows are packed as B = source, or as
    B = sourceᵀ if transposed.
    """
    slot = tile % tags.size
    at = slot * shelf.shape[1]
    tag = (block << 32) + tile
    if tags[slot] != tag:
        flat = shelf.reshape(shelf.size)
        if transposed:
            pack_columns(flat, at, source, panel, width)
        else:
            pack_rows(flat, at, source, panel, width)
        tags[slot] = tag
    return at
