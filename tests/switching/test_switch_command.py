"""`exptilt switch`: what it prints and writes, and what it refuses with nothing written."""

import csv

import numpy as np
import pytest

from exptilt.cli.main import main


@pytest.fixture
def series(tmp_path):
    rng = np.random.default_rng(0)
    regime = (np.arange(120) // 30) % 2
    y = np.where(regime, rng.normal(5, 1, 120), rng.normal(0, 1, 120))
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["day", "price", "note", "flat"])
        for t in range(120):
            writer.writerow([f"d{t}", "" if t == 7 else f"{y[t]:.5f}", "some, text", 1])
    return path


@pytest.mark.parametrize("kind", ["level", "local-level"])
def test_page_table_and_summary(series, tmp_path, capsys, kind):
    out = tmp_path / "out"
    assert (
        main(
            [
                "switch",
                str(series),
                "--columns",
                "price",
                "--index",
                "day",
                "--model",
                kind,
                "--starts",
                "2",
                "--forecast",
                "4",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "2 regimes" in said
    assert "AIC" in said
    assert "lasts" in said
    html = (out / "index.html").read_text()
    assert "<svg" in html
    assert "http-equiv" in html
    assert "forecast" in html.lower()
    with (out / "probabilities.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    assert rows[3]["row"] == "d3"
    assert float(rows[3]["smoothed_0"]) + float(rows[3]["smoothed_1"]) == pytest.approx(1.0, abs=1e-8)
    if kind == "level":
        guess = [int(row["most_likely"]) for row in rows]
        assert np.mean(np.array(guess) == (np.arange(120) // 30) % 2) > 0.95


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, [], "No such file"),
        ("", [], "is empty"),
        ("a,b\n", [], "no rows"),
        ("a,b\n1,2\n3\n", [], "line 3 has 1 cells"),
        ("a,b\n1,x\n2,y\n3,z\n", ["--columns", "b"], "line 2 of column 'b' holds 'x'"),
        ("a\n1\n2\n", ["--columns", "c"], "has no column 'c'"),
        ("a\nx\ny\n", [], "no column of numbers"),
        ("a\n1\n1\n1\n1\n1\n1\n1\n", [], "is constant"),
        ('a\n""\n""\nNA\n', ["--columns", "a"], "observed values"),
        ("a\n1\ninf\n2\n", ["--columns", "a"], "not a finite number"),
        (b"\xff\xfe\x00\x01", [], "not a text file"),
        ("a\n1\n2\n3\n", [], "at least 6 rows"),
    ],
)
def test_bad_files_write_nothing(tmp_path, capsys, content, words, said):
    path, out = tmp_path / "bad.csv", tmp_path / "out"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["switch", str(path), *words, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") <= 2
    assert not out.exists()


def test_wrong_words_are_answered_in_a_line(series, capsys):
    for words in (["--modes", "0"], ["--modes", "two"], ["--model", "arima"]):
        with pytest.raises(SystemExit) as stop:
            main(["switch", str(series), *words])
        assert stop.value.code == 2
        assert "switch: error" in capsys.readouterr().err
