"""Forecasts: the filtered law carried on with nothing observed.

The mode probabilities move by ``mu @ transition`` and the moments of each mode by collapse and prediction,
which commute, so means and covariances are exact given the filtered ones. Intervals are quantiles of the
mixture over modes, one Gaussian a mode, component by component.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from ..._support.errors import ArgumentError
from ..checks import plain
from ..parameters import RANKS, ModelParameters
from ..series import Data, SeriesLike, Values, arrange, read
from .moments import Moments, mixture, observe, step_ahead
from .problem import read_inputs


@dataclass(frozen=True, eq=False)
class Forecast:
    """What comes next, as arrays, tensors or tables like the data.

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


def mixture_quantile(level: float, weight: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """The `level` quantile of Gaussian mixtures: weight ``(..., M)``, mean and deviation ``(..., M, m)``."""
    parts = mean + deviation * ndtri(level)  # the quantile of a mixture lies between those of its parts
    low, high = parts.min(-2), parts.max(-2)
    diffuse = np.isinf(low) | np.isinf(high)
    low, high = np.where(diffuse, 0.0, low), np.where(diffuse, 0.0, high)
    for _ in range(80):
        middle = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (middle[..., None, :] - mean) / deviation
        z = np.where(np.isnan(z), 0.0, z)
        below = np.einsum("...j,...ja->...a", weight, ndtr(z)) < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.where(diffuse, np.copysign(np.inf, level - 0.5), (low + high) / 2)


def forecast(
    models: Sequence[ModelParameters],
    data: Data,
    law: Moments,
    steps: int,
    inputs: SeriesLike | None,
    level: float,
) -> Forecast:
    """Carry the filtered law of each series on: log P(mode) ``(B, M)``, mode means and mode covariances."""
    model = models[0]
    if steps < 1:
        raise ArgumentError(f"forecast: steps is {steps}. Pass at least 1.")
    if not 0 < level < 1:
        raise ArgumentError(f"forecast: level is {level}. Pass a number between 0 and 1, such as 0.9.")
    known, most = (
        min((one.steps for one in models if one.steps is not None), default=None),
        data.lengths.max(),
    )
    if known is not None and most + steps > known:
        raise ArgumentError(
            f"forecast: the model's parameters cover {known} steps, {most} of data and {steps} ahead are "
            "needed. Give parameters for the steps ahead too."
        )
    ahead = read(np.zeros((data.series, steps, model.outputs)), model.outputs)
    u = plain(read_inputs(model, ahead, inputs, "forecast"))

    def pick(name: str, k: int) -> np.ndarray:
        """The parameter k steps after each series' end, ``(B or 1, M, ...)``."""
        rows = []
        for b, one in enumerate(models):
            array, last = (
                plain(getattr(one, name)),
                data.lengths[b:] if len(models) == 1 else data.lengths[[b]],
            )
            rows.append(array[last + k] if array.ndim == RANKS[name] + 1 else array[None])
        return np.concatenate(rows)

    def offset(name: str, k: int, size: int) -> np.ndarray:
        """The offset of an equation with the effect of the inputs added."""
        base = np.zeros((1, model.modes, size))
        if getattr(model, f"{name}_offset") is not None:
            base = pick(f"{name}_offset", k)
        if getattr(model, f"{name}_input") is None:
            return base
        return np.asarray(base + (pick(f"{name}_input", k) @ u[:, None, k, :, None])[..., 0])

    maps = None
    if model.maps is not None:
        spread = np.zeros(model.maps.shape) if model.map_covariance is None else plain(model.map_covariance)
        maps = plain(model.maps), spread
    log_mode, mean, cov = law
    rows: list[list[np.ndarray]] = []
    for k in range(steps):
        now = [pick("transition", k), pick("dynamics", k), offset("dynamics", k, model.states)]
        probability, mean, cov = step_ahead(log_mode, mean, cov, [*now, pick("process_noise", k)], maps)
        with np.errstate(divide="ignore"):
            log_mode = np.log(probability)
        sensor = [
            pick("observation", k),
            offset("observation", k, model.outputs),
            pick("observation_noise", k),
        ]
        means, covs, center, spread = observe(probability, mean, cov, sensor)
        deviation = np.sqrt(np.maximum(np.diagonal(covs, axis1=-2, axis2=-1), 0.0))
        edges = [
            mixture_quantile(q, probability, means, deviation) for q in ((1 - level) / 2, (1 + level) / 2)
        ]
        rows.append([center, spread, *edges, probability, *mixture(probability, mean, cov)])
    shown = ahead_of(data, steps)
    names = ("output", None, "output", "output", "mode", "state", None)
    columns = [np.stack(column, 1) for column in zip(*rows, strict=True)]
    flat = [column.reshape(data.series * steps, *column.shape[2:]) for column in columns]
    parts = [arrange(value, shown, name) for value, name in zip(flat, names, strict=True)]
    mean, covariance, lower, upper, probability, state_mean, state_covariance = parts
    return Forecast(mean, covariance, lower, upper, probability, state_mean, state_covariance, level)


def ahead_of(data: Data, steps: int) -> Data:
    """The layout of the steps ahead: as the data, with an index that goes on where theirs ends."""
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
