"""One Kalman step on flat buffers, the only compiled copy of its arithmetic.

Every filter of this folder is made of three moves on Gaussians with mean x and covariance P:

    predict    x ← W x + c,       P ← W P W' + Q
    update     x ← x + K e,       P ← (I − K H) P (I − K H)' + K R K'        (Joseph's form)
               e = y − H x − d,   S = H P H' + R,   K = P H' S^{-1},   log p(y) = −½ (log |2πS| + e' S^{-1} e)
    collapse   x ← Σ w_i x_i,     P ← Σ w_i (P_i + δ_i δ_i'),   δ_i = x_i − x      (the M-projection)

All matrices of a kernel live row by row in ONE buffer `w` of numbers (`numbers.py`: one law at a time, or
four at once), each addressed by its offset. What belongs together lies together, under one offset:

    a law      x (n), P (n·n)
    a move     W (n·n), c (n), Q (n·n), W' (n·n)
    a sensor   H (m·n), d (m), R (m·m)

The lower triangle of each covariance is mirrored to the upper one, so symmetry cannot be lost. Joseph's form
multiplies by I − K H from both sides, so positive definiteness is not lost either.

The sizes arrive as arguments. They may be known when the caller is compiled (see `count`); as everything
inlined here is then compiled for those sizes, loops over 4 states are unrolled as if the 4 had been typed in.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ..._support import kernels
from . import numbers
from .numbers import FAST, between, get, get4, get_lane, logarithm, moderate, put, put4, rolled, zero, zero4

Buffer = np.ndarray
View = tuple[int, int, int]
LOG_TWO_PI = 1.8378770664093453
ROUNDING = 4 * 2.220446049250313e-16  # of a sum, for each of its terms
inlined = numbers.inlined
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


@inlined
def law_size(n: int) -> int:
    """How many numbers a law takes."""
    return n + n * n


@inlined
def update_room(n: int, m: int) -> int:
    """How many numbers of scratch `update` needs."""
    return m * m + 3 * n * m + 2 * m + n * n


@inlined
def copy(length: int, source: Buffer, source_at: int, target: Buffer, target_at: int) -> None:
    """Copy `length` numbers."""
    rolled(0)
    fours = length // 4
    for block in range(fours):
        put4(target, target_at + 4 * block, get4(source, source_at + 4 * block))
    for i in range(4 * fours, length):
        put(target, target_at + i, get(source, source_at + i))


@inlined
def clear(length: int, w: Buffer, at: int, diagonal: int, value: float) -> None:
    """Set `length` numbers to zero, but those on the diagonal of a matrix with `diagonal` rows to `value`."""
    rolled(0)
    for i in range(length):
        put(w, at + i, value if diagonal > 0 and i % (diagonal + 1) == 0 else 0.0)


@inlined
def mirror(n: int, w: Buffer, P: int) -> None:
    """Copy the lower triangle to the upper one."""
    rolled(0)
    for i in range(n):
        for j in range(i):
            put(w, P + j * n + i, get(w, P + i * n + j))


@inlined
def turn(n: int, w: Buffer, move: int) -> None:
    """Write the transpose of a move's W to its place."""
    rolled(0)
    for i in range(n):
        for k in range(n):
            put(w, move + 2 * n * n + n + k * n + i, get(w, move + i * n + k))


@inlined
def multiply(
    w: Buffer, rows: int, inner: int, columns: int, f: float, A: View, B: int, C: int, out: int
) -> None:
    """Write C + f A B; A is a view (an offset and its steps by row and column), the others lie row by row."""
    rolled(0)
    fours = columns // 4
    for i in range(rows):
        for block in range(fours):
            j = 4 * block
            four = get4(w, C + i * columns + j)
            for k in range(inner):
                four = four + (f * get(w, A[0] + i * A[1] + k * A[2])) * get4(w, B + k * columns + j)
            put4(w, out + i * columns + j, four)
        for j in range(4 * fours, columns):
            s = get(w, C + i * columns + j)
            for k in range(inner):
                s = s + (f * get(w, A[0] + i * A[1] + k * A[2])) * get(w, B + k * columns + j)
            put(w, out + i * columns + j, s)


@inlined
def predict(n: int, w: Buffer, move: int, source: int, target: int, scratch: int) -> None:
    """Write the law at `source`, moved, to `target`; `scratch` (n·n) is left with W P."""
    rolled(0)
    W, c, Q = move, move + n * n, move + n * n + n
    turned = Q + n * n
    multiply(w, 1, n, n, 1.0, (source, 0, 1), turned, c, target)
    clear(n * n, w, scratch, 0, 0.0)
    multiply(w, n, n, n, 1.0, (W, n, 1), source + n, scratch, scratch)
    multiply(w, n, n, n, 1.0, (scratch, n, 1), turned, Q, target + n)
    mirror(n, w, target + n)


@inlined
def factor(m: int, w: Buffer, S: int, size: int, cutoff: float, otherwise: float) -> Any:
    """Factor S = L D L' in place (L below the diagonal, 1/D on it) and return log |S|.

    The m numbers at `size` say how large the terms are that rows of S are sums of; a pivot of at most
    `cutoff` times its own is rounding, and `otherwise` takes its place: NaN where S must be positive
    definite, infinity where `solve` is to leave its direction out, as a generalised inverse does.
    """
    rolled(0)
    log_determinant = zero(w)
    product = log_determinant + 1.0
    for a in range(m):
        for b in range(a):
            s = get(w, S + a * m + b)
            for k in range(b):
                s = s - get(w, S + a * m + k) * get(w, S + b * m + k)
            put(w, S + a * m + b, s)
        s = get(w, S + a * m + a)
        for k in range(a):
            scaled = get(w, S + a * m + k) * get(w, S + k * m + k)
            s = s - get(w, S + a * m + k) * scaled
            put(w, S + a * m + k, scaled)
        s = between(s, cutoff * get(w, size + a), otherwise)
        put(w, S + a * m + a, 1.0 / s)
        product = product * s
        if not moderate(product):  # one logarithm for many pivots, without under- or overflow
            log_determinant = log_determinant + logarithm(product)
            product = zero(w) + 1.0
    return log_determinant + logarithm(product)


@inlined
def solve(m: int, columns: int, w: Buffer, S: int, X: int) -> None:
    """Overwrite the matrix X (m, columns) with S^{-1} X, S as `factor` left it."""
    rolled(0)
    for a in range(m):
        for b in range(a):
            for i in range(columns):
                s = get(w, X + a * columns + i) - get(w, S + a * m + b) * get(w, X + b * columns + i)
                put(w, X + a * columns + i, s)
    for back in range(m):
        a = m - 1 - back
        for i in range(columns):
            s = get(w, X + a * columns + i) * get(w, S + a * m + a)
            for b in range(a + 1, m):
                s = s - get(w, S + b * m + a) * get(w, X + b * columns + i)
            put(w, X + a * columns + i, s)


@inlined
def joseph(
    n: int, m: int, w: Buffer, H: int, R: int, K: int, HP: int, P: int, target: int, scratch: int
) -> None:
    """Write (I − K H) P (I − K H)' + K R K' from K' and H P; `scratch` holds n·m + n·n numbers.

    With B = P (I − K H)' = P − (H P)' K' it is B − K (H B − R K').
    """
    rolled(0)
    G, B = scratch, scratch + n * m
    multiply(w, n, m, n, -1.0, (HP, 1, n), K, P, B)
    clear(m * n, w, G, 0, 0.0)
    multiply(w, m, n, n, 1.0, (H, n, 1), B, G, G)
    multiply(w, m, m, n, -1.0, (R, m, 1), K, G, G)
    multiply(w, n, m, n, -1.0, (K, 1, n), G, B, target)
    mirror(n, w, target)


@inlined
def update(n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int) -> Any:
    """Condition the law at `source` on the `m` numbers at `y`; return their log-density (NaN: S is singular).

    `scratch` is left with the factor of S (m·m), K' and H P (m·n each), e and S^{-1} e (m each).
    """
    rolled(0)
    H, d, R, P = sensor, sensor + m * n, sensor + m * n + m, source + n
    S = scratch
    K = S + m * m
    HP = K + n * m
    e = HP + n * m
    v = e + m
    clear(m * n, w, HP, 0, 0.0)
    multiply(w, m, n, n, 1.0, (H, n, 1), P, HP, HP)
    for a in range(m):
        for b in range(a + 1):
            s = get(w, R + a * m + b)
            for k in range(n):
                s = s + get(w, H + a * n + k) * get(w, HP + b * n + k)
            put(w, S + a * m + b, s)
        size, gap = get(w, R + a * m + a), get(w, y + a) - get(w, d + a)
        for k in range(n):
            h = get(w, H + a * n + k)
            size = size + h * h * get(w, P + k * n + k)
            gap = gap - h * get(w, source + k)
        put(w, e + a, gap)
        put(w, v + a, size)
    total = factor(m, w, S, v, ROUNDING * (n + m), np.nan) + m * LOG_TWO_PI
    copy(m * n, w, HP, w, K)
    solve(m, n, w, S, K)
    copy(m, w, e, w, v)
    solve(m, 1, w, S, v)
    for a in range(m):
        total = total + get(w, e + a) * get(w, v + a)
    multiply(w, 1, m, n, 1.0, (e, 0, 1), K, source, target)
    joseph(n, m, w, H, R, K, HP, P, target + n, v + m)
    return -0.5 * total


@inlined
def collapse(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """Write the law with mean and covariance of a mixture of the `parts` laws at first, first + step, …"""
    rolled(0)
    for i in range(n):
        s = zero(w)
        for k in range(parts):
            s = s + get(w, weight + k * weight_step) * get(w, first + k * step + i)
        put(w, target + i, s)
    fours = n // 4
    for i in range(n):
        row = n + i * n
        for block in range(fours):
            j = 4 * block
            four = zero4(w)
            for k in range(parts):
                part, share = first + k * step, get(w, weight + k * weight_step)
                gap = share * (get(w, part + i) - get(w, target + i))
                four = four + share * get4(w, part + row + j)
                four = four + gap * (get4(w, part + j) - get4(w, target + j))
            put4(w, target + row + j, four)
        for j in range(4 * fours, n):
            s = zero(w)
            for k in range(parts):
                part, share = first + k * step, get(w, weight + k * weight_step)
                gap = share * (get(w, part + i) - get(w, target + i))
                s = s + share * get(w, part + row + j) + gap * (get(w, part + j) - get(w, target + j))
            put(w, target + row + j, s)
    mirror(n, w, target + n)


@inlined
def log_sum(length: int, w: Buffer, at: int, step: int, lane: int = 0) -> float:
    """log Σ exp of `length` numbers of a lane, −inf for a sum of nothing."""
    rolled(0)
    top = -np.inf
    for i in range(length):
        top = max(top, get_lane(w, at + i * step, lane))
    if top == -np.inf:
        return top
    s = 0.0
    for i in range(length):
        s += np.exp(get_lane(w, at + i * step, lane) - top)
    return float(top + np.log(s))


# The moves compiled once for all sizes, and called rather than inlined.


@kernel
def predict_some(n: int, w: Buffer, move: int, source: int, target: int, scratch: int) -> None:
    """`predict` for sizes known only at run time."""
    rolled(n)
    predict(n, w, move, source, target, scratch)


@kernel
def update_lanes(
    n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int, density: int
) -> None:
    """`update` for sizes known only at run time; the log-density goes to `density`.

    Nothing observed leaves the law as it is.
    """
    rolled(n)
    if m == 0:
        copy(law_size(n), w, source, w, target)
        put(w, density, 0.0)
    else:
        put(w, density, update(n, m, w, y, sensor, source, target, scratch))


@kernel
def update_some(
    n: int, m: int, w: Buffer, y: int, sensor: int, source: int, target: int, scratch: int
) -> float:
    """`update` of one law for sizes known only at run time; nothing observed leaves the law as it is."""
    rolled(n)
    if m == 0:
        copy(law_size(n), w, source, w, target)
        return 0.0
    return float(update(n, m, w, y, sensor, source, target, scratch))


@kernel
def collapse_some(
    n: int, parts: int, w: Buffer, weight: int, weight_step: int, first: int, step: int, target: int
) -> None:
    """`collapse` for sizes known only at run time."""
    rolled(n)
    collapse(n, parts, w, weight, weight_step, first, step, target)
