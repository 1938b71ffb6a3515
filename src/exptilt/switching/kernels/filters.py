r"""The two forward recursions: mix before the update (IMM, GPB1), or after it (GPB2).

With μ_i the mode probabilities, π_ij the transition, λ = log μ and N_j(·) the Kalman step of mode j:

    IMM    c_j = Σ_i μ_i π_ij,  w_{i|j} = μ_i π_ij / c_j,  law_j = N_j(collapse_i(w_{i|j}, law_i)),
           log weight_j = log c_j + log p_j(y)
    GPB1   as IMM with w_{i|j} = μ_i: all modes start from one Gaussian
    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),  law_j = collapse_i(w_{i|j}, N_j(law_i)),
           w_{i|j} ∝_i weight_ij

The log-likelihood term of a step is the log-sum of its weights. Weights stay logarithms throughout: modes 10⁵
nats apart still rank, and a mode of probability 0 has λ = −inf and a finite Gaussian (collapsed with weights
μ_i).
"""

from typing import Any

import numpy as np

from .buffers import (
    Parameters,
    Place,
    Run,
    Stored,
    begin_series,
    keep,
    load,
    look,
    places,
    recall,
    sensor_size,
    work_buffer,
    write_row,
)
from .kalman import (
    Buffer,
    choose,
    clear,
    collapse,
    collapse_some,
    copy,
    count,
    inlined,
    kernel,
    log_sum,
    predict,
    predict_some,
    symmetric,
    update,
    update_some,
)

IMM, GPB1, GPB2 = 0, 1, 2


@inlined
def read_as(p: Parameters, w: Buffer, at: Place, maps: int, i: int, j: int, source: int) -> int:
    """Where the law of mode i is as mode j reads it: at `source` itself, or through the map between them."""
    if p.maps.size == 0:
        return source
    predict_some(at.states, w, maps + (i * at.modes + j) * at.move, source, at.read, at.scratch)
    return at.read


@inlined
def sensor_of(at: Place, seen: int, j: int) -> int:
    """Where the sensor of mode j for what is seen lies."""
    return at.sensors + j * at.sensor if seen == at.m else at.seen + j * sensor_size(at.n, seen)


@inlined
def carry(w: Buffer, at: Place, seen: int, begun: bool, j: int, source: int, target: int) -> float:
    """Move a law by mode j (unless the series has only begun) and condition it on what is seen.

    Returns the log-density of what is seen (NaN: its covariance is singular). Move and sensor of the mode
    must be at `at.own_move` and `at.own_sensor`. The law is worked on in places that are known when sizes
    are, for then the compiler knows what overlaps, and keeps sums in registers.
    """
    n, m = at.n, at.m
    if begun:
        copy(at.law, w, source, w, at.ahead)
    else:
        predict(n, w, at.own_move, source, at.ahead, at.scratch)
    if seen == m:
        density = update(n, m, w, at.y, at.own_sensor, at.ahead, at.after, at.scratch)
        symmetric(n, w, at.after, target)
    else:
        density = update_some(at.states, seen, w, at.y, sensor_of(at, seen, j), at.ahead, target, at.scratch)
    return float(density)


@kernel
def carry_some(w: Buffer, at: Place, seen: int, begun: bool, j: int, source: int, target: int) -> float:
    """`carry` for sizes known only at run time; the predicted law stays at `at.ahead`."""
    if begun:
        copy(at.law, w, source, w, at.ahead)
    else:
        predict_some(at.n, w, at.moves + j * at.move, source, at.ahead, at.scratch)
    return float(update_some(at.n, seen, w, at.y, sensor_of(at, seen, j), at.ahead, target, at.scratch))


@inlined
def backward_weights(M: int, w: Buffer, j: int, score: int, total: float, log_mode: int, weight: int) -> None:
    """weight[i, j] = exp(score[i, j] − total), or μ_i where mode j cannot be reached (total = −inf)."""
    for i in range(M):
        w[weight + i * M + j] = np.exp(w[score + i * M + j] - total if total > -np.inf else w[log_mode + i])


@inlined
def mixing_weights(
    w: Buffer, at: Place, log_mode: int, one: bool, score: int, weight: int, prior: int
) -> None:
    """prior[j] = log c_j and weight[i, j] = w_{i|j} of the mix-first recursions."""
    M = at.M
    for i in range(M):
        for j in range(M):
            w[score + i * M + j] = w[log_mode + i] + w[at.log_transition + i * M + j]
            w[weight + i * M + j] = np.exp(w[score + i * M + j])
    for j in range(M):
        linear = 0.0
        for i in range(M):
            linear += w[weight + i * M + j]
        if linear > 1e-280:
            w[prior + j] = np.log(linear)
            for i in range(M):
                w[weight + i * M + j] /= linear
        else:  # too small for plain numbers, or zero
            w[prior + j] = log_sum(M, w, score + j, M)
            backward_weights(M, w, j, score, w[prior + j], log_mode, weight)
        if one:
            for i in range(M):
                w[weight + i * M + j] = np.exp(w[log_mode + i])


@inlined
def keep_step(
    out: Stored, row: int, term: float, w: Buffer, at: Place, log_mode: int, state: int, weight: int
) -> None:
    """Write one step's results."""
    out.terms[row] = term
    write_row(at.M, w, log_mode, out.log_mode, row, 0)
    keep(w, at, state, out.mode_mean, out.mode_covariance, row)
    write_row(at.M * at.M, w, weight, out.mixing, row, 0)


@kernel
def forward(
    run: Run, begin: int, end: int, method: int, everything: bool, sizes: tuple[Any, Any, Any]
) -> None:
    """Filter series `begin` to `end`; keep each step, or only the last of each series."""
    p, y, starts, out, lead = run
    at = places(count(sizes[0]), count(sizes[1]), count(sizes[2]), p)
    step, merge = choose(sizes[1], carry, carry_some), choose(sizes[1], collapse, collapse_some)
    M, n, law = at.M, at.n, at.law
    state = at.end
    log_mode = state + M * law
    read = log_mode + M  # laws as mode j reads them
    after = read + M * law
    score = after + M * M * law
    weight = score + M * M
    prior = weight + M * M
    log_weight = prior + M
    maps = log_weight + M
    w, index = work_buffer(p, at, maps), np.empty(at.m, np.int64)
    for series in range(begin, end):
        done = lead[series]
        if done > 0:
            recall(out, starts[series] + done - 1, w, at, state, log_mode)
        else:
            begin_series(p, series, w, at, state, log_mode)
        total = 0.0
        for t in range(done, starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(p, series, t, t == done, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            pairs = method == GPB2 and not begun
            if begun:
                copy(M, w, log_mode, w, prior)
                clear(M * M, w, weight, M, 1.0)
            elif not pairs:
                mixing_weights(w, at, log_mode, method == GPB1, score, weight, prior)
            for ji in range(at.modes * at.modes if pairs else at.modes):
                i, j = (ji % M, ji // M) if pairs else (0, ji)
                ij = i * M + j
                if i == 0:
                    copy(at.move, w, at.moves + j * at.move, w, at.own_move)
                    copy(at.sensor, w, at.sensors + j * at.sensor, w, at.own_sensor)
                if begun:
                    copy(law, w, state + j * law, w, at.read)
                elif pairs:
                    copy(law, w, read_as(p, w, at, maps, i, j, state + i * law), w, at.read)
                elif p.maps.size > 0:
                    for k in range(at.modes):
                        move = maps + (k * M + j) * at.move
                        predict_some(at.states, w, move, state + k * law, read + k * law, at.scratch)
                    collapse_some(at.states, at.modes, w, weight + j, M, read, law, at.read)
                else:
                    merge(n, M, w, weight + j, M, state, law, at.read)
                value = step(w, at, seen, begun, j, at.read, after + ij * law)
                if np.isnan(value):
                    out.failure[series, 0], out.failure[series, 1] = t, j
                    return
                if pairs:
                    w[score + ij] = value + w[log_mode + i] + w[at.log_transition + ij]
                else:
                    w[log_weight + j] = value + w[prior + j]
            if pairs:
                for j in range(M):
                    w[log_weight + j] = log_sum(M, w, score + j, M)
            term = log_sum(M, w, log_weight, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            if pairs:
                for j in range(M):
                    backward_weights(M, w, j, score, w[log_weight + j], log_mode, weight)
                for j in range(M):
                    merge(n, M, w, weight + j, M, after + j * law, M * law, at.read)
                    symmetric(n, w, at.read, state + j * law)
            else:
                copy(M * law, w, after, w, state)
            for j in range(M):
                w[log_mode + j] = w[log_weight + j] - term
            total += term
            if everything:
                keep_step(out, row, term, w, at, log_mode, state, weight)
        out.log_likelihood[series] = total
        if not everything:
            keep_step(out, series, total, w, at, log_mode, state, weight)
