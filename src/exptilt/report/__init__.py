"""Numbers in, one self-contained HTML page out. How to write a page of your own stands at the top of `report/page.py`."""

from exptilt.report.page import Figure, Formula, Page, Section, Table, render, write_page
from exptilt.report.study import write

__all__ = ["Figure", "Formula", "Page", "Section", "Table", "render", "write", "write_page"]
