"""What the documentation shows is run."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples" / "flow_to_equilibrium.py"), run_name="__main__")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("renormaliser")
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert (counts["sphere"], counts["whiten"]) == (1, 5)
    assert counts["batch"] < 5
