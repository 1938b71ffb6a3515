"""Compiled kernels: when they are compiled anew, where they are kept, what is said of it, threads."""

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

import exptilt
from exptilt._support import kernels

SUPPORT = Path(kernels.__file__).parent


@pytest.fixture
def forgetful():
    """Nothing remembered of sources and folders, before and after."""
    remembered = (kernels._source, kernels.source_stamp, kernels._folder, kernels._temporary)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


# ---- kept


MODULES = {
    "main.py": "import numpy\nfrom exptilt.helper import x\nfrom .deep import inner\n",
    "helper.py": "x = 1\n",
    "deep/__init__.py": "",
    "deep/inner.py": "def f():\n    from ..leaf import (\n        y,\n    )\n",
    "leaf.py": "from exptilt import main\n",
    "other.py": "import exptilt.main\n",
}


def test_stamp_is_of_all_that_is_imported_directly_or_not(tmp_path, monkeypatch, forgetful):
    monkeypatch.setattr(kernels, "_ROOT", tmp_path)
    (tmp_path / "deep").mkdir()
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)

    def stamp():
        kernels._source.cache_clear()
        kernels.source_stamp.cache_clear()
        return kernels.source_stamp("exptilt.main")

    first = stamp()
    assert stamp() == first
    changes = set()
    for name in MODULES:
        (tmp_path / name).write_text(MODULES[name] + "# more\n")
        if stamp() != first:
            changes.add(name)
        (tmp_path / name).write_text(MODULES[name])
    assert changes == set(MODULES) - {"other.py"}


def test_stamps_of_real_kernels_hold_their_helpers(monkeypatch, forgetful):
    for module, helper in (
        ("exptilt.tilting.backends.numba.forward", "exptilt.tilting.backends.numba.vector_math"),
        # imported by a relative name
        ("exptilt.switching.kernels.filters", "exptilt.switching.kernels.kalman"),
    ):
        kernels.source_stamp.cache_clear()
        before = kernels.source_stamp(module)
        kernels.source_stamp.cache_clear()
        real = kernels._source
        with monkeypatch.context() as patch:
            patch.setattr(
                kernels,
                "_source",
                lambda name, real=real, helper=helper: ("edited", ()) if name == helper else real(name),
            )
            assert kernels.source_stamp(module) != before


def test_nowhere_to_write_gives_a_temporary_folder_and_says_so(tmp_path, monkeypatch, capsys, forgetful):
    (tmp_path / "file").touch()  # no folder can be made below a file, not even by an administrator
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = kernels._folder(tmp_path / "file")
    assert folder == kernels._folder(tmp_path / "file" / "other")
    assert folder.is_dir()
    folder.rmdir()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(folder) in said
    assert "NUMBA_CACHE_DIR" in said


def test_order_of_folders(tmp_path, monkeypatch, capsys, forgetful):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert kernels._folder(tmp_path / "package") == tmp_path / "asked" / "exptilt"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    kernels._folder.cache_clear()
    assert kernels._folder(tmp_path / "package") == tmp_path / "package" / "__pycache__"
    (tmp_path / "file").touch()
    assert kernels._folder(tmp_path / "file") == tmp_path / "home" / "exptilt" / "kernels"
    assert capsys.readouterr().err == ""


KERNEL = """
import numpy as np
from exptilt._support.kernels import kernel
from exptilt.{folder}.helper import number

@kernel("the kernel of {folder}")
def run(x):
    return x[0] + number()
"""
HELPER = "from numba import njit\n\n@njit\ndef number():\n    return {}\n"
PROGRAM = """
import numpy as np
from exptilt.one import same as one
from exptilt.two import same as two
print(int(one.run(np.zeros(1))), int(two.run(np.zeros(1))))
"""


def run(code, **environment):
    kept = {
        name: text for name, text in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(False, id="beside the source"),
        pytest.param(True, id="NUMBA_CACHE_DIR", marks=pytest.mark.slow),
    ],
)
def test_an_edit_of_a_helper_recompiles_and_nothing_else_does(tmp_path, asked):
    """A package of our name with two kernels, whose files have one name; three processes."""
    package = tmp_path / "exptilt"
    shutil.copytree(SUPPORT, package / "_support", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(exptilt.__file__, package)
    for folder, number in (("one", 1), ("two", 2)):
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
        (package / folder / "same.py").write_text(KERNEL.format(folder=folder))
        (package / folder / "helper.py").write_text(HELPER.format(number))
    environment = {"PYTHONPATH": str(tmp_path)} | (
        {"NUMBA_CACHE_DIR": str(tmp_path / "asked")} if asked else {}
    )
    first, second = run(PROGRAM, **environment), run(PROGRAM, **environment)
    assert (first.stdout, second.stdout) == ("1 2\n", "1 2\n")
    lines = ["exptilt: compiling the kernel of one (once", "exptilt: compiling the kernel of two (once"]
    assert [line[: len(lines[0])] for line in first.stderr.splitlines()] == lines
    assert second.stderr == ""
    (package / "two" / "helper.py").write_text(HELPER.format(7))
    third = run(PROGRAM, **environment)
    assert third.stdout == "1 7\n"
    assert [line[: len(lines[0])] for line in third.stderr.splitlines()] == lines[1:]
    # what is kept may name a class of an older release, or be cut off: compiled again, and kept again
    head = pickle.dumps(numba.__version__)
    for rest in (b"cexptilt.one.same\nGone\n.", b"") if asked else ():
        for file in tmp_path.rglob("*one*.nbi"):
            file.write_bytes(head + rest)
        again, once_more = run(PROGRAM, **environment), run(PROGRAM, **environment)
        assert (again.stdout, once_more.stdout) == ("1 7\n", "1 7\n")
        assert [line[: len(lines[0])] for line in again.stderr.splitlines()] == lines[:1]
        assert once_more.stderr == ""
    places = {file.parent for file in tmp_path.rglob("*.nbi")}
    assert places == (
        {tmp_path / "asked" / "exptilt"}
        if asked
        else {package / name / "__pycache__" for name in ("one", "two")}
    )


# ---- run


@pytest.fixture(params=["team", "pool"])
def team(request, monkeypatch):
    """Both kinds of threads."""
    if request.param == "pool":
        monkeypatch.setattr(kernels, "team", lambda: None)
    elif kernels.team() is None:
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
    kernels.run_region(ctypes.cast(callback, ctypes.c_void_p).value, 7, threads)
    assert len(seen) == threads
    assert given == [7] * threads


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("total", [0, 1, 2, 100])
def test_chunks_cover_everything_once(team, threads, total):
    done = []
    kernels.run_chunks(lambda start, stop: done.extend(range(start, stop)), total, threads=threads)
    assert sorted(done) == list(range(total))


def test_chunks_run_on_so_many_threads(team):
    meeting, seen = threading.Barrier(2), set()

    def work(start, stop):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            meeting.wait(60)

    kernels.run_chunks(work, 16, threads=2)
    assert len(seen) == 2


@pytest.mark.parametrize("error", [RuntimeError("broken chunk"), KeyboardInterrupt()])
def test_an_error_in_a_chunk_is_raised(team, error):
    def work(start, stop):
        if start >= 3:
            raise error

    with pytest.raises(type(error)):
        kernels.run_chunks(work, 16, threads=2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_no_team_in_a_forked_child():
    child = os.fork()
    if child == 0:
        done = []
        kernels.run_chunks(lambda start, stop: done.extend(range(start, stop)), 9, threads=2)
        os._exit(0 if kernels.team() is None and sorted(done) == list(range(9)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_helper_has_no_way_in_from_python():
    @kernels.helper()
    def twice(x):
        return 2.0 * x

    @numba.njit
    def four_times(x):
        return twice(twice(x))

    assert four_times(1.5) == 6.0
    with pytest.raises(AttributeError, match="twice_is_for_kernels_alone"):
        twice(1.5)
