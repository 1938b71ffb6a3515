"""Numbers in, one self-contained HTML page out. `report/page.py` says how to write a page of your own."""

from exptilt.report.page import Figure, Formula, Page, Section, Table, render, write_page
from exptilt.report.study.page import write

__all__ = ["Figure", "Formula", "Page", "Section", "Table", "render", "write", "write_page"]
