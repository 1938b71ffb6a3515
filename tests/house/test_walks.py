"""docs/architecture.md names the files that four calls pass: all of them, and no other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from house import checks, walks

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = dict(
    re.findall(
        r"^### `(.+?)`\n(.*?)(?=^### |\Z)",
        (ROOT / "docs" / "architecture.md").read_text("utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
)
ATTEND = "attend(query, key, value, causal=True)"


def named(section):
    """The files of the package that the page names on the way of a call."""
    return {path for path in checks.quoted_paths(section) if (walks.PACKAGE / path).suffix == ".py"}


@pytest.fixture(scope="module")
def traced():
    if not hasattr(os, "fork"):
        pytest.skip("walks are traced in forks, which this system does not have")
    script = [sys.executable, str(ROOT / "tests" / "house" / "walks.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_has_these_calls():
    assert list(SECTIONS) == list(walks.CALLS)
    for section in SECTIONS.values():
        steps = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
        assert 3 <= len(steps) <= 8
        assert [step for step in steps if not checks.quoted_paths(step)] == []


@pytest.mark.parametrize("call", walks.CALLS)
def test_every_file_that_a_call_passes_is_named_and_no_other(traced, call):
    passed, said = {path for path, _ in traced[call]}, named(SECTIONS[call])
    known = {"__init__.py"}  # which finds the public name
    if call != ATTEND and "tilting/attend.py" in said:  # from there on the way is that of `attend`
        known |= named(SECTIONS[ATTEND])
    assert {
        "passed, not named": sorted(passed - said - known),
        "named, not passed": sorted(said - passed),
    } == {"passed, not named": [], "named, not passed": []}


def test_attend_is_six_steps_from_the_kernel(traced):
    """A repeated call goes this way, in this order, and all of it passes ten files."""
    assert len(named(SECTIONS[ATTEND])) <= 10
    walk = [
        ["tilting/arguments.py", "explained"],
        ["tilting/attend.py", "attend"],
        ["tilting/arguments.py", "prepare_again"],
        ["tilting/attend.py", "run"],
        ["tilting/backends/dispatch.py", "forward"],
        ["tilting/backends/cpu.py", "forward"],
        ["tilting/backends/layout.py", "run"],
    ]
    starts = [at for at, step in enumerate(traced[ATTEND]) if step == walk[0]]
    assert len(starts) == 3
    assert [step for step in traced[ATTEND][starts[1] : starts[2]] if step in walk] == walk
