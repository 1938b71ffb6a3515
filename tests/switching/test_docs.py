"""What the documentation shows is run."""

import doctest
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_on_switching():
    found = doctest.testfile(str(ROOT / "docs" / "switching.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 10
    assert found.failed == 0


def test_the_turning_target(capsys):
    runpy.run_path(str(ROOT / "examples" / "turning_target.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["extended", "unscented"]
    assert all(float(line.split("worst ")[1].split(";")[0]) < 1.0 for line in lines)
