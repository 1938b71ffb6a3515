"""Numbers on the command line; one that is out of range gets a line that says so."""

import argparse

LARGEST = 2**63 - 1


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{value} is out of range; pass a whole number from {least} to {LARGEST}"
        )
    return value


def seed(text: str) -> int:
    """A whole number from 0, which the generators of torch and numpy take for a seed."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)
