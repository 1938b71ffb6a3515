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

Differences of angles are taken around the circle, and their means are circular. What is known of a series is
a row of numbers as for linear modes (`online.py`), a factor where a covariance is there.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .filters import GPB1, GPB2
from .kalman import LOG_TWO_PI, ROUNDING, Buffer, copy, inlined, kernel, log_sum
from .online import row_places


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
    """What the filter writes; the smoother writes over it what is known given the whole series."""

    terms: Buffer  # (rows,)
    log_mode: Buffer  # (rows, M)
    mean: Buffer  # (rows, M·n)
    factor: Buffer  # (rows, M·n·n)
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


@inlined
def room_size(n: int, m: int, M: int) -> int:
    """How many numbers of scratch one step needs."""
    p, most = 2 * n + 1, max(n, m)
    work = most * (4 * p + 4 * most + 8) + n * (p + M * (n + 1)) + p * most + p + most * most + m * n
    return (M * M + 1) * (n + n * n) + M * M + 2 * M + work


@kernel
def step(
    q: Modes, w: Buffer, row: int, u: int, y: int, index: Buffer, how: tuple[int, int, int, int], room: int
) -> int:
    """Take the row at `row` a step on, by inputs at `u` and observations at `y`.

    `how` is the method, whether to predict, whether the initial law is itself the prediction, and whether to
    update. Returns −1, or the mode it stopped at: M for all of them.
    """
    method, ahead_too, begun, seen_too = how
    M, n, m = q.number.shape[0], q.angle.shape[0], q.observation_angle.shape[0]
    law, pairs = n + n * n, method == GPB2
    laws = M * M if pairs else M
    places = row_places(M, n, pairs)
    log_mode, term, ahead = row + places[0], row + places[1], row + places[2]
    score, prior = row + places[3], row + places[4]
    mixed, new = room, room + law
    density = new + laws * law
    log_weight = density + M * M
    weight = log_weight + M
    scratch = weight + M
    if ahead_too == 1:
        for j in range(M):
            for i in range(M):
                came = w[log_mode + i] + q.log_transition[i * M + j]
                if begun == 1:
                    came = w[log_mode + j] if i == j else -np.inf
                w[score + i * M + j] = came
            w[prior + j] = log_sum(M, w, score + j, M)
        for k in range(laws):
            i, j = (k % M, k // M) if pairs else (0, k)
            if begun == 1:
                copy(law, w, row + j * law, w, ahead + k * law)
                continue
            source = row + i * law
            if not pairs:
                shares(M, w, score + j, M, log_mode, method == GPB1, weight)
                merge(q, n, M, w, weight, row, mixed, scratch)
                source = mixed
            advance(q, n, j, w, source, u, ahead + k * law, scratch)
    if seen_too == 0:
        return -1
    seen = 0
    for a in range(m):
        if not np.isnan(w[y + a]):
            index[seen] = a
            seen += 1
    for k in range(laws):
        j = k // M if pairs else k
        value = absorb(q, n, m, j, w, ahead + k * law, u, y, index, seen, new + k * law, scratch)
        if np.isnan(value):
            return int(j)
        w[density + k] = value
    for j in range(M):
        if pairs:
            for i in range(M):
                w[density + j * M + i] += w[score + i * M + j]
            w[log_weight + j] = log_sum(M, w, density + j * M, 1)
        else:
            w[log_weight + j] = w[prior + j] + w[density + j]
    value = log_sum(M, w, log_weight, 1)
    if not value > -np.inf:
        return int(M)
    for j in range(M):
        if pairs:
            shares(M, w, density + j * M, 1, log_mode, False, weight)
            merge(q, n, M, w, weight, new + j * M * law, row + j * law, scratch)
        else:
            copy(law, w, new + j * law, w, row + j * law)
    for j in range(M):
        w[log_mode + j] = w[log_weight + j] - value
    w[term] = value
    w[term + 1] += value
    return -1


@kernel
def follow(
    q: Modes, y: Buffer, u: Buffer, starts: Buffer, out: Followed, begin: int, end: int, method: int
) -> None:
    """Filter series `begin` to `end`; y is (rows, m), u (rows, r)."""
    M, n, m, r = q.number.shape[0], q.angle.shape[0], y.shape[1], u.shape[1]
    law = n + n * n
    log_mode, term, _, _, _, length = row_places(M, n, method == GPB2)
    row_y, row_u, room = length, length + m, length + m + r
    w, index = np.zeros(room + room_size(n, m, M)), np.empty(m, np.int64)
    for series in range(begin, end):
        own = series if q.mean.shape[0] > 1 else 0
        for j in range(M):
            copy(n, q.mean[own], j * n, w, j * law)
            copy(n * n, q.factor[own], j * n * n, w, j * law + n)
            w[log_mode + j] = q.log_probability[own, j]
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            copy(m, y[row], 0, w, row_y)
            copy(r, u[row], 0, w, row_u)
            begun = 1 if t == 0 and q.first == 1 else 0
            mode = step(q, w, 0, row_u, row_y, index, (method, 1, begun, 1), room)
            if mode >= 0:
                out.failure[series, 0], out.failure[series, 1] = t, mode
                break
            out.terms[row] = w[term]
            for j in range(M):
                out.log_mode[row, j] = w[log_mode + j]
                copy(n, w, j * law, out.mean[row], j * n)
                copy(n * n, w, j * law + n, out.factor[row], j * n * n)


@kernel
def follow_rows(
    q: Modes,
    u: Buffer,
    before: Buffer,
    y: Buffer,
    after: Buffer,
    begin: int,
    end: int,
    how: tuple[int, int, int, int],
) -> int:
    """Take members `begin` to `end` a step on, from `before` to `after`; u is (members or 1, r).

    Returns −1, or where it stopped: member · (M + 1) + mode, or M for all modes.
    """
    M, n, m, r = q.number.shape[0], q.angle.shape[0], q.observation_angle.shape[0], u.shape[1]
    length = before.shape[1]
    row_y, row_u, room = length, length + m, length + m + r
    w, index = np.zeros(room + room_size(n, m, M)), np.empty(m, np.int64)
    for member in range(begin, end):
        copy(length, before[member], 0, w, 0)
        copy(r, u[member if u.shape[0] > 1 else 0], 0, w, row_u)
        if how[3] == 1:
            copy(m, y[member], 0, w, row_y)
        mode = step(q, w, 0, row_u, row_y, index, how, room)
        if mode >= 0:
            return int(member * (M + 1) + mode)
        copy(length, w, 0, after[member], 0)
    return -1


@kernel
def sight(q: Modes, laws: Buffer, u: Buffer, center: Buffer, S: Buffer) -> None:
    """Write mean (rows, M, m) and covariance S of what each mode observes of its laws (rows, M·law)."""
    rows, M, m = center.shape
    n, r = q.angle.shape[0], u.shape[1]
    law, p = n + n * n, 2 * n + 1 if q.unscented == 1 else n
    Y = law + r + m
    X = Y + m * p
    w = np.zeros(X + n * p + room_size(n, m, M))
    for row in range(rows):
        copy(r, u[row if u.shape[0] > 1 else 0], 0, w, law)
        for j in range(M):
            copy(law, laws[row], j * law, w, 0)
            image(q, n, m, q.number[j, 1], q.observation_angle, w, 0, law, (Y, X, X + n * p))
            for a in range(m):
                center[row, j, a] = w[Y - m + a]
                for b in range(m):
                    s = 0.0
                    for c in range(p):
                        s += w[Y + a * p + c] * w[Y + b * p + c]
                    for c in range(m):
                        s += q.observation_root[j, a * m + c] * q.observation_root[j, b * m + c]
                    S[row, j, a, b] = s


@inlined
def shares(M: int, w: Buffer, score: int, apart: int, log_mode: int, one: bool, weight: int) -> None:
    """Weights from M scores `apart`; mode probabilities for GPB1, and where the mode cannot be reached."""
    total = log_sum(M, w, score, apart)
    for i in range(M):
        w[weight + i] = np.exp(w[log_mode + i] if one or total == -np.inf else w[score + i * apart] - total)
