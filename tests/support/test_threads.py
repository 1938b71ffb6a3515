"""Threads: torch's own team, or a pool."""

import ctypes
import os
import threading

import pytest

from exptilt._support import native
from exptilt._support import threads as regions


@pytest.fixture(params=["team", "pool"])
def team(request, monkeypatch):
    """Both kinds of threads."""
    if request.param == "pool":
        monkeypatch.setattr(regions, "team", lambda: None)
    elif regions.team() is None:
        pytest.skip("this build of torch has no GNU OpenMP team to join")
    return request.param


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_region_runs_on_so_many_threads(team, threads):
    meeting, seen, given = threading.Barrier(threads), set(), []

    def body(argument):
        meeting.wait(60)  # nobody goes on before all have come
        seen.add(threading.get_ident())
        given.append(argument)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    regions.run_region(ctypes.cast(callback, ctypes.c_void_p).value, 7, threads)
    assert len(seen) == threads
    assert given == [7] * threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_no_team_in_a_forked_child():
    child = os.fork()
    if child == 0:
        done = []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(done.append)
        regions.run_region(ctypes.cast(callback, ctypes.c_void_p).value, 7, 2)
        os._exit(0 if regions.team() is None and done == [7, 7] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_kernel_says_what_it_returned_on_every_thread(team, threads, monkeypatch):
    """What threads return is added up; memory that ran out on one of them is an error."""
    lacking, calls = False, []

    def body(_):
        calls.append(0)
        return -1 if lacking and len(calls) == 1 else 5

    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(body)
    place, own = ctypes.cast(callback, ctypes.c_void_p).value, native.address
    monkeypatch.setattr(native, "address", lambda name: place if name == "own" else own(name))
    monkeypatch.setattr(native, "function", lambda name: callback)
    frame = native.frame("Shared")()
    assert regions.run_kernel("own", frame, threads) == 5 * threads
    lacking, calls = True, []
    with pytest.raises(MemoryError, match="no memory is left for own"):
        regions.run_kernel("own", frame, threads)
    assert len(calls) == threads


def test_one_thread_for_small_matrices():
    """Inside, SciPy's OpenBLAS has one thread; afterwards as many as before."""
    known = regions._blas_threads("scipy.optimize._lbfgsb")
    if known is None:
        pytest.skip("SciPy does not use OpenBLAS here")
    read, write = known
    before = read()
    try:
        write(2)
        with regions.one_blas_thread():
            assert read() == 1
        assert read() == 2
    finally:
        write(before)
    assert regions._blas_threads("exptilt.no_such_module") is None
