r"""The derivative of what a filter gives in every parameter, by one pass backwards through it.

For one component, with a bar for the derivative of the objective, g that of the component's log-density,
v = S^{-1}e, A = I − KH, G = ½g(vv' − S^{-1}), b = K'x̄ and a = A'x̄ (x̄, P̄ belong to the updated mean x and
covariance P, x⁻, P⁻ are the predicted ones):

    x̄⁻ = a + g H'v              P̄⁻ = A'P̄A + H'GH + sym(a v'H)           d̄ = g v − b
    R̄  = G + K'P̄K − sym(b v')    H̄  = g v x⁻' + 2 G H P⁻ + v (P x̄)' − b x' − 2 K'P̄P

    predict    x̄ = W'x̄⁻,  P̄ = W'P̄⁻W,  W̄ = x̄⁻x' + 2 P̄⁻W P,  c̄ = x̄⁻,  Q̄ = P̄⁻
    collapse   w̄_i = x̄·x_i + <P̄, P_i + δ_iδ_i'>,  x̄_i = w_i (x̄ + 2P̄δ_i),  P̄_i = w_i P̄

and for the weights, with λ = log μ, p the posterior of a component and ḡ the derivative of the step's term,
the derivative of its log weight is

    GPB2   p̄_ij = w_{i|j} (λ̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij) + p_ij (ḡ − Σ λ̄)
    IMM    p̄_j = λ̄_j + μ_j (ḡ − Σ λ̄),   and for log μ_i π_ij:   w_{i|j} (p̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij)

where Σ_i w_{i|j} w̄_ij = x̄·x + <P̄, P>, x and P being the collapsed moments. The filtered moments of the
forward pass are on file; each step is done again from them, so memory stays O(T). The derivative in a
transition probability that is exactly 0 is given as 0: such an entry says which transitions exist.
"""

from typing import NamedTuple

import numpy as np

from .buffers import (
    Parameters,
    Place,
    Run,
    Sizes,
    law_before,
    layout,
    load,
    look,
    now,
    sensor_size,
    step_of,
    work_buffer,
    write_row,
)
from .filters import GPB1, GPB2, carry_some, read_as, sensor_of
from .kalman import Buffer, View, clear, collapse_some, copy, kernel, law_size, multiply, solve
from .numbers import inlined


class Bars(NamedTuple):
    """The derivatives of an objective in what a filter gave, as `Stored` has it.

    Those in the log mode probabilities, means and covariances have no rows if only the terms are in it.
    """

    terms: Buffer
    log_mode: Buffer
    mean: Buffer
    covariance: Buffer


@inlined
def add(length: int, source: Buffer, source_at: int, target: Buffer, target_at: int) -> None:
    """Add `length` numbers to others."""
    for i in range(length):
        target[target_at + i] += source[source_at + i]


@inlined
def dot(length: int, w: Buffer, a: int, b: int) -> float:
    """The sum of products of two stretches of numbers."""
    s = 0.0
    for i in range(length):
        s += w[a + i] * w[b + i]
    return s


@inlined
def add_product(
    w: Buffer, rows: int, inner: int, columns: int, f: float, A: View, B: View, out: Buffer, at: int
) -> None:
    """Add f A B to the matrix at `at`; a view is an offset and its steps by row and by column."""
    for i in range(rows):
        for j in range(columns):
            s = 0.0
            for k in range(inner):
                s += w[A[0] + i * A[1] + k * A[2]] * w[B[0] + k * B[1] + j * B[2]]
            out[at + i * columns + j] += f * s


@inlined
def product(w: Buffer, rows: int, inner: int, columns: int, A: View, B: View, out: int) -> None:
    """Write A B."""
    clear(rows * columns, w, out, 0, 0.0)
    add_product(w, rows, inner, columns, 1.0, A, B, w, out)


@inlined
def adjoint_room(n: int, m: int) -> int:
    """Scratch of `update_adjoint`, in numbers."""
    return 2 * m + 2 * m * m + 3 * n + 2 * n * m + 2 * n * n


@kernel
def update_adjoint(
    w: Buffer,
    at: Place,
    seen: int,
    j: int,
    target: int,
    g: float,
    target_bar: int,
    source_bar: int,
    room: int,
) -> None:
    """Write the derivatives of `update` by mode j, whose scratch must still be as that call left it.

    The derivative in the law before it goes to `source_bar`; `room` gets that in the sensor, and then
    scratch.
    """
    n, m, source = at.n, seen, at.ahead
    if m == 0:
        copy(law_size(n), w, target_bar, w, source_bar)
        return
    H, P0, P, P_bar = (
        (sensor_of(at, seen, j), n, 1),
        (source + n, n, 1),
        (target + n, n, 1),
        (target_bar + n, n, 1),
    )
    HT, x_bar = (H[0], 1, n), (target_bar, 1, 1)
    d_bar, R_bar, P0_bar = room + m * n, room + m * n + m, source_bar + n
    S = at.scratch
    K = S + m * m
    e = K + 2 * n * m
    v = room + sensor_size(n, m)
    b = v + m
    inverse = b + m
    G = inverse + m * m
    GH = G + m * m
    a = GH + n * m
    hv = a + n
    Px = hv + n
    PK = Px + n
    PA = PK + n * m
    A = PA + n * n  # (I − K H)'
    clear(n * n, w, A, n, 1.0)
    multiply(w, n, m, n, -1.0, HT, K, A, A)
    copy(m, w, e, w, v)
    solve(m, 1, w, S, v)
    clear(m * m, w, inverse, m, 1.0)
    solve(m, m, w, S, inverse)
    product(w, m, n, 1, (K, n, 1), x_bar, b)
    for r in range(m):
        w[d_bar + r] = g * w[v + r] - w[b + r]
        for c in range(m):
            w[G + r * m + c] = 0.5 * g * (w[v + r] * w[v + c] - w[inverse + r * m + c])
            w[R_bar + r * m + c] = w[G + r * m + c] - 0.5 * (w[b + r] * w[v + c] + w[b + c] * w[v + r])
    product(w, n, n, 1, (A, n, 1), x_bar, a)
    product(w, n, n, 1, P, x_bar, Px)
    product(w, n, m, 1, HT, (v, 1, 1), hv)
    product(w, n, n, m, P_bar, (K, 1, n), PK)
    product(w, m, m, n, (G, m, 1), H, GH)
    product(w, n, n, n, P_bar, (A, 1, n), PA)
    for i in range(n):
        w[source_bar + i] = w[a + i] + g * w[hv + i]
        for k in range(n):
            w[P0_bar + i * n + k] = 0.5 * (w[a + i] * w[hv + k] + w[a + k] * w[hv + i])
        for r in range(m):
            x = g * w[source + i] + w[Px + i]
            w[room + r * n + i] = w[v + r] * x - w[b + r] * w[target + i]
    add_product(w, n, n, n, 1.0, (A, n, 1), (PA, n, 1), w, P0_bar)
    add_product(w, n, m, n, 1.0, HT, (GH, n, 1), w, P0_bar)
    add_product(w, m, n, m, 1.0, (K, n, 1), (PK, m, 1), w, R_bar)
    add_product(w, m, n, n, 2.0, (GH, n, 1), P0, w, room)
    add_product(w, m, n, n, -2.0, (PK, 1, m), P, w, room)


@kernel
def predict_adjoint(
    n: int, w: Buffer, W: int, source: int, bar: int, W_bar: Buffer, W_at: int, source_bar: int, scratch: int
) -> None:
    """Add the derivatives of `predict`: W's to `W_bar` from `W_at` on, the law's to `source_bar`.

    The offset's and Q's are those of the result, at `bar`; `scratch` holds n·n numbers.
    """
    product(w, n, n, n, (bar + n, n, 1), (W, n, 1), scratch)
    add_product(w, n, 1, n, 1.0, (bar, 1, 1), (source, 1, 1), W_bar, W_at)
    add_product(w, n, n, n, 2.0, (scratch, n, 1), (source + n, n, 1), W_bar, W_at)
    add_product(w, n, n, n, 1.0, (W, 1, n), (scratch, n, 1), w, source_bar + n)
    add_product(w, n, n, 1, 1.0, (W, 1, n), (bar, 1, 1), w, source_bar)


@kernel
def collapse_adjoint(
    n: int, w: Buffer, weight: float, part: int, mean: int, bar: int, part_bar: int
) -> float:
    """Write the derivative of `collapse` in one part to `part_bar`; return that in the part's weight."""
    weight_bar = 0.0
    for i in range(n):
        di = w[part + i] - w[mean + i]
        s = 0.0
        for j in range(n):
            dj, P_bar = w[part + j] - w[mean + j], w[bar + n + i * n + j]
            s += P_bar * dj
            weight_bar += P_bar * (w[part + n + i * n + j] + di * dj)
            w[part_bar + n + i * n + j] = weight * P_bar
        weight_bar += w[bar + i] * w[part + i]
        w[part_bar + i] = weight * (w[bar + i] + 2.0 * s)
    return weight_bar


@inlined
def read_as_adjoint(
    p: Parameters,
    g: Parameters,
    w: Buffer,
    at: Place,
    maps: int,
    ij: int,
    source: int,
    bar: int,
    source_bar: int,
) -> None:
    """Add the derivative of `read_as` to that of the law at `source` and of the map, if any."""
    n = at.n
    if p.maps.size > 0:
        add(n * n, w, bar + n, g.map_covariance, ij * n * n)
        map_at = maps + ij * at.move
        predict_adjoint(n, w, map_at, source, bar, g.maps, ij * n * n, source_bar, at.scratch)
    else:
        add(at.law, w, bar, w, source_bar)


@inlined
def sensor_adjoint(
    g: Parameters,
    y_bar: Buffer,
    w: Buffer,
    at: Place,
    index: Buffer,
    seen: int,
    place: tuple[int, int, int, int],
    bar: int,
) -> None:
    """Add the derivative in the sensor of mode j for what was seen, at `bar`, to those of H, d, R and y."""
    row, series, t, j = place
    n, m, d_bar = at.n, at.m, bar + seen * at.n
    H, R = now(g.observation, series, t), now(g.observation_noise, series, t)
    d_row = now(g.observation_offset, series, t)
    for a in range(seen):
        ia = index[a]
        y_bar[row, ia] -= w[d_bar + a]
        d_row[j * m + ia] += w[d_bar + a]
        add(n, w, bar + a * n, H, (j * m + ia) * n)
        for c in range(seen):
            R[(j * m + ia) * m + index[c]] += w[d_bar + seen + a * seen + c]


@inlined
def add_bars(bars: Bars, row: int, w: Buffer, at: Place, bar: int, log_bar: int) -> None:
    """Add the derivatives in the laws of a row to those at `bar`, in covariances as symmetric matrices."""
    n = at.n
    for j in range(at.M):
        w[log_bar + j] += bars.log_mode[row, j]
        for i in range(n):
            w[bar + j * at.law + i] += bars.mean[row, j * n + i]
            for k in range(n):
                both = bars.covariance[row, (j * n + i) * n + k] + bars.covariance[row, (j * n + k) * n + i]
                w[bar + j * at.law + n + i * n + k] += 0.5 * both


@inlined
def transition_adjoint(p: Parameters, g: Parameters, series: int, t: int, ij: int, bar: float) -> None:
    """Add the derivative in log π_ij."""
    share = now(p.transition, series, t)[ij]
    if share > 0.0:
        now(g.transition, series, t)[ij] += bar / share


@kernel
def filter_adjoint(
    run: Run,
    begin: int,
    end: int,
    method: int,
    bars: Bars,
    g: Parameters,
    y_bar: Buffer,
    lead_bar: Buffer,
    sizes: Sizes,
) -> None:
    """Add the derivatives of Σ bars · results over series `begin` to `end` to `g` and `y_bar`.

    Where steps were done before, that in the M laws and log probabilities they left goes to `lead_bar`.
    """
    p, y, starts, out, lead = run
    at = layout(sizes[0], sizes[1], sizes[2], sizes[0])
    M, n, law = at.M, at.n, at.law
    state = at.end  # laws before the step, and after it
    log_mode = state + M * law
    new = log_mode + M
    log_new = new + M * law
    read = log_new + M  # of the mix-first filters: laws as mode j reads them, and their collapse
    mixed = read + M * law
    weight = mixed + law
    after = weight + M
    bar = after + law  # derivatives in what is known after the step, and before it
    log_bar = bar + M * law
    new_bar = log_bar + M
    new_log_bar = new_bar + M * law
    part_bar = new_log_bar + M
    ahead_bar = part_bar + law
    source_bar = ahead_bar + law
    sensor_bar = source_bar + law
    maps = sensor_bar + at.sensor + adjoint_room(n, at.m)
    w, index = work_buffer(p, at, maps), np.empty(at.m, np.int64)
    for series in range(begin, end):
        length = starts[series + 1] - starts[series]
        clear(M * law + M, w, bar, 0, 0.0)
        for back in range(length - lead[series]):
            t = length - 1 - back
            row = starts[series] + t
            load(p, series, t, back == 0, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            law_before(run, series, t + 1, w, at, new, log_new)
            law_before(run, series, t, w, at, state, log_mode)
            c_bar = now(g.dynamics_offset, series, t)
            W_bar, Q_bar = now(g.dynamics, series, t), now(g.process_noise, series, t)
            if bars.mean.shape[0] > 0:
                add_bars(bars, row, w, at, bar, log_bar)
            clear(M * law + M, w, new_bar, 0, 0.0)
            excess = bars.terms[row]
            for j in range(M):
                excess -= w[log_bar + j]
            pairs = method == GPB2 and not begun
            for ij in range(M * M if pairs else M):
                i, j = ij // M, ij % M
                bar_j, new_j = bar + j * law, new + j * law
                s = w[log_bar + j] + np.exp(w[log_new + j]) * excess
                # the step once more: the law before it is at `source`, the one after it at `after`
                source = state + j * law
                if pairs:
                    source = at.read
                    read_as(p, w, at, maps, i, j, state, source)
                elif not begun:
                    source = mixed
                    for k in range(M):
                        w[weight + k] = out.mixing[row, k * M + j]
                        read_as(p, w, at, maps, k, j, state, read + k * law)
                    collapse_some(n, M, w, weight, 1, read, law, mixed)
                carry_some(w, at, seen, begun, j, source, after)
                # the derivative in what it gave, and in its log weight
                if pairs:
                    share = out.mixing[row, ij]
                    s += collapse_adjoint(n, w, share, after, new_j, bar_j, part_bar) - dot(
                        law, w, bar_j, new_j
                    )
                    s *= share
                    w[new_log_bar + i] += s
                    transition_adjoint(p, g, series, t, ij, s)
                else:
                    copy(law, w, bar_j, w, part_bar)
                update_adjoint(w, at, seen, j, after, s, part_bar, ahead_bar, sensor_bar)
                sensor_adjoint(g, y_bar, w, at, index, seen, (row, series, t, j), sensor_bar)
                if begun:
                    add(law, w, ahead_bar, w, new_bar + j * law)
                    w[new_log_bar + j] += s
                    continue
                add(n, w, ahead_bar, c_bar, j * n)
                add(n * n, w, ahead_bar + n, Q_bar, j * n * n)
                clear(law, w, source_bar, 0, 0.0)
                W = at.moves + j * at.move
                predict_adjoint(n, w, W, source, ahead_bar, W_bar, j * n * n, source_bar, at.scratch)
                if pairs:
                    read_as_adjoint(p, g, w, at, maps, ij, state + i * law, source_bar, new_bar + i * law)
                    continue
                reach = 0.0
                for k in range(M):
                    reach += np.exp(w[log_mode + k] + w[at.log_transition + k * M + j])
                for k in range(M):
                    share, law_k = w[weight + k], read + k * law
                    gain = collapse_adjoint(n, w, share, law_k, mixed, source_bar, part_bar)
                    read_as_adjoint(
                        p, g, w, at, maps, k * M + j, state + k * law, part_bar, new_bar + k * law
                    )
                    if method == GPB1:
                        w[new_log_bar + k] += share * gain
                        joint = np.exp(w[log_mode + k] + w[at.log_transition + k * M + j])
                        q = joint / reach * s if reach > 0.0 else 0.0
                    else:
                        q = share * (s + gain - dot(law, w, source_bar, mixed))
                    w[new_log_bar + k] += q
                    transition_adjoint(p, g, series, t, k * M + j, q)
            copy(M * law + M, w, new_bar, w, bar)
        if lead[series] > 0:
            write_row(M * law + M, w, bar, lead_bar, series, 0)
            continue
        own = step_of(g.initial_mean.shape[0], series)
        for j in range(M):
            add(n, w, bar + j * law, g.initial_mean[own], j * n)
            add(n * n, w, bar + j * law + n, g.initial_covariance[own], j * n * n)
        add(M, w, log_bar, g.initial_log_probability[own], 0)
