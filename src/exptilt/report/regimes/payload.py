"""The numbers of the page: a ready model fitted to a series, smoothed, and run on into the future.

What fits is imported when the file has been read and found fit: torch takes seconds to import.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from exptilt._support.errors import ArgumentError
from exptilt.report.regimes.dates import next_labels, span
from exptilt.report.regimes.series import Series, read_series

if TYPE_CHECKING:
    from exptilt.switching.compare import Comparison

Array = NDArray[np.float64]
LONG = 2000  # rows from which on the log score holds out one stretch instead of four


@dataclass(frozen=True)
class Regimes:
    """Numbers of the page of a series of T rows and m columns with M regimes.

    Attributes:
        source, columns, labels, y: the series, as `Series` has it; y ``(T, m)``.
        index: the column that names the rows, None if they are numbered.
        kind: which model, "level", "local-level", "autoregression" or "counts".
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
        unit: the period from a row to the next, "quarter" for example, or "row".
        shaded: ``(T,)``, the rows that the user asked to shade; None if there are none.
        order: how many lags the model has.
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
    comparison: "Comparison | None" = None
    unit: str = "row"
    shaded: NDArray[np.bool_] | None = None
    order: int = 0

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
    lags: int = 0,
    starts: int = 5,
    steps: int = 12,
    level: float = 0.9,
    seed: int = 0,
    counts: Sequence[int] = (),
    shade: Sequence[str] = (),
    progress: bool | None = None,
) -> Regimes:
    """Read a CSV or parquet file, fit a ready model, smooth and forecast.

    Args:
        path: the file.
        columns: which columns to model, together; None takes all columns of numbers that vary.
        index: the column that names the rows; None takes the first that holds dates, or a counter in front.
        kind: "level", "local-level" or "counts"; for "counts" there is no comparison and no residuals.
        modes: how many regimes.
        lags: of an autoregression around the levels; 0 for none.
        starts: how many starts of the fit.
        steps: how many steps to forecast.
        level: of the forecast's interval.
        seed: of the starts.
        counts: numbers of regimes to compare; none for no comparison.
        shade: spans of rows to shade, "FROM..TO" in dates or labels; or the name of a column of 0 and 1.
        progress: whether to show a bar; None shows it if standard error is a terminal.
    """
    marks = [name for name in shade if ".." not in name]
    if len(marks) > 1:
        raise ArgumentError(f"switch: --shade has {marks}. Pass one column, or spans FROM..TO.")
    series = read_series(Path(path), columns, index, *marks)
    kind, cut = ("autoregression", lags) if lags and kind == "level" else (kind, 0)
    if lags and kind != "autoregression":
        raise ArgumentError(f"switch: the model {kind!r} takes no lags. Leave --lags or --model out.")
    T, m = series.values.shape
    if kind == "autoregression" and m > 1:
        raise ArgumentError(f"switch: with lags one column is modelled, not {m}. Choose it with --columns.")
    if (least := least_rows(kind, modes, m, lags)) > T:
        size = f"{modes} regime{'s'[: modes > 1]} of {m} column{'s'[: m > 1]}"
        raise ArgumentError(f"{path} has {T} rows, too few: {size} need at least {least}.")
    y = series.values
    ahead = tuple(series.times.ahead(steps)) if series.times else next_labels(series.labels, steps)
    shaded = _shaded(series, [text for text in shade if ".." in text]) if shade else None
    if kind == "counts":
        from exptilt.report.regimes.counts import count_regimes

        fit, found = count_regimes(y, modes, starts, steps, level, seed, progress)
    else:
        options = modes, lags, starts, steps, level, seed, progress
        most = [k for k in counts if least_rows(kind, k, m, lags) <= T]
        fit, found = level_regimes(kind, most, series.columns, y, *options)
    said = ["The first row is" if cut == 1 else f"The first {cut} rows are"] if cut else []
    said = [f"{words} given, not modelled: each value is explained by those before it." for words in said]
    return Regimes(
        source=series.source,
        columns=series.columns,
        labels=series.labels[cut:],
        y=y[cut:],
        kind=kind,
        seed=seed,
        level=level,
        index=series.index,
        ahead=ahead,
        chosen=(*series.chosen, *said),
        unit=series.times.unit if series.times else "row",
        shaded=None if shaded is None else shaded[cut:],
        order=lags,
        **_of_fit(fit, found["transition"], found["smoothed"]),
        **found,
    )


def _of_fit(fit: Any, transition: Array, smoothed: Array) -> dict[str, Any]:
    """The fields of `Regimes` that every fit gives: its criteria, how long regimes last and their shares."""
    with np.errstate(divide="ignore"):
        duration = 1.0 / (1.0 - transition.diagonal())
    names = ("log_likelihood", "aic", "bic", "free_parameters", "observations")
    status = fit.status.value + (f" ({fit.reason})" if fit.reason else "")
    found = {name: getattr(fit, name) for name in names}
    return found | {"status": status, "duration": duration, "share": smoothed.mean(0)}


def least_rows(kind: str, modes: int, columns: int, lags: int = 0) -> int:
    """The fewest rows that a model can be fitted to: more values than parameters, three rows a regime."""
    each = {"level": columns * (columns + 3) // 2, "local-level": columns, "counts": 2 * columns}
    shared = columns if kind == "local-level" else lags
    parameters = modes * (each.get(kind, 2) + modes - 1) + shared
    return max(3 * modes, parameters // columns + 1) + lags


def _shaded(series: Series, spans: Sequence[str]) -> NDArray[np.bool_]:
    """``(T,)``, the rows that are marked, or inside spans "FROM..TO" of dates or labels, both included."""
    out = np.zeros(len(series.labels), dtype=bool) if series.marked is None else series.marked.copy()
    for text in spans:
        ends = [part.strip() for part in text.split("..", 1)]
        if set(ends) <= set(series.labels):
            out[series.labels.index(ends[0]) : series.labels.index(ends[1]) + 1] = True
            continue
        keys = series.times.keys if series.times else ()
        try:
            if not keys or not isinstance(keys[0], datetime):
                raise ValueError(text)
            first, after = span(ends[0])[0], span(ends[1])[1]
        except ValueError:
            raise ArgumentError(
                f"switch: --shade {text!r} is no span of rows. Pass FROM..TO in dates such as "
                f"2007-12..2009-06, or as rows are named ({series.labels[0]}..{series.labels[-1]})."
            ) from None
        out |= [first <= key.replace(tzinfo=None) < after for key in keys]
    return out


def level_regimes(
    kind: str,
    counts: Sequence[int],
    names: Sequence[str],
    y: Array,
    modes: int,
    lags: int,
    starts: int,
    steps: int,
    level: float,
    seed: int,
    progress: bool | None,
) -> tuple[Any, dict[str, Any]]:
    """The fit of a model of levels and its fields of `Regimes`; arguments as for `find_regimes`."""
    from exptilt.switching import compare, fit_named_model
    from exptilt.switching.learning.maximum_likelihood import check_columns
    from exptilt.switching.learning.summary import residual_tests, sum_modes

    if kind == "level":
        check_columns("switch", y[~np.isnan(y).any(1)], True, names, 1e-3)
    fit = fit_named_model(y, kind=kind, modes=modes, order=lags, starts=starts, seed=seed, progress=progress)
    model = fit.model
    post = model.filter(fit.y, method=fit.filter, inputs=fit.inputs)
    back = model.smooth(fit.y, method=fit.filter, inputs=fit.inputs)
    smoothed, size = sum_modes(back.mode_probability, modes), model.modes // modes
    residuals = fit.residuals()
    errors, unknown = fit.standard_errors or {}, np.full((modes, y.shape[1]), np.nan)
    path = model.most_likely_path(fit.y, inputs=fit.inputs) // size
    transition = model.transition
    if kind == "level":
        center = model.observation_offset
        center_error = errors.get("observation_offset", unknown)
        signal = smoothed @ center
    elif kind == "autoregression":
        center, center_error = fit.estimates["intercept"][:, None], errors["intercept"][:, None]
        means = (
            model.observation_offset + np.einsum("kmr,tr->tkm", model.observation_input, fit.inputs)[..., 0:1]
        )
        signal, transition = (
            np.einsum("tk,tkm->tm", back.mode_probability, means),
            fit.estimates["transition"],
        )
    else:
        center = np.sqrt(_diagonals(model.process_noise))
        spread = _diagonals(errors["process_noise"]) if "process_noise" in errors else unknown
        center_error, signal = spread / (2 * center), back.mean
    deviation = np.sqrt(_diagonals(model.observation_noise))[::size]
    if kind == "autoregression":
        paths = fit.future_paths(steps, seed=seed)
        tails = (1 - level) / 2
        lower, upper = np.quantile(paths[1], (tails, 1 - tails), 0)
        chance = (paths[0][..., None] == np.arange(modes)).mean(0)
        forecast = {"forecast": paths[1].mean(0), "lower": lower, "upper": upper}
        forecast["forecast_probability"] = chance
    else:
        ahead = post.forecast(steps, level=level)
        forecast = {"forecast": ahead.mean, "lower": ahead.lower, "upper": ahead.upper}
        forecast["forecast_probability"] = ahead.mode_probability
    compared = None
    if counts:
        compared = compare(
            y,
            modes=counts,
            kind=kind,
            order=lags,
            folds=4 if len(y) <= LONG else 1,
            starts=starts,
            seed=seed,
            known={modes: fit},
            progress=progress,
        )
    return fit, forecast | {
        "transition": transition,
        "center": center,
        "center_error": center_error,
        "deviation": deviation,
        "filtered": sum_modes(post.mode_probability, modes),
        "smoothed": smoothed,
        "path": path,
        "signal": signal,
        "residuals": residuals,
        "tests": tuple(residual_tests(column) for column in residuals.T),
        "comparison": compared,
    }


def _diagonals(matrices: Array) -> Array:
    """``(M, m)``, the diagonals of ``(M, m, m)``."""
    return np.diagonal(matrices, axis1=1, axis2=2)
