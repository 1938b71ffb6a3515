"""The example is run; so is docs/switching.md, which pytest collects by itself."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_turning_target(capsys):
    runpy.run_path(str(ROOT / "examples" / "turning_target.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["extended", "unscented"]
    assert all(float(line.split("worst ")[1].split(";")[0]) < 1.0 for line in lines)
