"""The long picture: every column, the probabilities and the residuals over one time axis, wide or narrow."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from exptilt._support.plotting import COLOURS
from exptilt.report import figures
from exptilt.report.regimes.payload import Regimes
from exptilt.report.tokens import plain, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 1000  # of a long series; the picture has about as many dots across
YEAR = re.compile(r"(\d{4})(?:$|[-/.: QqMmWw])")


SHADED = ("#707070", 0.06)  # the colour of rows shaded as asked, and how much of the panel's height they have


def shade(regime: int) -> tuple[str, float]:
    """The colour of a regime and the opacity of its bands; blue is kept for the signal."""
    return COLOURS[(2, 1, 3, 5, 4)[regime % 5]], 0.24


def draw(found: Regimes, *, narrow: bool) -> str:
    """The picture as SVG; `narrow` for telephones."""
    panels = len(found.columns) + 1 + (found.residuals is not None)
    width, name = (4.2, "narrow") if narrow else (10.4, "wide")
    height = (1.5 if narrow else 1.75) * (len(found.columns) * 1.35 + panels - len(found.columns)) + 0.4
    return figures.draw(name, partial(_paint, found, narrow), width=width, height=height)


def _paint(found: Regimes, narrow: bool, axes: "Axes") -> None:
    m, figure = len(found.columns), axes.figure
    axes.remove()
    heights = [1.35] * m + [1.0] * (1 + (found.residuals is not None))
    grid: Any = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    panels = list(grid[:, 0])
    T, h = len(found.y), len(found.forecast)
    for a, panel in enumerate(panels[:m]):
        _series(found, a, panel, narrow)
    _probability(found, panels[m])
    if found.residuals is not None:
        _residuals(found, panels[m + 1])
    labels = [*found.labels, *found.ahead] if found.ahead else list(found.labels)
    panels[-1].set_xticks(*ticks(labels, 4 if narrow else 9), fontsize=7 if narrow else 8)
    panels[-1].set_xlim(-0.5, T + h - 0.5)
    for panel in panels:
        panel.tick_params(labelsize=7 if narrow else 8)
        panel.grid(axis="x", visible=False)


def ticks(labels: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Positions and labels of the ticks on the time axis: round years if the labels begin with years."""
    found = [YEAR.match(label) for label in labels]
    years = [int(match[1]) for match in found if match]
    if len(years) == len(labels) and years == sorted(years) and years[-1] - years[0] > 3:
        gap = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if (years[-1] - years[0]) / step < most)
        new = [k for k in range(1, len(years)) if years[k] != years[k - 1] and years[k] % gap == 0]
        return new, [str(years[k]) for k in new]
    at = np.unique(np.linspace(0, len(labels) - 1, most).astype(int)).tolist()
    return at, [visible(plain(labels[k])) for k in at]


def thin(columns: np.ndarray) -> np.ndarray:
    """The rows of ``(T, k)`` to draw: all of a short series, else the extremes of each column in each bin."""
    T = len(columns)
    if T <= 2 * BINS:
        return np.arange(T)
    edges = np.linspace(0, T, BINS + 1).astype(int)
    rows = {0, T - 1}
    for begin, end in pairwise(edges.tolist()):
        for column in columns[begin:end].T:
            rows |= {begin + int(column.argmin()), begin + int(column.argmax())}  # NaN first: gaps are kept
    return np.array(sorted(rows))


def _bands(
    axes: "Axes", spans: Sequence[tuple[float, float]], height: float, color: str, alpha: float
) -> None:
    """Bands of colour from the bottom of a panel up to a share of its height; spans are begin and length."""
    where = axes.get_xaxis_transform()
    axes.broken_barh(spans, (0, height), transform=where, color=color, alpha=alpha, linewidth=0)


def _series(found: Regimes, a: int, axes: "Axes", narrow: bool) -> None:
    T, h = len(found.y), len(found.forecast)
    later, blue = np.arange(T, T + h), figures.SERIES[0]
    for regime in range(len(found.share)):
        spans = [(s.begin - 0.5, s.end - s.begin) for s in found.spells if s.regime == regime]
        _bands(axes, spans, 1.0, *shade(regime))
    if found.shaded is not None:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], found.shaded, [False]]).astype(int)))
        spans = [(begin - 0.5, end - begin) for begin, end in edges.reshape(-1, 2).tolist()]
        _bands(axes, spans, SHADED[1], SHADED[0], 0.8)
    line = 0.7 if narrow or T > 400 else 1.0
    at, smooth = thin(found.y[:, a : a + 1]), thin(found.signal[:, a : a + 1])
    axes.plot(at, found.y[at, a], color=figures.INK, linewidth=line, label="data")
    axes.plot(smooth, found.signal[smooth, a], color=blue, linewidth=1.3, label="smoothed")
    axes.fill_between(later, found.lower[:, a], found.upper[:, a], color=blue, alpha=0.3, linewidth=0)
    label = f"forecast, {100 * found.level:g} %"
    axes.plot(later, found.forecast[:, a], color=blue, linestyle="--", linewidth=1.3, label=label)
    axes.set_title(visible(found.columns[a]), fontsize=9)
    if a == 0:
        axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)


def _probability(found: Regimes, axes: "Axes") -> None:
    T, M = len(found.y), len(found.share)
    stacked = np.concatenate([found.smoothed, found.forecast_probability])
    at = thin(stacked)
    ends = np.concatenate([np.zeros((len(at), 1)), stacked[at].cumsum(1)], 1)
    for k in range(M):
        color, _ = shade(k)
        axes.fill_between(at, ends[:, k], ends[:, k + 1], color=color, alpha=0.6, linewidth=0, step="mid")
    axes.axvline(T - 0.5, color=figures.INK, linewidth=0.7, linestyle=":")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_title("probability of the regimes", fontsize=9)


def _residuals(found: Regimes, axes: "Axes") -> None:
    assert found.residuals is not None
    for a, column in enumerate(found.residuals.T):
        color = figures.INK if a == 0 else COLOURS[a % len(COLOURS)]
        some = np.arange(len(column)) % (1 + len(column) // (2 * BINS)) == 0
        at = np.flatnonzero(some | (np.abs(column) > 3))  # of a long series every so many, and all far out
        axes.plot(at, column[at], ".", color=color, markersize=2.5)
    for edge in (-1.96, 1.96):
        axes.axhline(edge, color=figures.INK, linewidth=0.6, linestyle=":")
    axes.set_title("residuals", fontsize=9)
