"""The compiled core: which library is taken, and what is said where none can be."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest

from exptilt._support import native

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SOURCE = """
extern "C" long long exptilt_abi() { return %d; }
extern "C" const char* exptilt_source() { return "%s"; }
extern "C" const char* exptilt_target() { return "v2"; }
extern "C" long long exptilt_runs_here() { return %d; }
"""


@pytest.fixture
def fresh():
    """Nothing remembered of libraries, before and after."""
    caches = native._loaded, native.function, native.address, native.frame
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh):
    """The only folder where libraries are looked for."""
    monkeypatch.setattr(native, "folders", lambda: [tmp_path])
    monkeypatch.delenv("EXPTILT_TARGET", raising=False)
    return tmp_path


def compiled(folder, text, target):
    if COMPILER is None:
        pytest.skip("no C++ compiler to make a library with")
    (folder / "made.cpp").write_text(text)
    file = folder / f"libexptilt-{target}.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(folder / "made.cpp"), "-o", str(file)], check=True)


def build(folder, abi=native.ABI, source=None, runs=1, target="v2"):
    compiled(folder, SOURCE % (abi, source or native.source_digest() or "", runs), target)


def test_no_library(folder):
    assert not native.available()
    assert native.target() == ""
    assert "was not built" in native.obstacle()
    with pytest.raises(native.CoreMissingError, match="make native"):
        native.load()


def test_a_library_that_cannot_be_read(folder):
    (folder / "libexptilt-v2.so").write_bytes(b"not a library")
    assert "cannot be loaded" in native.obstacle()


def test_a_library_that_is_something_else(folder):
    compiled(folder, 'extern "C" int other() { return 1; }', "v2")
    assert "cannot be loaded" in native.obstacle()


def test_a_library_of_another_version(folder):
    build(folder, abi=native.ABI + 1)
    assert f"is of version {native.ABI + 1}, and this package needs {native.ABI}" in native.obstacle()


def test_a_library_of_other_sources(folder):
    build(folder, source="0123456789abcdef")
    assert "was built from other sources" in native.obstacle()
    assert "make native" in native.obstacle()


def test_a_processor_that_runs_none(folder):
    build(folder, runs=0)
    assert "this processor runs none of v2" in native.obstacle()


def test_the_best_that_runs_is_taken(folder):
    build(folder, target="v2")
    build(folder, target="v3")
    build(folder, target="v4", runs=0)
    assert native.target() == "v3"


def test_a_target_by_name(folder, monkeypatch):
    build(folder, target="v2")
    build(folder, target="v3")
    monkeypatch.setenv("EXPTILT_TARGET", "v2")
    assert native.target() == "v2"


def test_a_target_that_is_not_there(folder, monkeypatch):
    build(folder)
    monkeypatch.setenv("EXPTILT_TARGET", "v9")
    with pytest.raises(native.CoreMissingError, match=r"EXPTILT_TARGET is 'v9'\. Set it to one of v2"):
        native.available()


WITHOUT = """
import warnings, torch, exptilt as xt
from exptilt._support import native
native.folders = lambda: []
q = torch.randn(1, 5, 4)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    first, second = xt.attend(q, q, q), xt.attend(q, q, q)
assert len(said) == 1 and "plain torch" in str(said[0].message) and "was not built" in str(said[0].message)
torch.testing.assert_close(first.output, torch.softmax(q @ q.mT / 2, -1) @ q)
try:
    xt.attend(q, q, q, backend="cpu")
except native.CoreMissingError as problem:
    assert "make native" in str(problem)
else:
    raise AssertionError
import numpy as np
one = np.ones((1, 1))
model = xt.switching.SwitchingLinearGaussian(
    transition=one, dynamics=one, process_noise=one, observation=one, observation_noise=one,
    initial_mean=np.zeros(1), initial_covariance=one, initial_probability=np.ones(1),
)
try:
    model.filter(np.zeros((5, 1)))
except native.CoreMissingError as problem:
    assert "make native" in str(problem)
else:
    raise AssertionError
"""


def test_without_a_library_attention_still_works_and_filters_say_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_names_the_target():
    done = subprocess.run(
        [sys.executable, "-m", "exptilt.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert f"compiled core: {native.target()}" in done.stdout


def test_an_unknown_target_is_said_in_the_version():
    done = subprocess.run(
        [sys.executable, "-m", "exptilt.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"EXPTILT_TARGET": "v9"},
    )
    assert "EXPTILT_TARGET is 'v9'" in done.stdout


def test_frames_are_made_of_the_librarys_own_list():
    frame = native.frame("Attention")
    names = [name for name, _ in frame._fields_]
    assert names[:2] == ["next", "units"]
    assert ctypes.sizeof(frame) == 8 * len(names)
