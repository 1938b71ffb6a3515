"""Threads for compiled kernels: as many as torch is set to use, safe under fork and from several Python threads at once.

Kernels release the interpreter lock, so a plain thread pool runs them side by side. (The thread layers that numba brings are each
unsafe in one of the two ways asked for here: after a fork, or called from two threads.) Work is cut into chunks that idle workers take
in turn, so uneven chunks (causal tiles) balance themselves. The calling thread works too; with one thread no pool exists at all.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_CHUNKS_PER_THREAD = 8


class _Process:
    """The pools of one process.

    A forked child inherits neither the pool's threads nor a lock in a known state, so they are looked up by process id.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[int, ThreadPoolExecutor] = {}

    def pool(self, size: int) -> ThreadPoolExecutor:
        with self.lock:
            if size not in self.pools:
                self.pools[size] = ThreadPoolExecutor(size, thread_name_prefix="exptilt")
            return self.pools[size]


_processes: dict[int, _Process] = {}


def _this_process() -> _Process:
    return _processes.setdefault(os.getpid(), _Process())


def run_chunks(work: Callable[[int, int, Any], None], total: int, scratch: Callable[[], Any], *, threads: int | None = None) -> None:
    """Call ``work(start, stop, own)`` over 0..total in chunks, on several threads; ``own = scratch()`` is made once a thread.

    Args:
        work: does the items start..stop; must release the interpreter lock to gain anything.
        total: number of items.
        scratch: makes a thread's own buffers.
        threads: how many; ``torch.get_num_threads()`` if None.
    """
    threads = min(torch.get_num_threads() if threads is None else threads, total)
    if total == 0:
        return
    if threads <= 1:
        work(0, total, scratch())
        return
    chunk = max(1, total // (threads * _CHUNKS_PER_THREAD))
    starts: Iterator[int] = iter(range(0, total, chunk))

    def labour() -> None:
        own = scratch()
        for start in starts:  # advancing a range iterator is atomic under the interpreter lock
            work(start, min(start + chunk, total), own)

    pool = _this_process().pool(threads - 1)
    futures = [pool.submit(labour) for _ in range(threads - 1)]
    try:
        labour()
    finally:
        for future in futures:
            future.result()


def run_all(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of all tasks, each on a thread of its own; they must not themselves wait for the pool."""
    if len(tasks) == 1:
        return [tasks[0]()]
    pool = _this_process().pool(len(tasks) - 1)
    futures = [pool.submit(task) for task in tasks[1:]]
    try:
        first = tasks[0]()
    finally:
        rest = [future.result() for future in futures]
    return [first, *rest]
