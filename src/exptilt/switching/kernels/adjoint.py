r"""The derivative of the log-likelihood in every parameter, by one pass backwards through a filter.

For one component, with a bar for the derivative of the objective, g that of the component's log-density, v = S^{-1}e, A = I − KH,
G = ½g(vv' − S^{-1}), b = K'm̄ and a = A'm̄ (m̄, P̄ belong to the updated mean m and covariance P, m⁻, P⁻ are the predicted ones):

    m̄⁻ = a + g H'v              P̄⁻ = A'P̄A + H'GH + sym(a v'H)           d̄ = g v − b
    R̄  = G + K'P̄K − sym(b v')    H̄  = g v m⁻' + 2 G H P⁻ + v (P m̄)' − b m' − 2 K'P̄P

    predict    m̄ = W'm̄⁻,  P̄ = W'P̄⁻W,  W̄ = m̄⁻m' + 2 P̄⁻W P,  c̄ = m̄⁻,  Q̄ = P̄⁻
    collapse   w̄_i = m̄·m_i + <P̄, P_i + δ_iδ_i'>,  m̄_i = w_i (m̄ + 2P̄δ_i),  P̄_i = w_i P̄

and for the weights, with λ = log μ, p the posterior of a component and ḡ the derivative of the step's term, the derivative of its log
weight is

    GPB2   p̄_ij = w_{i|j} (λ̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij) + p_ij (ḡ − Σ λ̄)
    IMM    p̄_j = λ̄_j + μ_j (ḡ − Σ λ̄),   and for log μ_i π_ij:   w_{i|j} (p̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij)

The filtered moments of the forward pass are on file; each step is done again from them, so memory stays O(T). The derivative in a
transition
probability that is exactly 0 is given as 0: such an entry is structure.
"""

from typing import NamedTuple

import numpy as np

from .buffers import Parameters, Stored, load, look, places
from .filters import begin_series
from .kalman import (
    Buffer,
    collapse_some,
    copy,
    count,
    inlined,
    kernel,
    predict_some,
    update_room,
    update_some,
)


class Gradients(NamedTuple):
    """Derivatives, each of the shape of the field of `Parameters` with its name; `y` has the shape of the data."""

    transition: Buffer
    dynamics: Buffer
    dynamics_offset: Buffer
    process_noise: Buffer
    observation: Buffer
    observation_offset: Buffer
    observation_noise: Buffer
    initial_mean: Buffer
    initial_covariance: Buffer
    initial_log_probability: Buffer
    maps: Buffer
    map_covariance: Buffer
    y: Buffer


@inlined
def adjoint_room(n: int, m: int) -> int:
    """Scratch of `update_adjoint`, in numbers."""
    return 3 * m + 3 * m * m + 3 * n + 2 * n * m + n * n


@kernel
def update_adjoint(
    n: int, m: int, w: Buffer, H: int, m0: int, P0: int, mean: int, cov: int, scratch: int, g: float, mean_bar: int, cov_bar: int,
    m0_bar: int, P0_bar: int, H_bar: int, d_bar: int, R_bar: int, room: int,
) -> None:  # fmt: skip
    """Derivatives of `update`, whose scratch must still be as that call left it; they are written to the offsets ending in `_bar`."""
    if m == 0:
        copy(n, w, mean_bar, w, m0_bar)
        copy(n * n, w, cov_bar, w, P0_bar)
        return
    S = scratch
    K = S + m * m
    e = K + 2 * n * m
    A = e + 2 * m
    v = room
    b = v + m
    unit = b + m
    inverse = unit + m
    G = inverse + m * m
    GH = G + m * m
    a = GH + n * m
    hv = a + n
    Pm = hv + n
    PK = Pm + n
    PA = PK + n * m
    for col in range(m + 1):  # column by column S^{-1}, and last v = S^{-1} e
        for r in range(m):
            s = w[e + r] if col == m else (1.0 if r == col else 0.0)
            for k in range(r):
                s -= w[S + r * m + k] * w[unit + k]
            w[unit + r] = s * w[S + r * m + r]
        for back in range(m):
            r = m - 1 - back
            s = w[unit + r]
            for k in range(r + 1, m):
                s -= w[S + k * m + r] * w[unit + k]
            w[unit + r] = s * w[S + r * m + r]
        copy(m, w, unit, w, v if col == m else inverse + col * m)
    for r in range(m):
        s = 0.0
        for i in range(n):
            s += w[K + i * m + r] * w[mean_bar + i]
        w[b + r] = s
        w[d_bar + r] = g * w[v + r] - s
        for c in range(m):
            w[G + r * m + c] = 0.5 * g * (w[v + r] * w[v + c] - w[inverse + r * m + c])
    for i in range(n):
        s, t, u = 0.0, 0.0, 0.0
        for k in range(n):
            s += w[A + k * n + i] * w[mean_bar + k]
            t += w[cov + i * n + k] * w[mean_bar + k]
        for r in range(m):
            u += w[H + r * n + i] * w[v + r]
        w[a + i], w[Pm + i], w[hv + i] = s, t, u
        w[m0_bar + i] = s + g * u
        for r in range(m):
            s, t = 0.0, 0.0
            for k in range(n):
                s += w[cov_bar + i * n + k] * w[K + k * m + r]
            for c in range(m):
                t += w[G + r * m + c] * w[H + c * n + i]
            w[PK + i * m + r], w[GH + r * n + i] = s, t
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += w[cov_bar + i * n + k] * w[A + k * n + j]
            w[PA + i * n + j] = s
    for i in range(n):
        for j in range(n):
            s = 0.5 * (w[a + i] * w[hv + j] + w[a + j] * w[hv + i])
            for k in range(n):
                s += w[A + k * n + i] * w[PA + k * n + j]
            for r in range(m):
                s += w[H + r * n + i] * w[GH + r * n + j]
            w[P0_bar + i * n + j] = s
    for r in range(m):
        for c in range(m):
            s = w[G + r * m + c] - 0.5 * (w[b + r] * w[v + c] + w[b + c] * w[v + r])
            for i in range(n):
                s += w[K + i * m + r] * w[PK + i * m + c]
            w[R_bar + r * m + c] = s
        for k in range(n):
            s = g * w[v + r] * w[m0 + k] + w[v + r] * w[Pm + k] - w[b + r] * w[mean + k]
            for i in range(n):
                s += 2.0 * (w[GH + r * n + i] * w[P0 + i * n + k] - w[PK + i * m + r] * w[cov + i * n + k])
            w[H_bar + r * n + k] = s


@kernel
def predict_adjoint(
    n: int,
    w: Buffer,
    W: int,
    m: int,
    P: int,
    mean_bar: int,
    cov_bar: int,
    W_bar: Buffer,
    W_bar_at: int,
    m_bar: int,
    P_bar: int,
    scratch: int,
) -> None:
    """Derivatives of `predict`: W's are added to a row of `W_bar`, those of m and P to what is at `m_bar` and `P_bar` (the offset's and
    Q's are
    `mean_bar` and `cov_bar` themselves); `scratch` holds n·n numbers.
    """
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += w[cov_bar + i * n + k] * w[W + k * n + j]
            w[scratch + i * n + j] = s
    for i in range(n):
        for j in range(n):
            s = w[mean_bar + i] * w[m + j]
            t = 0.0
            for k in range(n):
                s += 2.0 * w[scratch + i * n + k] * w[P + k * n + j]
                t += w[W + k * n + i] * w[scratch + k * n + j]
            W_bar[W_bar_at + i * n + j] += s
            w[P_bar + i * n + j] += t
            w[m_bar + j] += w[W + i * n + j] * w[mean_bar + i]


@kernel
def collapse_adjoint(n: int, w: Buffer, weight: float, part: int, part_cov: int, mean: int, mean_bar: int, cov_bar: int,
                     part_bar: int, part_cov_bar: int) -> float:  # fmt: skip
    """Derivative of `collapse` in one part, added to `part_bar` and `part_cov_bar`; returns the derivative in its weight."""
    weight_bar = 0.0
    for i in range(n):
        di = w[part + i] - w[mean + i]
        s = 0.0
        for j in range(n):
            dj = w[part + j] - w[mean + j]
            s += w[cov_bar + i * n + j] * dj
            weight_bar += w[cov_bar + i * n + j] * (w[part_cov + i * n + j] + di * dj)
            w[part_cov_bar + i * n + j] += weight * w[cov_bar + i * n + j]
        weight_bar += w[mean_bar + i] * w[part + i]
        w[part_bar + i] += weight * (w[mean_bar + i] + 2.0 * s)
    return weight_bar


@kernel
def backward(p: Parameters, y: Buffer, starts: Buffer, begin: int, end: int, method: int, out: Stored, terms_bar: Buffer, g: Gradients,
             sizes: tuple) -> None:  # fmt: skip
    """Add the derivatives of Σ terms_bar · terms over series `begin` to `end` to `g`; `method` is 0 for IMM, 1 for GPB1, 2 for GPB2."""
    M, n, m = count(sizes[0]), count(sizes[1]), count(sizes[2])
    nn = n * n
    at = places(M, n, m)
    state = at.end
    cov = state + M * n
    read = cov + M * nn
    read_cov = read + M * n
    source = read_cov + M * nn
    source_cov = source + n
    ahead = source_cov + nn
    ahead_cov = ahead + n
    after = ahead_cov + nn
    after_cov = after + M * n
    total = after_cov + M * nn
    log_mode = total + M * n
    state_bar = log_mode + M
    cov_bar = state_bar + M * n
    log_bar = cov_bar + M * nn
    new_bar = log_bar + M
    new_cov_bar = new_bar + M * n
    new_log_bar = new_cov_bar + M * nn
    ahead_bar = new_log_bar + M
    ahead_cov_bar = ahead_bar + n
    source_bar = ahead_cov_bar + nn
    source_cov_bar = source_bar + n
    part_bar = source_cov_bar + nn
    part_cov_bar = part_bar + n
    H_bar = part_cov_bar + nn
    d_bar = H_bar + m * n
    R_bar = d_bar + m
    weight_bar = R_bar + m * m
    score_bar = weight_bar + M * M
    scratch = score_bar + M * M
    room = scratch + update_room(n, m)
    maps = room + adjoint_room(n, m)
    w = np.zeros(maps + 2 * p.maps.size)
    index = np.empty(m, np.int64)
    for series in range(begin, end):
        length = starts[series + 1] - starts[series]
        for i in range(state_bar, new_bar):
            w[i] = 0.0
        for back in range(length):
            t = length - 1 - back
            row = starts[series] + t
            load(M, n, m, p, series, t, back == 0, w, at, maps)
            seen = look(M, n, m, y, row, w, at, index)
            begun = t == 0 and p.first == 1
            if t == 0:
                begin_series(M, n, p, w, state, cov, log_mode)
            else:
                copy(M * n, out.mode_mean[row - 1], 0, w, state)
                copy(M * nn, out.mode_covariance[row - 1], 0, w, cov)
                copy(M, out.log_mode[row - 1], 0, w, log_mode)
            kT = t if p.transition.shape[0] > 1 else 0
            kW = t if p.dynamics.shape[0] > 1 else 0
            kQ = t if p.process_noise.shape[0] > 1 else 0
            kH = t if p.observation.shape[0] > 1 else 0
            kR = t if p.observation_noise.shape[0] > 1 else 0
            kc, bc = (
                t if p.dynamics_offset.shape[1] > 1 else 0,
                series if p.dynamics_offset.shape[0] > 1 else 0,
            )
            kd, bd = (
                t if p.observation_offset.shape[1] > 1 else 0,
                series if p.observation_offset.shape[0] > 1 else 0,
            )
            for i in range(new_bar, ahead_bar):
                w[i] = 0.0
            excess = terms_bar[row]
            for j in range(M):
                excess -= w[log_bar + j]
            for j in range(M):
                mu_j = np.exp(out.log_mode[row, j])
                pairs = M if method == 2 and not begun else 1
                if (
                    pairs == M
                ):  # all M updates into mode j first: their collapse gives the derivatives of the weights
                    for step in range(M):
                        prior_of(M, n, w, p, maps, at.zero, state, cov, step, j, source, source_cov, scratch)
                        predict_some(
                            n,
                            w,
                            at.W + j * nn,
                            at.c + j * n,
                            at.Q + j * nn,
                            source,
                            source_cov,
                            ahead,
                            ahead_cov,
                            scratch,
                        )
                        update_some(
                            n,
                            seen,
                            w,
                            at.y,
                            at.H_seen + j * seen * n if seen < m else at.H + j * m * n,
                            at.d_seen + j * seen if seen < m else at.d + j * m,
                            at.R_seen + j * seen * seen if seen < m else at.R + j * m * m,
                            ahead,
                            ahead_cov,
                            after + step * n,
                            after_cov + step * nn,
                            scratch,
                        )
                    mean_weight_bar = 0.0
                    for step in range(M):
                        for i in range(part_bar, H_bar):
                            w[i] = 0.0
                        copy(n, out.mode_mean[row], j * n, w, total)
                        w[weight_bar + step] = collapse_adjoint(n, w, 1.0, after + step * n, after_cov + step * nn, total,
                                                                state_bar + j * n, cov_bar + j * nn, part_bar, part_cov_bar)  # fmt: skip
                        mean_weight_bar += out.mixing[row, step * M + j] * w[weight_bar + step]
                else:
                    mean_weight_bar = 0.0
                    if not begun:
                        for i in range(M):
                            prior_of(
                                M,
                                n,
                                w,
                                p,
                                maps,
                                at.zero,
                                state,
                                cov,
                                i,
                                j,
                                read + i * n,
                                read_cov + i * nn,
                                scratch,
                            )
                            w[score_bar + i] = out.mixing[row, i * M + j]
                        collapse_some(n, M, w, score_bar, 1, read, n, read_cov, nn, source, source_cov)
                for step in range(pairs):
                    if pairs == M:
                        prior_of(M, n, w, p, maps, at.zero, state, cov, step, j, source, source_cov, scratch)
                    if begun:
                        copy(n, w, state + j * n, w, ahead)
                        copy(nn, w, cov + j * nn, w, ahead_cov)
                    else:
                        predict_some(
                            n,
                            w,
                            at.W + j * nn,
                            at.c + j * n,
                            at.Q + j * nn,
                            source,
                            source_cov,
                            ahead,
                            ahead_cov,
                            scratch,
                        )
                    H = at.H_seen + j * seen * n if seen < m else at.H + j * m * n
                    update_some(
                        n,
                        seen,
                        w,
                        at.y,
                        H,
                        at.d_seen + j * seen if seen < m else at.d + j * m,
                        at.R_seen + j * seen * seen if seen < m else at.R + j * m * m,
                        ahead,
                        ahead_cov,
                        after,
                        after_cov,
                        scratch,
                    )
                    for i in range(part_bar, H_bar):
                        w[i] = 0.0
                    if pairs == M:
                        weight = out.mixing[row, step * M + j]
                        copy(n, out.mode_mean[row], j * n, w, total)
                        collapse_adjoint(
                            n,
                            w,
                            weight,
                            after,
                            after_cov,
                            total,
                            state_bar + j * n,
                            cov_bar + j * nn,
                            part_bar,
                            part_cov_bar,
                        )
                        s = weight * (w[log_bar + j] + w[weight_bar + step] - mean_weight_bar + mu_j * excess)
                        w[new_log_bar + step] += s
                        if p.transition[kT, step * M + j] > 0.0:
                            g.transition[kT, step * M + j] += s / p.transition[kT, step * M + j]
                    else:
                        copy(n, w, state_bar + j * n, w, part_bar)
                        copy(nn, w, cov_bar + j * nn, w, part_cov_bar)
                        s = w[log_bar + j] + mu_j * excess
                    update_adjoint(n, seen, w, H, ahead, ahead_cov, after, after_cov, scratch, s, part_bar, part_cov_bar,
                                   ahead_bar, ahead_cov_bar, H_bar, d_bar, R_bar, room)  # fmt: skip
                    for a in range(seen):
                        ia = index[a]
                        g.y[row, ia] -= w[d_bar + a]
                        g.observation_offset[bd, kd, j * m + ia] += w[d_bar + a]
                        for k in range(n):
                            g.observation[kH, (j * m + ia) * n + k] += w[H_bar + a * n + k]
                        for c in range(seen):
                            g.observation_noise[kR, (j * m + ia) * m + index[c]] += w[R_bar + a * seen + c]
                    if begun:
                        for i in range(n):
                            w[new_bar + j * n + i] += w[ahead_bar + i]
                        for i in range(nn):
                            w[new_cov_bar + j * nn + i] += w[ahead_cov_bar + i]
                        w[new_log_bar + j] += s
                        continue
                    for i in range(n):
                        g.dynamics_offset[bc, kc, j * n + i] += w[ahead_bar + i]
                        w[source_bar + i] = 0.0
                    for i in range(nn):
                        g.process_noise[kQ, j * nn + i] += w[ahead_cov_bar + i]
                        w[source_cov_bar + i] = 0.0
                    predict_adjoint(n, w, at.W + j * nn, source, source_cov, ahead_bar, ahead_cov_bar, g.dynamics[kW], j * nn,
                                    source_bar, source_cov_bar, scratch)  # fmt: skip
                    if pairs == M:
                        prior_adjoint(
                            M,
                            n,
                            w,
                            p,
                            maps,
                            state,
                            cov,
                            step,
                            j,
                            source_bar,
                            source_cov_bar,
                            new_bar,
                            new_cov_bar,
                            g,
                            scratch,
                        )
                        continue
                    mean_weight_bar = 0.0
                    for i in range(M):
                        for k in range(part_bar, H_bar):
                            w[k] = 0.0
                        weight = out.mixing[row, i * M + j]
                        w[weight_bar + i] = collapse_adjoint(
                            n,
                            w,
                            weight,
                            read + i * n,
                            read_cov + i * nn,
                            source,
                            source_bar,
                            source_cov_bar,
                            part_bar,
                            part_cov_bar,
                        )
                        mean_weight_bar += weight * w[weight_bar + i]
                        prior_adjoint(
                            M,
                            n,
                            w,
                            p,
                            maps,
                            state,
                            cov,
                            i,
                            j,
                            part_bar,
                            part_cov_bar,
                            new_bar,
                            new_cov_bar,
                            g,
                            scratch,
                        )
                    reach = 0.0
                    for i in range(M):
                        reach += np.exp(w[log_mode + i]) * p.transition[kT, i * M + j]
                    for i in range(M):
                        weight = out.mixing[row, i * M + j]
                        if method == 1:
                            w[new_log_bar + i] += weight * w[weight_bar + i]
                            weight = (
                                np.exp(w[log_mode + i]) * p.transition[kT, i * M + j] / reach
                                if reach > 0.0
                                else 0.0
                            )
                            q = weight * s
                        else:
                            q = weight * (s + w[weight_bar + i] - mean_weight_bar)
                        w[new_log_bar + i] += q
                        if p.transition[kT, i * M + j] > 0.0:
                            g.transition[kT, i * M + j] += q / p.transition[kT, i * M + j]
            copy(M * n + M * nn + M, w, new_bar, w, state_bar)
        for i in range(M * n):
            g.initial_mean[i] += w[state_bar + i]
        for i in range(M * nn):
            g.initial_covariance[i] += w[cov_bar + i]
        for i in range(M):
            g.initial_log_probability[i] += w[log_bar + i]


@inlined
def prior_of(M: int, n: int, w: Buffer, p: Parameters, maps: int, zero: int, state: int, cov: int, i: int, j: int, mean: int, mean_cov: int,
             scratch: int) -> None:  # fmt: skip
    """The state of mode i as mode j reads it: itself, or through the map between them."""
    if p.maps.size > 0:
        ij = (i * M + j) * n * n
        predict_some(
            n,
            w,
            maps + ij,
            zero,
            maps + p.maps.size + ij,
            state + i * n,
            cov + i * n * n,
            mean,
            mean_cov,
            scratch,
        )
    else:
        copy(n, w, state + i * n, w, mean)
        copy(n * n, w, cov + i * n * n, w, mean_cov)


@inlined
def prior_adjoint(
    M: int,
    n: int,
    w: Buffer,
    p: Parameters,
    maps: int,
    state: int,
    cov: int,
    i: int,
    j: int,
    mean_bar: int,
    mean_cov_bar: int,
    new_bar: int,
    new_cov_bar: int,
    g: Gradients,
    scratch: int,
) -> None:
    """Derivative of `prior_of`, added to those of mode i's state and of the map."""
    if p.maps.size > 0:
        ij = (i * M + j) * n * n
        for k in range(n * n):
            g.map_covariance[ij + k] += w[mean_cov_bar + k]
        predict_adjoint(n, w, maps + ij, state + i * n, cov + i * n * n, mean_bar, mean_cov_bar, g.maps, ij,
                        new_bar + i * n, new_cov_bar + i * n * n, scratch)  # fmt: skip
    else:
        for k in range(n):
            w[new_bar + i * n + k] += w[mean_bar + k]
        for k in range(n * n):
            w[new_cov_bar + i * n * n + k] += w[mean_cov_bar + k]
