"""`exptilt switch`: what it prints and writes, and what it refuses with nothing written."""

import csv

import numpy as np
import pytest

from exptilt.cli.main import main
from exptilt.report.regimes.series import read_series


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
    words = f"--columns price --index day --model {kind} --starts 2 --forecast 4".split()
    words += ["--compare", "2" if kind == "level" else "1", "--out", str(out)]
    assert main(["switch", str(series), *words]) == 0
    said = capsys.readouterr().out
    assert "2 regimes" in said
    assert "AIC" in said
    assert "this one has lasted" in said
    html = (out / "index.html").read_text()
    assert "<svg" in html
    assert "http-equiv" in html
    assert "forecast" in html.lower()
    assert ("How many regimes" in html) == (kind == "level")
    last = 1 if kind == "level" else 0  # a local level takes the steps themselves for its fast regime
    assert f"At the last row, d119, the series is in regime {last}" in said
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
        (None, [], "there is no folder or file"),
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
        ("a\n1\n2\n3\n", [], "has 3 rows, too few: 2 regimes of 1 column need at least 7"),
        ("a\n" + "1\n2\n" * 9 + "oops\n", [], "line 20 of column 'a' holds 'oops'"),
        ("a\n" + "1\n2\n" * 9 + "inf\n", [], "line 20 of column 'a' holds 'inf'"),
        (b"PK\x03\x04", [], "is an Excel workbook. Save its sheet as CSV"),
        ("a,b\n" + "1,2\n3,6\n2,4\n" * 9, [], "column 'b' is a combination of ['a']"),
        (
            "c,t,y\nA,2001,1\nA,2002,2\nB,2001,3\nB,2002,5\n",
            ["--index", "t"],
            "lines 2 and 4 are both of '2001'",
        ),
        ("a\n" + "1\n2\n" * 9, ["--shade", "x..y", "--compare", "1", "--starts", "1"], "is no span of rows"),
        ("a,b\n" + "1,2\n3,5\n2,4\n" * 9, ["--lags", "1"], "with lags one column is modelled, not 2"),
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


def _written(path, separator, decimal):
    rng = np.random.default_rng(1)
    y = np.where((np.arange(60) // 20) % 2, 6.0, 0.0) + rng.normal(size=60)
    lines = [separator.join(("", "gnp"))]
    lines += [separator.join((str(k), f"{v:.4f}".replace(".", decimal))) for k, v in enumerate(y)]
    path.write_text("\n".join(lines) + "\n")
    return y


@pytest.mark.parametrize(("separator", "decimal"), [(",", "."), (";", ","), ("\t", ".")])
def test_the_first_column_of_a_table_with_a_counter_is_its_index(tmp_path, capsys, separator, decimal):
    y = _written(tmp_path / "gnp.csv", separator, decimal)
    found = read_series(tmp_path / "gnp.csv", None, None)
    assert found.columns == ("gnp",)
    assert found.index == ""
    assert found.labels[:2] == ("0", "1")
    np.testing.assert_allclose(found.values[:, 0], y, atol=1e-4)


@pytest.mark.parametrize(
    ("cells", "index"),
    [
        (["1947Q1", "1947Q2", "1947Q3", "1947Q4"], "when"),
        (["2001-02-03", "2001-02-04", "2001-02-05", "2001-02-06"], "when"),
        (["3.1.2001", "4.1.2001", "5.1.2001", "6.1.2001"], "when"),
        (["1990", "1991", "1992", "1993"], "when"),
        (["1.5", "1.2", "1.9", "1.1"], None),
        (["1", "2", "", "4"], None),
    ],
)
def test_dates_and_counters_name_the_rows(tmp_path, cells, index):
    path = tmp_path / "data.csv"
    path.write_text("when,y\n" + "".join(f"{cell},{k * k % 5}\n" for k, cell in enumerate(cells)))
    found = read_series(path, None, None)
    assert found.index == index
    assert found.columns == (("y",) if index else ("when", "y"))
    assert read_series(path, ["y"], None).labels == (tuple(cells) if index else ("0", "1", "2", "3"))


def test_a_column_that_is_asked_for_is_not_the_index(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("year,y\n" + "".join(f"{1990 + k},{k * k % 3}\n" for k in range(5)))
    assert read_series(path, ["year"], None).columns == ("year",)
    (tmp_path / "one.csv").write_text("y\n1\n2\n3\n4\n")
    assert read_series(tmp_path / "one.csv", None, None).columns == ("y",)


def test_a_column_of_years_names_the_rows_wherever_it_stands(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("country,year,y\n" + "".join(f"DE,{1990 + k},{k * k % 3}\n" for k in range(5)))
    found = read_series(path, None, None)
    assert (found.index, found.columns, found.times.unit) == ("year", ("y",), "year")


def test_counts(tmp_path, capsys):
    rng = np.random.default_rng(1)
    counts = rng.poisson(np.where((np.arange(60) // 20) % 2, 25, 3))
    path, out = tmp_path / "counts.csv", tmp_path / "out"
    cells = ["" if t == 7 else str(k) for t, k in enumerate(counts)]
    path.write_text("day,calls\n" + "".join(f"{t},{cell}\n" for t, cell in enumerate(cells)))
    words = "--model counts --starts 1 --compare 2 --forecast 3 --out"
    command = ["switch", str(path), *words.split(), str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "calls rate" in said
    with (out / "probabilities.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = np.array([int(row["most_likely"]) for row in rows])
    assert (found == (np.arange(60) // 20) % 2).mean() > 0.9
    assert "Poisson" in (out / "index.html").read_text()
    path.write_text("day,calls\n0,1\n1,2.5\n2,3\n3,4\n4,4\n5,1\n6,2\n7,3\n")
    assert main(command) != 0
    assert "step 1 is [2.5], which Poisson cannot give" in capsys.readouterr().err


def test_without_matplotlib_there_is_a_summary(series, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("exptilt.cli.switch.find_spec", lambda name: None if name == "matplotlib" else name)
    words = ["--columns", "price", "--compare", "1", "--starts", "1", "--out", str(tmp_path / "out")]
    assert main(["switch", str(series), *words]) == 1
    captured = capsys.readouterr()
    assert "matplotlib is not installed" in captured.err
    assert "2 regimes" in captured.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "forecast.csv",
        "probabilities.csv",
        "regimes.csv",
        "regimes.json",
    ]


def test_lags_and_shades(tmp_path, capsys):
    rng = np.random.default_rng(2)
    y = np.where((np.arange(90) // 30) % 2, 5.0, 0.0) + rng.normal(size=90)
    path = tmp_path / "q.csv"
    path.write_text("when,y\n" + "".join(f"{1990 + k // 4}Q{k % 4 + 1},{v:.4f}\n" for k, v in enumerate(y)))
    words = ["--lags", "1", "--shade", "1997-07..2004Q4", "--compare", "2", "--starts", "2"]
    assert main(["switch", str(path), *words, "--forecast", "2", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "model 'autoregression' with 1 lag" in said
    assert "30 rows are shaded; regime 1 (high) is the likeliest in 100 % of them" in said
    assert "quarters; this one has lasted" in said
    assert "2012Q3" in said
    assert "level[regime_{t" in (tmp_path / "out" / "index.html").read_text()
