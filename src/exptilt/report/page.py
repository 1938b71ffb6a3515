"""The shell of every page: dataclasses of text, tables and figures in, one HTML file out that loads nothing.

How to write a page of your own, as `report/regimes/` does:

1. Compute. A function returns a frozen dataclass of numbers. Nothing is drawn there.
2. Draw. A function per picture returns `figures.draw(name, paint)`, an SVG string; `paint(axes)` draws with
   matplotlib.
3. Lay out. `Page(title, lead, sections, seed, sources)`; a `Section` has paragraphs and blocks: `Formula`,
   `Table`, `Figure`. Figures stand side by side where there is room. Every figure has an `alt` that says what
   is to be seen, every table a caption.
4. `write_page(page, folder)` writes `folder/index.html` at once or not at all, and returns its path.

All text is escaped; only the SVG of a `Figure` is taken as it is. The page forbids itself
(Content-Security-Policy) every load, style and script but its own files in `assets/`. Numbers in tables stay
numbers: the page formats them, and sorts by them where a table says so.
"""

import base64
import hashlib
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from exptilt import __version__
from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt._support.files import write_together

Cell = str | float | int | bool
REPORT, LEDGER = "index.html", "claims.html"  # names of a report and a ledger in one folder
LIBRARIES = ("torch", "numpy", "scipy", "matplotlib", "transformers")


@dataclass(frozen=True)
class Formula:
    """A displayed formula, as plain text with mathematical characters.

    Attributes:
        text: the formula; a line break is kept.
    """

    text: str


@dataclass(frozen=True)
class Table:
    """A table; numbers are set to the right.

    Attributes:
        caption: what the rows are.
        header: one name a column.
        rows: one tuple a row, of text and numbers; the first cell names the row.
        note: a line below, if any.
        sortable: whether the reader can sort by a column of numbers.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    sortable: bool = False

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ArgumentError(
                    f"Table {self.caption!r}: row {index} has {len(row)} cells, the header has "
                    f"{len(self.header)}. Pass one cell a column."
                )


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        svg: an ``<svg>`` element, from `figures.draw`.
        alt: what is to be seen, for those who do not see it.
        caption: what it means, in a sentence.
    """

    svg: str
    alt: str
    caption: str

    def __post_init__(self) -> None:
        if not self.svg.startswith("<svg"):
            raise ArgumentError(
                f"Figure: svg starts with {self.svg[:20]!r}. Pass the string that figures.draw returns."
            )
        if not self.alt.strip():
            raise ArgumentError("Figure: alt is empty. Say in a sentence what is to be seen.")


@dataclass(frozen=True)
class Section:
    """A heading with the paragraphs and blocks below it.

    Attributes:
        title: the heading.
        text: paragraphs.
        blocks: formulas, tables and figures, in order.
    """

    title: str
    text: Sequence[str] = ()
    blocks: Sequence[Formula | Table | Figure] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title: the title.
        lead: one or two sentences below it.
        sections: the sections below the lead.
        seed: the seed all random numbers came from, or None if there were none.
        sources: where the data came from: files, models, data sets, in words.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    seed: int | None
    sources: Sequence[str]


def number(value: float | int) -> str:
    """A number for people: four significant digits, a true minus sign, words for what is not finite.

    Args:
        value: any real number.

    Example:
        >>> number(0.000012345), number(-2.5), number(1234567), number(float("nan"))
        ('1.234e−05', '−2.5', '1234567', 'n/a')
    """
    if isinstance(value, int):
        text = str(value)
    elif math.isnan(value):
        return "n/a"
    elif math.isinf(value):
        text = "∞" if value > 0 else "-∞"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def _cell(value: Cell) -> tuple[str, str | None]:
    """Text of a table cell, and the number to sort by; None if the cell is not a number."""
    if isinstance(value, bool):
        return "yes" if value else "no", None
    if isinstance(value, str):
        return value, None
    return getattr(value, "shown", None) or number(value), repr(value)


def versions() -> dict[str, str]:
    """Versions of exptilt, Python and the installed libraries that the numbers depend on, by name."""
    found = {"exptilt": __version__, "Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _shipped(folder: str, name: str) -> str:
    """The text of a file that comes with the package."""
    return (resources.files("exptilt.report") / folder / name).read_text("utf-8")


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy admits exactly this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render(
    page: Page,
    *,
    template: str = "page.html",
    assets: Sequence[str] = (),
    context: Mapping[str, Any] | None = None,
) -> str:
    """The page as one HTML string that stands alone.

    Args:
        page: the content.
        template: which file of `templates/`; one that extends `page.html`.
        assets: names of files in `assets/` that come after `page.css` and `page.js`, styles and scripts.
        context: more values for the template, by name.
    """
    try:
        import jinja2
    except ImportError as problem:
        raise MissingExtraError("jinja2", "report") from problem
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _shipped("templates", name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["block_kind"] = lambda block: type(block).__name__
    environment.globals["cell"] = _cell
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    style, script = (
        "\n".join(_shipped("assets", name) for name in (f"page.{kind}", *assets) if name.endswith(f".{kind}"))
        for kind in ("css", "js")
    )
    own = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return environment.get_template(template).render(
        page=page,
        style=style,
        script=script,
        policy=f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'",
        versions=versions(),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **(context or {}),
    )


def write_page(page: Page, folder: str | os.PathLike[str], *, name: str = "index.html") -> Path:
    """Write the page into `folder`, whole or not at all: if anything fails, the old page is still there.

    Args:
        page: the content.
        folder: where to write; made if it is not there.
        name: the file's name.

    Returns:
        The path of the file.
    """
    return write_together(folder, {name: render(page)})[0]
