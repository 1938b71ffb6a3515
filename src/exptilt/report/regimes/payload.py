"""The numbers of the page: a ready model fitted to a series, smoothed, and run on into the future."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exptilt.report.regimes.series import read_series
from exptilt.switching import fit_ready

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Regimes:
    """What was found in a series of T rows and m columns with M regimes.

    Attributes:
        source, columns, labels, y: the series, as `Series` has it; y ``(T, m)``.
        index: the column that names the rows, None if they are numbered.
        kind: which model, "level" or "local-level".
        seed: of the starts.
        log_likelihood, aic, bic, free_parameters, observations, status: of the fit.
        transition: ``(M, M)``.
        duration: ``(M,)``, expected number of steps a regime lasts.
        share: ``(M,)``, smoothed share of time.
        center, deviation: ``(M, m)``, level and standard deviation of each regime; for "local-level" the
            pace, and the observation noise.
        center_error: ``(M, m)``, standard errors of `center`, NaN where the curvature does not tell.
        filtered, smoothed: ``(T, M)``, probabilities of the regimes.
        path: ``(T,)``, the most likely sequence.
        signal: ``(T, m)``, smoothed mean of the observation without its noise.
        forecast, lower, upper: ``(h, m)``, mean and interval of the next h rows.
        forecast_probability: ``(h, M)``.
        level: of the interval.
    """

    source: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    y: Array
    kind: str
    seed: int
    log_likelihood: float
    aic: float
    bic: float
    free_parameters: int
    observations: int
    status: str
    transition: Array
    duration: Array
    share: Array
    center: Array
    center_error: Array
    deviation: Array
    filtered: Array
    smoothed: Array
    path: NDArray[np.int64]
    signal: Array
    forecast: Array
    lower: Array
    upper: Array
    forecast_probability: Array
    level: float
    index: str | None = None


def find_regimes(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    index: str | None = None,
    kind: str = "level",
    modes: int = 2,
    starts: int = 5,
    steps: int = 12,
    level: float = 0.9,
    seed: int = 0,
    progress: bool | None = None,
) -> Regimes:
    """Read a CSV file, fit a ready model, smooth and forecast.

    Args:
        path: the CSV file.
        columns: which columns to model, together; None takes all columns of numbers.
        index: the column that names the rows; None takes the first if it holds dates or a counter.
        kind: "level" or "local-level".
        modes: how many regimes.
        starts: how many starts of the fit.
        steps: how many steps to forecast.
        level: of the forecast's interval.
        seed: of the starts.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    series = read_series(Path(path), columns, index)
    y = series.values
    fit = fit_ready(y, kind=kind, modes=modes, starts=starts, seed=seed, progress=progress)
    model = fit.model
    post, back = model.filter(y), model.smooth(y)
    ahead = post.forecast(steps, level=level)
    errors, unknown = fit.standard_errors or {}, np.full((modes, y.shape[1]), np.nan)
    deviation = np.sqrt(_diagonals(model.observation_noise))
    if kind == "level":
        center = model.observation_offset
        center_error = errors.get("observation_offset", unknown)
        signal = back.mode_probability @ center
    else:
        center = np.sqrt(_diagonals(model.process_noise))
        spread = _diagonals(errors["process_noise"]) if "process_noise" in errors else unknown
        center_error, signal = spread / (2 * center), back.mean
    with np.errstate(divide="ignore"):
        duration = 1.0 / (1.0 - model.transition.diagonal())
    return Regimes(
        source=series.source,
        columns=series.columns,
        labels=series.labels,
        y=y,
        kind=kind,
        seed=seed,
        log_likelihood=fit.log_likelihood,
        aic=fit.aic,
        bic=fit.bic,
        free_parameters=fit.free_parameters,
        observations=fit.observations,
        status=fit.status.value,
        transition=model.transition,
        duration=duration,
        share=back.mode_probability.mean(0),
        center=center,
        center_error=center_error,
        deviation=deviation,
        filtered=post.mode_probability,
        smoothed=back.mode_probability,
        path=model.most_likely_path(y),
        signal=signal,
        forecast=ahead.mean,
        lower=ahead.lower,
        upper=ahead.upper,
        forecast_probability=ahead.mode_probability,
        level=level,
        index=series.index,
    )


def _diagonals(matrices: Array) -> Array:
    """``(M, m)``, the diagonals of ``(M, m, m)``."""
    return np.diagonal(matrices, axis1=1, axis2=2)
