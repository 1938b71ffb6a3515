"""The attention benchmarks: rivals compute the same thing, a quick run goes through, the page shows what was saved."""

import json

import pytest
import torch
from torch.testing import assert_close

import attention
import attention_memory
import attention_scaling
import harness
from rivals import attention as rivals

SHAPE = (1, 2, 130, 16)


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Runs a benchmark's quick form; its files go to a folder of the test."""
    monkeypatch.setattr(harness, "folder", lambda quick: tmp_path if quick else pytest.fail("a quick run must not write to docs"))
    page = attention.PAGE.read_text("utf-8")
    yield lambda benchmark: benchmark.main(["--quick"])
    assert attention.PAGE.read_text("utf-8") == page


@pytest.fixture(params=[False, True], ids=["plain", "causal"])
def computed(request):
    """What every case returns, by name, at a small shape."""
    return {name: case() for group in rivals.groups(SHAPE, request.param) for name, case in group.cases.items()}


def close(a, b):
    assert_close(a, b, atol=2e-5, rtol=2e-4)


def test_all_ways_compute_the_same(computed):
    ours, whole = computed["attend"], computed["materialised"]
    for name in rivals.STATISTICS:
        close(getattr(ours, name), whole[name])
    close(computed["SDPA"], ours.output)
    close(computed["two-pass SDPA"], (ours.output, ours.score_mean))
    close(computed["FlexAttention eager"], (ours.output, ours.log_normalizer))
    close(computed["attend, key_mass"].key_mass.sum(-1), torch.full(SHAPE[:2], float(SHAPE[2])))
    for name in ("backward", "backward of three", "forward mode", "double backward"):
        close(computed[f"attend, {name}"], computed[f"materialised, {name}"])
    close(computed["SDPA, backward"], computed["attend, backward"])


def test_double_backward_reaches_everything(computed):
    _, first, second = computed["attend, double backward"]
    assert len(first) == 3
    assert len(second) == 4
    assert all(gradient.abs().max() > 0 for gradient in (*first, *second))


def test_refusals_are_told(monkeypatch):
    """Those the page speaks of, by their own words; one that works is not among them."""
    said = rivals.refusals()
    assert "SDPA" not in said
    assert {"SDPA, forward mode", "SDPA, double backward", "FlexAttention eager, backward"} <= set(said)
    assert all(": " in words and "\n" not in words for words in said.values())


@pytest.mark.slow
def test_quick_run_of_times(quick, capsys):
    path = quick(attention)
    results = harness.read(path)
    assert [run["causal"] for run in results["runs"]] == [False, True]
    assert len(results["goals"]) == 2 * len(attention.LIMITS)
    assert (path.parent / "attention.svg").is_file()
    printed = capsys.readouterr().out
    for words in [*attention.LIMITS, *results["refused"]]:
        assert words in printed


@pytest.mark.slow
def test_quick_run_of_memory(quick, capsys):
    results = harness.read(quick(attention_memory))
    assert results["matrix"] == 2 * 1024**2 * 4
    returned = {name: seen["returned"] for name, seen in results["memory"].items()}
    one = 2 * 1024 * 64 * 4  # an output, a gradient
    assert returned["attend"] >= one
    assert returned["attend, double backward"] == 8 * one  # output, three gradients, and four of these
    assert "one n×n matrix" in capsys.readouterr().out


@pytest.mark.slow
def test_quick_run_of_scaling(quick, capsys):
    path = quick(attention_scaling)
    assert [run["n"] for run in harness.read(path)["runs"]] == list(attention_scaling.QUICK)
    assert {p.name for p in path.parent.glob("*.svg")} == {"attention_scaling.svg", "attention_scaling_ratio.svg"}
    assert "exponent" in capsys.readouterr().out


def test_a_missed_goal_is_told():
    assert attention.verdict([1.1, 1.3, 1.2], 1.2) == ("≤ 1.2", "NOT met (2 of 3 met)")
    assert attention.verdict([1.1, 1.2], 1.2) == ("≤ 1.2", "met")
    assert attention.verdict([1.1], None) == ("", "")


def test_slope_is_the_exponent():
    assert attention_scaling.slope([(n, 3e-9 * n**2) for n in (512, 1024, 4096)]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("mark", "benchmark"), [("times", attention), ("memory", attention_memory), ("scaling", attention_scaling)], ids=lambda x: str(x)[:8]
)
def test_page_shows_what_was_saved(mark, benchmark):
    page = attention.PAGE.read_text("utf-8")
    begin, end = harness.marked(page, mark)
    saved = harness.FOLDER / f"{benchmark.__name__}.json"
    if saved.exists():
        assert page[begin:end] == harness.markdown(*benchmark.table(json.loads(saved.read_text("utf-8"))["results"]))
    else:
        assert page[begin:end].startswith("Not measured yet")
