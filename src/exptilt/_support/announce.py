"""Say what is going on when something takes longer than a reader would wait without wondering."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def announce_if_slow(message: str, *, after: float = 1.0) -> Iterator[None]:
    """Print `message` on standard error if the block has not ended after so many seconds."""
    timer = threading.Timer(after, lambda: print(message, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
