"""Pictures in the style of the house: figures of matplotlib, and small tables and drawings for notebooks.

Figures are made without `pyplot`, so that no global state is touched. Results in a notebook (`_repr_html_`)
are plain HTML and SVG, need no library, and escape all text.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from exptilt._support.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2b83c6", "#d1701c", "#3a9a6b", "#8e5bb5", "#b8860b", "#c0395e")
"""Distinct for colour-blind readers; the first three have a contrast of 3 : 1 on light and dark paper."""

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}


@contextmanager
def new_figure(width: float, height: float, style: dict[str, Any] | None = None) -> "Iterator[Figure]":
    """A white figure, its size in inches, to draw and save inside the block, where `style` holds."""
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingExtraError("matplotlib", "report") from problem
    settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=COLOURS), **(style or {})}
    with matplotlib.rc_context(settings):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def caption(axes: Any, title: str, x: str, y: str = "") -> None:
    """Set the title and the names of the axes."""
    axes.set(title=title, xlabel=x, ylabel=y)


def whole_log(axes: Any) -> None:
    """Make the vertical axis logarithmic, labelled 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    """A table of text and numbers for a notebook; numbers have four digits."""

    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else escape(str(value))

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(x)}</td>" for x in row) + "</tr>" for row in rows)
    head = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>"


def html_squares(weight: np.ndarray, title: str, side: int = 144) -> str:
    """A drawing of a matrix ``(row, column)`` with entries in [0, 1]: the darker, the larger."""
    step = side / max(1, len(weight))
    cells = []
    for (row, column), x in np.ndenumerate(weight):
        if x > 0.004:
            place = f'x="{column * step:.2f}" y="{row * step:.2f}" width="{step:.2f}" height="{step:.2f}"'
            cells.append(f'<rect {place} fill-opacity="{x**0.5:.2f}"/>')
    return _svg(side, side, title, "".join(cells), 'fill="#0a365c"')


def html_curves(values: np.ndarray, title: str, width: int = 360, height: int = 72) -> str:
    """A drawing of the columns of ``(place, curve)``, of at most 200 places; "" for fewer than two places."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.unique(np.linspace(0, len(values) - 1, min(len(values), 200)).round().astype(int))]
    finite = values[np.isfinite(values)]
    if len(values) < 2 or not len(finite):
        return ""
    low, high = float(finite.min()), float(finite.max())
    x = np.linspace(2, width - 2, len(values))
    y = height - 4 - (values - low) / ((high - low) or 1.0) * (height - 8)
    lines = [
        '<polyline points="'
        + " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, column, strict=True) if np.isfinite(b))
        + f'" stroke="{COLOURS[place % len(COLOURS)]}"/>'
        for place, column in enumerate(y.T)
    ]
    return _svg(width, height, f"{title}, from {low:.4g} to {high:.4g}", "".join(lines), 'fill="none"')


def _svg(width: int, height: int, title: str, inside: str, style: str) -> str:
    title = escape(title)
    return (
        f'<figure style="margin:0"><svg width="{width}" height="{height}" role="img" aria-label="{title}" '
        f'{style} style="border:1px solid #888"><title>{title}</title>{inside}</svg>'
        f"<figcaption>{title}</figcaption></figure>"
    )
