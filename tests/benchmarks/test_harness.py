"""The measuring tools measure: sizes known beforehand, and times on a clock that only the cases move."""

import json
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import harness
from benchmarks import memory_cases as cases

MEGABYTE = cases.MEGABYTE


@pytest.mark.parametrize("case", [cases.numpy_case, cases.torch_case, cases.after_a_large_setup])
def test_memory_sees_100_megabytes(case):
    seen = harness.peak_extra_memory(case, 100)
    assert 95 * MEGABYTE < seen.peak < 125 * MEGABYTE
    assert seen.returned == 0
    assert seen.beyond == seen.peak


def test_memory_tells_outputs_apart():
    seen = harness.peak_extra_memory(cases.returning_case, 60)
    assert seen.returned == 60 * MEGABYTE
    assert 110 * MEGABYTE < seen.peak < 145 * MEGABYTE
    assert seen.beyond == seen.peak - seen.returned


def test_memory_failure_is_told():
    with pytest.raises(RuntimeError, match="no such luck"):
        harness.peak_extra_memory(cases.failing_case)


def test_sampling_agrees_with_the_kernel(monkeypatch):
    monkeypatch.setattr(harness, "_reset_high_water", lambda: False)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(harness, "time", SimpleNamespace(sleep=pause))

    def run():
        block = np.ones(200 * MEGABYTE // 8)
        before = len(pauses)
        while len(pauses) < before + 2:  # between two pauses the sampler has looked, however busy the machine
            time.sleep(0.001)
        return float(block[0])

    assert 190 * MEGABYTE < harness._one_call(run).peak < 230 * MEGABYTE


def test_storages_are_counted_once():
    @dataclass
    class Result:
        a: object
        b: object

    x = torch.zeros(1000, dtype=torch.float64)
    assert harness.tensor_bytes(Result(x, [x[:10], x.view(10, 100)])) == 8000
    y = np.zeros(100)
    assert harness.tensor_bytes({"y": y, "part": y[3:], "text": "no"}) == 800


def test_compare_is_interleaved():
    order = []
    times = harness.compare(
        {name: lambda name=name: order.append(name) for name in "abc"}, "a", rounds=4, minimum_seconds=0.0
    )
    assert order[:6] == list("aabbcc")  # warm-up and calibration
    assert order[6:] == list("abc") + list("bca") + list("cab") + list("abc")
    assert times["a"].ratio == 1.0
    assert times["a"].rounds == 4


def test_slow_cases_join_some_rounds():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    times = harness.compare(cases, "a", rounds=4, minimum_seconds=0.0, slow={"c": 2})
    assert order[:4] == list("aabb")  # a slow case is not warmed up
    assert order[4:] == list("abc") + list("ba") + list("cab") + list("ab")
    assert [times[name].rounds for name in "abc"] == [4, 4, 2]


@pytest.fixture
def clock(monkeypatch):
    """A clock for `compare`; `clock.wait(seconds)` moves it on, and nothing else does."""
    now = 0.0

    def wait(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(harness, "_clock", lambda: now)
    return SimpleNamespace(wait=wait)


def test_compare_finds_a_ratio(clock):
    """Best over best, and quartiles of what the rounds say: one takes 4 in each round, three 12 to 20."""
    three = iter([100, 100, 16, 12, 20, 16, 16])  # the first two are warm-up and calibration
    cases = {"one": lambda: clock.wait(4.0), "three": lambda: clock.wait(next(three))}
    times = harness.compare(cases, "one", rounds=5, minimum_seconds=0.0)
    assert (times["one"].best, times["one"].median, times["one"].ratio) == (4, 4, 1)
    assert (times["three"].best, times["three"].median) == (12, 16)
    assert (times["three"].ratio, times["three"].ratio_median) == (3, 4)
    assert 3 <= times["three"].ratio_low < 4 < times["three"].ratio_high <= 5


def test_quick_functions_are_repeated(clock):
    count = 0

    def quick():
        nonlocal count
        count += 1
        clock.wait(0.125)

    timing = harness.compare({"quick": quick}, "quick", rounds=2, minimum_seconds=2.0)["quick"]
    assert timing.calls == 16
    assert timing.best == 0.125
    assert count == 2 + 2 * timing.calls


def test_compare_refuses():
    with pytest.raises(ValueError, match="baseline is 'b', and the cases are a"):
        harness.compare({"a": lambda: None}, "b")
    with pytest.raises(ValueError, match="rounds is 0"):
        harness.compare({"a": lambda: None}, "a", rounds=0)
    for slow in ({"a": 1}, {"c": 1}, {"b": 0}, {"b": 3}):
        with pytest.raises(ValueError, match="slow has"):
            harness.compare({"a": lambda: None, "b": lambda: None}, "a", rounds=2, slow=slow)


def test_goals_are_printed_and_never_fail(capsys):
    harness.print_goals([harness.Goal("fast", 1.1, 1.2), harness.Goal("small", 200.0, 150.0, "MB")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["fast", "≤", "1.2", "×", "1.1", "×", "met"]
    assert lines[2].split() == ["small", "≤", "150", "MB", "200", "MB", "NOT", "met"]


def test_save_and_plot(tmp_path, capsys):
    timing = harness.Timing(1.0, 2.0, 1.5, 1.4, 1.6, 3, 1)
    path = harness.save(
        "some",
        {"times": {"a": timing}, "goal": harness.Goal("g", 1.0, 2.0), "n": np.int64(3)},
        folder=tmp_path,
    )
    content = json.loads(path.read_text("utf-8"))
    assert content["results"]["times"]["a"]["ratio"] == 1.5
    assert content["results"]["goal"]["met"] is True
    assert content["results"]["n"] == 3
    assert content["machine"]["torch"] == torch.__version__
    with pytest.raises(TypeError, match="cannot write a object"):
        harness.save("some", object(), folder=tmp_path)
    assert json.loads(path.read_text("utf-8")) == content  # the failure left the old file

    first = harness.plot("some", lambda axes: axes.plot([1, 2], [3, 4]), folder=tmp_path).read_bytes()
    assert first.startswith(b"<?xml")
    assert harness.plot("some", lambda axes: axes.plot([1, 2], [3, 4]), folder=tmp_path).read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["some.json", "some.svg"]
    assert "Wrote" in capsys.readouterr().out


def test_quick_results_stay_out_of_docs():
    assert harness.folder(False).parent == harness.FOLDER
    assert harness.FOLDER not in (harness.folder(True), *harness.folder(True).parents)


def test_start_reads_arguments(capsys):
    before = torch.get_num_threads()
    try:
        arguments = harness.start("words", ["--quick", "--threads", "1"])
        assert arguments.quick
        assert torch.get_num_threads() == 1
        assert "torch threads: 1" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)
