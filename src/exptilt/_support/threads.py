"""Threads for compiled kernels: as many as torch is set to use, safe under fork and from several Python threads at once.

Kernels release the interpreter lock, so plain threads run them side by side. Idle workers take chunks of what is left, ever smaller
ones, so uneven work (causal tiles) balances itself. The calling thread works too; with one thread nothing else is started.

Which threads? Torch's own, where it runs on GNU OpenMP: after each of its operations they keep spinning for some milliseconds, waiting
for the next, and any other thread would have to share a core with them (measured: 15 % of a 25 ms call on two cores). Elsewhere, and in
a forked child, where OpenMP's team is gone and a new one would hang, a thread pool. (The thread layers that numba brings are each
unsafe in one of the two ways asked for here: after a fork, or called from two threads.)
"""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

_first_process = os.getpid()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _open_team() -> Callable[..., None] | None:
    """GNU OpenMP's entry into a parallel region, of the very library that torch has loaded; None where there is none."""
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        try:
            function = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return function
    return None


def _on_team(labour: Callable[[], None], threads: int) -> bool:
    """Run `labour` on every thread of torch's team; False, and nothing run, if there is no team to be had."""
    open_team = _open_team() if os.getpid() == _first_process else None
    if open_team is None:
        return False
    errors: list[BaseException] = []

    def region(_: int | None) -> None:
        try:
            labour()
        except BaseException as error:  # an exception cannot pass through the library: it is raised below
            errors.append(error)

    open_team(_Region(region), None, threads, 0)
    if errors:
        raise errors[0]
    return True


def _on_pool(labour: Callable[[], None], threads: int) -> None:
    """Run `labour` on this thread and threads − 1 of a pool, which belongs to this process alone."""
    key = os.getpid(), threads - 1
    if key not in _pools:
        _pools.setdefault(key, ThreadPoolExecutor(threads - 1, thread_name_prefix="exptilt"))
    futures = [_pools[key].submit(labour) for _ in range(threads - 1)]
    try:
        labour()
    finally:
        for future in futures:
            future.result()


def run_chunks(work: Callable[[int, int, Any], None], total: int, scratch: Callable[[], Any], *, threads: int | None = None) -> None:
    """Call ``work(start, stop, own)`` over 0..total in chunks, on several threads; ``own = scratch()`` is made once a thread.

    Args:
        work: does the items start..stop; must release the interpreter lock to gain anything.
        total: number of items.
        scratch: makes a thread's own buffers.
        threads: how many; ``torch.get_num_threads()`` if None.
    """
    threads = min(torch.get_num_threads() if threads is None else threads, total)
    if threads <= 1:
        if total > 0:
            work(0, total, scratch())
        return
    lock = threading.Lock()
    done = 0

    def take() -> tuple[int, int]:
        """The next chunk: a share of what is left, so that chunks are few and the last ones small."""
        nonlocal done
        with lock:
            start = done
            done = min(total, start + max(1, (total - start) // (2 * threads)))
            return start, done

    def labour() -> None:
        start, stop = take()
        if start == stop:
            return
        own = scratch()
        while start < stop:
            work(start, stop, own)
            start, stop = take()

    if not _on_team(labour, threads):
        _on_pool(labour, threads)
