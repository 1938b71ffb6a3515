"""Forecasts: the filtered law predicted over steps without observations.

The mode probabilities move by ``mu @ transition`` and the moments of each mode by collapse and prediction,
which commute, so means and covariances are exact given the filtered ones. Intervals are quantiles of the
mixture over modes, one Gaussian a mode, component by component.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..parameters import ModelParameters
from ..series import Data, SeriesLike, Values, arrange
from .moments import SENSOR, STEP, Moments, by_row, maps_of, mixture, observe, step_ahead
from .problem import Problem, prepare


@dataclass(frozen=True, eq=False)
class Forecast:
    """Forecast of the next steps, as arrays, tensors or tables like the data.

    Leading axes ``(h, ...)``, or ``(B, h, ...)`` for a batch or list of series.

    Attributes:
        mean, covariance: of y, ``(h, m)`` and ``(h, m, m)``.
        lower, upper: central interval for each component of y at `level`, ``(h, m)``.
        mode_probability: ``(h, M)``.
        state_mean, state_covariance: of x, ``(h, n)`` and ``(h, n, n)``.
        level: of the interval.
    """

    mean: Values
    covariance: Values = field(repr=False)
    lower: Values
    upper: Values
    mode_probability: Values
    state_mean: Values
    state_covariance: Values = field(repr=False)
    level: float


def interval(level: float, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> list[np.ndarray]:
    """The ends of the central interval of each component of Gaussian mixtures.

    Weights are ``(..., M)``, means ``(..., M, m)``, covariances ``(..., M, m, m)``, the ends ``(..., m)``.
    """
    from scipy.special import ndtr, ndtri

    deviation, ends = np.sqrt(np.maximum(np.diagonal(cov, axis1=-2, axis2=-1), 0.0)), []
    for q in ((1 - level) / 2, (1 + level) / 2):
        parts = mean + deviation * ndtri(q)  # the quantile of a mixture lies between those of its parts
        low, high = parts.min(-2), parts.max(-2)
        diffuse = np.isinf(low) | np.isinf(high)
        low, high = np.where(diffuse, 0.0, low), np.where(diffuse, 0.0, high)
        for _ in range(80):
            middle = (low + high) / 2
            with np.errstate(divide="ignore", invalid="ignore"):
                z = (middle[..., None, :] - mean) / deviation
            z = np.where(np.isnan(z), 0.0, z)
            below = np.einsum("...j,...ja->...a", weight, ndtr(z)) < q
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        ends.append(np.where(diffuse, np.copysign(np.inf, q - 0.5), (low + high) / 2))
    return ends


def check_forecast(steps: int, level: float) -> None:
    """Raise unless `steps` is at least 1 and `level` is between 0 and 1."""
    if steps < 1:
        raise ArgumentError(f"forecast: steps is {steps}. Pass at least 1.")
    if not 0 < level < 1:
        raise ArgumentError(f"forecast: level is {level}. Pass a number between 0 and 1, such as 0.9.")


def steps_ahead(
    models: Sequence[ModelParameters], data: Data, steps: int, inputs: SeriesLike | None
) -> Problem:
    """A problem over the steps after the end of each series, with every observation missing."""
    known, most = min((one.steps for one in models if one.steps), default=None), data.lengths.max()
    if known is not None:
        if most + steps > known:
            raise ArgumentError(
                f"forecast: the model's parameters cover {known} steps, {most} of data and {steps} ahead are "
                "needed. Give parameters for the steps ahead too."
            )
        own = models if len(models) > 1 else [models[0]] * data.series
        models = [
            one._replaced(**{name: getattr(one, name)[end : end + steps] for name in one._lengths()})
            for one, end in zip(own, data.lengths, strict=True)
        ]
    with torch.no_grad():
        return prepare(models, np.zeros((data.series, steps, models[0].outputs)), inputs, "forecast")


def forecast(
    models: Sequence[ModelParameters],
    data: Data,
    law: Moments,
    steps: int,
    inputs: SeriesLike | None,
    level: float,
) -> Forecast:
    """Forecast from the filtered law of each series: log P(mode) ``(B, M)``, mode means and covariances."""
    check_forecast(steps, level)
    problem, M = steps_ahead(models, data, steps, inputs), models[0].modes
    p = problem.parameters
    every = by_row(p, problem.data.starts, STEP + SENSOR, M)
    (log_mode, mean, cov), rows = law, list[tuple[np.ndarray, ...]]()
    for k in range(steps):
        now = [value[k::steps] if len(value) > 1 else value for value in every]
        probability, mean, cov = step_ahead(log_mode, mean, cov, now[:4], maps_of(p, M))
        with np.errstate(divide="ignore"):
            log_mode = np.log(probability)
        seen = observe(probability, mean, cov, now[4:])
        rows.append((probability, *seen, *mixture(probability, mean, cov)))
    columns = [np.stack(column, 1) for column in zip(*rows, strict=True)]
    return arranged(data, steps, level, *(column.reshape(-1, *column.shape[2:]) for column in columns))


def arranged(
    data: Data,
    steps: int,
    level: float,
    probability: np.ndarray,
    means: np.ndarray,
    covs: np.ndarray,
    *moments: np.ndarray,
) -> Forecast:
    """The forecast, from rows of mode probabilities and of moments: of y by mode, of y over modes, of x."""
    edges = interval(level, probability, means, covs)
    values = (*moments[:2], *edges, probability, *moments[2:])
    names = ("output", None, "output", "output", "mode", "state", None)
    shown = ahead_of(data, steps)
    parts = [arrange(value, shown, name) for value, name in zip(values, names, strict=True)]
    return Forecast(*(*parts, level))


def ahead_of(data: Data, steps: int) -> Data:
    """The layout of the steps ahead: that of the data, with their index continued."""
    starts = np.arange(data.series + 1) * steps
    index = None if data.index is None else tuple(_continue(old, steps) for old in data.index)
    layout = "batch" if data.layout == "list" and data.kind != "pandas" else data.layout
    return replace(data, starts=starts, layout=layout, index=index)


def _continue(index: Any, steps: int) -> Any:
    """The next labels of a regular pandas index, or 1 … steps after one that is not."""
    import pandas as pd

    if isinstance(index, pd.PeriodIndex):
        return pd.period_range(index[-1] + 1, periods=steps, freq=index.freq)
    if isinstance(index, pd.DatetimeIndex):
        freq = index.freq or (pd.infer_freq(index) if len(index) > 2 else None)
        if freq is not None:
            return pd.date_range(index[-1], periods=steps + 1, freq=freq)[1:]
    if len(index) > 1 and pd.api.types.is_integer_dtype(index.dtype) and index[-1] != index[-2]:
        last, step = int(index[-1]), int(index[-1] - index[-2])
        return pd.RangeIndex(last + step, last + step * (steps + 1), step)
    return pd.RangeIndex(1, steps + 1)
