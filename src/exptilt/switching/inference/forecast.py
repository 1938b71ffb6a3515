"""Forecasts: the filtered law carried on with nothing observed.

The mode probabilities move by ``mu @ transition`` and the moments of each mode by collapse and prediction, which commute, so means and
covariances are exact
given the filtered ones. Intervals are quantiles of the mixture over modes, one Gaussian a mode, component by component.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from ..._support.errors import ArgumentError
from ..checks import plain
from ..model import SwitchingLinearGaussian
from ..series import Data, _inputs, arrange, read
from .moments import mixture, observe, step_ahead


@dataclass(frozen=True, eq=False)
class Forecast:
    """What comes next. Leading axes ``(h, ...)``, or ``(B, h, ...)`` for a batch or list of series; arrays, tensors or tables as the data
    were.

    Attributes:
        mean, covariance: of y, ``(h, m)`` and ``(h, m, m)``.
        lower, upper: central interval for each component of y at `level`, ``(h, m)``.
        mode_probability: ``(h, M)``.
        state_mean, state_covariance: of x, ``(h, n)`` and ``(h, n, n)``.
        level: of the interval.
    """

    mean: Any
    covariance: Any = field(repr=False)
    lower: Any
    upper: Any
    mode_probability: Any
    state_mean: Any
    state_covariance: Any = field(repr=False)
    level: float


def mixture_quantile(level: float, weight: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """The `level` quantile of Gaussian mixtures over the axis before the last: weight ``(..., M)``, mean and deviation ``(..., M, m)``."""
    low = (mean + deviation * ndtri(level)).min(
        -2
    )  # the quantile of a mixture lies between those of its parts
    high = (mean + deviation * ndtri(level)).max(-2)
    for _ in range(80):
        middle = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (middle[..., None, :] - mean) / deviation
        z = np.where(np.isnan(z), 0.0, z)
        below = np.einsum("...j,...ja->...a", weight, ndtr(z)) < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def forecast(
    model: SwitchingLinearGaussian,
    data: Data,
    law: tuple[np.ndarray, np.ndarray, np.ndarray],
    steps: int,
    inputs: Any,
    level: float,
) -> Forecast:
    """Carry the filtered law of each series on for `steps` steps.

    Args:
        model: the model; parameters that vary in time must cover the steps ahead too.
        data: the data that were filtered.
        law: log mode probabilities ``(B, M)``, mode means ``(B, M, n)`` and covariances ``(B, M, n, n)`` after the last step.
        steps: h.
        inputs: ``(h, r)`` or ``(B, h, r)``, the inputs of the steps ahead, where the model has input matrices.
        level: of the intervals, between 0 and 1.
    """
    if steps < 1:
        raise ArgumentError(f"forecast: steps is {steps}. Pass at least 1.")
    if not 0 < level < 1:
        raise ArgumentError(f"forecast: level is {level}. Pass a number between 0 and 1, such as 0.9.")
    known = model.steps
    if known is not None and data.lengths.max() + steps > known:
        raise ArgumentError(
            f"forecast: the model's parameters cover {known} steps, {data.lengths.max()} of data and {steps} ahead are needed. "
            "Give parameters for the steps ahead too."
        )
    ahead = read(np.zeros((data.series, steps, model.outputs)), model.outputs)
    u = plain(_inputs(model, ahead, inputs, "forecast"))

    def at(name: str, rank: int, k: int, zero: tuple[int, ...]) -> np.ndarray:
        value = getattr(model, name)
        if value is None:
            return np.zeros((1, *zero))
        array = plain(value)
        return array[data.lengths + k] if array.ndim == rank + 1 else array[None]

    M, n, m = model.modes, model.states, model.outputs
    maps = (
        None
        if model.maps is None
        else (
            plain(model.maps),
            np.zeros((M, M, n, n)) if model.map_covariance is None else plain(model.map_covariance),
        )
    )
    log_mode, mean, cov = law
    rows: list[list[np.ndarray]] = []
    for k in range(steps):
        c, d = at("dynamics_offset", 2, k, (M, n)), at("observation_offset", 2, k, (M, m))
        if u.shape[-1]:
            c = c + np.einsum(
                "bjkr,br->bjk",
                np.broadcast_to(at("dynamics_input", 3, k, (M, n, u.shape[-1])), (len(u), M, n, u.shape[-1])),
                u[:, k],
            )
            d = d + np.einsum(
                "bjkr,br->bjk",
                np.broadcast_to(
                    at("observation_input", 3, k, (M, m, u.shape[-1])), (len(u), M, m, u.shape[-1])
                ),
                u[:, k],
            )
        now = [at("transition", 2, k, ()), at("dynamics", 3, k, ()), c, at("process_noise", 3, k, ())]
        probability, mean, cov = step_ahead(log_mode, mean, cov, now, maps, False)
        with np.errstate(divide="ignore"):
            log_mode = np.log(probability)
        seen = [at("observation", 3, k, ()), d, at("observation_noise", 3, k, ())]
        means, covs, center, spread = observe(probability, mean, cov, seen)
        deviation = np.sqrt(np.maximum(np.diagonal(covs, axis1=-2, axis2=-1), 0.0))
        edges = [
            mixture_quantile(q, probability, means, deviation) for q in ((1 - level) / 2, (1 + level) / 2)
        ]
        rows.append([center, spread, *edges, probability, *mixture(probability, mean, cov)])
    shown = _frame(data, steps)
    names = ("output", None, "output", "output", "mode", "state", None)
    values = [
        np.stack(column, 1).reshape(data.series * steps, *column[0].shape[1:])
        for column in zip(*rows, strict=True)
    ]
    parts = [arrange(value, shown, name, last=False) for value, name in zip(values, names, strict=True)]
    mean, covariance, lower, upper, probability, state_mean, state_covariance = parts
    return Forecast(mean, covariance, lower, upper, probability, state_mean, state_covariance, level)


def _frame(data: Data, steps: int) -> Data:
    """The layout of the steps ahead: as the data, with an index that goes on where theirs ends."""
    starts = np.arange(data.series + 1) * steps
    index = None
    if data.index is not None:
        index = tuple(_continue(old, steps) for old in data.index)
    layout = "batch" if data.layout == "list" and data.kind != "pandas" else data.layout
    return Data(data.tensor, starts, layout, data.kind, data.dtype, index, data.columns)


def _continue(index: Any, steps: int) -> Any:
    """The next labels of a regular index, or 1 … steps after one that is not."""
    import pandas as pd

    if isinstance(index, pd.PeriodIndex):
        return pd.period_range(index[-1] + 1, periods=steps, freq=index.freq)
    if isinstance(index, pd.DatetimeIndex):
        freq = index.freq or (pd.infer_freq(index) if len(index) > 2 else None)
        if freq is not None:
            return pd.date_range(index[-1], periods=steps + 1, freq=freq)[1:]
    if len(index) > 1 and pd.api.types.is_integer_dtype(index.dtype):
        step = int(index[-1] - index[-2])
        return (
            pd.RangeIndex(int(index[-1]) + step, int(index[-1]) + step * (steps + 1), step)
            if step
            else pd.RangeIndex(1, steps + 1)
        )
    return pd.RangeIndex(1, steps + 1)
