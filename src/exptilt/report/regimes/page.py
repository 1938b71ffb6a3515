"""The page of a series that switches regime, and its table of probabilities."""

import csv
import io
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exptilt._support.files import write_together
from exptilt.report import figures
from exptilt.report.page import Cell, Figure, Formula, Page, Section, Table, number, render
from exptilt.report.regimes.payload import Array, Regimes
from exptilt.report.tokens import plain, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMULAS = {
    "level": "y_t = level[regime_t] + v_t,   v_t ~ N(0, variance[regime_t])",
    "local-level": "x_t = x_{t−1} + w_t,  w_t ~ N(0, pace[regime_t]²)\ny_t = x_t + v_t,  v_t ~ N(0, noise²)",
}
# What the two numbers of a regime are called.
WORDS = {"level": ("level", "standard deviation"), "local-level": ("pace (sd of a step)", "observation sd")}


def write_regimes(found: Regimes, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write `index.html` and `probabilities.csv` into `folder`, both or none.

    Args:
        found: the numbers.
        folder: where; made if it is not there.

    Returns:
        The paths of the page and of the table.
    """
    texts = {"probabilities.csv": probabilities(found), "index.html": render(build(found))}
    table, page = write_together(folder, texts)
    return page, table


def probabilities(found: Regimes) -> str:
    """Filtered and smoothed probabilities, the likeliest path and the signal as CSV text, a line a row."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    modes, columns = range(len(found.share)), range(len(found.columns))
    probability = [f"{kind}_{k}" for kind in ("filtered", "smoothed") for k in modes]
    table.writerow(["row", *probability, "most_likely", *(f"signal_{a}" for a in columns)])
    for label, filtered, smoothed, mode, signal in zip(
        found.labels, found.filtered, found.smoothed, found.path, found.signal, strict=True
    ):
        numbers = [f"{value:.10g}" for value in (*filtered, *smoothed)]
        table.writerow([label, *numbers, int(mode), *(f"{value:.10g}" for value in signal)])
    return written.getvalue()


def build(found: Regimes) -> Page:
    """The page."""
    M, (center, deviation) = len(found.share), WORDS[found.kind]
    facts = (
        f"Log-likelihood {number(found.log_likelihood)}, AIC {number(found.aic)}, BIC {number(found.bic)}, "
        f"{found.free_parameters} free parameters, {found.observations} observed values. "
        f"The fit {found.status}."
    )
    header = ["regime", "share of time", "expected duration"]
    for name in found.columns:
        header += [f"{name}: {center}", "s.e.", f"{name}: {deviation}"]
    numbers = np.stack([found.center, found.center_error, found.deviation], -1).reshape(M, -1)
    regimes = _rows(map(str, range(M)), np.column_stack([found.share, found.duration, numbers]))
    chain = _rows((f"from {k}" for k in range(M)), found.transition)
    ahead = np.stack([found.forecast, found.lower, found.upper], -1).reshape(len(found.forecast), -1)
    steps = _rows(
        (f"+{k + 1}" for k in range(len(ahead))), np.column_stack([ahead, found.forecast_probability])
    )
    later = ["step", *(word for name in found.columns for word in (name, "low", "high"))]
    later += [f"P(regime {k})" for k in range(M)]
    sections = [
        Section(
            "Regimes",
            ("The model:",),
            [Formula(FORMULAS[found.kind]), Table("Regimes, numbered from the lowest up", header, regimes)],
        ),
        Section("The series", (facts,), pictures(found)),
        Section(
            "The chain",
            (),
            [Table("Probability of the next regime", ["", *(f"to {k}" for k in range(M))], chain)],
        ),
        Section("Forecast", (), [Table("What comes next", later, steps)]),
    ]
    named = "numbered" if found.index is None else f"named by the column {found.index}"
    rows = f"{', '.join(found.columns)}: {len(found.y)} rows, {named}"
    lead = f"{rows}; {M} regimes found by the {found.kind} model."
    return Page("Regimes", lead, sections, found.seed, [found.source])


def _rows(names: Iterable[str], values: Array) -> list[list[Cell]]:
    """Rows of a table: a name and the numbers of each."""
    return [[name, *map(float, row)] for name, row in zip(names, values, strict=True)]


def pictures(found: Regimes) -> list[Figure]:
    """One picture a column, and one of the probabilities."""
    M, interval = len(found.share), f"{100 * found.level:g} %"
    drawn = [
        Figure(
            figures.draw(f"series-{a}", partial(_paint_series, found, a), width=4.4, height=2.6),
            f"{name} over {len(found.y)} rows with coloured bands where a regime above 0 is the likeliest, "
            f"and a forecast of {len(found.forecast)} steps.",
            f"{name}: data, smoothed signal, regime bands and forecast with its {interval} interval.",
        )
        for a, name in enumerate(found.columns)
    ]
    probability = Figure(
        figures.draw("probability", partial(_paint_probability, found), width=4.4, height=2.6),
        f"Smoothed probabilities of {M} regimes over time.",
        "Probability of each regime given the whole series.",
    )
    return [*drawn, probability]


def _paint_series(found: Regimes, a: int, axes: "Axes") -> None:
    T, h = len(found.y), len(found.forecast)
    time, later, blue = np.arange(T), np.arange(T, T + h), figures.SERIES[0]
    _shade(found, axes)
    axes.plot(time, found.y[:, a], color=figures.INK, linewidth=0.9, label=visible(found.columns[a]))
    axes.plot(time, found.signal[:, a], color=blue, linewidth=1.4, label="smoothed")
    axes.fill_between(later, found.lower[:, a], found.upper[:, a], color=blue, alpha=0.25, linewidth=0)
    label = f"forecast, {100 * found.level:g} %"
    axes.plot(later, found.forecast[:, a], color=blue, linestyle="--", label=label)
    _label(found, axes)


def _paint_probability(found: Regimes, axes: "Axes") -> None:
    for k, probability in enumerate(found.smoothed.T):
        color = figures.SERIES[1 + (k - 1) % 2] if k else figures.INK
        axes.plot(
            probability, linewidth=1.2, color=color, label=f"regime {k}", linestyle="-" if k < 3 else ":"
        )
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("probability")
    _label(found, axes)


def _shade(found: Regimes, axes: "Axes") -> None:
    """Bands where the highest regime, or with several each but the lowest, is the likeliest one."""
    likely = found.smoothed.argmax(1)
    edges = np.flatnonzero(np.diff(likely)) + 1
    for first, end in zip([0, *edges], [*edges, len(likely)], strict=True):
        above = int(likely[first]) - 1
        if above >= 0:
            color, alpha = figures.SERIES[1 + above % 2], 0.10 + 0.06 * (above // 2)
            axes.axvspan(float(first) - 0.5, float(end) - 0.5, color=color, alpha=alpha, linewidth=0)


def _label(found: Regimes, axes: "Axes") -> None:
    """A few row labels below the picture, and the legend above it."""
    T = len(found.labels)
    at = np.unique(np.linspace(0, T - 1, min(T, 6)).astype(int))
    axes.set_xticks(at.tolist(), [plain(found.labels[k]) for k in at], fontsize=7)
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
