"""Pictures as SVG strings that live inside a page: text as paths, colours that follow the page, no styles, no links.

Matplotlib draws, `draw` then makes its file fit to stand in a page beside others:

- what is drawn in `INK` becomes ``currentColor``, so that a figure turns light on a dark page;
- ``style="fill: …"`` becomes attributes ``fill="…"``, because the page's security policy forbids styles it does not know;
- every id gets the figure's name before it, because ids are shared by the whole page;
- metadata, which holds addresses and dates, is dropped: the same numbers give the same bytes.

Figures are drawn without `pyplot`, so no global state of matplotlib is touched.
"""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
# Three hues that keep a contrast of at least 3 : 1 on the light and on the dark paper, and differ for colour-blind readers.
SERIES = ("#2b83c6", "#d1701c", "#3a9a6b")

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "path",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def draw(name: str, paint: "Callable[[Axes], None]", *, width: float = 4.4, height: float = 3.0) -> str:
    """Draw on one pair of axes in the house's style.

    Args:
        name: a word that no other figure of the page has; it goes before every id.
        paint: a function that draws on the axes it is given.
        width: inches; 4.4 is readable on a telephone.
        height: inches.

    Returns:
        The figure as text, from ``<svg`` to ``</svg>``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ArgumentError(
            f"draw: name is {name!r}. Pass small letters, digits and hyphens, a letter first."
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingExtraError("matplotlib", "report") from problem
    written = io.StringIO()
    settings: Any = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return for_page(written.getvalue(), name)


def _attributes(match: re.Match[str]) -> str:
    """``style="a: b; c: d"`` as ``a="b" c="d"``."""
    pairs = [part.split(":", 1) for part in match[1].split(";") if part.strip()]
    return " ".join(f'{name.strip()}="{value.strip()}"' for name, value in pairs)


def for_page(svg: str, name: str) -> str:
    """What matplotlib wrote, as one element fit to stand in a page.

    Args:
        svg: an SVG file.
        name: what goes before every id.
    """
    svg = svg[svg.index("<svg") : svg.rindex("</svg>") + len("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'style="([^"]*)"', _attributes, svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r"^<svg[^>]*>", _opening, svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)


def _opening(match: re.Match[str]) -> str:
    """The opening tag with its view box alone: the page sets the size."""
    box = re.search(r'viewBox="[^"]*"', match[0])
    if box is None:
        raise ArgumentError("figure: matplotlib wrote an <svg> without a viewBox.")
    return f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} aria-hidden="true">'
