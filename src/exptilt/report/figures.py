"""Pictures as SVG strings for a page: text as paths, colours that follow the page, no styles, no links.

Matplotlib draws, `draw` then makes its file fit to stand in a page beside others:

- what is drawn in `INK` becomes ``currentColor``, so that a figure turns light on a dark page;
- ``style="fill: …"`` becomes attributes ``fill="…"``, because the page's security policy forbids styles it
  does not know;
- every id gets the figure's name before it, because ids are shared by the whole page;
- metadata, which holds addresses and dates, is dropped: the same numbers give the same bytes.

Labels are taken as they are: a dollar sign in the name of a column begins no formula.
"""

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exptilt._support import plotting
from exptilt._support.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
SERIES = plotting.COLOURS[:3]
"""The hues that keep their contrast on light and on dark paper."""

STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "text.color"), INK),
    "font.family": "DejaVu Sans",
    "svg.fonttype": "path",
    "axes.linewidth": 0.7,
    "grid.alpha": 0.12,
    "lines.linewidth": 1.8,
}


def draw(name: str, paint: "Callable[[Axes], object]", *, width: float = 4.4, height: float = 3.0) -> str:
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
    written = io.StringIO()
    own = {"svg.hashsalt": name, "text.parse_math": False}
    with plotting.new_figure(width, height, STYLE | own) as figure, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # drawn as a box; the caption has the letter
        paint(figure.add_subplot())
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(written.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """The SVG that matplotlib wrote, as one element fit to stand in a page."""
    svg = svg[svg.index("<svg") : svg.rindex("</svg>") + len("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'style="([^"]*)"', _attributes, svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r"^<svg[^>]*>", _opening, svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)


def _attributes(match: re.Match[str]) -> str:
    """``style="a: b; c: d"`` as ``a="b" c="d"``."""
    pairs = [part.split(":", 1) for part in match[1].split(";") if part.strip()]
    return " ".join(f'{name.strip()}="{value.strip()}"' for name, value in pairs)


def _opening(match: re.Match[str]) -> str:
    """The opening tag with its view box alone: the page sets the size."""
    box = re.search(r'viewBox="[^"]*"', match[0])
    if box is None:
        raise ArgumentError("figure: matplotlib wrote an <svg> without a viewBox.")
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} {box[0]} aria-hidden="true">'
