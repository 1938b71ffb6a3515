"""The attention benchmarks: rivals compute the same thing, a quick run goes through."""

import pytest
import torch
from torch.testing import assert_close

import attention
import attention_decoding
import attention_half
import attention_memory
import attention_scaling
import attention_shared
import attention_small
import classifier
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
    monkeypatch.setattr(
        harness,
        "folder",
        lambda quick: tmp_path if quick else pytest.fail("a quick run must not write to docs"),
    )
    page = attention.PAGE.read_text("utf-8")
    yield lambda benchmark: benchmark.main(["--quick"])
    assert attention.PAGE.read_text("utf-8") == page


@pytest.fixture(params=[False, True], ids=["plain", "causal"])
def computed(request):
    """What every case returns, by name, at a small shape."""
    return {
        name: case() for group in rivals.groups(SHAPE, request.param) for name, case in group.cases.items()
    }


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
    assert {p.name for p in path.parent.glob("*.svg")} == {
        "attention_scaling.svg",
        "attention_scaling_ratio.svg",
    }
    assert "exponent" in capsys.readouterr().out


@pytest.mark.parametrize("heads", attention_decoding.HEADS)
@pytest.mark.parametrize("layout", attention_decoding.LAYOUTS)
def test_decoding_compares_like_with_like(heads, layout):
    tensors = attention_decoding.inputs(heads, 48, torch.float32, layout)
    assert tensors[1].is_contiguous() == (layout == "contiguous")
    assert tensors[1].shape == (1, heads[1], 48, 64)
    cases = attention_decoding.cases(tensors)
    close(cases["SDPA"](), cases["attend"]().output)


@pytest.mark.slow
def test_quick_run_of_decoding(quick, capsys):
    results = harness.read(quick(attention_decoding))
    assert len(results["runs"]) == 8
    assert len(results["goals"]) == 8 * len(attention_decoding.QUICK)
    assert "32/8 heads, bfloat16, sliced" in capsys.readouterr().out
    assert [attention_decoding.limit(n) for n in attention_decoding.KEYS] == [1.8, 1.1, 1.1]


@pytest.mark.slow
def test_quick_run_of_small_calls(quick, capsys):
    results = harness.read(quick(attention_small))
    assert [run["n"] for run in results["runs"]] == [16, 64]
    assert [(goal["what"], goal["limit"]) for goal in results["goals"]] == [("attend, n = 64", 4.0)]
    assert "≤ 4: " in capsys.readouterr().out


@pytest.mark.slow
def test_quick_run_of_half_precision(quick, capsys):
    results = harness.read(quick(attention_half))
    assert [goal["limit"] for goal in results["goals"]] == [1.0, 0.9]
    assert "attend, float32" in capsys.readouterr().out


def test_classifiers_compute_the_same():
    close(*[classifier.case(name, (30, 200, 16))() for name in classifier.FUNCTIONS])


@pytest.mark.slow
def test_quick_run_of_the_classifier(quick, capsys):
    results = harness.read(quick(classifier))
    states, outcomes, dimension = classifier.QUICK
    returned = {seen["returned"] for seen in results["memory"].values()}
    assert returned == {4 * (states + (states + outcomes) * dimension)}  # G and two gradients
    assert [(goal["limit"], goal["unit"]) for goal in results["goals"]] == [(1.0, "×"), (60.0, "MB")]
    assert "≤ 60: " in capsys.readouterr().out


@pytest.mark.parametrize("name", attention_shared.CASES)
def test_shared_and_copied_compute_the_same(name):
    kind, make = attention_shared.CASES[name]
    shared, copied = [make(attention_shared.QUICK[kind], full)() for full in (False, True)]
    close(shared, copied)


@pytest.mark.slow
def test_quick_run_of_shared_parts(quick, capsys):
    results = harness.read(quick(attention_shared))
    seen = results["memory"]["bias, one for all, backward to it"]
    assert seen["copy"] == 2 * 2 * 64 * 64 * 4
    assert seen["shared"]["returned"] == 4 * (
        4 * 2 * 2 * 64 * 64 + 64 * 64
    )  # output, three gradients, the bias's
    assert [goal["limit"] for goal in results["goals"]] == [seen["copy"] / 4e6]
    assert attention_shared.copy_bytes("keys", attention_shared.QUICK["keys"]) == 2 * 2 * 128 * 64 * 4
    assert "one copy alone" in capsys.readouterr().out


def test_a_missed_goal_is_told():
    assert attention.verdict([1.1, 1.3, 1.2], [1.2] * 3) == ("≤ 1.2", "NOT met (2 of 3 met)")
    assert attention.verdict([1.0, 0.95], [1.0, 0.9]) == ("≤ 1, causal ≤ 0.9", "NOT met (1 of 2 met)")
    assert attention.verdict([1.1, 1.2], [1.2] * 2) == ("≤ 1.2", "met")
    assert attention.verdict([1.1], []) == ("", "")


def test_slope_is_the_exponent():
    assert attention_scaling.slope([(n, 3e-9 * n**2) for n in (512, 1024, 4096)]) == pytest.approx(2.0)
