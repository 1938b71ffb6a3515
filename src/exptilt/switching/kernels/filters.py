r"""The two forward recursions: mix before the update (IMM, GPB1), or after it (GPB2).

With μ_i the mode probabilities, π_ij the transition, λ = log μ and N_j(·) the Kalman step of mode j:

    IMM    c_j = Σ_i μ_i π_ij,  w_{i|j} = μ_i π_ij / c_j,  state_j = N_j(collapse_i(w_{i|j}, state_i)),    log weight_j  = log c_j + log
    p_j(y)
    GPB1   as IMM with w_{i|j} = μ_i: all modes start from one Gaussian
    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),  state_j = collapse_i(w_{i|j}, N_j(state_i)),     w_{i|j} ∝_i weight_ij

The log-likelihood term of a step is the log-sum of its weights. Weights stay logarithms throughout: modes 10⁵ nats apart still rank, and
a mode
of probability 0 has λ = −inf and a finite Gaussian (collapsed with weights μ_i alone).
"""

import numpy as np

from .buffers import Parameters, Place, Stored, load, look, places
from .kalman import (
    Buffer,
    choose_collapse,
    choose_predict,
    choose_update,
    collapse_some,
    copy,
    count,
    inlined,
    kernel,
    log_sum,
    predict_some,
    update_room,
    update_some,
)  # fmt: skip


@inlined
def backward_weights(M: int, w: Buffer, j: int, score: int, total: float, log_mode: int, weight: int) -> None:
    """weight[i, j] = exp(score[i, j] − total), or μ_i where mode j cannot be reached (total = −inf)."""
    for i in range(M):
        w[weight + i * M + j] = (
            np.exp(w[score + i * M + j] - total) if total > -np.inf else np.exp(w[log_mode + i])
        )


@inlined
def mixing_weights(
    M: int, w: Buffer, at: Place, log_mode: int, one: int, score: int, weight: int, prior: int
) -> None:
    """prior[j] = log c_j and weight[i, j] = w_{i|j} of the mix-first recursions."""
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
        if one == 1:
            for i in range(M):
                w[weight + i * M + j] = np.exp(w[log_mode + i])


@inlined
def begin_series(M: int, n: int, p: Parameters, w: Buffer, state: int, cov: int, log_mode: int) -> None:
    """Put the initial law in place."""
    copy(M * n, p.initial_mean, 0, w, state)
    copy(M * n * n, p.initial_covariance, 0, w, cov)
    copy(M, p.initial_log_probability, 0, w, log_mode)


@inlined
def keep(
    M: int,
    n: int,
    out: Stored,
    row: int,
    term: float,
    w: Buffer,
    log_mode: int,
    state: int,
    cov: int,
    weight: int,
) -> None:
    """Write one step's results."""
    out.terms[row] = term
    for j in range(M):
        out.log_mode[row, j] = w[log_mode + j]
    for i in range(M * n):
        out.mode_mean[row, i] = w[state + i]
    for i in range(M * n * n):
        out.mode_covariance[row, i] = w[cov + i]
    for i in range(M * M):
        out.mixing[row, i] = w[weight + i]


@kernel
def mix_first(
    p: Parameters,
    y: Buffer,
    starts: Buffer,
    begin: int,
    end: int,
    one: int,
    everything: int,
    out: Stored,
    sizes: tuple,
) -> None:
    """IMM (``one = 0``) or GPB1 (``one = 1``) over series `begin` to `end` of the rows of `y`, series b in rows starts[b] to
    starts[b+1].
    """
    M, n, m = count(sizes[0]), count(sizes[1]), count(sizes[2])
    at = places(M, n, m)
    state = at.end
    cov = state + M * n
    log_mode = cov + M * n * n
    mixed = log_mode + M
    mixed_cov = mixed + M * n
    ahead = mixed_cov + M * n * n
    ahead_cov = ahead + n
    read = ahead_cov + n * n
    read_cov = read + M * n
    score = read_cov + M * n * n
    weight = score + M * M
    prior = weight + M * M
    log_weight = prior + M
    scratch = log_weight + M
    maps = scratch + update_room(n, m)
    w = np.empty(maps + 2 * p.maps.size)
    index = np.empty(m, np.int64)
    modes = p.initial_log_probability.shape[
        0
    ]  # M and n again, known at run time only: the loop over modes is not to be unrolled,
    states = p.initial_mean.shape[0] // modes  # and the rarer moves are compiled once for all sizes
    for series in range(begin, end):
        begin_series(M, n, p, w, state, cov, log_mode)
        total = 0.0
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(M, n, m, p, series, t, t == 0, w, at, maps)
            seen = look(M, n, m, y, row, w, at, index)
            begun = t == 0 and p.first == 1
            if begun:
                copy(M, w, log_mode, w, prior)
                for i in range(M * M):
                    w[weight + i] = 1.0 if i % (M + 1) == 0 else 0.0
            else:
                mixing_weights(M, w, at, log_mode, one, score, weight, prior)
                for j in range(M):
                    if p.maps.size > 0:
                        for i in range(M):
                            ij = (i * M + j) * n * n
                            predict_some(states, w, maps + ij, at.zero, maps + p.maps.size + ij, state + i * n, cov + i * n * n,
                                    read + i * n, read_cov + i * n * n, scratch)  # fmt: skip
                        collapse_some(
                            states,
                            modes,
                            w,
                            weight + j,
                            M,
                            read,
                            n,
                            read_cov,
                            n * n,
                            mixed + j * n,
                            mixed_cov + j * n * n,
                        )
                    else:
                        choose_collapse(
                            sizes[1],
                            n,
                            M,
                            w,
                            weight + j,
                            M,
                            state,
                            n,
                            cov,
                            n * n,
                            mixed + j * n,
                            mixed_cov + j * n * n,
                        )
            for j in range(modes):
                nj, nnj = j * n, j * n * n
                if begun:
                    copy(n, w, state + nj, w, ahead)
                    copy(n * n, w, cov + nnj, w, ahead_cov)
                else:
                    choose_predict(
                        sizes[1],
                        n,
                        w,
                        at.W + nnj,
                        at.c + nj,
                        at.Q + nnj,
                        mixed + nj,
                        mixed_cov + nnj,
                        ahead,
                        ahead_cov,
                        scratch,
                    )
                if seen == m:
                    score_j = choose_update(sizes[1], n, m, w, at.y, at.H + j * m * n, at.d + j * m, at.R + j * m * m, ahead, ahead_cov,
                                     state + nj, cov + nnj, scratch)  # fmt: skip
                else:
                    score_j = update_some(
                        states,
                        seen,
                        w,
                        at.y,
                        at.H_seen + j * seen * n,
                        at.d_seen + j * seen,
                        at.R_seen + j * seen * seen,
                        ahead,
                        ahead_cov,
                        state + nj,
                        cov + nnj,
                        scratch,
                    )
                if np.isnan(score_j):
                    out.failure[series, 0], out.failure[series, 1] = t, j
                    return
                w[log_weight + j] = score_j + w[prior + j]
            term = log_sum(M, w, log_weight, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            for j in range(M):
                w[log_mode + j] = w[log_weight + j] - term
            total += term
            if everything == 1:
                keep(M, n, out, row, term, w, log_mode, state, cov, weight)
        out.log_likelihood[series] = total
        if everything == 0:
            keep(M, n, out, series, total, w, log_mode, state, cov, weight)


@kernel
def mix_last(
    p: Parameters,
    y: Buffer,
    starts: Buffer,
    begin: int,
    end: int,
    one: int,
    everything: int,
    out: Stored,
    sizes: tuple,
) -> None:
    """GPB2 over series `begin` to `end`; arguments as in `mix_first` (`one` is not used)."""
    M, n, m = count(sizes[0]), count(sizes[1]), count(sizes[2])
    at = places(M, n, m)
    state = at.end
    cov = state + M * n
    log_mode = cov + M * n * n
    read = log_mode + M
    read_cov = read + n
    ahead = read_cov + n * n
    ahead_cov = ahead + n
    after = ahead_cov + n * n
    after_cov = after + M * M * n
    score = after_cov + M * M * n * n
    weight = score + M * M
    total_of = weight + M * M
    scratch = total_of + M
    maps = scratch + update_room(n, m)
    w = np.empty(maps + 2 * p.maps.size)
    index = np.empty(m, np.int64)
    modes = p.initial_log_probability.shape[
        0
    ]  # M and n again, known at run time only: the loop over modes is not to be unrolled,
    states = p.initial_mean.shape[0] // modes  # and the rarer moves are compiled once for all sizes
    for series in range(begin, end):
        begin_series(M, n, p, w, state, cov, log_mode)
        total = 0.0
        for t in range(starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(M, n, m, p, series, t, t == 0, w, at, maps)
            seen = look(M, n, m, y, row, w, at, index)
            begun = t == 0 and p.first == 1
            for ij in range(modes * modes):
                i, j = ij // M, ij % M
                nj, nnj = j * n, j * n * n
                if begun:
                    copy(n, w, state + nj, w, ahead)
                    copy(n * n, w, cov + nnj, w, ahead_cov)
                else:
                    source, source_cov = state + i * n, cov + i * n * n
                    if p.maps.size > 0:
                        predict_some(
                            states,
                            w,
                            maps + ij * n * n,
                            at.zero,
                            maps + p.maps.size + ij * n * n,
                            source,
                            source_cov,
                            read,
                            read_cov,
                            scratch,
                        )
                        source, source_cov = read, read_cov
                    choose_predict(
                        sizes[1],
                        n,
                        w,
                        at.W + nnj,
                        at.c + nj,
                        at.Q + nnj,
                        source,
                        source_cov,
                        ahead,
                        ahead_cov,
                        scratch,
                    )
                if seen == m:
                    score_ij = choose_update(sizes[1], n, m, w, at.y, at.H + j * m * n, at.d + j * m, at.R + j * m * m, ahead, ahead_cov,
                                      after + ij * n, after_cov + ij * n * n, scratch)  # fmt: skip
                else:
                    score_ij = update_some(
                        states,
                        seen,
                        w,
                        at.y,
                        at.H_seen + j * seen * n,
                        at.d_seen + j * seen,
                        at.R_seen + j * seen * seen,
                        ahead,
                        ahead_cov,
                        after + ij * n,
                        after_cov + ij * n * n,
                        scratch,
                    )
                if np.isnan(score_ij):
                    out.failure[series, 0], out.failure[series, 1] = t, j
                    return
                if begun:
                    w[score + ij] = score_ij + w[log_mode + j] if i == j else -np.inf
                else:
                    w[score + ij] = score_ij + w[log_mode + i] + w[at.log_transition + ij]
            for j in range(M):
                w[total_of + j] = log_sum(M, w, score + j, M)
            term = log_sum(M, w, total_of, 1)
            if not term > -np.inf:
                out.failure[series, 0], out.failure[series, 1] = t, M
                return
            for j in range(M):
                backward_weights(M, w, j, score, w[total_of + j], log_mode, weight)
            for j in range(M):
                choose_collapse(
                    sizes[1],
                    n,
                    M,
                    w,
                    weight + j,
                    M,
                    after + j * n,
                    M * n,
                    after_cov + j * n * n,
                    M * n * n,
                    state + j * n,
                    cov + j * n * n,
                )
                w[log_mode + j] = w[total_of + j] - term
            total += term
            if everything == 1:
                keep(M, n, out, row, term, w, log_mode, state, cov, weight)
        out.log_likelihood[series] = total
        if everything == 0:
            keep(M, n, out, series, total, w, log_mode, state, cov, weight)
