"""One step of a filter at a time, for one member or many, from and to rows of numbers.

A row holds all that is known of a member, one stretch after the other:

    laws by mode, their log probabilities       given all that was seen
    the log density of the last y, and the sum of these since the start
    predicted laws, M (or, for GPB2, M·M: [j, i] is mode j's from mode i's), the scores
    log μ_i π_ij (M·M) and their log-sums over i, the predicted log probabilities (M)

`matrices` holds a member's transition, moves and sensors as they lie at the start of a work buffer, then the
maps between modes. Nothing is kept between calls, so rows may be copied, stored and taken up anywhere.
"""

from typing import Any

import numpy as np

from .buffers import Parameters, layout, load, look
from .filters import GPB1, GPB2, mixing_weights, sensor_of
from .kalman import (
    Buffer,
    collapse,
    collapse_some,
    copy,
    count,
    inlined,
    kernel,
    law_size,
    log_sum,
    predict,
    predict_some,
    update,
    update_some,
)


@inlined
def row_places(M: int, n: int, pairs: bool) -> tuple[int, int, int, int, int, int]:
    """Where log probabilities, term, predicted laws, scores and prior lie in a row, and its length."""
    law = law_size(n)
    log_mode = M * law
    term = log_mode + M
    ahead = term + 2
    score = ahead + (M * M if pairs else M) * law
    prior = score + M * M
    return log_mode, term, ahead, score, prior, prior + M


@kernel
def pack(p: Parameters, t: int, out: Buffer, sizes: tuple[int, int, int]) -> None:
    """Write the matrices of step t of each member to its row of `out`."""
    at = layout(sizes[0], sizes[1], sizes[2], sizes[0])
    maps = at.y
    for member in range(out.shape[0]):
        load(p, member, t, True, out[member], at, maps)


@kernel
def step_rows(
    matrices: Buffer,
    before: Buffer,
    y: Buffer,
    after: Buffer,
    begin: int,
    end: int,
    how: tuple[int, int, int, int, int, int],
    sizes: tuple[Any, Any, Any],
) -> int:
    """Take members `begin` to `end` a step on: from `before` to `after`, by the matrices of the step.

    `how` is the method, whether to predict, whether the initial law is itself the prediction, whether to
    update by `y` (members, m), and M and n once more. Returns −1, or where it stopped: member · (M + 1) +
    mode, or M for all modes.
    """
    method, ahead_too, begun, seen_too, _, states = how
    M, n, m = count(sizes[0]), count(sizes[1]), count(sizes[2])
    at = layout(M, n, m, M)
    law, pairs, laws = at.law, method == GPB2, M
    if pairs:
        laws = M * M
    state = at.end
    log_mode, term, ahead, score, prior, length = row_places(M, n, pairs)
    log_mode, term, ahead, score, prior = (
        state + log_mode,
        state + term,
        state + ahead,
        state + score,
        state + prior,
    )
    weight = state + length
    density = weight + M * M
    log_weight = density + M * M
    new = log_weight + M
    read = new + laws * law
    maps = read + M * law
    w = np.zeros(maps + matrices.shape[1] - at.y)
    index = np.empty(m, np.int64)
    mapped = matrices.shape[1] > at.y
    for member in range(begin, end):
        if member == begin or matrices.shape[0] > 1:
            own = matrices[member if matrices.shape[0] > 1 else 0]
            copy(at.y, own, 0, w, 0)
            copy(matrices.shape[1] - at.y, own, at.y, w, maps)
        copy(length, before[member], 0, w, state)
        if ahead_too == 1:
            if begun == 1:
                for i in range(M):
                    w[prior + i] = w[log_mode + i]
                    for j in range(M):
                        w[score + i * M + j] = w[log_mode + j] if i == j else -np.inf
            elif pairs:
                for j in range(M):
                    for i in range(M):
                        w[score + i * M + j] = w[log_mode + i] + w[at.log_transition + i * M + j]
                    w[prior + j] = log_sum(M, w, score + j, M)
            else:
                mixing_weights(w, at, log_mode, method == GPB1, score, weight, prior)
            for k in range(laws):
                i, j = (k % M, k // M) if pairs else (0, k)
                target = ahead + k * law
                if begun == 1:
                    copy(law, w, state + j * law, w, target)
                    continue
                if pairs:
                    copy(law, w, state + i * law, w, at.read)
                    if mapped:
                        move = maps + (i * M + j) * at.move
                        predict_some(states, w, move, state + i * law, at.read, at.scratch)
                elif mapped:
                    for part in range(M):
                        move = maps + (part * M + j) * at.move
                        predict_some(states, w, move, state + part * law, read + part * law, at.scratch)
                    collapse(n, M, w, weight + j, M, read, law, at.read)
                else:
                    collapse(n, M, w, weight + j, M, state, law, at.read)
                copy(at.move, w, at.moves + j * at.move, w, at.own_move)
                predict(n, w, at.own_move, at.read, at.ahead, at.scratch)
                copy(law, w, at.ahead, w, target)
        if seen_too == 1:
            seen = look(y, member, w, at, index)
            for k in range(laws):
                j = k // M if pairs else k
                source, target = ahead + k * law, new + k * law
                if seen == m:
                    copy(law, w, source, w, at.ahead)
                    copy(at.sensor, w, at.sensors + j * at.sensor, w, at.own_sensor)
                    value = update(n, m, w, at.y, at.own_sensor, at.ahead, at.after, at.scratch)
                    copy(law, w, at.after, w, target)
                else:
                    sensor = sensor_of(at, seen, j)
                    value = update_some(states, seen, w, at.y, sensor, source, target, at.scratch)
                if np.isnan(value):
                    return member * (M + 1) + j
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
                return member * (M + 1) + M
            for j in range(M):
                if pairs:
                    for i in range(M):
                        total = w[log_weight + j]
                        w[weight + i] = np.exp(
                            w[density + j * M + i] - total if total > -np.inf else w[log_mode + i]
                        )
                    collapse(n, M, w, weight, 1, new + j * M * law, law, at.read)
                    copy(law, w, at.read, w, state + j * law)
                else:
                    copy(law, w, new + j * law, w, state + j * law)
            for j in range(M):
                w[log_mode + j] = w[log_weight + j] - value
            w[term] = value
            w[term + 1] += value
        copy(length, w, state, after[member], 0)
    return -1


@kernel
def appraise(
    matrices: Buffer,
    rows: Buffer,
    y: Buffer,
    e: Buffer,
    S: Buffer,
    distance: Buffer,
    log_density: Buffer,
    pairs: bool,
    sizes: tuple[int, int, int],
) -> int:
    """Innovations of candidates `y` (members, K, m) under each mode's predicted law.

    Writes e (members, K, M, m), S (members, M, m, m), the squares e'S^{-1}e and the log densities (members,
    K, M). Missing components are left out: their e is NaN. Returns as `step_rows` does.
    """
    M, n, m = sizes
    at = layout(M, n, m, M)
    law, laws = at.law, at.end
    _, _, ahead, score, prior, length = row_places(M, n, pairs)
    row = laws + M * law
    weight = row + length
    w, index = np.zeros(weight + M), np.empty(m, np.int64)
    pick = np.empty((1, m))
    for member in range(rows.shape[0]):
        if member == 0 or matrices.shape[0] > 1:
            copy(at.y, matrices[member if matrices.shape[0] > 1 else 0], 0, w, 0)
        copy(length, rows[member], 0, w, row)
        for j in range(M):
            if pairs:  # the moments of mode j over where it came from
                reach = w[row + prior + j]
                for i in range(M):
                    share = w[row + score + i * M + j] - reach
                    w[weight + i] = np.exp(share) if reach > -np.inf else 1.0 / M
                collapse_some(n, M, w, weight, 1, row + ahead + j * M * law, law, laws + j * law)
            else:
                copy(law, w, row + ahead + j * law, w, laws + j * law)
            sensor, P = at.sensors + j * at.sensor, laws + j * law + n
            for a in range(m):
                for b in range(m):
                    s = w[sensor + m * n + m + a * m + b]
                    for k in range(n):
                        for l in range(n):
                            s += w[sensor + a * n + k] * w[P + k * n + l] * w[sensor + b * n + l]
                    S[member, j, a, b] = s
        for candidate in range(y.shape[1]):
            for a in range(m):
                pick[0, a] = y[member, candidate, a]
            seen = look(pick, 0, w, at, index)
            for j in range(M):
                own = sensor_of(at, seen, j)
                value = update_some(n, seen, w, at.y, own, laws + j * law, at.after, at.scratch)
                if np.isnan(value):
                    return member * (M + 1) + j
                log_density[member, candidate, j] = value
                place = at.scratch + seen * seen + 2 * n * seen
                square = 0.0
                for a in range(m):
                    e[member, candidate, j, a] = np.nan
                for a in range(seen):
                    e[member, candidate, j, index[a]] = w[place + a]
                    square += w[place + a] * w[place + seen + a]
                distance[member, candidate, j] = square
    return -1
