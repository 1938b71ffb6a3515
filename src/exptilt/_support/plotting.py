"""The house's style of figures, drawn by matplotlib without `pyplot`, so that no global state of it is touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2b83c6", "#d1701c", "#3a9a6b", "#8e5bb5", "#b8860b", "#c0395e")
_STYLE = {
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
def new_figure(width: float, height: float) -> "Iterator[Figure]":
    """A figure in the house's style."""
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingExtraError("matplotlib", "report") from problem
    settings: Any = {**_STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
    with matplotlib.rc_context(settings):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def caption(axes: Any, title: str, x: str, y: str = "") -> None:
    """Title and names of the axes."""
    axes.set(title=title, xlabel=x, ylabel=y)


def whole_log(axes: Any) -> None:
    """A logarithmic axis of counts, labelled 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
