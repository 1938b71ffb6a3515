"""The numbers of the page: a ready model fitted to a series, smoothed, and run on into the future."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exptilt.report.regimes.counts import count_regimes, of_fit
from exptilt.report.regimes.dates import next_labels
from exptilt.report.regimes.series import read_series
from exptilt.switching import compare, fit_named_model
from exptilt.switching.compare import Comparison
from exptilt.switching.learning.summary import residual_tests

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Regimes:
    """Numbers of the page of a series of T rows and m columns with M regimes.

    Attributes:
        source, columns, labels, y: the series, as `Series` has it; y ``(T, m)``.
        index: the column that names the rows, None if they are numbered.
        kind: which model, "level", "local-level" or "counts".
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
        ahead: ``(h,)``, labels of the forecast's rows.
        chosen: sentences on what was read, and what was left out.
        residuals: ``(T, m)``, standard normal and independent if the model is right.
        tests: for each column, statistics and p-values of tests of its residuals by name.
        comparison: the same model with other numbers of regimes, None if not asked for.
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
    ahead: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    residuals: Array | None = None
    tests: tuple[dict[str, tuple[float, float]], ...] = ()
    comparison: Comparison | None = None

    @property
    def likely(self) -> NDArray[np.int64]:
        """``(T,)``, the likeliest regime of each row given the whole series."""
        return np.asarray(self.smoothed.argmax(1))

    @cached_property
    def spells(self) -> list["Spell"]:
        """The stretches of rows in which one regime is the likeliest, from the first to the last."""
        likely = self.likely
        edges = [0, *(np.flatnonzero(np.diff(likely)) + 1).tolist(), len(likely)]
        return [self._spell(int(likely[a]), a, b) for a, b in pairwise(edges)]

    def _spell(self, regime: int, begin: int, end: int) -> "Spell":
        seen = [column[~np.isnan(column)] for column in self.y[begin:end].T]
        mean = np.array([column.mean() if len(column) else np.nan for column in seen])
        deviation = np.array([column.std(ddof=1) if len(column) > 1 else np.nan for column in seen])
        sure = float(self.smoothed[begin:end, regime].mean())
        return Spell(regime, begin, end, mean, deviation, sure)


@dataclass(frozen=True)
class Spell:
    """A stretch of rows in one regime.

    Attributes:
        regime: number of the regime.
        begin, end: its first row, and the row after its last.
        mean, deviation: ``(m,)``, of the data in these rows.
        probability: the mean smoothed probability of the regime in these rows.
    """

    regime: int
    begin: int
    end: int
    mean: Array
    deviation: Array
    probability: float


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
    counts: Sequence[int] = (),
    progress: bool | None = None,
) -> Regimes:
    """Read a CSV or parquet file, fit a ready model, smooth and forecast.

    Args:
        path: the file.
        columns: which columns to model, together; None takes all columns of numbers that vary.
        index: the column that names the rows; None takes the first that holds dates, or a counter in front.
        kind: "level", "local-level" or "counts"; for "counts" there is no comparison and no residuals.
        modes: how many regimes.
        starts: how many starts of the fit.
        steps: how many steps to forecast.
        level: of the forecast's interval.
        seed: of the starts.
        counts: numbers of regimes to compare; none for no comparison.
        progress: whether to show a bar; None shows it if standard error is a terminal.
    """
    series = read_series(Path(path), columns, index)
    about = (series.source, series.columns, series.labels, series.values, kind, seed)
    ahead = next_labels(series.labels, steps)
    given = (series.values, modes, starts, steps, level, seed, progress)
    found = count_regimes(*given) if kind == "counts" else level_regimes(kind, counts, *given)
    return Regimes(*about, level=level, index=series.index, ahead=ahead, chosen=series.chosen, **found)


def level_regimes(
    kind: str,
    counts: Sequence[int],
    y: Array,
    modes: int,
    starts: int,
    steps: int,
    level: float,
    seed: int,
    progress: bool | None,
) -> dict[str, Any]:
    """The fields of `Regimes` that a model of levels gives; arguments as for `find_regimes`."""
    fit = fit_named_model(y, kind=kind, modes=modes, starts=starts, seed=seed, progress=progress)
    model = fit.model
    post, back = model.filter(y), model.smooth(y)
    residuals = fit.residuals()
    ahead = post.forecast(steps, level=level)
    errors, unknown = fit.standard_errors or {}, np.full((modes, y.shape[1]), np.nan)
    if kind == "level":
        center = model.observation_offset
        center_error = errors.get("observation_offset", unknown)
        signal = back.mode_probability @ center
    else:
        center = np.sqrt(_diagonals(model.process_noise))
        spread = _diagonals(errors["process_noise"]) if "process_noise" in errors else unknown
        center_error, signal = spread / (2 * center), back.mean
    compared = None
    if counts:
        compared = compare(y, modes=counts, kind=kind, starts=min(starts, 3), seed=seed, progress=progress)
    return of_fit(fit, model.transition, back.mode_probability) | {
        "center": center,
        "center_error": center_error,
        "deviation": np.sqrt(_diagonals(model.observation_noise)),
        "filtered": post.mode_probability,
        "path": model.most_likely_path(y),
        "signal": signal,
        "forecast": ahead.mean,
        "lower": ahead.lower,
        "upper": ahead.upper,
        "forecast_probability": ahead.mode_probability,
        "residuals": residuals,
        "tests": tuple(residual_tests(column) for column in residuals.T),
        "comparison": compared,
    }


def _diagonals(matrices: Array) -> Array:
    """``(M, m)``, the diagonals of ``(M, m, m)``."""
    return np.diagonal(matrices, axis1=1, axis2=2)
