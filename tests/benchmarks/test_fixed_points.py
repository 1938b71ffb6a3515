"""The benchmark against torchdeq: a quick run goes through."""

import pytest
import torch

pytest.importorskip("torchdeq", reason="torchdeq is not installed: make setup")

import fixed_points
import harness


def test_quick_run(tmp_path, monkeypatch, capsys) -> None:
    """Without the clock, and without the table of abilities, which other tests hold us to."""
    monkeypatch.setattr(
        harness,
        "folder",
        lambda quick: tmp_path if quick else pytest.fail("a quick run must not write to docs"),
    )
    monkeypatch.setattr(
        harness,
        "compare",
        lambda cases, baseline, **_: dict.fromkeys(cases, harness.Timing(1.0, 1.0, 1.0, 1.0, 1.0, 1, 1)),
    )
    monkeypatch.setattr(
        fixed_points, "abilities", lambda: {"grad": {"exptilt": "yes", "torchdeq": "Error: a | b"}}
    )
    threads, page = torch.get_num_threads(), fixed_points.PAGE.read_text("utf-8")
    try:
        results = harness.read(fixed_points.main(["--quick"]))
    finally:
        torch.set_num_threads(threads)
    assert fixed_points.PAGE.read_text("utf-8") == page
    _, rows = fixed_points.table(results)
    assert len(rows) == 2 * len(fixed_points.PAIRS)
    assert all(float(row[-1]) == 1 and int(row[1]) > 2 for row in rows)
    assert fixed_points.ability_table(results)[1] == [["grad", "yes", "Error: a / b"]]
    assert "a | b" in capsys.readouterr().out
