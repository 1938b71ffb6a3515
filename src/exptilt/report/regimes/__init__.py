"""A series that switches regime, fitted by `switching.fit_named_model`, as a page and as text.

The parts load when they are asked for: a file that cannot be read is refused before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exptilt.report.regimes.page import tables, write_regimes
    from exptilt.report.regimes.payload import Regimes, find_regimes
    from exptilt.report.regimes.sentences import text

__all__ = ["Regimes", "find_regimes", "tables", "text", "write_regimes"]
_HOME = {"Regimes": "payload", "find_regimes": "payload", "text": "sentences"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'page')}"), name)
