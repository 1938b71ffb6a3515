r"""Kim's backward pass for modes that are functions, in square-root form.

The filtered law of mode j at t, with deviations X of its state and Y of what the dynamics of mode k make of
it (`nonlinear.py`), is given the law of mode k at t + 1, x̂_k and L̂_k, by

    J = X Y' (Y Y' + Q_k)^{-1},   x_jk = x_j + J (x̂_k − mean of f_k(x)),   [X − J Y | J Q_k^½ | J L̂_k]

and these are collapsed over k. Where Y Y' + Q_k is singular directions without variance are left alone.
"""

import numpy as np

from .kalman import ROUNDING, Buffer, copy, factor, kernel, log_sum, solve
from .nonlinear import Followed, Modes, around, image, merge, triangular


@kernel
def pull_back(
    q: Modes, n: int, k: int, w: Buffer, law: int, u: int, later: int, target: int, room: int
) -> None:
    """Write the law at `law` given the law at `later` of the next step, which is in mode k."""
    p = 2 * n + 1 if q.unscented == 1 else n
    wide = p + 2 * n
    Y = room + n
    X = Y + n * p
    A = X + n * p
    S = A + n * wide
    size = S + n * n
    J = size + n  # transposed
    image(q, n, n, q.number[k, 0], q.angle, w, law, u, (Y, X, J + n * n))
    for i in range(n):
        for l in range(n):
            s, cross = 0.0, 0.0
            for c in range(p):
                s += w[Y + i * p + c] * w[Y + l * p + c]
                cross += w[Y + i * p + c] * w[X + l * p + c]
            for c in range(n):
                s += q.process_root[k, i * n + c] * q.process_root[k, l * n + c]
            w[S + i * n + l], w[J + i * n + l] = s, cross
        w[size + i] = w[S + i * n + i]
    factor(n, w, S, size, ROUNDING * n, np.inf)
    solve(n, n, w, S, J)
    for i in range(n):
        s = w[law + i]
        for l in range(n):
            s += w[J + l * n + i] * around(w[later + l] - w[room + l], q.angle[l])
        w[target + i] = s
        for c in range(p):
            s = w[X + i * p + c]
            for l in range(n):
                s -= w[J + l * n + i] * w[Y + l * p + c]
            w[A + i * wide + c] = s
        for c in range(n):
            noise, spread = 0.0, 0.0
            for l in range(n):
                noise += w[J + l * n + i] * q.process_root[k, l * n + c]
                spread += w[J + l * n + i] * w[later + n + l * n + c]
            w[A + i * wide + p + c], w[A + i * wide + p + n + c] = noise, spread
    triangular(n, wide, w, A, target + n)


@kernel
def follow_back(q: Modes, u: Buffer, starts: Buffer, out: Followed, begin: int, end: int) -> None:
    """Smooth series `begin` to `end`: what `follow` wrote to `out` is replaced by what all say."""
    M, n, r = q.number.shape[0], q.angle.shape[0], u.shape[1]
    law, p = n + n * n, 2 * n + 1
    hat = law
    parts = hat + M * law
    pair = parts + M * law
    weight = pair + M * M
    score = weight + M
    row_u = score + M
    room = row_u + r
    w = np.zeros(room + n * (4 * p + 4 * n + M * (n + 1) + 8) + p * (n + 1) + 2 * n * n)
    for series in range(begin, end):
        for back in range(starts[series + 1] - starts[series] - 1):
            row = starts[series + 1] - 2 - back
            copy(r, u[row + 1], 0, w, row_u)
            for k in range(M):
                copy(n, out.mean[row + 1], k * n, w, hat + k * law)
                copy(n * n, out.factor[row + 1], k * n * n, w, hat + k * law + n)
                for j in range(M):
                    w[score + j] = out.log_mode[row, j] + q.log_transition[j * M + k]
                total = log_sum(M, w, score, 1)
                for j in range(M):
                    share = w[score + j] - total if total > -np.inf else -np.inf
                    w[pair + j * M + k] = out.log_mode[row + 1, k] + share
            for j in range(M):
                mine = log_sum(M, w, pair + j * M, 1)
                out.log_mode[row, j] = mine
                if mine == -np.inf:  # a mode the series cannot have been in keeps its filtered moments
                    continue
                copy(n, out.mean[row], j * n, w, 0)
                copy(n * n, out.factor[row], j * n * n, w, n)
                for k in range(M):
                    w[weight + k] = np.exp(w[pair + j * M + k] - mine)
                    copy(law, w, 0, w, parts + k * law)
                    if w[weight + k] > 0.0:
                        pull_back(q, n, k, w, 0, row_u, hat + k * law, parts + k * law, room)
                merge(q, n, M, w, weight, parts, 0, room)
                copy(n, w, 0, out.mean[row], j * n)
                copy(n * n, w, n, out.factor[row], j * n * n)
