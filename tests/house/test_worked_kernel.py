"""The kernel that docs/kernels.md writes step by step compiles, and gives the right numbers."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from exptilt._support import native

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text("utf-8")
QUOTED, WORKED = PAGE.split("## A kernel, step by step")
FLAGS = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-DEXPTILT_BITS=128", "-DEXPTILT_ROWS=6"]


def blocks(page, language):
    """The code blocks of a page in a language; those of Python that are no doctests."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [text for text in found if ">>>" not in text]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The page's kernel in place of the compiled core."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or os.name == "nt":
        pytest.skip("no C++ compiler to make a library with")
    source, file = tmp_path / "row_sums.cpp", tmp_path / "library.so"
    source.write_text("\n".join(blocks(WORKED, "cpp")), "utf-8")
    words = [compiler, *FLAGS, "-fPIC", "-shared", "-I", str(ROOT / "csrc"), str(source), "-o", str(file)]
    subprocess.run(words, check=True)
    made = ctypes.CDLL(str(file))
    caches = native.function, native.address, native.frame
    for function in caches:
        function.cache_clear()
    monkeypatch.setattr(native, "load", lambda: made)
    yield
    for function in caches:
        function.cache_clear()


def test_the_kernel_of_the_page(library):
    once, on_threads = blocks(WORKED, "python")
    names: dict = {}
    exec(once, names)
    scores = torch.from_numpy(names["scores"])
    expected = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(torch.from_numpy(names["G"]), scores.logsumexp(1), atol=0, rtol=1e-14)
    torch.testing.assert_close(torch.from_numpy(names["H"]), expected, atol=0, rtol=1e-13)
    before = names["G"].copy(), names["H"].copy()
    names["G"].fill(0), names["H"].fill(0)
    exec(on_threads, names)
    assert (names["G"] == before[0]).all()
    assert (names["H"] == before[1]).all()


def test_what_the_page_quotes_is_there():
    (quoted,) = blocks(QUOTED, "cpp")
    assert quoted in (ROOT / "csrc" / "small.cpp").read_text("utf-8")


def test_the_page_names_every_target():
    named = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert set(native.TARGETS) <= set(named)
