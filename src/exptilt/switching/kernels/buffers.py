"""A model as the kernels see it: arrays with a time axis (length 1 where nothing varies), and room to work.

`Parameters` is what goes in, `Stored` what comes out, `Place` where things lie in a kernel's work buffer. All
are named tuples, which numba takes as arguments; the last axis of their arrays is flattened row by row.
"""

from typing import Any, NamedTuple

import numpy as np

from .kalman import Buffer, copy, law_size, turn, update_room
from .numbers import get, get_lane, inlined, put, put_lane, rolled, width, work_room

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
    """Sizes, and where things lie in the work buffer; a kernel's own things begin at `end`.

    Modes lie side by side in the lanes of a buffer: mode j in lane j % L of group j // L. A buffer without
    lanes has as many groups as modes.
    """

    M: int
    n: int
    m: int
    groups: int
    law: int  # how many numbers a law, a move and a sensor take
    move: int
    sensor: int
    log_transition: int  # [i · groups + group of j], and the probabilities themselves
    transition: int
    moves: int  # one a group
    sensors: int  # one a group
    y: int  # the components that were seen
    seen: int  # sensors of those components alone
    own_move: int
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
def layout(M: int, n: int, m: int, groups: int) -> Place:
    """Lay out the work buffer; the matrices of a step come first, up to the place of `y`."""
    law, move, sensor = law_size(n), 3 * n * n + n, sensor_size(n, m)
    transition = M * groups
    moves = 2 * transition
    sensors = moves + groups * move
    y = sensors + groups * sensor
    seen = y + m
    own = seen + groups * sensor
    read = own + move + sensor
    ahead, after = read + law, read + 2 * law
    scratch = after + law
    end = scratch + update_room(n, m)
    sizes = (M, n, m, groups, law, move, sensor)
    matrices = (0, transition, moves, sensors, y, seen, own, own + move)
    return Place(*sizes, *matrices, read, ahead, after, scratch, end)


@inlined
def work_buffer(p: Parameters, at: Place, maps: int, size: Any = 0) -> Buffer:
    """A buffer with room for the maps, as moves, from `maps` on: they come last, for there may be none.

    It has lanes if `size` is a tuple. Lanes without a mode get a sensor that can be divided by.
    """
    rolled(0)
    w: Buffer = work_room(maps + p.maps.size // (at.M * at.n * at.n) * at.groups * at.move, size)
    for j in range(at.M, at.groups * width(w)):
        for i in range(at.M):
            put_lane(w, at.transition + i * at.groups + at.groups - 1, j % width(w), 1.0)
        for a in range(at.m):
            R = at.sensors + (at.groups - 1) * at.sensor + at.m * at.n + at.m
            put_lane(w, R + a * at.m + a, j % width(w), 1.0)
    return w


@inlined
def step_of(length: int, t: int) -> int:
    """Where a parameter's values of step (or series) t are: at 0 if it does not vary."""
    return t if length > 1 else 0


@inlined
def now(value: Buffer, series: int, t: int) -> Buffer:
    """A parameter's values for a series at step t."""
    return value[step_of(value.shape[0], series), step_of(value.shape[1], t)]  # type: ignore[no-any-return]


@inlined
def spread(M: int, size: int, source: Buffer, first: int, w: Buffer, at: int, step: int) -> None:
    """Copy M blocks of `size` numbers, one a mode, to the modes' lanes; groups are `step` apart."""
    rolled(0)
    for j in range(M):
        place, lane = at + j // width(w) * step, j % width(w)
        for i in range(size):
            put_lane(w, place + i, lane, source[first + j * size + i])


@inlined
def scatter(M: int, size: int, table: Buffer, row: int, w: Buffer, at: int, step: int) -> None:
    """`spread` from a row of a table: a view of it would have to be counted."""
    rolled(0)
    for j in range(M):
        place, lane = at + j // width(w) * step, j % width(w)
        for i in range(size):
            put_lane(w, place + i, lane, table[row, j * size + i])


@inlined
def gather(M: int, size: int, w: Buffer, at: int, step: int, table: Buffer, row: int, first: int) -> None:
    """Copy M blocks of `size` numbers, one a mode, from the modes' lanes to a row of a table."""
    rolled(0)
    for j in range(M):
        place, lane = at + j // width(w) * step, j % width(w)
        for i in range(size):
            table[row, first + j * size + i] = get_lane(w, place + i, lane)


@inlined
def lift(length: int, w: Buffer, mode: int, source: int, step: int, target: int) -> None:
    """Copy `length` numbers of one mode to all lanes; groups at `source` are `step` apart."""
    rolled(0)
    place, lane = source + mode // width(w) * step, mode % width(w)
    for i in range(length):
        put(w, target + i, get_lane(w, place + i, lane))


@inlined
def load(p: Parameters, series: int, t: int, again: bool, w: Buffer, at: Place, maps: int) -> None:
    """Copy the parameters of step `t` to their places; what does not vary only with `again`."""
    rolled(0)
    M, n, m, G = at.M, at.n, at.m, at.groups
    if again or p.transition.shape[1] > 1:
        row = now(p.transition, series, t)
        for i in range(M):
            spread(M, 1, row, i * M, w, at.transition + i * G, 1)
            for j in range(M):
                put_lane(w, at.log_transition + i * G + j // width(w), j % width(w), np.log(row[i * M + j]))
    if again or p.dynamics.shape[1] > 1:
        spread(M, n * n, now(p.dynamics, series, t), 0, w, at.moves, at.move)
        for g in range(G):
            turn(n, w, at.moves + g * at.move)
    if again or p.dynamics_offset.shape[1] > 1:
        spread(M, n, now(p.dynamics_offset, series, t), 0, w, at.moves + n * n, at.move)
    if again or p.process_noise.shape[1] > 1:
        spread(M, n * n, now(p.process_noise, series, t), 0, w, at.moves + n * n + n, at.move)
    if again or p.observation.shape[1] > 1:
        spread(M, m * n, now(p.observation, series, t), 0, w, at.sensors, at.sensor)
    if again or p.observation_offset.shape[1] > 1:
        spread(M, m, now(p.observation_offset, series, t), 0, w, at.sensors + m * n, at.sensor)
    if again or p.observation_noise.shape[1] > 1:
        spread(M, m * m, now(p.observation_noise, series, t), 0, w, at.sensors + m * n + m, at.sensor)
    if again and p.maps.size > 0:  # as moves without an offset, which the buffer holds as zeros
        for i in range(M):
            place = maps + i * G * at.move
            spread(M, n * n, p.maps, i * M * n * n, w, place, at.move)
            spread(M, n * n, p.map_covariance, i * M * n * n, w, place + n * n + n, at.move)
            for g in range(G):
                turn(n, w, place + g * at.move)


@inlined
def look(y: Buffer, row: int, w: Buffer, at: Place, index: Buffer) -> int:
    """Copy the seen components of a row (and, if some are missing, their sensors); return their number."""
    rolled(0)
    n, m, seen = at.n, at.m, 0
    for a in range(m):
        if not np.isnan(y[row, a]):
            index[seen] = a
            put(w, at.y + seen, y[row, a])
            seen += 1
    if seen < m:
        for g in range(at.groups):
            H, S = at.sensors + g * at.sensor, at.seen + g * sensor_size(n, seen)
            for a in range(seen):
                ia = index[a]
                copy(n, w, H + ia * n, w, S + a * n)
                put(w, S + seen * n + a, get(w, H + m * n + ia))
                for b in range(seen):
                    R = S + seen * n + seen + a * seen + b
                    put(w, R, get(w, H + m * n + m + ia * m + index[b]))
    return seen


@inlined
def law_before(run: Run, series: int, t: int, w: Buffer, at: Place, state: int, log_mode: int) -> None:
    """Put a series' law before step t in place: a law a mode, and the logarithms of their probabilities.

    It is the initial law before step 0, and then what the filter left.
    """
    rolled(0)
    M, n, law, p, out = at.M, at.n, at.law, run.p, run.out
    if t == 0:
        own = step_of(p.initial_mean.shape[0], series)
        scatter(M, n, p.initial_mean, own, w, state, law)
        scatter(M, n * n, p.initial_covariance, own, w, state + n, law)
        scatter(M, 1, p.initial_log_probability, own, w, log_mode, 1)
    else:
        row = run.starts[series] + t - 1
        scatter(M, n, out.mode_mean, row, w, state, law)
        scatter(M, n * n, out.mode_covariance, row, w, state + n, law)
        scatter(M, 1, out.log_mode, row, w, log_mode, 1)


@inlined
def write_row(length: int, w: Buffer, at: int, out: Buffer, row: int, column: int) -> None:
    """Copy `length` numbers to a row of a table, from `column` on: a view would have to be counted."""
    rolled(0)
    for i in range(length):
        out[row, column + i] = w[at + i]


@inlined
def keep(w: Buffer, at: Place, state: int, mean: Buffer, cov: Buffer, row: int) -> None:
    """Write the laws at `state` to a row of means and covariances."""
    rolled(0)
    gather(at.M, at.n, w, state, at.law, mean, row, 0)
    gather(at.M, at.n * at.n, w, state + at.n, at.law, cov, row, 0)
