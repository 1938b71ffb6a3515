"""A model as the kernels see it: arrays with a time axis (length 1 where nothing varies), and room to work.

`Parameters` is what goes in, `Stored` what comes out, `Place` where things lie in a kernel's work buffer. All
are named tuples, which numba takes as arguments; the last axis of their arrays is flattened row by row.
"""

from typing import NamedTuple

import numpy as np

from .kalman import Buffer, copy, inlined, law_size, turn, update_room

Sizes = tuple[int, int, int]  # M, n, m


class Parameters(NamedTuple):
    """All a kernel needs of models; ``L`` is 1 or the number of steps, ``C`` 1 or that of series."""

    transition: Buffer  # (C, L, M·M)
    dynamics: Buffer  # (C, L, M·n·n)
    dynamics_offset: Buffer  # (C, L, M·n), inputs included
    process_noise: Buffer  # (C, L, M·n·n)
    observation: Buffer  # (C, L, M·m·n)
    observation_offset: Buffer  # (C, L, M·m), inputs included
    observation_noise: Buffer  # (C, L, M·m·m)
    initial_mean: Buffer  # (C, M·n)
    initial_covariance: Buffer  # (C, M·n·n)
    initial_log_probability: Buffer  # (C, M)
    maps: Buffer  # (M·M·n·n,) or (0,): state of mode i read as a state of mode j
    map_covariance: Buffer  # as maps
    first: int  # 1 if the initial law is the prior of the first observation, 0 if it lies one step before


class Stored(NamedTuple):
    """What a filter leaves behind; ``rows`` counts steps of all series, or (``store="last"``) series."""

    log_likelihood: Buffer  # (series,)
    terms: Buffer  # (rows,)
    log_mode: Buffer  # (rows, M)
    mode_mean: Buffer  # (rows, M·n)
    mode_covariance: Buffer  # (rows, M·n·n)
    mixing: Buffer  # (rows, M·M): [i, j] = P(mode i before | mode j now, data the collapse has seen)
    failure: Buffer  # (series, 2): step and mode of a singular innovation covariance, or −1


class Run(NamedTuple):
    """All that a pass over series reads and writes; series b is rows starts[b] to starts[b+1] of `y`."""

    p: Parameters
    y: Buffer  # (steps of all series, m)
    starts: Buffer  # (series + 1,)
    out: Stored
    lead: Buffer  # (series,): so many steps of each series are done already, their rows written


class Place(NamedTuple):
    """Sizes, and where things lie in the work buffer; a kernel's own things begin at `end`."""

    M: int
    n: int
    m: int
    modes: int  # M and n again, known at run time only: loops over these are not unrolled
    states: int
    law: int  # how many numbers a law, a move and a sensor take
    move: int
    sensor: int
    log_transition: int
    moves: int  # one a mode
    sensors: int  # one a mode
    y: int  # the components that were seen
    seen: int  # sensors of those components alone
    own_move: int  # of the mode at work, and its sensor: places that are known when sizes are
    own_sensor: int
    read: int  # a law, read through a map if there is one
    ahead: int  # a law predicted
    after: int  # a law updated
    scratch: int  # of `update`
    end: int


@inlined
def sensor_size(n: int, m: int) -> int:
    """How many numbers a sensor of m components takes."""
    return m * n + m + m * m


@inlined
def places(M: int, n: int, m: int, p: Parameters) -> Place:
    """Lay out the work buffer."""
    modes = p.initial_log_probability.shape[1]
    return layout(M, n, m, modes, p.initial_mean.shape[1] // modes)


@inlined
def layout(M: int, n: int, m: int, modes: int, states: int) -> Place:
    """Lay out the work buffer; the matrices of a step come first, up to the place of `y`."""
    law, move, sensor = law_size(n), 3 * n * n + n, sensor_size(n, m)
    moves = M * M
    sensors = moves + M * move
    y = sensors + M * sensor
    seen = y + m
    own = seen + M * sensor
    read = own + move + sensor
    ahead, after = read + law, read + 2 * law
    scratch = after + law
    end = scratch + update_room(n, m)
    sizes = (M, n, m, modes, states, law, move, sensor)
    return Place(*sizes, 0, moves, sensors, y, seen, own, own + move, read, ahead, after, scratch, end)


@inlined
def work_buffer(p: Parameters, at: Place, maps: int) -> Buffer:
    """A buffer with room for the maps, as moves, from `maps` on: they come last, for there may be none."""
    return np.zeros(maps + p.maps.size // (at.n * at.n) * at.move)


@inlined
def step_of(length: int, t: int) -> int:
    """Where a parameter's values of step (or series) t are: at 0 if it does not vary."""
    return t if length > 1 else 0


@inlined
def now(value: Buffer, series: int, t: int) -> Buffer:
    """A parameter's values for a series at step t."""
    return value[step_of(value.shape[0], series), step_of(value.shape[1], t)]  # type: ignore[no-any-return]


@inlined
def spread(M: int, size: int, source: Buffer, w: Buffer, at: int, step: int) -> None:
    """Copy M blocks of `size` numbers to places `step` apart."""
    for j in range(M):
        copy(size, source, j * size, w, at + j * step)


@inlined
def load(p: Parameters, series: int, t: int, again: bool, w: Buffer, at: Place, maps: int) -> None:
    """Copy the parameters of step `t` to their places; what does not vary only with `again`."""
    M, n, m = at.M, at.n, at.m
    if again or p.transition.shape[1] > 1:
        row = now(p.transition, series, t)
        for i in range(M * M):
            w[at.log_transition + i] = np.log(row[i])
    if again or p.dynamics.shape[1] > 1:
        spread(M, n * n, now(p.dynamics, series, t), w, at.moves, at.move)
        for j in range(M):
            turn(n, w, at.moves + j * at.move)
    if again or p.dynamics_offset.shape[1] > 1:
        spread(M, n, now(p.dynamics_offset, series, t), w, at.moves + n * n, at.move)
    if again or p.process_noise.shape[1] > 1:
        spread(M, n * n, now(p.process_noise, series, t), w, at.moves + n * n + n, at.move)
    if again or p.observation.shape[1] > 1:
        spread(M, m * n, now(p.observation, series, t), w, at.sensors, at.sensor)
    if again or p.observation_offset.shape[1] > 1:
        spread(M, m, now(p.observation_offset, series, t), w, at.sensors + m * n, at.sensor)
    if again or p.observation_noise.shape[1] > 1:
        spread(M, m * m, now(p.observation_noise, series, t), w, at.sensors + m * n + m, at.sensor)
    if again and p.maps.size > 0:  # as moves without an offset, which the buffer holds as zeros
        spread(M * M, n * n, p.maps, w, maps, at.move)
        for ij in range(M * M):
            turn(n, w, maps + ij * at.move)
        spread(M * M, n * n, p.map_covariance, w, maps + n * n + n, at.move)


@inlined
def look(y: Buffer, row: int, w: Buffer, at: Place, index: Buffer) -> int:
    """Copy the seen components of a row (and, if some are missing, their sensors); return their number."""
    n, m, seen = at.n, at.m, 0
    for a in range(m):
        if not np.isnan(y[row, a]):
            index[seen] = a
            w[at.y + seen] = y[row, a]
            seen += 1
    if seen < m:
        for j in range(at.M):
            H, S = at.sensors + j * at.sensor, at.seen + j * sensor_size(n, seen)
            for a in range(seen):
                ia = index[a]
                copy(n, w, H + ia * n, w, S + a * n)
                w[S + seen * n + a] = w[H + m * n + ia]
                for b in range(seen):
                    w[S + seen * n + seen + a * seen + b] = w[H + m * n + m + ia * m + index[b]]
    return seen


@inlined
def begin_series(p: Parameters, series: int, w: Buffer, at: Place, state: int, log_mode: int) -> None:
    """Put the initial law of a series in place: M laws and the logarithms of their probabilities."""
    own = step_of(p.initial_mean.shape[0], series)
    spread(at.M, at.n, p.initial_mean[own], w, state, at.law)
    spread(at.M, at.n * at.n, p.initial_covariance[own], w, state + at.n, at.law)
    copy(at.M, p.initial_log_probability[own], 0, w, log_mode)


@inlined
def write_row(length: int, w: Buffer, at: int, out: Buffer, row: int, column: int) -> None:
    """Copy `length` numbers to a row of a table, from `column` on: a view would have to be counted."""
    for i in range(length):
        out[row, column + i] = w[at + i]


@inlined
def read_row(length: int, table: Buffer, row: int, column: int, w: Buffer, at: int) -> None:
    """Copy `length` numbers from a row of a table, from `column` on."""
    for i in range(length):
        w[at + i] = table[row, column + i]


@inlined
def recall(out: Stored, row: int, w: Buffer, at: Place, state: int, log_mode: int) -> None:
    """Put the filtered laws of a row in place."""
    n = at.n
    for j in range(at.M):
        read_row(n, out.mode_mean, row, j * n, w, state + j * at.law)
        read_row(n * n, out.mode_covariance, row, j * n * n, w, state + j * at.law + n)
    read_row(at.M, out.log_mode, row, 0, w, log_mode)


@inlined
def keep(w: Buffer, at: Place, state: int, mean: Buffer, cov: Buffer, row: int) -> None:
    """Write the M laws at `state` to a row of means and covariances."""
    n = at.n
    for j in range(at.M):
        write_row(n, w, state + j * at.law, mean, row, j * n)
        write_row(n * n, w, state + j * at.law + n, cov, row, j * n * n)
