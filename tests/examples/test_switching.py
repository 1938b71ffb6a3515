"""The example is run; so is docs/switching.md, which pytest collects by itself."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_turning_target(capsys):
    runpy.run_path(str(ROOT / "examples" / "turning_target.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["extended", "unscented"]
    assert all(float(line.split("worst ")[1].split(";")[0]) < 1.0 for line in lines)


def test_the_manoeuvring_target(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["manoeuvring_target.py", str(tmp_path / "picture.png")])
    runpy.run_path(str(ROOT / "examples" / "manoeuvring_target.py"), run_name="__main__")
    error, mode = capsys.readouterr().out.splitlines()
    filtered, measured = (float(word) for word in error.replace(",", "").split() if word[0].isdigit())
    assert filtered < 0.7 * measured
    assert int(mode.split(" in ")[1].split("%")[0]) > 70
    assert (tmp_path / "picture.png").stat().st_size > 10_000
