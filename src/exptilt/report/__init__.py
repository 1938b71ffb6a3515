"""Numbers in, one self-contained HTML page out. `report/page.py` says how to write a page of your own."""

from typing import TYPE_CHECKING, Any

from exptilt.report.page import Figure, Formula, Page, Section, Table, render, write_page

if TYPE_CHECKING:
    from exptilt.report.curvature.page import write_curvature
    from exptilt.report.study.page import write

__all__ = ["Figure", "Formula", "Page", "Section", "Table"]
__all__ += ["render", "write", "write_curvature", "write_page"]


def __getattr__(name: str) -> Any:
    """Load `write` and `write_curvature`, which need lens, claims and curvature, when first asked for."""
    if name == "write":
        from exptilt.report.study.page import write

        return write
    if name == "write_curvature":
        from exptilt.report.curvature.page import write_curvature

        return write_curvature
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
