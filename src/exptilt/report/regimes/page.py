"""The page of a series that switches regime, and the files beside it."""

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from exptilt._support.files import write_together
from exptilt.report.page import Cell, Figure, Formula, Page, Section, Table, render
from exptilt.report.regimes.payload import Regimes
from exptilt.report.regimes.pictures import SHADED, draw, shade
from exptilt.report.regimes.sentences import agreement, counted, doubt, name_of, now, verdicts, words_of
from exptilt.report.tokens import plain
from exptilt.switching.learning.climb import FitStatus
from exptilt.switching.learning.summary import write_number, write_p

FORMULAS = {
    "autoregression": "y_t = level[regime_t] + Σ_k φ_k (y_{t−k} − level[regime_{t−k}]) + v_t,"
    "   v_t ~ N(0, variance[regime_t])",
    "level": "y_t = level[regime_t] + v_t,   v_t ~ N(0, variance[regime_t])",
    "counts": "y_t ~ Poisson(rate_t),   log p(rate_t) = δ log p(rate_{t−1} | y) + (1 − δ) log rest[regime_t]",
    "local-level": "x_t = x_{t−1} + w_t,  w_t ~ N(0, pace[regime_t]²)\ny_t = x_t + v_t,  v_t ~ N(0, noise²)",
}
# What the two numbers of a regime are called.
WORDS = {
    "level": ("level", "standard deviation"),
    "autoregression": ("level", "standard deviation"),
    "local-level": ("pace (sd of a step)", "observation sd"),
    "counts": ("rate at rest", "standard deviation"),
}
DOWNLOADS = {
    "probabilities.csv": "filtered and smoothed probabilities, likeliest path, signal and residuals by row",
    "regimes.csv": "the list of regimes with their dates and statistics",
    "forecast.csv": "forecast means, intervals and regime probabilities",
    "regimes.json": "every number of this page",
}
MOST = 60  # rows of the list of regimes on the page; the file has all


class Shown(float):
    """A number with the text that stands for it on the page."""

    shown: str

    def __new__(cls, value: float, shown: str) -> "Shown":
        """The number `value`, written as `shown`."""
        made = super().__new__(cls, value)
        made.shown = shown
        return made


def value(x: float) -> Shown:
    """A number as people write it."""
    return numbers([x])[0]


def numbers(column: Iterable[float], like: Iterable[float] | None = None) -> list[Shown]:
    """Numbers of a column with equal decimal places: four digits for the largest, of `like` if given."""
    cells = [float(x) for x in column]
    size = max((abs(x) for x in (cells if like is None else like) if np.isfinite(x)), default=0.0)
    places = int(np.clip(3 - np.floor(np.log10(size)), 0, 6)) if size else 0
    return [Shown(x, _written(x, places, 1e-4 <= size < 1e9)) for x in cells]


def _written(x: float, places: int, usual: bool) -> str:
    if not np.isfinite(x):
        return {np.inf: "∞", -np.inf: "−∞"}.get(x, "n/a")
    if not usual:
        return write_number(x)
    return f"{x:,.{places}f}".replace("-", "−").replace(",", "\u202f")


def share(p: float) -> Shown:
    """A probability in percent."""
    text = "<0.1 %" if 0 < p < 0.001 else ">99.9 %" if 0.999 < p < 1 else f"{100 * p:.1f} %"
    return Shown(float(p), "n/a" if np.isnan(p) else text)


def write_regimes(found: Regimes, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write `index.html` and the files of `DOWNLOADS` into `folder`, all or none.

    Args:
        found: the numbers.
        folder: where to write; made if it is not there.

    Returns:
        The paths of the page and of the table of probabilities.
    """
    written = write_together(folder, tables(found) | {"index.html": html(found)})
    return written[-1], written[0]


def tables(found: Regimes) -> dict[str, str]:
    """The files beside the page by name, as text."""
    return {
        "probabilities.csv": probabilities(found),
        "regimes.csv": spells(found),
        "forecast.csv": forecast(found),
        "regimes.json": as_json(found),
    }


def html(found: Regimes) -> str:
    """The page as one HTML string."""
    key = [(*shade(k), f"regime {name_of(found, k)}") for k in range(len(found.share))]
    key += [] if found.shaded is None else [(SHADED[0], 0.8, "shaded periods")]
    context = {"now": now(found), "key": key, "narrow": draw(found, narrow=True), "downloads": DOWNLOADS}
    context["chips"] = [f"regime {name_of(found, k)}: {share(p).shown}" for k, p in enumerate(found.share)]
    assets = "study/study.css", "regimes/regimes.css"
    return render(build(found), template="regimes.html", assets=assets, context=context)


def build(found: Regimes) -> Page:
    """The content of the page."""
    sections = [
        Section("The series", [*found.chosen, *filter(None, [agreement(found)])], [_picture(found)]),
        Section("The regimes", _told_apart(found), [Formula(FORMULAS[found.kind]), *_regimes(found)]),
        Section("When", (), [_list(found)]),
        Section("What comes next", verdicts(found), [_ahead(found)]),
    ]
    if found.comparison is not None:
        sections.append(_comparison(found))
    sections.append(_diagnostics(found))
    ends = f"{plain(found.labels[0])} to {plain(found.labels[-1])}"
    rows = f"{', '.join(found.columns)}: {counted(found, len(found.y))}, {ends}"
    lead = f"{rows}; {len(found.share)} regimes found by the {found.kind} model."
    return Page("Regimes", lead, sections, found.seed, [found.source])


def _picture(found: Regimes) -> Figure:
    level, columns = f"{100 * found.level:g} %", ", ".join(found.columns)
    return Figure(
        draw(found, narrow=False),
        f"{columns} over {counted(found, len(found.y))}, bands of colour where each regime is the "
        f"likeliest, a forecast of {counted(found, len(found.forecast))}, the probabilities of the "
        "regimes, and residuals.",
        f"Data, smoothed signal and forecast with its {level} interval; below, the probability of each "
        "regime given the whole series, and residuals, which lie between the dotted lines 95 % of the time "
        "if the model is right. All share one time axis.",
    )


def _told_apart(found: Regimes) -> list[str]:
    """Sentences if nothing tells the regimes apart by name, or one regime would do."""
    said = list(filter(None, [doubt(found)]))
    if len(found.share) == 1 or any(words_of(found)):
        return said
    return [*said, "The regimes do not differ clearly in level or deviation, so they have no names."]


def _rows(names: Iterable[str], columns: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """Rows of a table: a name and a cell of each column."""
    return [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]


def _regimes(found: Regimes) -> list[Table]:
    """Tables of the regimes and of their transition probabilities."""
    M, (center, deviation) = len(found.share), WORDS[found.kind]
    header, columns = ["regime", "share of time", f"average spell ({found.unit}s)"], list[Sequence[Cell]]()
    columns += [[share(p) for p in found.share], [Shown(d, _written(d, 1, True)) for d in found.duration]]
    for a, name in enumerate(found.columns):
        header += [f"{name}: {center}", "s.e.", f"{name}: {deviation}"]
        like = found.center[:, a]
        columns += [
            numbers(like),
            numbers(found.center_error[:, a], like),
            numbers(found.deviation[:, a], like),
        ]
    names = [name_of(found, k) for k in range(M)]
    chain = [[share(p) for p in column] for column in found.transition.T]
    to, where = [f"to {k}" for k in range(M)], [f"from {k}" for k in range(M)]
    return [
        Table("Regimes, numbered from the lowest up", header, _rows(names, columns)),
        Table("Probability of the next regime", ["", *to], _rows(where, chain)),
    ]


def _list(found: Regimes) -> Table:
    """Table of the stretches of each regime, the latest first."""
    header = ["from", "to", "regime", f"{found.unit}s", "probability"]
    for name in found.columns:
        header += [f"{name}: mean", "sd"]
    latest, names = found.spells[::-1][:MOST], [name_of(found, k) for k in range(len(found.share))]
    statistics = list[Sequence[Cell]]()
    for a in range(len(found.columns)):
        like = [spell.mean[a] for spell in latest]
        statistics += [numbers(like), numbers([spell.deviation[a] for spell in latest], like)]
    columns: list[Sequence[Cell]] = [
        [found.labels[spell.end - 1] for spell in latest],
        [names[spell.regime] for spell in latest],
        [spell.end - spell.begin for spell in latest],
        [share(spell.probability) for spell in latest],
    ]
    rows = _rows([found.labels[spell.begin] for spell in latest], [*columns, *statistics])
    count = len(found.spells)
    note = f"The latest {MOST} of {count}; regimes.csv has all." if count > MOST else ""
    return Table("Spells in which one regime is the likeliest, the latest first", header, rows, note)


def _ahead(found: Regimes) -> Table:
    """Table of the forecast."""
    labels = found.ahead or [f"+{k + 1}" for k in range(len(found.forecast))]
    header, columns = [found.unit], list[Sequence[Cell]]()
    for a, name in enumerate(found.columns):
        header += [name, "low", "high"]
        parts = [part[:, a] for part in (found.forecast, found.lower, found.upper)]
        columns += [numbers(part, np.concatenate(parts)) for part in parts]
    header += [f"P(regime {k})" for k in range(len(found.share))]
    columns += [[share(p) for p in column] for column in found.forecast_probability.T]
    return Table(f"Forecast with {100 * found.level:g} % intervals", header, _rows(labels, columns))


def _comparison(found: Regimes) -> Section:
    """Section that compares the model with other numbers of regimes."""
    c = found.comparison
    assert c is not None
    text = [
        f"{c.said[0].upper()}{c.said[1:]}. BIC and AIC are better when lower. The log score is the "
        "mean of log p(a value | "
        "those before it) over the last part of the series, with parameters fitted to the part before; "
        "higher is better. Choose by the log score if you want to forecast."
    ]
    text += [f"{k} regimes could not be fitted: {why}" for k, why in c.failed.items()]
    bounded = [str(k) for k, fit in c.fits.items() if fit.status is FitStatus.DEGENERATE]
    if bounded:
        text.append(
            f"With {' and '.join(bounded)} regimes the likelihood has no bound, because a regime can shrink "
            "onto a few points; the row shows the best bounded maximum."
        )
    criteria = ("log_likelihood", "aic", "bic", "log_score")
    cells: list[Sequence[Cell]] = [numbers(getattr(c, name)) for name in criteria]
    cells.insert(0, [int(k) for k in c.parameters])
    header = ["regimes", "parameters", "log-likelihood", "AIC", "BIC", "log score"]
    return Section(
        "How many regimes", text, [Table("Numbers of regimes", header, _rows(map(str, c.modes), cells))]
    )


def _diagnostics(found: Regimes) -> Section:
    """Section on the fit: its likelihood and criteria, and tests of its residuals."""
    facts = (
        f"The fit {found.status}. Log-likelihood {write_number(found.log_likelihood, 6)}, "
        f"AIC {write_number(found.aic, 6)}, BIC {write_number(found.bic, 6)}; {found.free_parameters} free "
        f"parameters, {found.observations} observed values."
    )
    rows: list[list[Cell]] = []
    for name, tests in zip(found.columns, found.tests, strict=False):
        rows += [[f"{name}: {test}", value(s), Shown(p, write_p(p))] for test, (s, p) in tests.items()]
    shown = [Table("Tests of the residuals", ["test", "statistic", "p"], rows)] if rows else []
    return Section("Diagnostics", (facts,), shown)


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(header)
    for row in rows:
        table.writerow([f"{cell:.10g}" if isinstance(cell, float) else cell for cell in row])
    return written.getvalue()


def probabilities(found: Regimes) -> str:
    """Filtered and smoothed probabilities, the likeliest path, signal and residuals as CSV, a line a row."""
    modes, columns = range(len(found.share)), range(len(found.columns))
    probability = [f"{kind}_{k}" for kind in ("filtered", "smoothed") for k in modes]
    header = ["row", *probability, "most_likely", *(f"signal_{a}" for a in columns)]
    parts = [found.filtered, found.smoothed, found.path[:, None], found.signal]
    if found.residuals is not None:
        header += [f"residual_{a}" for a in columns]
        parts.append(found.residuals)
    lines = zip(found.labels, *(part.tolist() for part in parts), strict=True)
    return _csv(header, ([label, *(x for cells in rest for x in cells)] for label, *rest in lines))


def spells(found: Regimes) -> str:
    """The list of regimes as CSV."""
    header = ["from", "to", "regime", "rows", "probability"]
    header += [f"{what}_{a}" for a in range(len(found.columns)) for what in ("mean", "sd")]
    rows = []
    for s in found.spells:
        statistics = np.stack([s.mean, s.deviation], 1).reshape(-1).tolist()
        ends = found.labels[s.begin], found.labels[s.end - 1]
        rows.append([*ends, s.regime, s.end - s.begin, s.probability, *statistics])
    return _csv(header, rows)


def forecast(found: Regimes) -> str:
    """The forecast as CSV."""
    labels = found.ahead or [f"+{k + 1}" for k in range(len(found.forecast))]
    columns = range(len(found.columns))
    header = ["row", *(f"{what}_{a}" for what in ("mean", "low", "high") for a in columns)]
    header += [f"probability_{k}" for k in range(len(found.share))]
    parts = np.concatenate([found.forecast, found.lower, found.upper, found.forecast_probability], 1)
    return _csv(header, ([label, *row] for label, row in zip(labels, parts.tolist(), strict=True)))


def as_json(found: Regimes) -> str:
    """Every number as JSON, null where one is missing or infinite."""

    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            shown = x.astype(object)
            if x.dtype.kind == "f":
                shown[~np.isfinite(x)] = None
            return shown.tolist()
        if isinstance(x, dict):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not np.isfinite(x) else x

    out = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "comparison"}
    if found.comparison is not None:
        c = found.comparison
        names = ("modes", "parameters", "log_likelihood", "aic", "bic", "log_score", "best", "failed")
        out["comparison"] = {name: getattr(c, name) for name in names}
    return json.dumps(plain(out), ensure_ascii=False, indent=1)
