"""One Kalman step on flat buffers, the only copy of its arithmetic.

Every filter of this folder is made of three moves on Gaussians ``(mean, covariance)``:

    predict    mean = W m + c,               covariance = W P W' + Q
    update     mean = m + K e,               covariance = (I − K H) P (I − K H)' + K R K'        (Joseph's form)
               e = y − H m − d,  S = H P H' + R,  K = P H' S^{-1},  log p(y) = −½ (log |2πS| + e' S^{-1} e)
    collapse   mean = Σ w_i m_i,             covariance = Σ w_i (P_i + δ_i δ_i'),   δ_i = m_i − mean     (the M-projection)

All matrices of a kernel live row by row in ONE one-dimensional float64 buffer `w`, each addressed by its offset. Of each symmetric result
only
the lower triangle is computed and then mirrored, so symmetry cannot be lost. Joseph's form is a sum of positive terms, so positive
definiteness
is not lost either.

The sizes arrive as arguments. They may be known when the caller is compiled (see `count`); as everything here is inlined into the caller,
loops
over 4 states are then unrolled as if the 4 had been typed in, and as all offsets count from one base the compiler knows that no two
matrices
overlap and keeps them in registers. Both together are worth a factor of 4.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..._support import kernels

Buffer = np.ndarray
LOG_TWO_PI = 1.8378770664093453

# Sums may be re-ordered and multiply-adds fused; infinities and NaN keep their meaning, for log 0 = −inf is an everyday value here.
FAST = {"contract", "reassoc", "nsz"}
inlined = njit(forceinline=True, fastmath=FAST, error_model="numpy")
kernel = kernels.kernel("the switching kernels", fastmath=FAST)


def count(size: Any) -> int:
    """The number a size stands for: itself if it is an integer, its length if it is a tuple.

    The length of a tuple is part of its type, so a kernel called with ``(0, 0, 0, 0)`` for the state dimension is compiled for dimension 4,
    and cached on disk under that signature; called with ``4`` it is compiled once for all sizes.
    """
    return len(size) if isinstance(size, tuple) else int(size)


@overload(count)
def _count(size):  # type: ignore[no-untyped-def]  # numba wants the signatures of this and of what it returns to be the same
    if isinstance(size, types.BaseTuple):
        length = len(size)
        return lambda size: length
    return lambda size: size


@inlined
def copy(length: int, source: Buffer, source_at: int, target: Buffer, target_at: int) -> None:
    """Copy `length` numbers."""
    for i in range(length):
        target[target_at + i] = source[source_at + i]


@inlined
def mirror(n: int, w: Buffer, P: int) -> None:
    """Copy the lower triangle to the upper one."""
    for i in range(n):
        for j in range(i):
            w[P + j * n + i] = w[P + i * n + j]


@inlined
def predict(
    n: int, w: Buffer, W: int, c: int, Q: int, m: int, P: int, mean: int, cov: int, scratch: int
) -> None:
    """W m + c and W P W' + Q; `scratch` holds n·n numbers."""
    for i in range(n):
        s = w[c + i]
        for k in range(n):
            s += w[W + i * n + k] * w[m + k]
        w[mean + i] = s
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
def cholesky(m: int, w: Buffer, S: int) -> float:
    """Factor S = L L' in place (lower triangle, the diagonal holds 1/L_ii) and return log |S|; NaN if S is not positive definite."""
    log_determinant = 0.0
    product = 1.0
    for a in range(m):
        for b in range(a):
            s = w[S + a * m + b]
            for k in range(b):
                s -= w[S + a * m + k] * w[S + b * m + k]
            w[S + a * m + b] = s * w[S + b * m + b]
        s = w[S + a * m + a]
        for k in range(a):
            s -= w[S + a * m + k] * w[S + a * m + k]
        if not (s > 0.0 and s < np.inf):
            return np.nan
        product *= s
        if not (1e-150 < product < 1e150):  # one logarithm for many pivots, without under- or overflow
            log_determinant += np.log(product)
            product = 1.0
        w[S + a * m + a] = 1.0 / np.sqrt(s)
    return log_determinant + np.log(product)


@inlined
def gain(n: int, m: int, w: Buffer, H: int, R: int, P: int, S: int, K: int, PH: int) -> float:
    """Fill S with the factor of H P H' + R, PH with P H' and K with P H' S^{-1}, both (n, m); return log |S| (NaN: singular)."""
    for i in range(n):
        for a in range(m):
            s = 0.0
            for k in range(n):
                s += w[P + i * n + k] * w[H + a * n + k]
            w[PH + i * m + a] = s
    for a in range(m):
        for b in range(a + 1):
            s = w[R + a * m + b]
            for k in range(n):
                s += w[H + a * n + k] * w[PH + k * m + b]
            w[S + a * m + b] = s
    log_determinant = cholesky(m, w, S)
    for i in range(n):
        for a in range(m):
            s = w[PH + i * m + a]
            for b in range(a):
                s -= w[S + a * m + b] * w[K + i * m + b]
            w[K + i * m + a] = s * w[S + a * m + a]
        for back in range(m):
            a = m - 1 - back
            s = w[K + i * m + a]
            for b in range(a + 1, m):
                s -= w[S + b * m + a] * w[K + i * m + b]
            w[K + i * m + a] = s * w[S + a * m + a]
    return log_determinant


@inlined
def update(
    n: int,
    m: int,
    w: Buffer,
    y: int,
    H: int,
    d: int,
    R: int,
    m0: int,
    P0: int,
    mean: int,
    cov: int,
    scratch: int,
) -> float:
    """Condition N(m0, P0) on the `m` numbers at `y`; return their log-density (NaN: singular innovation covariance).

    `scratch` holds ``update_room(n, m)`` numbers: S (m·m), K and PH (n·m), e (2m: innovation and its whitened form), A and AP (n·n).
    """
    S = scratch
    K = S + m * m
    PH = K + n * m
    e = PH + n * m
    A = e + 2 * m
    AP = A + n * n
    log_determinant = gain(n, m, w, H, R, P0, S, K, PH)
    square = 0.0
    for a in range(m):
        s = w[y + a] - w[d + a]
        for k in range(n):
            s -= w[H + a * n + k] * w[m0 + k]
        w[e + a] = s
        for b in range(a):
            s -= w[S + a * m + b] * w[e + m + b]
        s *= w[S + a * m + a]
        w[e + m + a] = s
        square += s * s
    for i in range(n):
        s = w[m0 + i]
        for a in range(m):
            s += w[K + i * m + a] * w[e + a]
        w[mean + i] = s
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
                s += w[A + i * n + k] * w[P0 + k * n + j]
            w[AP + i * n + j] = s
        for a in range(m):
            s = 0.0
            for b in range(m):
                s += w[K + i * m + b] * w[R + b * m + a]
            w[PH + i * m + a] = s
    for i in range(n):
        for j in range(i + 1):
            s = 0.0
            for k in range(n):
                s += w[AP + i * n + k] * w[A + j * n + k]
            for a in range(m):
                s += w[PH + i * m + a] * w[K + j * m + a]
            w[cov + i * n + j] = s
    mirror(n, w, cov)
    return -0.5 * (m * LOG_TWO_PI + log_determinant + square)


@inlined
def update_room(n: int, m: int) -> int:
    """How many numbers of scratch `update` needs."""
    return m * m + 2 * n * m + 2 * m + 2 * n * n


@inlined
def collapse(n: int, parts: int, w: Buffer, weight: int, weight_step: int, means: int, mean_step: int, covs: int, cov_step: int,
             mean: int, cov: int) -> None:  # fmt: skip
    """The Gaussian with the mean and covariance of a mixture of `parts` Gaussians."""
    for i in range(n):
        s = 0.0
        for k in range(parts):
            s += w[weight + k * weight_step] * w[means + k * mean_step + i]
        w[mean + i] = s
    for i in range(n):
        for j in range(i + 1):
            s = 0.0
            for k in range(parts):
                di = w[means + k * mean_step + i] - w[mean + i]
                dj = w[means + k * mean_step + j] - w[mean + j]
                s += w[weight + k * weight_step] * (w[covs + k * cov_step + i * n + j] + di * dj)
            w[cov + i * n + j] = s
    mirror(n, w, cov)


@inlined
def log_sum(length: int, w: Buffer, at: int, step: int) -> float:
    """Log Σ exp of `length` numbers, −inf for a sum of nothing."""
    top = -np.inf
    for i in range(length):
        top = max(top, w[at + i * step])
    if top == -np.inf:
        return top
    s = 0.0
    for i in range(length):
        s += np.exp(w[at + i * step] - top)
    return top + np.log(s)


# The same three moves, compiled once for all sizes and called rather than inlined.


@kernel
def predict_some(
    n: int, w: Buffer, W: int, c: int, Q: int, m: int, P: int, mean: int, cov: int, scratch: int
) -> None:
    """`predict` for sizes known only at run time."""
    predict(n, w, W, c, Q, m, P, mean, cov, scratch)


@kernel
def update_some(
    n: int,
    m: int,
    w: Buffer,
    y: int,
    H: int,
    d: int,
    R: int,
    m0: int,
    P0: int,
    mean: int,
    cov: int,
    scratch: int,
) -> float:
    """`update` for a number of observed components known only at run time; nothing observed leaves the Gaussian as it is."""
    if m == 0:
        copy(n, w, m0, w, mean)
        copy(n * n, w, P0, w, cov)
        return 0.0
    return update(n, m, w, y, H, d, R, m0, P0, mean, cov, scratch)


@kernel
def collapse_some(n: int, parts: int, w: Buffer, weight: int, weight_step: int, means: int, mean_step: int, covs: int, cov_step: int,
                  mean: int, cov: int) -> None:  # fmt: skip
    """`collapse` for sizes known only at run time."""
    collapse(n, parts, w, weight, weight_step, means, mean_step, covs, cov_step, mean, cov)


def choose_predict(size, n, w, W, c, Q, m, P, mean, cov, scratch):  # type: ignore[no-untyped-def]
    """`predict` if `size` is a tuple (known to the compiler), `predict_some` if it is a number."""


@overload(choose_predict)
def _choose_predict(size, n, w, W, c, Q, m, P, mean, cov, scratch):  # type: ignore[no-untyped-def]
    move = predict if isinstance(size, types.BaseTuple) else predict_some
    return lambda size, n, w, W, c, Q, m, P, mean, cov, scratch: move(n, w, W, c, Q, m, P, mean, cov, scratch)


def choose_update(size, n, m, w, y, H, d, R, m0, P0, mean, cov, scratch):  # type: ignore[no-untyped-def]
    """`update` if `size` is a tuple (known to the compiler), `update_some` if it is a number."""


@overload(choose_update)
def _choose_update(size, n, m, w, y, H, d, R, m0, P0, mean, cov, scratch):  # type: ignore[no-untyped-def]
    move = update if isinstance(size, types.BaseTuple) else update_some
    return lambda size, n, m, w, y, H, d, R, m0, P0, mean, cov, scratch: move(
        n, m, w, y, H, d, R, m0, P0, mean, cov, scratch
    )


def choose_collapse(size, n, parts, w, weight, weight_step, means, mean_step, covs, cov_step, mean, cov):  # type: ignore[no-untyped-def]
    """`collapse` if `size` is a tuple (known to the compiler), `collapse_some` if it is a number."""


@overload(choose_collapse)
def _choose_collapse(size, n, parts, w, weight, weight_step, means, mean_step, covs, cov_step, mean, cov):  # type: ignore[no-untyped-def]
    move = collapse if isinstance(size, types.BaseTuple) else collapse_some
    return lambda size, n, parts, w, weight, weight_step, means, mean_step, covs, cov_step, mean, cov: move(
        n, parts, w, weight, weight_step, means, mean_step, covs, cov_step, mean, cov
    )
