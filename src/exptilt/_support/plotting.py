"""Matplotlib figures in the style of the house, made without `pyplot`: no global state is touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2b83c6", "#d1701c", "#3a9a6b", "#8e5bb5", "#b8860b", "#c0395e")
"""Differ for colour-blind readers; the first three have a contrast of 3 : 1 on light and dark paper."""

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
    """A white figure to draw on inside the block, and to save there if the style is to hold for the saving.

    Args:
        width: inches.
        height: inches.
        style: settings of matplotlib that come before those of `STYLE`.
    """
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
