r"""The two forward recursions: mix before the update (IMM, GPB1), or after it (GPB2, Viterbi).

With μ_i the mode probabilities, π_ij the transition, λ = log μ and N_j(·) the Kalman step of mode j:

    IMM    c_j = Σ_i μ_i π_ij,  w_{i|j} = μ_i π_ij / c_j,  law_j = N_j(collapse_i(w_{i|j}, law_i)),
           log weight_j = log c_j + log p_j(y)
    GPB1   as IMM with w_{i|j} = μ_i: all modes start from one Gaussian
    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),  law_j = collapse_i(w_{i|j}, N_j(law_i)),
           w_{i|j} ∝_i weight_ij
    Viterbi   as GPB2 with w_{i|j} = 1 for the largest weight_ij, which is mode j's: it follows a path

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
    gather,
    keep,
    law_before,
    layout,
    lift,
    load,
    look,
    sensor_size,
    work_buffer,
)
from .kalman import (
    Buffer,
    clear,
    collapse,
    copy,
    count,
    kernel,
    predict,
    predict_some,
    update,
    update_lanes,
    update_some,
)
from .numbers import get, get_lane, groups_of, inlined, put, put_lane, rolled, width, zero

IMM, GPB1, GPB2, VITERBI = 0, 1, 2, 3


@inlined
def read_as(p: Parameters, w: Buffer, at: Place, maps: int, i: int, g: int, state: int, target: int) -> None:
    """Write the law of mode i as the modes of group g read it: as it is, or through the maps between them."""
    if p.maps.size == 0:
        lift(at.law, w, i, state, at.law, target)
    else:
        lift(at.law, w, i, state, at.law, at.ahead)
        predict_some(at.n, w, maps + (i * at.groups + g) * at.move, at.ahead, target, at.scratch)


@inlined
def sensor_of(at: Place, seen: int, g: int) -> int:
    """Where the sensors of group g for what is seen lie."""
    return at.sensors + g * at.sensor if seen == at.m else at.seen + g * sensor_size(at.n, seen)


@inlined
def carry(
    w: Buffer, at: Place, seen: int, begun: bool, g: int, source: int, target: int, density: int
) -> None:
    """Move a law by the modes of group g (unless the series has only begun), condition it on what is seen.

    The log-density of what is seen (NaN: its covariance is singular) goes to `density`; the predicted law
    stays at `at.ahead`, and what `update` leaves at `at.scratch`.
    """
    rolled(0)
    n, m = at.n, at.m
    if begun:
        copy(at.law, w, source, w, at.ahead)
    else:
        predict(n, w, at.moves + g * at.move, source, at.ahead, at.scratch)
    if seen == m:
        sensor = at.sensors + g * at.sensor
        put(w, density, update(n, m, w, at.y, sensor, at.ahead, target, at.scratch))
    else:
        sensor = at.seen + g * sensor_size(n, seen)
        update_lanes(n, seen, w, at.y, sensor, at.ahead, target, at.scratch, density)


@kernel
def carry_some(w: Buffer, at: Place, seen: int, begun: bool, j: int, source: int, target: int) -> float:
    """`carry` of one law for sizes known only at run time; returns the log-density."""
    if begun:
        copy(at.law, w, source, w, at.ahead)
    else:
        predict_some(at.n, w, at.moves + j * at.move, source, at.ahead, at.scratch)
    return float(update_some(at.n, seen, w, at.y, sensor_of(at, seen, j), at.ahead, target, at.scratch))


@inlined
def shares(
    M: int, w: Buffer, lane: int, step: int, score: int, weight: int, log_mode: int, choose: bool
) -> float:
    """Write the shares of M scores of a lane, and return their log-sum.

    Where all are −inf (the mode cannot be reached) the shares are the mode probabilities. To `choose`, the
    first largest has it all, and its score is returned.
    """
    rolled(0)
    top = -np.inf
    for i in range(M):
        top = max(top, get_lane(w, score + i * step, lane))
    if choose:
        left = 1.0
        for i in range(M):
            part = left if get_lane(w, score + i * step, lane) == top else 0.0
            put_lane(w, weight + i * step, lane, part)
            left -= part
        return top
    total = 0.0
    for i in range(M):
        if top > -np.inf:
            part = np.exp(get_lane(w, score + i * step, lane) - top)
        else:
            part = np.exp(get_lane(w, log_mode + i // width(w), i % width(w)))
        put_lane(w, weight + i * step, lane, part)
        total += part
    for i in range(M):
        put_lane(w, weight + i * step, lane, get_lane(w, weight + i * step, lane) / total)
    return float(top + np.log(total)) if top > -np.inf else top


@inlined
def mixing_weights(
    w: Buffer, at: Place, log_mode: int, one: bool, score: int, weight: int, prior: int
) -> None:
    """prior[j] = log c_j, weight[i, j] = w_{i|j} and score[i, j] = log μ_i π_ij of mixing first."""
    rolled(0)
    M, G, L = at.M, at.groups, width(w)
    for i in range(M):
        log_share = get_lane(w, log_mode + i // L, i % L)
        share = np.exp(log_share)
        for g in range(G):
            ig = i * G + g
            put(w, score + ig, get(w, at.log_transition + ig) + log_share)
            put(w, weight + ig, get(w, at.transition + ig) * share)
    for g in range(G):
        s = zero(w)
        for i in range(M):
            s = s + get(w, weight + i * G + g)
        put(w, prior + g, s)
        for i in range(M):
            put(w, weight + i * G + g, get(w, weight + i * G + g) / s)
    for j in range(M):
        linear = get_lane(w, prior + j // L, j % L)
        if linear > 1e-280:
            put_lane(w, prior + j // L, j % L, np.log(linear))
        else:  # too small for plain numbers, or zero
            g = j // L
            total = shares(M, w, j % L, G, score + g, weight + g, log_mode, False)
            put_lane(w, prior + g, j % L, total)
    if one:
        for i in range(M):
            share = np.exp(get_lane(w, log_mode + i // L, i % L))
            for g in range(G):
                put(w, weight + i * G + g, share)


@inlined
def keep_step(
    out: Stored, row: int, term: float, w: Buffer, at: Place, log_mode: int, state: int, weight: int
) -> None:
    """Write one step's results."""
    rolled(0)
    out.terms[row] = term
    gather(at.M, 1, w, log_mode, 1, out.log_mode, row, 0)
    keep(w, at, state, out.mode_mean, out.mode_covariance, row)
    for i in range(at.M):
        gather(at.M, 1, w, weight + i * at.groups, 1, out.mixing, row, i * at.M)


@kernel
def forward(run: Run, begin: int, end: int, method: int, everything: bool, sizes: tuple[Any, Any]) -> None:
    """Filter series `begin` to `end`; keep each step, or only the last of each series."""
    rolled(sizes[0])
    p, y, starts, out, lead = run
    M = p.initial_log_probability.shape[1]
    G = groups_of(M, sizes[0])
    at = layout(M, count(sizes[0]), count(sizes[1]), G)
    n, law = at.n, at.law
    parts = at.end  # laws by the mode before, of one group
    state = parts + M * law
    new = state + G * law
    log_mode = new + G * law
    score = log_mode + G
    weight = score + M * G
    prior = weight + M * G
    log_weight = prior + G
    maps = log_weight + G
    w, index = work_buffer(p, at, maps, sizes[0]), np.empty(at.m, np.int64)
    L = width(w)
    for series in range(begin, end):
        done = lead[series]
        law_before(run, series, done, w, at, state, log_mode)
        total = 0.0
        for t in range(done, starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(p, series, t, t == done, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            pairs = method >= GPB2 and not begun
            if begun:
                copy(G, w, log_mode, w, prior)
                clear(M * G, w, weight, 0, 0.0)
                for j in range(M):
                    put_lane(w, weight + j * G + j // L, j % L, 1.0)
            elif not pairs:
                mixing_weights(w, at, log_mode, method == GPB1, score, weight, prior)
            for g in range(G):
                source = at.read
                if begun:
                    source = state + g * law
                else:
                    for i in range(M):
                        read_as(p, w, at, maps, i, g, state, parts + i * law)
                    if not pairs:
                        collapse(n, M, w, weight + g, G, parts, law, at.read)
                for i in range(M if pairs else 1):
                    if pairs:
                        source = parts + i * law
                    target = source if pairs else new + g * law
                    carry(w, at, seen, begun, g, source, target, log_weight + g)
                    for j in range(g * L, min(M, g * L + L)):
                        if np.isnan(get_lane(w, log_weight + g, j % L)):
                            out.failure[series, 0], out.failure[series, 1] = t, j
                            return
                    if pairs:
                        before = get(w, at.log_transition + i * G + g) + get_lane(w, log_mode + i // L, i % L)
                        put(w, score + i * G + g, get(w, log_weight + g) + before)
                    else:
                        put(w, log_weight + g, get(w, log_weight + g) + get(w, prior + g))
                if pairs:
                    for j in range(g * L, min(M, g * L + L)):
                        value = shares(M, w, j % L, G, score + g, weight + g, log_mode, method == VITERBI)
                        put_lane(w, log_weight + g, j % L, value)
                    collapse(n, M, w, weight + g, G, parts, law, new + g * law)
            term = -np.inf
            for j in range(M):
                term = max(term, get_lane(w, log_weight + j // L, j % L))
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            s = 0.0
            for j in range(M):
                s += np.exp(get_lane(w, log_weight + j // L, j % L) - term)
            term += np.log(s)
            for g in range(G):
                put(w, log_mode + g, get(w, log_weight + g) - term)
            copy(G * law, w, new, w, state)
            total += term
            if everything:
                keep_step(out, row, term, w, at, log_mode, state, weight)
        out.log_likelihood[series] = total
        if not everything:
            keep_step(out, series, total, w, at, log_mode, state, weight)
