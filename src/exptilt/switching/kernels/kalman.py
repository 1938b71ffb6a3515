"""One Kalman step on flat buffers, the only compiled copy of its arithmetic.

Every filter of this folder is made of three moves on Gaussians with mean x and covariance P:

    predict    x ← W x + c,       P ← W P W' + Q
    update     x ← x + K e,       P ← (I − K H) P (I − K H)' + K R K'        (Joseph's form)
               e = y − H x − d,   S = H P H' + R,   K = P H' S^{-1},   log p(y) = −½ (log |2πS| + e' S^{-1} e)
    collapse   x ← Σ w_i x_i,     P ← Σ w_i (P_i + δ_i δ_i'),   δ_i = x_i − x      (the M-projection)

All matrices of a kernel live row by row in ONE one-dimensional float64 buffer `w`, each addressed by its
offset. What belongs together lies together, under one offset:

    a law      x (n), P (n·n)
    a move     W (n·n), c (n), Q (n·n)
    a sensor   H (m·n), d (m), R (m·m)

Of each symmetric result only the lower triangle is computed and then mirrored, so symmetry cannot be lost.
Joseph's form is a sum of positive terms, so positive definiteness is not lost either.

The sizes arrive as arguments. They may be known when the caller is compiled (see `count`); as everything
inlined here is then compiled for those sizes, loops over 4 states are unrolled as if the 4 had been typed in,
and as all offsets count from one base the compiler knows that no two matrices overlap.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..._support import kernels

Buffer = np.ndarray
View = tuple[int, int, int]
LOG_TWO_PI = 1.8378770664093453

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
    """Copy `length` numbers."""
    for i in range(length):
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


# The three moves are written out: the products above cost a quarter more here.


@inlined
def predict(n: int, w: Buffer, move: int, source: int, target: int, scratch: int) -> None:
    """Write the law at `source`, moved, to `target`; `scratch` holds n·n numbers."""
    W, c, Q = move, move + n * n, move + n * n + n
    P, cov = source + n, target + n
    for i in range(n):
        s = w[c + i]
        for k in range(n):
            s += w[W + i * n + k] * w[source + k]
        w[target + i] = s
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += w[W + i * n + k] * w[P + k * n + j]
            w[scratch + i * n + j] = s
    for i in range(n):
        for j in range(i + 1):
            s = w[Q + i * n + j]
            for k in range(n):
                s += w[scratch + i * n + k] * w[W + j * n + k]
            w[cov + i * n + j] = s
    mirror(n, w, cov)


@inlined
def cholesky(m: int, w: Buffer, S: int, cutoff: float) -> float:
    """Factor S = L L' in place (lower triangle, the diagonal holds 1/L_ii) and return log |S|.

    A pivot of at most `cutoff` times its diagonal counts as zero: with a cutoff of 0 the result is NaN (S is
    not positive definite), with a larger one `solve` leaves its direction out, as a generalised inverse does.
    """
    log_determinant = 0.0
    product = 1.0
    for a in range(m):
        for b in range(a):
            s = w[S + a * m + b]
            for k in range(b):
                s -= w[S + a * m + k] * w[S + b * m + k]
            w[S + a * m + b] = s * w[S + b * m + b]
        s = w[S + a * m + a]
        least = cutoff * s
        for k in range(a):
            s -= w[S + a * m + k] * w[S + a * m + k]
        if not (s > least and s < np.inf):
            if cutoff == 0.0:
                return np.nan
            w[S + a * m + a] = 0.0
            continue
        product *= s
        if not (1e-150 < product < 1e150):  # one logarithm for many pivots, without under- or overflow
            log_determinant += np.log(product)
            product = 1.0
        w[S + a * m + a] = 1.0 / np.sqrt(s)
    return float(log_determinant + np.log(product))


@inlined
def whiten(m: int, w: Buffer, S: int, x: int) -> None:
    """Overwrite the vector at `x` with L^{-1} x, S as `cholesky` left it."""
    for a in range(m):
        s = w[x + a]
        for b in range(a):
            s -= w[S + a * m + b] * w[x + b]
        w[x + a] = s * w[S + a * m + a]


@inlined
def solve(m: int, w: Buffer, S: int, x: int) -> None:
    """Overwrite the vector at `x` with S^{-1} x, S as `cholesky` left it."""
    whiten(m, w, S, x)
    for back in range(m):
        a = m - 1 - back
        s = w[x + a]
        for b in range(a + 1, m):
            s -= w[S + b * m + a] * w[x + b]
        w[x + a] = s * w[S + a * m + a]


@inlined
def update(n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int) -> float:
    """Condition the law at `source` on the `m` numbers at `y`; return their log-density (NaN: S is singular).

    `scratch` is left with the factor of S (m·m), K and K R (n·m each), e and L^{-1} e (m each), A = I − K H
    and A P (n·n each).
    """
    H, d, R = sensor, sensor + m * n, sensor + m * n + m
    P, cov = source + n, target + n
    S = scratch
    K = S + m * m
    KR = K + n * m
    e = KR + n * m
    A = e + 2 * m
    AP = A + n * n
    for i in range(n):
        for a in range(m):
            s = 0.0
            for k in range(n):
                s += w[P + i * n + k] * w[H + a * n + k]
            w[K + i * m + a] = s
    for a in range(m):
        for b in range(a + 1):
            s = w[R + a * m + b]
            for k in range(n):
                s += w[H + a * n + k] * w[K + k * m + b]
            w[S + a * m + b] = s
    log_determinant = cholesky(m, w, S, 0.0)
    for i in range(n):
        solve(m, w, S, K + i * m)
    square = 0.0
    for a in range(m):
        s = w[y + a] - w[d + a]
        for k in range(n):
            s -= w[H + a * n + k] * w[source + k]
        w[e + a] = s
        for b in range(a):
            s -= w[S + a * m + b] * w[e + m + b]
        s *= w[S + a * m + a]
        w[e + m + a] = s
        square += s * s
    for i in range(n):
        s = w[source + i]
        for a in range(m):
            s += w[K + i * m + a] * w[e + a]
        w[target + i] = s
    for i in range(n):
        for j in range(n):
            s = 1.0 if i == j else 0.0
            for a in range(m):
                s -= w[K + i * m + a] * w[H + a * n + j]
            w[A + i * n + j] = s
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += w[A + i * n + k] * w[P + k * n + j]
            w[AP + i * n + j] = s
        for a in range(m):
            s = 0.0
            for b in range(m):
                s += w[K + i * m + b] * w[R + b * m + a]
            w[KR + i * m + a] = s
    for i in range(n):
        for j in range(i + 1):
            s = 0.0
            for k in range(n):
                s += w[AP + i * n + k] * w[A + j * n + k]
            for a in range(m):
                s += w[KR + i * m + a] * w[K + j * m + a]
            w[cov + i * n + j] = s
    mirror(n, w, cov)
    return float(-0.5 * (m * LOG_TWO_PI + log_determinant + square))


@inlined
def collapse(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """Write the law with mean and covariance of a mixture of the `parts` laws at first, first + step, …"""
    cov = target + n
    for i in range(n):
        s = 0.0
        for k in range(parts):
            s += w[weight + k * weight_step] * w[first + k * step + i]
        w[target + i] = s
    for i in range(n):
        for j in range(i + 1):
            s = 0.0
            for k in range(parts):
                part = first + k * step
                di, dj = w[part + i] - w[target + i], w[part + j] - w[target + j]
                s += w[weight + k * weight_step] * (w[part + n + i * n + j] + di * dj)
            w[cov + i * n + j] = s
    mirror(n, w, cov)


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


@kernel
def update_some(
    n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int
) -> float:
    """`update` for sizes known only at run time; nothing observed leaves the law as it is."""
    if m == 0:
        copy(law_size(n), w, source, w, target)
        return 0.0
    return float(update(n, m, w, y, sensor, source, target, scratch))


@kernel
def collapse_some(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """`collapse` for sizes known only at run time."""
    collapse(n, parts, w, weight, weight_step, first, step, target)
