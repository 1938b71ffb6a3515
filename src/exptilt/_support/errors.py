"""Errors of exptilt.

One root, `ExptiltError`; every subclass also inherits the built-in error a Python programmer would catch. A
message says what is wrong, what was got (names, shapes, dtypes), and what to do about it.
"""

from importlib import import_module
from typing import Any


class ExptiltError(Exception):
    """Root of every error this package raises on purpose."""


class ArgumentError(ExptiltError, ValueError):
    """An argument has the wrong shape, dtype, device, range or content."""


class KeywordError(ExptiltError, TypeError):
    """A keyword of another library was passed; the message says what to write here instead."""


class BackendError(ExptiltError, RuntimeError):
    """A backend that was asked for by name cannot do what was asked, or is not installed."""


class ConvergenceError(ExptiltError, RuntimeError):
    """A solver stopped before it reached its tolerance, and the caller had asked for an error then."""


class ExptiltWarning(UserWarning):
    """Something was done that the caller should know of: a fallback, a repair and its size."""


def needed(library: str, extra: str) -> Any:
    """The module of an optional library; if it is missing, raises an error that says how to install it."""
    try:
        return import_module(library)
    except ImportError as problem:
        raise MissingExtraError(library, extra) from problem


class MissingExtraError(ExptiltError, ImportError):
    """An optional library that the called part of the package needs is not installed."""

    def __init__(self, library: str, extra: str = "") -> None:
        what = f"'exptilt[{extra}]'" if extra else f"--no-deps {library}"  # no extra brings it
        super().__init__(
            f"{library} is not installed, and this part of exptilt needs it. "
            f"Install it with: pip install {what}"
        )
