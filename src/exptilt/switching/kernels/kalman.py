"""One Kalman step on flat buffers, the only compiled copy of its arithmetic.

Every filter of this folder is made of three moves on Gaussians with mean x and covariance P:

    predict    x ← W x + c,       P ← W P W' + Q
    update     x ← x + K e,       P ← (I − K H) P (I − K H)' + K R K'        (Joseph's form)
               e = y − H x − d,   S = H P H' + R,   K = P H' S^{-1},   log p(y) = −½ (log |2πS| + e' S^{-1} e)
    collapse   x ← Σ w_i x_i,     P ← Σ w_i (P_i + δ_i δ_i'),   δ_i = x_i − x      (the M-projection)

All matrices of a kernel live row by row in ONE one-dimensional float64 buffer `w`, each addressed by its
offset. What belongs together lies together, under one offset:

    a law      x (n), P (n·n)
    a move     W (n·n), c (n), Q (n·n), W' (n·n)
    a sensor   H (m·n), d (m), R (m·m)

Of each law that is kept the lower triangle is mirrored to the upper one, so symmetry cannot be lost.
Joseph's form is a sum of positive terms, so positive definiteness is not lost either.

The sizes arrive as arguments. They may be known when the caller is compiled (see `count`); as everything
inlined here is then compiled for those sizes, loops over 4 states are unrolled as if the 4 had been typed in,
and as all offsets count from one base the compiler knows that no two matrices overlap.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from ..._support import kernels

Buffer = np.ndarray
View = tuple[int, int, int]
LOG_TWO_PI = 1.8378770664093453
ROUNDING = 4 * 2.220446049250313e-16  # of a sum, for each of its terms

# Sums may be re-ordered and multiply-adds fused; infinities keep their meaning, for log 0 = −inf is common.
FAST = {"contract", "reassoc", "nsz"}
inlined = njit(forceinline=True, fastmath=FAST, error_model="numpy")
kernel = kernels.kernel("the switching kernels", fastmath=FAST)


def count(size: Any) -> int:
    """The number a size stands for: itself if it is an integer, its length if it is a tuple.

    The length of a tuple is part of its type, so a kernel called with ``(0, 0, 0, 0)`` for the state
    dimension is compiled for dimension 4; called with ``4`` it is compiled once for all sizes.
    """
    return len(size) if isinstance(size, tuple) else int(size)


@overload(count)
def _count(size):  # type: ignore[no-untyped-def]  # numba compares the names of the arguments
    if isinstance(size, types.BaseTuple):
        length = len(size)
        return lambda size: length
    return lambda size: size


def choose(size: Any, exact: Any, general: Any) -> Any:
    """`exact` if `size` is a tuple (known to the compiler), else `general`; both are compiled functions."""
    return exact if isinstance(size, tuple) else general


@overload(choose)
def _choose(size, exact, general):  # type: ignore[no-untyped-def]
    if isinstance(size, types.BaseTuple):
        return lambda size, exact, general: exact
    return lambda size, exact, general: general


@inlined
def law_size(n: int) -> int:
    """How many numbers a law takes."""
    return n + n * n


@inlined
def update_room(n: int, m: int) -> int:
    """How many numbers of scratch `update` needs."""
    return m * m + 2 * n * m + 2 * m + 2 * n * n


@inlined
def copy(length: int, source: Buffer, source_at: int, target: Buffer, target_at: int) -> None:
    """Copy `length` numbers, four at a time: a four read before it is written may be one vector."""
    fours = length // 4
    for block in range(fours):
        i, j = source_at + 4 * block, target_at + 4 * block
        a, b, c, d = source[i], source[i + 1], source[i + 2], source[i + 3]
        target[j], target[j + 1], target[j + 2], target[j + 3] = a, b, c, d
    for i in range(4 * fours, length):
        target[target_at + i] = source[source_at + i]


@inlined
def clear(length: int, w: Buffer, at: int, diagonal: int, value: float) -> None:
    """Set `length` numbers to zero, but those on the diagonal of a matrix with `diagonal` rows to `value`."""
    for i in range(length):
        w[at + i] = value if diagonal > 0 and i % (diagonal + 1) == 0 else 0.0


@inlined
def add_product(
    w: Buffer, rows: int, inner: int, columns: int, f: float, A: View, B: View, out: Buffer, at: int
) -> None:
    """Add f A B to the matrix at `at`; a view is an offset and its steps by row and by column."""
    for i in range(rows):
        for j in range(columns):
            s = 0.0
            for k in range(inner):
                s += w[A[0] + i * A[1] + k * A[2]] * w[B[0] + k * B[1] + j * B[2]]
            out[at + i * columns + j] += f * s


@inlined
def product(w: Buffer, rows: int, inner: int, columns: int, A: View, B: View, out: int) -> None:
    """Write A B."""
    for i in range(rows):
        for j in range(columns):
            s = 0.0
            for k in range(inner):
                s += w[A[0] + i * A[1] + k * A[2]] * w[B[0] + k * B[1] + j * B[2]]
            w[out + i * columns + j] = s


@inlined
def mirror(n: int, w: Buffer, P: int) -> None:
    """Copy the lower triangle to the upper one."""
    for i in range(n):
        for j in range(i):
            w[P + j * n + i] = w[P + i * n + j]


@intrinsic
def add_four(typing_context, w, factor, row, target):  # type: ignore[no-untyped-def]
    """Add `factor` times four numbers to four others, as one vector."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        vector, fuse = ir.VectorType(ir.DoubleType(), 4), ("contract", "reassoc", "nsz")
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 4), [0] * 4)
        first, empty = ir.Constant(ir.IntType(32), 0), ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(empty, arguments[1], first)
        places = [builder.bitcast(builder.gep(data, [at]), vector.as_pointer()) for at in arguments[2:]]
        x, y = (builder.load(place, align=8) for place in places)
        scaled = builder.fmul(builder.shuffle_vector(one, one, zeros), x, flags=fuse)
        builder.store(builder.fadd(y, scaled, flags=fuse), places[1], align=8)
        return context.get_dummy_value()

    return types.void(w, types.float64, types.int64, types.int64), generate


@inlined
def add_row(length: int, w: Buffer, factor: float, row: int, target: int) -> None:
    """Add `factor` times one row to another, four places at a time: all products are sums of rows."""
    fours = length // 4
    for block in range(fours):
        add_four(w, factor, row + 4 * block, target + 4 * block)  # type: ignore[call-arg]
    for j in range(4 * fours, length):
        w[target + j] += factor * w[row + j]


@inlined
def turn(n: int, w: Buffer, move: int) -> None:
    """Write the transpose of a move's W to its place."""
    for i in range(n):
        for k in range(n):
            w[move + 2 * n * n + n + k * n + i] = w[move + i * n + k]


# The three moves are written out: the products above cost a quarter more here.


@inlined
def predict(n: int, w: Buffer, move: int, source: int, target: int, scratch: int) -> None:
    """Write the law at `source`, moved, to `target`; `scratch` holds n·n numbers."""
    W, c, Q = move, move + n * n, move + n * n + n
    turned, P, cov = Q + n * n, source + n, target + n
    for i in range(n):
        w[target + i] = w[c + i]
    for k in range(n):
        add_row(n, w, w[source + k], turned + k * n, target)
    for i in range(n * n):
        w[scratch + i] = 0.0
        w[cov + i] = w[Q + i]
    for i in range(n):
        for k in range(n):
            add_row(n, w, w[W + i * n + k], P + k * n, scratch + i * n)
        for k in range(n):
            add_row(n, w, w[scratch + i * n + k], turned + k * n, cov + i * n)


@kernel
def log_some(x: float) -> float:
    """The logarithm where it is seldom wanted: called, or the compiler would take it in any case."""
    return float(np.log(x))


@inlined
def factor(m: int, w: Buffer, S: int, size: int, cutoff: float, strict: bool) -> float:
    """Factor S = L D L' in place (L below the diagonal, 1/D on it) and return log |S|.

    The m numbers at `size` say how large the terms are that rows of S are sums of; a pivot of at most
    `cutoff` times its own is rounding and counts as zero. If `strict` the result is then NaN (S is not
    positive definite); else `solve` leaves its direction out, as a generalised inverse does.
    """
    log_determinant = 0.0
    product = 1.0
    for a in range(m):
        for b in range(a):
            for k in range(b):
                w[S + a * m + b] -= w[S + a * m + k] * w[S + b * m + k]
        s = w[S + a * m + a]
        least = cutoff * w[size + a]
        for k in range(a):
            scaled = w[S + a * m + k] * w[S + k * m + k]
            s -= w[S + a * m + k] * scaled
            w[S + a * m + k] = scaled
        if not (s > least and s < np.inf):
            if strict:
                return np.nan
            w[S + a * m + a] = 0.0
            continue
        product *= s
        if not (1e-150 < product < 1e150):  # one logarithm for many pivots, without under- or overflow
            log_determinant += log_some(product)
            product = 1.0
        w[S + a * m + a] = 1.0 / s
    return float(log_determinant + np.log(product))


@inlined
def solve(m: int, columns: int, w: Buffer, S: int, X: int) -> None:
    """Overwrite the matrix X (m, columns) with S^{-1} X, S as `factor` left it."""
    for a in range(m):
        for b in range(a):
            for i in range(columns):
                w[X + a * columns + i] -= w[S + a * m + b] * w[X + b * columns + i]
    for back in range(m):
        a = m - 1 - back
        for i in range(columns):
            w[X + a * columns + i] *= w[S + a * m + a]
        for b in range(a + 1, m):
            for i in range(columns):
                w[X + a * columns + i] -= w[S + b * m + a] * w[X + b * columns + i]


@inlined
def update(n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int) -> float:
    """Condition the law at `source` on the `m` numbers at `y`; return their log-density (NaN: S is singular).

    `scratch` is left with the factor of S (m·m), K' and (K R)' (m·n each), e and S^{-1} e (m each),
    A' = (I − K H)' and A P (n·n each).
    """
    H, d, R = sensor, sensor + m * n, sensor + m * n + m
    P, cov = source + n, target + n
    S = scratch
    K = S + m * m
    KR = K + n * m
    e = KR + n * m
    A = e + 2 * m
    AP = A + n * n
    for i in range(m * n):
        w[K + i] = 0.0
        w[KR + i] = 0.0
    for a in range(m):
        for k in range(n):
            add_row(n, w, w[H + a * n + k], P + k * n, K + a * n)
        for b in range(a + 1):
            s = w[R + a * m + b]
            for k in range(n):
                s += w[H + a * n + k] * w[K + b * n + k]
            w[S + a * m + b] = s
        s = w[R + a * m + a]
        for k in range(n):
            s += w[H + a * n + k] * w[H + a * n + k] * w[P + k * n + k]
        w[e + a] = s
    log_determinant = factor(m, w, S, e, ROUNDING * (n + m), True)
    solve(m, n, w, S, K)
    for a in range(m):
        s = w[y + a] - w[d + a]
        for k in range(n):
            s -= w[H + a * n + k] * w[source + k]
        w[e + a] = s
        w[e + m + a] = s
    solve(m, 1, w, S, e + m)
    square = 0.0
    for a in range(m):
        square += w[e + a] * w[e + m + a]
    for i in range(n):
        w[target + i] = w[source + i]
    for i in range(n * n):
        w[A + i] = 1.0 if i % (n + 1) == 0 else 0.0
        w[AP + i] = 0.0
        w[cov + i] = 0.0
    for a in range(m):
        add_row(n, w, w[e + a], K + a * n, target)
        for k in range(n):
            add_row(n, w, -w[H + a * n + k], K + a * n, A + k * n)
        for b in range(m):
            add_row(n, w, w[R + a * m + b], K + b * n, KR + a * n)
    for i in range(n):
        for k in range(n):
            add_row(n, w, w[A + k * n + i], P + k * n, AP + i * n)
        for k in range(n):
            add_row(n, w, w[AP + i * n + k], A + k * n, cov + i * n)
        for a in range(m):
            add_row(n, w, w[KR + a * n + i], K + a * n, cov + i * n)
    return float(-0.5 * (m * LOG_TWO_PI + log_determinant + square))


@inlined
def collapse(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """Write the law with mean and covariance of a mixture of the `parts` laws at first, first + step, …"""
    cov = target + n
    for i in range(law_size(n)):
        w[target + i] = 0.0
    for k in range(parts):
        add_row(n, w, w[weight + k * weight_step], first + k * step, target)
    for k in range(parts):
        part, share = first + k * step, w[weight + k * weight_step]
        add_row(n * n, w, share, part + n, cov)
        for i in range(n):
            gap = share * (w[part + i] - w[target + i])
            for j in range(n):
                w[cov + i * n + j] += gap * (w[part + j] - w[target + j])


@inlined
def symmetric(n: int, w: Buffer, source: int, target: int) -> None:
    """Copy a law, the lower triangle of its covariance to both."""
    copy(n, w, source, w, target)
    for i in range(n):
        for j in range(n):
            w[target + n + i * n + j] = w[source + n + max(i, j) * n + min(i, j)]


@inlined
def log_sum(length: int, w: Buffer, at: int, step: int) -> float:
    """log Σ exp of `length` numbers, −inf for a sum of nothing."""
    top = -np.inf
    for i in range(length):
        top = max(top, w[at + i * step])
    if top == -np.inf:
        return top
    s = 0.0
    for i in range(length):
        s += np.exp(w[at + i * step] - top)
    return float(top + np.log(s))


# The moves compiled once for all sizes, and called rather than inlined.


@kernel
def predict_some(n: int, w: Buffer, move: int, source: int, target: int, scratch: int) -> None:
    """`predict` for sizes known only at run time."""
    predict(n, w, move, source, target, scratch)
    mirror(n, w, target + n)


@kernel
def update_some(
    n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int
) -> float:
    """`update` for sizes known only at run time; nothing observed leaves the law as it is."""
    if m == 0:
        copy(law_size(n), w, source, w, target)
        return 0.0
    density = update(n, m, w, y, sensor, source, target, scratch)
    mirror(n, w, target + n)
    return float(density)


@kernel
def collapse_some(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """`collapse` for sizes known only at run time."""
    collapse(n, parts, w, weight, weight_step, first, step, target)
    mirror(n, w, target + n)
