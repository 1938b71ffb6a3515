"""The numbers that other programs print of Markov models, found again by the builders."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "what_others_print.py"


@pytest.mark.slow
def test_what_others_print_is_found():
    """As high as theirs, and where it is the same maximum, the same numbers.

    A process of its own: statsmodels' tests have marks that pytest does not know here.
    """
    done = subprocess.run([sys.executable, SCRIPT, "--no-page"], capture_output=True, text=True, check=True)
    rows = [line.strip().strip("|").split("|") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 13
    for name, printed, there, probabilities, highest, ours, *gaps, remark in rows:
        assert abs(float(there) - float(printed)) < 2e-4, name
        assert float(probabilities.strip(" *")) < 1e-5, name
        assert float(ours) > float(highest) - 1e-3, name
        numbers = [float(gap) for gap in gaps if gap.strip()[:1].isdigit()]
        assert numbers or remark.strip().startswith(("a higher maximum", "the printed parameters")), name
        assert max(numbers, default=0.0) < 1e-3, name
