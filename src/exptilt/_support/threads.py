"""Work on several threads: as many as torch is set to use, and torch's own where that is possible.

`run_region` calls a C function of one pointer on the threads of torch's OpenMP team, where torch runs on GNU
OpenMP: these threads keep spinning for some milliseconds after each torch operation, and any other thread
would have to share a core with them. They share out the work through a counter in memory; Python is not
called. Elsewhere, and in a forked child, where OpenMP's team is gone and a new one would hang, a thread pool
calls the same function.
"""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from exptilt._support import FIRST_PROCESS, native

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _team() -> Any:
    """`GOMP_parallel` of the GNU OpenMP library that torch has loaded, or None."""
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        try:
            function = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def team() -> Any:
    """`GOMP_parallel` of torch's OpenMP, or None; None in a forked child, where it would hang."""
    return _team() if os.getpid() == FIRST_PROCESS else None


def _pool(helpers: int) -> ThreadPoolExecutor:
    """This process's pool of `helpers` threads."""
    key = os.getpid(), helpers
    return _pools.get(key) or _pools.setdefault(
        key, ThreadPoolExecutor(helpers, thread_name_prefix="exptilt")
    )


@cache
def _callable(address: int) -> Any:
    return _Region(address)


def run_region(address: int, argument: int, threads: int) -> None:
    """Call the C function at `address` with the pointer `argument` on `threads` threads, and wait for all."""
    if threads > 1 and (enter := team()) is not None:
        enter(address, argument, threads, 0)
        return
    function = _callable(address)
    futures = [_pool(threads - 1).submit(function, argument) for _ in range(threads - 1)]
    function(argument)
    for future in futures:
        future.result()


def run_kernel(name: str, filled: ctypes.Structure, threads: int) -> int:
    """Run a kernel on `threads` threads that share its frame, and return the sum of their results.

    Raises MemoryError if memory runs out on any of them.
    """
    if threads <= 1:
        return native.call(name, filled)
    shared: Any = native.frame("Shared")(kernel=native.address(name), frame=ctypes.addressof(filled))
    run_region(native.address("share"), ctypes.addressof(shared), threads)
    if shared.lacking:
        raise native.no_memory(name)
    return int(shared.sum)


@cache
def _blas_threads(module: str) -> tuple[Any, Any] | None:
    """Functions that read and set the number of threads of a module's OpenBLAS; None if it has none."""
    try:
        library = ctypes.CDLL(str(import_module(module).__file__))
    except (ImportError, OSError):
        return None
    for name in ("scipy_openblas_{}_num_threads", "openblas_{}_num_threads"):
        if hasattr(library, name.format("set")):
            return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let SciPy's L-BFGS-B multiply its small matrices on one thread.

    It factorizes matrices of at most 40 rows at every step. Several threads of OpenBLAS wait for each other
    there far longer than they compute: a fit took twenty times as long on a machine with other work.
    """
    known = _blas_threads("scipy.optimize._lbfgsb")
    before = known[0]() if known else 1
    if known is None or before == 1:
        yield
        return
    known[1](1)
    try:
        yield
    finally:
        known[1](before)
