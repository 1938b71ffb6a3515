"""Models, data and results in the form of the compiled kernels: arrays with a time axis of length 1 or T.

A `Run` holds the data, the model (`Parameters`) and the results (`Stored`). The last axis of these arrays is
flattened row by row. `described` writes a run into a frame, the struct `Series` of
csrc/switching/series.hpp.
"""

import ctypes
import math
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .._support import native

Buffer = np.ndarray
Sizes = tuple[int, int, int]  # M, n, m
IMM, GPB1, GPB2, VITERBI = 0, 1, 2, 3  # numbers of csrc/switching/switching.hpp
METHODS = {"imm": IMM, "gpb1": GPB1, "gpb2": GPB2}
RECURSIONS = METHODS | {"viterbi": VITERBI}  # viterbi gives a path, not a law
LOG_TWO_PI = 1.8378770664093453
ROUNDING = 4 * 2.220446049250313e-16  # relative rounding error of a sum, for each term


class Parameters(NamedTuple):
    """Matrices of models; ``L`` is 1 or the number of steps, ``C`` 1 or the number of series."""

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


class KeptParameters(Parameters):
    """Parameters kept between calls, with a frame that holds their addresses."""

    @cached_property
    def sizes(self) -> Sizes:
        """M, n and m."""
        return sizes_of(self)

    @cached_property
    def frame(self) -> Any:
        """Frame with sizes, addresses and strides; each run adds its data and results."""
        return parameters_frame(self)


class Stored:
    """Results of a filter in one block of memory; each array is made when it is first read.

    ``rows`` is the number of steps of all series; with ``store="last"`` it is the number of series.
    """

    def __init__(self, series: int, rows: int, M: int, n: int, mixing: bool = True) -> None:
        self.marks, self._shapes = _layout(series, rows, M, n, mixing)
        self.numbers = np.empty(self.marks[-1])

    def _array(self, k: int) -> Buffer:
        return self.numbers[self.marks[k] : self.marks[k + 1]].reshape(self._shapes[k])

    @cached_property
    def log_likelihood(self) -> Buffer:
        """Log-likelihood of each series, ``(series,)``."""
        return self._array(0)

    @cached_property
    def terms(self) -> Buffer:
        """Log-likelihood terms, ``(rows,)``."""
        return self._array(1)

    @cached_property
    def log_mode(self) -> Buffer:
        """Log mode probabilities, ``(rows, M)``."""
        return self._array(2)

    @cached_property
    def mode_mean(self) -> Buffer:
        """Means by mode, ``(rows, M·n)``."""
        return self._array(3)

    @cached_property
    def mode_covariance(self) -> Buffer:
        """Covariances by mode, ``(rows, M·n·n)``."""
        return self._array(4)

    @cached_property
    def mixing(self) -> Buffer:
        """[i, j] = P(mode i before | mode j now, data the collapse has seen), ``(rows, M·M or 0)``."""
        return self._array(5)

    @property
    def failure(self) -> Buffer:
        """Step and mode at which the filter of each series failed, −1 if it did not, ``(series, 2)``."""
        return self._array(6).view(np.int64)

    @property
    def steps(self) -> tuple[Buffer, ...]:
        """The arrays with a row for each step, from `terms` to `mixing`."""
        return self.terms, self.log_mode, self.mode_mean, self.mode_covariance, self.mixing


@lru_cache(maxsize=256)
def _layout(series: int, rows: int, M: int, n: int, mixing: bool) -> tuple[list[int], list[tuple[int, ...]]]:
    """Offsets of the arrays of `Stored` in its memory, the total size last, and their shapes."""
    wide = [(rows, k) for k in (M, M * n, M * n * n, M * M * mixing)]
    shapes: list[tuple[int, ...]] = [(series,), (rows,), *wide, (series, 2)]
    return [0, *accumulate(map(math.prod, shapes))], shapes


class Run(NamedTuple):
    """Inputs and outputs of a pass over series; series b is rows starts[b] to starts[b+1] of `y`."""

    p: Parameters
    y: Buffer  # (steps of all series, m)
    starts: Buffer  # (series + 1,)
    out: Stored
    lead: Buffer | None = None  # (series,): number of first steps whose rows are already written
    recurrence: Buffer | None = None  # (M, n): R of `RecurrentSwitching`


class Smoothing(NamedTuple):
    """Results of the backward pass; the last four fields are sums over steps, for EM."""

    probability: Buffer  # (rows, M)
    mean: Buffer  # (rows, M·n)
    covariance: Buffer  # (rows, M·n·n)
    pairs: Buffer  # (rows, M·M), [i, j] = P(s_{t−1} = i, s_t = j | y)
    initial_probability: Buffer  # (series, M): the step before the data, or the first one
    initial_mean: Buffer  # (series, M·n)
    initial_covariance: Buffer  # (series, M·n·n)
    total: Buffer  # (M,)
    zz: Buffer  # (M, n + q, n + q)
    rz: Buffer  # (M, n, n + q)
    rr: Buffer  # (M, n, n)


class Bars(NamedTuple):
    """Derivatives of an objective with respect to the arrays of `Stored`.

    All but the first have no rows if the objective depends on the terms alone.
    """

    terms: Buffer
    log_mode: Buffer
    mean: Buffer
    covariance: Buffer


class Cloud(NamedTuple):
    """The particles after each step, before they are resampled: modes, log weights, laws of the state."""

    mode: Buffer  # (rows, N), whole numbers
    log_weight: Buffer  # (rows, N)
    mean: Buffer  # (rows, N·n)
    covariance: Buffer  # (rows, N·n·n)


def sizes_of(p: Parameters) -> Sizes:
    """M, n and m."""
    M = p.initial_log_probability.shape[-1]
    return M, p.initial_mean.shape[-1] // M, p.observation_offset.shape[-1] // M


def address(array: np.ndarray) -> int:
    """Memory address of a contiguous array; 0 if it is empty."""
    try:
        # a quarter of the time of array.ctypes.data
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only or empty
        return int(array.ctypes.data) if array.size else 0


def filled(name: str, **values: Any) -> Any:
    """Struct `name` of the compiled core with its fields set; arrays are passed by address."""
    places = {key: address(v) if isinstance(v, np.ndarray) else v for key, v in values.items()}
    return native.frame(name)(**places)


def new_run(
    p: Parameters, y: np.ndarray, starts: np.ndarray, everything: bool = True, mixing: bool = True
) -> Run:
    """A run with empty results: a row for each step or, without `everything`, for each series."""
    M, n, _ = p.sizes if isinstance(p, KeptParameters) else sizes_of(p)
    series = len(starts) - 1
    rows = len(y) if everything else series
    return Run(p, np.ascontiguousarray(y), starts, Stored(series, rows, M, n, mixing))


def parameters_frame(p: Parameters) -> Any:
    """A frame with the sizes, addresses and strides of parameters, whose arrays must be contiguous."""
    frame = native.frame("Series")()
    frame.modes, frame.states, frame.outputs = sizes_of(p)
    frame.first, frame.initial_varies = p.first, p.initial_mean.shape[0] > 1
    for name, value in zip(Parameters._fields[:-1], p[:-1], strict=True):
        setattr(frame, name, address(value))
        if value.ndim == 3:
            setattr(frame, f"{name}_series", value[0].size if value.shape[0] > 1 else 0)
            setattr(frame, f"{name}_step", value.shape[2] if value.shape[1] > 1 else 0)
    return frame


def described(run: Run, method: str, everything: bool = True) -> Any:
    """Frame of a run. It holds addresses: the run's arrays must be contiguous and outlive it."""
    p, y, starts, out, lead, recurrence = run
    if isinstance(p, KeptParameters):
        frame = type(p.frame).from_buffer_copy(p.frame)
    else:
        frame = parameters_frame(p)
    frame.method, frame.everything, frame.series = RECURSIONS[method], everything, len(starts) - 1
    frame.y, frame.starts = address(y), address(starts)
    if lead is not None:
        frame.lead = address(lead)
    if recurrence is not None:
        frame.recurrence = address(recurrence)
    place, marks = address(out.numbers), out.marks
    frame.log_likelihood, frame.terms, frame.log_mode = place, place + 8 * marks[1], place + 8 * marks[2]
    frame.mode_mean, frame.mode_covariance = place + 8 * marks[3], place + 8 * marks[4]
    frame.mixing = place + 8 * marks[5] if marks[6] > marks[5] else 0
    frame.failure = place + 8 * marks[6]
    return frame
