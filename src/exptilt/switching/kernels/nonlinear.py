r"""Filters for modes that are functions, in square-root form: covariances are kept as factors, P = L L'.

A Gaussian x, L goes through a function g as deviations X of x and Y of g(x), so that X X' = P and, about the
mean of g(x), Y Y' is its covariance and X Y' the cross-covariance:

    extended    Y = G L, X = L, G the Jacobian at x; the mean is g(x)
    unscented   columns √w (g(x_i) − mean) and √w (x_i − x) for the 2n + 1 points x, x ± √(n + κ) L_k, with
                w = κ/(n + κ) for x and ½/(n + κ) for the others

and each step is a matrix [A | B] made triangular by reflections, (A A' + B B') = L L', never a difference:

    predict     [Y | Q^½]
    update      S^½ from [Y | R^½],   K = X Y' S^{-1},   [X − K Y | K R^½]
    collapse    [√w_i L_i | √w_i δ_i],   δ_i = x_i − Σ w_i x_i

Differences of angles are taken around the circle, and their means are circular.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .filters import GPB1, GPB2
from .kalman import LOG_TWO_PI, ROUNDING, Buffer, copy, inlined, kernel, log_sum


class Modes(NamedTuple):
    """Functions and noises by mode; ``C`` is 1 or the number of series."""

    address: int  # of `traced.Compiled`
    constants: Buffer
    number: Buffer  # (M, 2): which of the compiled functions are dynamics and observation
    log_transition: Buffer  # (M·M,)
    process_root: Buffer  # (M, n·n)
    observation_root: Buffer  # (M, m·m)
    mean: Buffer  # (C, M·n)
    factor: Buffer  # (C, M·n·n)
    log_probability: Buffer  # (C, M)
    angle: Buffer  # (n,), 1 for angles
    observation_angle: Buffer  # (m,)
    first: int
    unscented: int


class Followed(NamedTuple):
    """What the filter writes."""

    terms: Buffer  # (rows,)
    log_mode: Buffer  # (rows, M)
    mean: Buffer  # (rows, M·n)
    covariance: Buffer  # (rows, M·n·n)
    failure: Buffer  # (series, 2)


@intrinsic
def apply(typing_context, address, which, w, x, u, constants, out):  # type: ignore[no-untyped-def]
    """Call the function at an address: state, inputs and result lie in `w`."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data, fixed = (
            context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (2, 5)
        )
        pointer = ir.DoubleType().as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64), *[pointer] * 4])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        places = [builder.gep(data, [arguments[k]]) for k in (3, 4, 6)]
        builder.call(function, [arguments[1], places[0], places[1], fixed, places[2]])
        return context.get_dummy_value()

    whole = types.int64
    return types.void(whole, whole, w, whole, whole, constants, whole), generate


@inlined
def around(difference: float, angle: int) -> float:
    """The difference, of angles around the circle."""
    return np.arctan2(np.sin(difference), np.cos(difference)) if angle == 1 else difference


@kernel
def triangular(n: int, columns: int, w: Buffer, A: int, out: int) -> None:
    """Write the lower triangular L with L L' = A A', diagonal not negative; A is used up."""
    for k in range(n):
        row, square = A + k * columns, 0.0
        for c in range(k, columns):
            square += w[row + c] * w[row + c]
        sign = -1.0 if w[row + k] > 0.0 else 1.0
        size = np.sqrt(square)
        head = w[row + k] - sign * size
        reach = square - w[row + k] * w[row + k] + head * head
        w[row + k] = head
        w[out + k * n + k] = size
        for i in range(k + 1, n):
            line, s = A + i * columns, 0.0
            if reach > 0.0:
                for c in range(k, columns):
                    s += w[line + c] * w[row + c]
                s *= 2.0 / reach
                for c in range(k, columns):
                    w[line + c] -= s * w[row + c]
            w[out + i * n + k] = sign * w[line + k]
            w[out + k * n + i] = 0.0


@inlined
def average(parts: int, w: Buffer, weight: int, first: int, step: int, angle: int) -> float:
    """Σ weight · value of numbers `step` apart, on the circle for an angle."""
    if angle == 1:
        sine, cosine = 0.0, 0.0
        for k in range(parts):
            sine += w[weight + k] * np.sin(w[first + k * step])
            cosine += w[weight + k] * np.cos(w[first + k * step])
        return float(np.arctan2(sine, cosine))
    s = 0.0
    for k in range(parts):
        s += w[weight + k] * w[first + k * step]
    return s


@inlined
def image(
    q: Modes,
    n: int,
    size: int,
    which: int,
    angle: Buffer,
    w: Buffer,
    law: int,
    u: int,
    at: tuple[int, int, int],
) -> int:
    """Write mean and deviations Y (size, p) of a function of a law, and X (n, p) of the law; return p.

    `at` is where Y and X go, the mean before Y, and scratch for 2n + 1 points and weights.
    """
    Y, X, scratch = at
    mean, L = Y - size, law + n
    if q.unscented == 0:
        apply(q.address, 2 * which, w, law, u, q.constants, mean)  # type: ignore[call-arg]
        apply(q.address, 2 * which + 1, w, law, u, q.constants, scratch)
        copy(n * n, w, L, w, X)
        for a in range(size):
            for k in range(n):
                s = 0.0
                for i in range(k, n):
                    s += w[scratch + a * n + i] * w[L + i * n + k]
                w[Y + a * n + k] = s
        return n
    # n + κ = 3 matches a Gaussian's fourth moment; positive weights keep covariances positive
    p, spread = 2 * n + 1, n + max(3.0 - n, 0.5)
    weight, point, points = scratch, scratch + p, scratch + p + n
    for c in range(p):
        w[weight + c] = 1.0 - n / spread if c == 0 else 0.5 / spread
        k, sign = (c - 1) % n, (1.0 if c <= n else -1.0) if c > 0 else 0.0
        for i in range(n):
            deviation = sign * w[L + i * n + k]
            w[point + i] = w[law + i] + np.sqrt(spread) * deviation
            w[X + i * p + c] = np.sqrt(0.5) * deviation
        apply(q.address, 2 * which, w, point, u, q.constants, points + c * size)  # type: ignore[call-arg]
    for a in range(size):
        w[mean + a] = average(p, w, weight, points + a, size, angle[a])
        for c in range(p):
            gap = around(w[points + c * size + a] - w[mean + a], angle[a])
            w[Y + a * p + c] = np.sqrt(w[weight + c]) * gap
    return p


@kernel
def advance(q: Modes, n: int, j: int, w: Buffer, law: int, u: int, target: int, room: int) -> None:
    """Write the law moved by the dynamics of mode j."""
    p = 2 * n + 1 if q.unscented == 1 else n
    Y = room + n
    X = Y + n * p
    A = X + n * p
    image(q, n, n, q.number[j, 0], q.angle, w, law, u, (Y, X, A + n * (p + n)))
    for i in range(n):
        w[target + i] = w[room + i]
        for c in range(p):
            w[A + i * (p + n) + c] = w[Y + i * p + c]
        for c in range(n):
            w[A + i * (p + n) + p + c] = q.process_root[j, i * n + c]
    triangular(n, p + n, w, A, target + n)


@kernel
def absorb(
    q: Modes,
    n: int,
    m: int,
    j: int,
    w: Buffer,
    law: int,
    u: int,
    y: int,
    index: Buffer,
    seen: int,
    target: int,
    room: int,
) -> float:
    """Write the law given the `seen` components of y that `index` names; return their log-density, or NaN."""
    if seen == 0:
        copy(n + n * n, w, law, w, target)
        return 0.0
    p = 2 * n + 1 if q.unscented == 1 else n
    wide = p + m
    Y = room + m
    X = Y + m * p
    A = X + n * p
    S = A + max(n, m) * wide
    K = S + m * m
    e = K + n * m
    z = e + m
    image(q, n, m, q.number[j, 1], q.observation_angle, w, law, u, (Y, X, z + m))
    for a in range(seen):
        ia, size = index[a], 0.0
        for c in range(p):
            w[A + a * wide + c] = w[Y + ia * p + c]
        for c in range(m):
            w[A + a * wide + p + c] = q.observation_root[j, ia * m + c]
        for c in range(wide):
            size += w[A + a * wide + c] ** 2
        w[z + a] = size
        w[e + a] = around(w[y + ia] - w[room + ia], q.observation_angle[ia])
    triangular(seen, wide, w, A, S)
    density, square = -0.5 * seen * LOG_TWO_PI, 0.0
    for a in range(seen):
        pivot = w[S + a * seen + a]
        if not (pivot * pivot > ROUNDING * (n + m) * w[z + a] and pivot < np.inf):
            return np.nan
        density -= np.log(pivot)
        s = w[e + a]
        for b in range(a):
            s -= w[S + a * seen + b] * w[z + b]
        w[z + a] = s / pivot
        square += w[z + a] * w[z + a]
    for i in range(n):  # K S^½ S^½' = X Y', row by row
        for a in range(seen):
            s = 0.0
            for c in range(p):
                s += w[X + i * p + c] * w[Y + index[a] * p + c]
            for b in range(a):
                s -= w[S + a * seen + b] * w[K + i * seen + b]
            w[K + i * seen + a] = s / w[S + a * seen + a]
        for back in range(seen):
            a = seen - 1 - back
            s = w[K + i * seen + a]
            for b in range(a + 1, seen):
                s -= w[S + b * seen + a] * w[K + i * seen + b]
            w[K + i * seen + a] = s / w[S + a * seen + a]
    for i in range(n):
        s = w[law + i]
        for a in range(seen):
            s += w[K + i * seen + a] * w[e + a]
        w[target + i] = around(s, q.angle[i])
        for c in range(p):
            s = w[X + i * p + c]
            for a in range(seen):
                s -= w[K + i * seen + a] * w[Y + index[a] * p + c]
            w[A + i * wide + c] = s
        for c in range(m):
            s = 0.0
            for a in range(seen):
                s += w[K + i * seen + a] * q.observation_root[j, index[a] * m + c]
            w[A + i * wide + p + c] = s
    triangular(n, wide, w, A, target + n)
    return float(density - 0.5 * square)


@kernel
def merge(q: Modes, n: int, parts: int, w: Buffer, weight: int, first: int, target: int, room: int) -> None:
    """Write the law with mean and covariance of a mixture of laws that follow each other."""
    law, wide = n + n * n, parts * (n + 1)
    for i in range(n):
        w[target + i] = average(parts, w, weight, first + i, law, q.angle[i])
    for i in range(n):
        for k in range(parts):
            root, part, at = np.sqrt(w[weight + k]), first + k * law, room + i * wide + k * (n + 1)
            for c in range(n):
                w[at + c] = root * w[part + n + i * n + c]
            w[at + n] = root * around(w[part + i] - w[target + i], q.angle[i])
    triangular(n, wide, w, room, target + n)


@kernel
def follow(
    q: Modes, y: Buffer, u: Buffer, starts: Buffer, out: Followed, begin: int, end: int, method: int
) -> None:
    """Filter series `begin` to `end`; y is (rows, m), u (rows, r)."""
    M, n, m, r = q.number.shape[0], q.angle.shape[0], y.shape[1], u.shape[1]
    law, p = n + n * n, 2 * n + 1
    state = 0
    log_mode = state + M * law
    new = log_mode + M
    score = new + M * M * law
    density = score + M * M
    log_weight = density + M * M
    weight = log_weight + M
    ahead = weight + M
    mixed = ahead + law
    row_y = mixed + law
    row_u = row_y + m
    room = row_u + r
    most = max(n, m)
    w = np.zeros(
        room + most * (4 * p + 4 * most + 8) + n * (p + M * (n + 1)) + p * most + p + most * most + m * n
    )
    index = np.empty(m, np.int64)
    for series in range(begin, end):
        own = series if q.mean.shape[0] > 1 else 0
        for j in range(M):
            copy(n, q.mean[own], j * n, w, state + j * law)
            copy(n * n, q.factor[own], j * n * n, w, state + j * law + n)
            w[log_mode + j] = q.log_probability[own, j]
        for t in range(starts[series + 1] - starts[series]):
            row, seen = starts[series] + t, 0
            for a in range(m):
                w[row_y + a] = y[row, a]
                if not np.isnan(y[row, a]):
                    index[seen] = a
                    seen += 1
            for k in range(r):
                w[row_u + k] = u[row, k]
            begun = t == 0 and q.first == 1
            pairs = method == GPB2 and not begun
            for k in range(M * M):
                w[score + k] = w[log_mode + k % M] + q.log_transition[(k % M) * M + k // M]  # [j, i]
            for j in range(M):
                for i in range(M if pairs else 1):
                    source = state + (i if pairs else j) * law
                    if not pairs and not begun:
                        shares(M, w, score + j * M, log_mode, method == GPB1, weight)
                        merge(q, n, M, w, weight, state, mixed, room)
                        source = mixed
                    if not begun:
                        advance(q, n, j, w, source, row_u, ahead, room)
                        source = ahead
                    place = j * M + i
                    value = absorb(q, n, m, j, w, source, row_u, row_y, index, seen, new + place * law, room)
                    if np.isnan(value):
                        out.failure[series, 0], out.failure[series, 1] = t, j
                        return
                    w[density + place] = value
                if pairs:
                    for i in range(M):
                        w[score + j * M + i] += w[density + j * M + i]
                    w[log_weight + j] = log_sum(M, w, score + j * M, 1)
                else:
                    prior = w[log_mode + j] if begun else log_sum(M, w, score + j * M, 1)
                    w[log_weight + j] = prior + w[density + j * M]
            term = log_sum(M, w, log_weight, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            for j in range(M):
                if pairs:
                    shares(M, w, score + j * M, log_mode, False, weight)
                    merge(q, n, M, w, weight, new + j * M * law, state + j * law, room)
                else:
                    copy(law, w, new + j * M * law, w, state + j * law)
            out.terms[row] = term
            for j in range(M):
                w[log_mode + j] = w[log_weight + j] - term
                out.log_mode[row, j] = w[log_mode + j]
                x, L = state + j * law, state + j * law + n
                for i in range(n):
                    out.mean[row, j * n + i] = w[x + i]
                    for k in range(n):
                        s = 0.0
                        for c in range(min(i, k) + 1):
                            s += w[L + i * n + c] * w[L + k * n + c]
                        out.covariance[row, (j * n + i) * n + k] = s


@inlined
def shares(M: int, w: Buffer, score: int, log_mode: int, one: bool, weight: int) -> None:
    """Weights from M scores, or mode probabilities: for GPB1, and where the mode cannot be reached."""
    total = log_sum(M, w, score, 1)
    for i in range(M):
        w[weight + i] = np.exp(w[log_mode + i] if one or total == -np.inf else w[score + i] - total)
