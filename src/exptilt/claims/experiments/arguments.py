"""Arguments that experiments share, checked before anything runs."""

from collections.abc import Iterable
from typing import Any

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError


def check_several(experiment: str, **given: Iterable[Any]) -> None:
    """Raise unless each argument is a tuple or list of settings, not a name or number alone."""
    for name, values in given.items():
        if not isinstance(values, tuple | list):
            raise ArgumentError(
                f"{experiment}: {name} is {values!r}. "
                f"Pass a tuple of all that are to be run, such as ({values!r},)."
            )


def check_whole(experiment: str, least: int, **given: Any) -> None:
    """Raise unless each argument is an integer, at least `least`."""
    for name, value in given.items():
        whole(experiment, name, value, least=least)
