"""A series that switches regime, fitted by `switching.fit_named_model`, as a page and as text."""

from exptilt.report.regimes.page import tables, write_regimes
from exptilt.report.regimes.payload import Regimes, find_regimes
from exptilt.report.regimes.sentences import text

__all__ = ["Regimes", "find_regimes", "tables", "text", "write_regimes"]
