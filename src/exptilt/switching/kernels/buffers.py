"""A model as the kernels see it: flat float64 buffers, a time axis on each (length 1 where nothing varies), and room to work in.

`Parameters` is what goes in, `Stored` what comes out, `Place` where the parameters of one step lie in a kernel's work buffer. All are
named tuples, which numba takes as
arguments; their fields are one- or two-dimensional arrays whose last axis is flattened row by row.
"""

from typing import NamedTuple

import numpy as np

from .kalman import Buffer, copy, inlined


class Parameters(NamedTuple):
    """Everything a kernel needs to know of a model; ``L`` is 1 or the number of steps, ``C`` is 1 or the number of series."""

    transition: Buffer  # (L, M·M)
    dynamics: Buffer  # (L, M·n·n)
    dynamics_offset: Buffer  # (C, L, M·n), inputs included
    process_noise: Buffer  # (L, M·n·n)
    observation: Buffer  # (L, M·m·n)
    observation_offset: Buffer  # (C, L, M·m), inputs included
    observation_noise: Buffer  # (L, M·m·m)
    initial_mean: Buffer  # (M·n,)
    initial_covariance: Buffer  # (M·n·n,)
    initial_log_probability: Buffer  # (M,)
    maps: Buffer  # (M·M·n·n,) or (0,): state of mode i read as a state of mode j
    map_covariance: Buffer  # as maps
    first: int  # 1 if the initial law is the prior of the first observation, 0 if it lies one step before


class Place(NamedTuple):
    """Where the parameters of one step lie in the work buffer; those of the observed components are packed at the fields that end in
    `_seen`.
    """

    log_transition: int
    W: int
    c: int
    Q: int
    H: int
    d: int
    R: int
    y: int
    H_seen: int
    d_seen: int
    R_seen: int
    zero: int
    end: int


class Stored(NamedTuple):
    """What a filter leaves behind; ``rows`` is the number of steps of all series together, or with ``store="last"`` the number of
    series.
    """

    log_likelihood: Buffer  # (series,)
    terms: Buffer  # (rows,)
    log_mode: Buffer  # (rows, M)
    mode_mean: Buffer  # (rows, M·n)
    mode_covariance: Buffer  # (rows, M·n·n)
    mixing: Buffer  # (rows, M·M): [i, j] = P(mode i before | mode j now, data the collapse has seen)
    failure: Buffer  # (series, 2): step and mode of a singular innovation covariance, or −1


@inlined
def places(M: int, n: int, m: int) -> Place:
    """Lay out the work buffer; a kernel's own scratch begins at `end`."""
    transition = 0
    W = transition + M * M
    c = W + M * n * n
    Q = c + M * n
    H = Q + M * n * n
    d = H + M * m * n
    R = d + M * m
    y = R + M * m * m
    H_seen = y + m
    d_seen = H_seen + M * m * n
    R_seen = d_seen + M * m
    zero = R_seen + M * m * m
    return Place(transition, W, c, Q, H, d, R, y, H_seen, d_seen, R_seen, zero, zero + n)


@inlined
def load(
    M: int, n: int, m: int, p: Parameters, series: int, t: int, again: bool, w: Buffer, at: Place, maps: int
) -> None:
    """Copy the parameters of step `t` to their places; those that do not vary only with `again` (the first step of a pass).

    The maps, whose number is not known when the kernel is compiled, come last in the buffer, at `maps`.
    """
    if again or p.transition.shape[0] > 1:
        k = t if p.transition.shape[0] > 1 else 0
        for i in range(M * M):
            w[at.log_transition + i] = np.log(p.transition[k, i])
    if again or p.dynamics.shape[0] > 1:
        copy(M * n * n, p.dynamics[t if p.dynamics.shape[0] > 1 else 0], 0, w, at.W)
    if again or p.dynamics_offset.shape[1] > 1:
        k = t if p.dynamics_offset.shape[1] > 1 else 0
        copy(M * n, p.dynamics_offset[series if p.dynamics_offset.shape[0] > 1 else 0, k], 0, w, at.c)
    if again or p.process_noise.shape[0] > 1:
        copy(M * n * n, p.process_noise[t if p.process_noise.shape[0] > 1 else 0], 0, w, at.Q)
    if again or p.observation.shape[0] > 1:
        copy(M * m * n, p.observation[t if p.observation.shape[0] > 1 else 0], 0, w, at.H)
    if again or p.observation_offset.shape[1] > 1:
        k = t if p.observation_offset.shape[1] > 1 else 0
        copy(M * m, p.observation_offset[series if p.observation_offset.shape[0] > 1 else 0, k], 0, w, at.d)
    if again or p.observation_noise.shape[0] > 1:
        copy(M * m * m, p.observation_noise[t if p.observation_noise.shape[0] > 1 else 0], 0, w, at.R)
    if again:
        copy(p.maps.size, p.maps, 0, w, maps)
        copy(p.maps.size, p.map_covariance, 0, w, maps + p.maps.size)
        for i in range(n):
            w[at.zero + i] = 0.0


@inlined
def look(M: int, n: int, m: int, y: Buffer, row: int, w: Buffer, at: Place, index: Buffer) -> int:
    """Copy the observed components of a row, and where some are missing the rows of H, d, R that belong to the others; return their
    number.
    """
    seen = 0
    for a in range(m):
        if not np.isnan(y[row, a]):
            index[seen] = a
            w[at.y + seen] = y[row, a]
            seen += 1
    if seen < m:
        for j in range(M):
            for a in range(seen):
                ia = index[a]
                w[at.d_seen + j * seen + a] = w[at.d + j * m + ia]
                for k in range(n):
                    w[at.H_seen + (j * seen + a) * n + k] = w[at.H + (j * m + ia) * n + k]
                for b in range(seen):
                    w[at.R_seen + (j * seen + a) * seen + b] = w[at.R + (j * m + ia) * m + index[b]]
    return seen
