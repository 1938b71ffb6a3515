"""Examples run, and print nothing absurd."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name", ["flow_to_equilibrium", "maximum_entropy", "tilting_measures", "turning_target"]
)
def test_an_example_prints_numbers(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    said = capsys.readouterr().out
    assert re.search(r"\d\.\d", said)
    assert not re.search(r"\b(nan|inf)\b", said)
