"""Threads for compiled kernels: as many as torch is set to use, safe under fork and from several Python threads at once.

Kernels release the interpreter lock, so a plain thread pool runs them side by side. (The thread layers that numba brings are each
unsafe in one of the two ways asked for here: after a fork, or called from two threads.) Work is cut into chunks that idle workers take
in turn, so uneven chunks (causal tiles) balance themselves. The calling thread works too; with one thread no pool exists at all.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_CHUNKS_PER_THREAD = 8

class _Process:
    """The pools of one process, and how many callers in it need single-threaded BLAS now.

    A forked child inherits neither the pool's threads nor a lock in a known state, so state is looked up by process id.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[int, ThreadPoolExecutor] = {}
        self.blas_users = 0
        self.blas_before: list[int] = []

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
        with single_threaded_blas():
            work(0, total, scratch())
        return
    chunk = max(1, total // (threads * _CHUNKS_PER_THREAD))
    starts: Iterator[int] = iter(range(0, total, chunk))

    def labour() -> None:
        own = scratch()
        for start in starts:  # advancing a range iterator is atomic under the interpreter lock
            work(start, min(start + chunk, total), own)

    pool = _this_process().pool(threads - 1)
    with single_threaded_blas():
        futures = [pool.submit(labour) for _ in range(threads - 1)]
        try:
            labour()
        finally:
            for future in futures:
                future.result()


@cache
def _blas_libraries() -> tuple[Any, ...]:
    """The BLAS that compiled kernels call: SciPy's. NumPy's own copy and torch's are left alone."""
    import scipy.linalg.cython_blas  # noqa: F401  (loads the library, so that it can be found)
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    scipys = [library for library in found if "scipy.libs" in library.filepath]
    return tuple(scipys or found)


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Within it, BLAS inside kernels runs on one thread; the setting found is restored when the last of several callers leaves."""
    libraries = _blas_libraries()
    process = _this_process()
    with process.lock:
        if process.blas_users == 0:
            process.blas_before = [library.get_num_threads() for library in libraries]
            for library in libraries:
                library.set_num_threads(1)
        process.blas_users += 1
    try:
        yield
    finally:
        with process.lock:
            process.blas_users -= 1
            if process.blas_users == 0:
                for library, threads in zip(libraries, process.blas_before, strict=True):
                    library.set_num_threads(threads)
