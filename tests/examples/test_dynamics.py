"""What the documentation shows is run."""

import runpy
from pathlib import Path

import torch

import flow as benchmark

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_compares_like_with_like():
    cases = benchmark.cases_for(64)
    torch.testing.assert_close(cases["Flow"](), cases["naive"](), rtol=1e-4, atol=1e-4)
    assert cases["measuring"]()["clusters"].count == 64


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples" / "flow_to_equilibrium.py"), run_name="__main__")
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("renormaliser")
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert (counts["sphere"], counts["whiten"]) == (1, 5)
    assert counts["batch"] < 5
