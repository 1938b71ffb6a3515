"""Progress of long work: bars with the time left, on terminals only, and a message where there is no bar."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def track(
    items: Iterable[Item], description: str, *, total: int | None = None, show: bool | None = None
) -> Iterator[Item]:
    """Yield from `items`, with a bar on standard error once two seconds have passed.

    `show` is True for always, False for never, None for where standard error is a terminal.
    """
    disable = None if show is None else not show
    yield from tqdm(items, desc=description, total=total, delay=2.0, disable=disable, leave=False)


@contextmanager
def announce_if_slow(message: str, *, after: float = 1.0) -> Iterator[None]:
    """Print `message` on standard error if the block has not ended after `after` seconds."""
    timer = threading.Timer(after, lambda: print(message, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
