"""A series that switches regime: fitted, smoothed, forecast, as a dataclass of numbers, a few lines of text, a page and a table.

The work is `exptilt.switching.fit_ready`'s; here a CSV file is read, the regimes are described, and everything is written at the end,
all of it or nothing.
"""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exptilt._support.errors import ArgumentError
from exptilt._support.files import write_together
from exptilt.report import figures
from exptilt.report.page import Figure, Formula, Page, Section, Table, number, render
from exptilt.switching import fit_ready

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = {"", "na", "nan", "null", "none", ".", "?", "n/a"}
FORMULAS = {
    "level": "y_t = level[regime_t] + v_t,   v_t ~ N(0, variance[regime_t])",
    "local-level": "x_t = x_{t−1} + w_t,  w_t ~ N(0, pace[regime_t]²)\ny_t = x_t + v_t,  v_t ~ N(0, noise²)",
}


@dataclass(frozen=True)
class Study:
    """The numbers of the page.

    Attributes:
        source: the file.
        columns: names of the components.
        labels: ``(T,)``, what the rows are called.
        y: ``(T, m)``, NaN where missing.
        kind: which model.
        seed: of the starts.
        log_likelihood, aic, bic, free_parameters, observations, status: of the fit.
        transition: ``(M, M)``.
        duration: ``(M,)``, expected number of steps a regime lasts.
        share: ``(M,)``, smoothed share of time.
        center, deviation: ``(M, m)``: level and standard deviation of each regime; for "local-level" the pace, and the observation noise.
        center_error: ``(M, m)``, standard errors of `center`, NaN where the curvature does not tell.
        filtered, smoothed: ``(T, M)``, probabilities of the regimes.
        path: ``(T,)``, the most likely sequence.
        signal, signal_deviation: ``(T, m)``, smoothed mean of the observation without its noise, and its standard deviation.
        forecast, lower, upper: ``(h, m)``; forecast_probability ``(h, M)``; level of the interval.
    """

    source: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    y: NDArray[np.float64]
    kind: str
    seed: int
    log_likelihood: float
    aic: float
    bic: float
    free_parameters: int
    observations: int
    status: str
    transition: NDArray[np.float64]
    duration: NDArray[np.float64]
    share: NDArray[np.float64]
    center: NDArray[np.float64]
    center_error: NDArray[np.float64]
    deviation: NDArray[np.float64]
    filtered: NDArray[np.float64]
    smoothed: NDArray[np.float64]
    path: NDArray[np.int64]
    signal: NDArray[np.float64]
    signal_deviation: NDArray[np.float64]
    forecast: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    forecast_probability: NDArray[np.float64]
    level: float


def read_csv(
    path: Path, columns: Sequence[str] | None, index: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], NDArray[np.float64]]:
    """Column names, row labels and numbers ``(T, m)`` of a CSV file with a header; empty cells and NA are NaN.

    Args:
        path: the file.
        columns: which columns; None takes every column of numbers that is not the index.
        index: the column that names the rows; None numbers them.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not a text file in UTF-8. Pass a CSV file.") from None
    except csv.Error as problem:
        raise ArgumentError(f"{path} is not a CSV file: {problem}.") from None
    if not rows:
        raise ArgumentError(f"{path} is empty. Pass a CSV file with a header and rows of numbers.")
    header, body = [name.strip() for name in rows[0]], rows[1:]
    if not body:
        raise ArgumentError(f"{path} has a header and no rows. Pass a CSV file with rows of numbers.")
    for name in [*(columns or ()), *([index] if index else [])]:
        if name not in header:
            raise ArgumentError(f"{path} has no column {name!r}. It has: {', '.join(header)}.")
        if header.count(name) > 1:
            raise ArgumentError(f"{path} has {header.count(name)} columns called {name!r}. Rename them.")
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ArgumentError(
                f"{path}: line {line} has {len(row)} cells, the header {len(header)}. Mend that line."
            )

    def numbers(name: str) -> list[float] | tuple[int, str]:
        out = []
        at = header.index(name)
        for line, row in enumerate(body, start=2):
            cell = row[at].strip()
            if cell.lower() in MISSING:
                out.append(math.nan)
                continue
            try:
                value = float(cell)
            except ValueError:
                return line, cell
            if math.isinf(value):
                return line, cell
            out.append(value)
        return out

    wanted = (
        list(columns)
        if columns
        else [name for name in header if name != index and isinstance(numbers(name), list)]
    )
    if not wanted:
        raise ArgumentError(f"{path} has no column of numbers. It has: {', '.join(header)}.")
    parts = []
    for name in wanted:
        column = numbers(name)
        if isinstance(column, tuple):
            raise ArgumentError(
                f"{path}: line {column[0]} of column {name!r} holds {column[1]!r}, not a finite number. Mend it, or leave the cell empty."
            )
        parts.append(column)
    labels = (
        tuple(row[header.index(index)] for row in body) if index else tuple(str(k) for k in range(len(body)))
    )
    return tuple(wanted), labels, np.array(parts, dtype=np.float64).T


def compute(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, index: str | None = None, kind: str = "level", modes: int = 2,
    starts: int = 5, steps: int = 12, level: float = 0.9, seed: int = 0, progress: bool | None = None,
) -> Study:  # fmt: skip
    """Read a CSV file, fit a ready model, smooth and forecast.

    Args:
        path: the CSV file.
        columns: which columns to model, together; None takes all columns of numbers.
        index: the column that names the rows.
        kind: "level" or "local-level".
        modes: how many regimes.
        starts: how many starts of the fit.
        steps: how many steps to forecast.
        level: of the forecast's interval.
        seed: of the starts.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    names, labels, y = read_csv(Path(path), columns, index)
    for name, column in zip(names, y.T, strict=True):
        seen = column[~np.isnan(column)]
        if len(seen) < 2:
            raise ArgumentError(
                f"{path}: column {name!r} has {len(seen)} observed values. Choose others with --columns."
            )
        if np.ptp(seen) == 0:
            raise ArgumentError(
                f"{path}: column {name!r} is constant ({seen[0]:g}). There are no regimes in it; choose others with --columns."
            )
    fit = fit_ready(y, kind=kind, modes=modes, starts=starts, seed=seed, progress=progress)
    model = fit.model
    post, back = model.filter(y), model.smooth(y)
    ahead = post.forecast(steps, level=level)
    M, m = model.modes, y.shape[1]
    probability, diagonal = back.mode_probability, model.transition.diagonal()
    errors = fit.standard_errors or {}
    if kind == "level":
        center, deviation = (
            model.observation_offset,
            np.sqrt(np.diagonal(model.observation_noise, axis1=1, axis2=2)),
        )
        center_error = errors.get("observation_offset", np.full((M, m), np.nan))
        signal = probability @ center
        signal_deviation = np.sqrt(np.maximum(probability @ center**2 - signal**2, 0.0))
    else:
        variance = np.diagonal(model.process_noise, axis1=1, axis2=2)
        center, deviation = np.sqrt(variance), np.sqrt(np.diagonal(model.observation_noise, axis1=1, axis2=2))
        spread = (
            np.diagonal(errors["process_noise"], axis1=1, axis2=2)
            if "process_noise" in errors
            else np.full((M, m), np.nan)
        )
        center_error = spread / (2 * center)
        signal, signal_deviation = back.mean, np.sqrt(np.diagonal(back.covariance, axis1=1, axis2=2))
    with np.errstate(divide="ignore"):
        duration = 1.0 / (1.0 - diagonal)
    return Study(
        source=str(path),
        columns=names,
        labels=labels,
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
        share=probability.mean(0),
        center=center,
        center_error=center_error,
        deviation=deviation,
        filtered=post.mode_probability,
        smoothed=probability,
        path=model.most_likely_path(y),
        signal=signal,
        signal_deviation=signal_deviation,
        forecast=ahead.mean,
        lower=ahead.lower,
        upper=ahead.upper,
        forecast_probability=ahead.mode_probability,
        level=level,
    )


def text(study: Study) -> str:
    """The summary, for a terminal."""
    words = ("level", "sd") if study.kind == "level" else ("pace", "noise sd")
    lines = [
        f"{study.source}: {len(study.y)} rows of {', '.join(study.columns)}; {len(study.share)} regimes, model {study.kind!r}",
        f"log-likelihood {study.log_likelihood:.4f}   AIC {study.aic:.2f}   BIC {study.bic:.2f}   {study.free_parameters} free parameters",
        study.status,
        "",
        "regime   share   lasts"
        + "".join(f"   {name} {words[0]} (s.e.)   {words[1]}" for name in study.columns),
    ]
    for k in range(len(study.share)):
        cells = "".join(
            f"   {study.center[k, a]:.4g} ({study.center_error[k, a]:.2g})   {study.deviation[k, a]:.4g}"
            for a in range(len(study.columns))
        )
        lines.append(f"{k:>6}   {100 * study.share[k]:4.1f}%   {study.duration[k]:5.1f}{cells}")
    lines.append("")
    lines += [
        f"from regime {k}: " + "  ".join(f"to {j}: {p:.4f}" for j, p in enumerate(row))
        for k, row in enumerate(study.transition)
    ]
    last = ", ".join(f"{k}: {p:.3f}" for k, p in enumerate(study.filtered[-1]))
    lines.append(f"probability of the regimes at the last row: {last}")
    return "\n".join(lines)


def _paint_series(study: Study, a: int, axes: "Axes") -> None:
    T, h = len(study.y), len(study.forecast)
    time, later = np.arange(T), np.arange(T, T + h)
    shade(study, axes)
    axes.plot(time, study.y[:, a], color=figures.INK, linewidth=0.9, label=study.columns[a])
    axes.plot(time, study.signal[:, a], color=figures.SERIES[0], linewidth=1.4, label="smoothed")
    axes.fill_between(
        later, study.lower[:, a], study.upper[:, a], color=figures.SERIES[0], alpha=0.25, linewidth=0
    )
    axes.plot(
        later,
        study.forecast[:, a],
        color=figures.SERIES[0],
        linestyle="--",
        label=f"forecast, {100 * study.level:g} %",
    )
    label_time(study, axes)
    axes.legend(fontsize=7, loc="best")


def shade(study: Study, axes: "Axes") -> None:
    """Bands where the highest regime, or with several each but the lowest, is the likeliest one."""
    likely = study.smoothed.argmax(1)
    edges = np.flatnonzero(np.diff(likely)) + 1
    for a, b in zip([0, *edges], [*edges, len(likely)], strict=True):
        k = int(likely[a])
        if k:
            axes.axvspan(
                float(a) - 0.5,
                float(b) - 0.5,
                color=figures.SERIES[1 + (k - 1) % 2],
                alpha=0.10 + 0.06 * ((k - 1) // 2),
                linewidth=0,
            )


def label_time(study: Study, axes: "Axes") -> None:
    """Row labels below the axis, a few of them."""
    T = len(study.labels)
    at = np.unique(np.linspace(0, T - 1, min(T, 6)).astype(int))
    axes.set_xticks(at.tolist(), [study.labels[k] for k in at], fontsize=7)


def _paint_probability(study: Study, axes: "Axes") -> None:
    for k in range(len(study.share)):
        color = figures.INK if k == 0 else figures.SERIES[1 + (k - 1) % 2]
        axes.plot(
            study.smoothed[:, k],
            linewidth=1.2,
            color=color,
            label=f"regime {k}",
            linestyle="-" if k < 3 else ":",
        )
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("probability")
    label_time(study, axes)
    axes.legend(fontsize=7, loc="best")


def build(study: Study) -> Page:
    """The page."""
    M, words = (
        len(study.share),
        ("level", "standard deviation")
        if study.kind == "level"
        else ("pace (sd of a step)", "observation sd"),
    )
    rows: list[tuple[str | float, ...]] = [
        (f"{k}", float(study.share[k]), float(study.duration[k]), *[float(v) for a in range(len(study.columns)) for v in
         (study.center[k, a], study.center_error[k, a], study.deviation[k, a])])
        for k in range(M)
    ]  # fmt: skip
    header = ["regime", "share of time", "expected duration"]
    for name in study.columns:
        header += [f"{name}: {words[0]}", "s.e.", f"{name}: {words[1]}"]
    pictures = [
        Figure(
            figures.draw(f"series-{a}", partial(_paint_series, study, a), width=5.6, height=2.8),
            f"{name} over {len(study.y)} rows with coloured bands where a regime above 0 is the likeliest, and a "
            f"forecast of {len(study.forecast)} steps.",
            f"{name}: data, smoothed signal, regime bands and forecast with its {100 * study.level:g} % interval.",
        )
        for a, name in enumerate(study.columns)
    ]
    probability = Figure(
        figures.draw("probability", partial(_paint_probability, study), width=5.6, height=2.8),
        f"Smoothed probabilities of {M} regimes over time.",
        "Probability of each regime given the whole series.",
    )
    ahead: list[tuple[str | float, ...]] = [
        (
            f"+{k + 1}",
            *[
                float(v)
                for a in range(len(study.columns))
                for v in (study.forecast[k, a], study.lower[k, a], study.upper[k, a])
            ],
            *[float(p) for p in study.forecast_probability[k]],
        )
        for k in range(len(study.forecast))
    ]
    ahead_header = (
        ["step"]
        + [word for name in study.columns for word in (name, "low", "high")]
        + [f"P(regime {k})" for k in range(M)]
    )
    facts = (
        f"Log-likelihood {number(study.log_likelihood)}, AIC {number(study.aic)}, BIC {number(study.bic)}, "
        f"{study.free_parameters} free parameters, "
        f"{study.observations} observed values. The fit {study.status}."
    )
    chain: list[tuple[str | float, ...]] = [
        (f"from {k}", *[float(p) for p in row]) for k, row in enumerate(study.transition)
    ]
    sections = [
        Section(
            "Regimes",
            ("The model:",),
            [Formula(FORMULAS[study.kind]), Table("Regimes, numbered from the lowest up", header, rows)],
        ),
        Section("The series", (facts,), [*pictures, probability]),
        Section(
            "The chain",
            (),
            [Table("Probability of the next regime", ["", *[f"to {k}" for k in range(M)]], chain)],
        ),
        Section("Forecast", (), [Table("What comes next", ahead_header, ahead)]),
    ]
    lead = f"{', '.join(study.columns)}: {len(study.y)} rows, {M} regimes found by the {study.kind} model."
    return Page("Regimes", lead, sections, study.seed, [study.source])


def table(study: Study) -> str:
    """Probabilities as CSV text: one row per row of the data."""
    M = len(study.share)
    header = [
        "row",
        *[f"filtered_{k}" for k in range(M)],
        *[f"smoothed_{k}" for k in range(M)],
        "most_likely",
    ]
    lines = [",".join([*header, *[f"signal_{k}" for k in range(len(study.columns))]])]
    for t, label in enumerate(study.labels):
        quoted = '"' + label.replace('"', '""') + '"' if any(c in label for c in ',"\n') else label
        numbers = [*study.filtered[t], *study.smoothed[t]]
        lines.append(
            ",".join(
                [
                    quoted,
                    *[f"{v:.10g}" for v in numbers],
                    str(int(study.path[t])),
                    *[f"{v:.10g}" for v in study.signal[t]],
                ]
            )
        )
    return "\n".join(lines) + "\n"


def write(study: Study, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write index.html and probabilities.csv into `folder`; returns both paths.

    Args:
        study: the numbers.
        folder: where; made if it is not there.
    """
    path, html = write_together(
        folder, {"probabilities.csv": table(study), "index.html": render(build(study))}
    )
    return html, path
