"""Progress of long work: bars with the time left on terminals, lines in files if a command asks for them."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
_doing: list["_Work"] = []  # what is under way, the outermost first


class _Work:
    """A piece of work that can say how far it is."""

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name, self.total, self.done, self.started = name, total, 0, time.monotonic()

    def __str__(self) -> str:
        spent = time.monotonic() - self.started
        if self.total is None or not self.done:
            return f"{self.name} ({spent:.0f} s)"
        left = spent / self.done * (self.total - self.done)
        return f"{self.name}: {self.done} of {self.total}, about {left:.0f} s left"


@contextmanager
def _under_way(work: _Work) -> Iterator[_Work]:
    _doing.append(work)
    try:
        yield work
    finally:
        _doing.remove(work)


@contextmanager
def told_in_lines(first: str, *, every: float = 2.0) -> Iterator[None]:
    """Print a line on standard error every two seconds, for commands whose output is a file.

    Args:
        first: what is done while nothing is tracked.
        every: seconds between two lines.
    """
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            print(_doing[-1], file=sys.stderr, flush=True)  # noqa: T201

    with _under_way(_Work(first)):
        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def track(
    items: Iterable[Item], description: str, *, total: int | None = None, show: bool | None = None
) -> Iterator[Item]:
    """Yield from `items`, with a bar on standard error once two seconds have passed.

    `show` is True for always, False for never, None for where standard error is a terminal.
    """
    disable = None if show is None else not show
    count = total if total is not None or not isinstance(items, Sized) else len(items)
    with _under_way(_Work(description, count)) as work:
        for item in tqdm(items, desc=description, total=total, delay=2.0, disable=disable, leave=False):
            yield item
            work.done += 1


@contextmanager
def announce_if_slow(message: str, *, after: float = 1.0) -> Iterator[None]:
    """Print `message` on standard error if the block has not ended after `after` seconds."""
    timer = threading.Timer(after, lambda: print(message, file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        with _under_way(_Work(message.rstrip(" ."))):
            yield
    finally:
        timer.cancel()
