"""The page of a series that switches regime: its numbers, its table, and names that try to break out."""

import csv
import io
import json
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from exptilt._support.errors import ArgumentError, ExptiltError
from exptilt.report.regimes import find_regimes, text, write_regimes
from exptilt.report.regimes.dates import next_labels, read_times
from exptilt.report.regimes.page import DOWNLOADS, numbers, probabilities, share, spells
from exptilt.report.regimes.pictures import ticks
from exptilt.report.regimes.sentences import name_of, now, words_of
from exptilt.report.regimes.series import read_series
from exptilt.switching.compare import Comparison
from report.made import HOSTILE, make_regimes


@pytest.mark.parametrize("kind", ["level", "local-level"])
def test_every_number_is_on_the_page(tmp_path, kind):
    found = make_regimes(kind)
    page, table = write_regimes(found, tmp_path / "out")
    assert (page.name, table.name) == ("index.html", "probabilities.csv")
    html = page.read_text("utf-8")
    for array in (found.center, found.deviation, found.transition, found.share, found.forecast, found.upper):
        for value in array.ravel():
            assert f'data-value="{float(value)!r}"' in html
    assert html.count("<svg xmlns") == 2  # one for wide screens, one for narrow ones
    assert {"level": "variance[regime_t]", "local-level": "pace[regime_t]²"}[kind] in html
    assert "n/a" in html  # the standard error that is not known
    assert "∞" in html  # the regime that never ends
    assert "e−" not in re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
    for k, part in enumerate(found.share):
        assert f"<li>regime {name_of(found, k)}: {share(part).shown} of the time</li>" in html
    for name in DOWNLOADS:
        assert (tmp_path / "out" / name).exists()
        assert f'<a href="{name}" download>' in html


def test_names_from_the_file_stay_text(tmp_path):
    found = make_regimes(columns=(HOSTILE, "\x1b[2J\u202e"))
    html = write_regimes(found, tmp_path)[0].read_text("utf-8")
    assert html.count("<script>") == 1
    assert "window.bad=1" in html
    said = text(found)
    assert HOSTILE in said
    assert "␛[2J⟨U+202E⟩" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", said)


@pytest.mark.parametrize("names", [("US$ per A$", "a_b^c"), (r"$\frac$", "%")])
def test_names_are_no_formulas(tmp_path, names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html = write_regimes(make_regimes(columns=names), tmp_path)[0].read_text("utf-8")
    plain = write_regimes(make_regimes(columns=tuple("n" * len(name) for name in names)), tmp_path)[
        0
    ].read_text("utf-8")
    assert html.count("<use") == plain.count("<use")  # a letter each, as the name has them


def test_the_table_reads_back(tmp_path):
    found = make_regimes()
    (tmp_path / "table").write_text(probabilities(found), newline="")
    with (tmp_path / "table").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == list(found.labels)
    for k in range(3):
        np.testing.assert_allclose([float(row[f"smoothed_{k}"]) for row in rows], found.smoothed[:, k])
    assert [int(row["most_likely"]) for row in rows] == found.path.tolist()
    np.testing.assert_allclose([float(row["signal_1"]) for row in rows], found.signal[:, 1])


def test_stretches_of_regimes_have_dates_and_statistics():
    found = make_regimes()
    assert [(s.regime, s.begin, s.end) for s in found.spells] == [(0, 0, 14), (1, 14, 27), (2, 27, 40)]
    first, last = found.spells[0], found.spells[-1]
    assert first.mean[0] == pytest.approx(np.nanmean(found.y[:14, 0]))
    assert last.deviation[1] == pytest.approx(found.y[27:, 1].std(ddof=1))
    assert last.probability == pytest.approx(0.9)
    rows = list(csv.DictReader(io.StringIO(spells(found), newline="")))
    assert [row["rows"] for row in rows] == ["14", "13", "13"]
    assert rows[1]["from"] == found.labels[14]


def test_everything_as_json(tmp_path):
    write_regimes(make_regimes(), tmp_path)
    there = json.loads((tmp_path / "regimes.json").read_text("utf-8"))
    assert there["duration"] == [10.0, 5.0, None]
    assert there["y"][3][0] is None


def test_numbers_as_people_write_them():
    assert [n.shown for n in numbers([1.7e-74, 3.14159, -1234.5])] == ["0", "3", "−1\u202f234"]
    assert [n.shown for n in numbers([0.12345, float("nan"), float("inf")])] == ["0.1235", "n/a", "∞"]
    assert [n.shown for n in numbers([0.1473], [3.635])] == ["0.147"]
    assert [share(p).shown for p in (1.7e-74, 0.0, 0.5, 0.99999, 1.0)] == [
        "<0.1 %",
        "0.0 %",
        "50.0 %",
        ">99.9 %",
        "100.0 %",
    ]


@pytest.mark.parametrize(
    ("labels", "want"),
    [
        (("2009Q3", "2009Q4"), ("2010Q1", "2010Q2")),
        (("2009-M11", "2009-M12"), ("2010-M01", "2010-M02")),
        (("2001-01-31", "2001-02-28", "2001-03-31"), ("2001-04-30", "2001-05-31")),
        (("2001-01-15", "2001-02-15"), ("2001-03-15", "2001-04-15")),
        (("2001/11", "2001/12"), ("2002/01", "2002/02")),
        (("2001-01-01", "2001-01-08", "2001-01-15"), ("2001-01-22", "2001-01-29")),
        (
            tuple(f"2024-01-{d:02d}" for d in (15, 16, 17, 18, 19, 22, 23, 24, 25, 26)),
            ("2024-01-29", "2024-01-30"),
        ),
        (("2024-01-25", "2024-01-26"), ("2024-01-27", "2024-01-28")),
        (("1999-12-31", "2000-12-31"), ("2001-12-31", "2002-12-31")),
        (("1998", "1999"), ("2000", "2001")),
        (("x", "y"), ("+1", "+2")),
    ],
)
def test_labels_go_on_as_they_came(labels, want):
    assert next_labels(labels, 2) == want


def test_round_years_name_the_time_axis():
    labels = [f"{1954 + k // 4}Q{k % 4 + 1}" for k in range(100)]
    at, names = ticks(labels, 9)
    assert names == ["1955", "1960", "1965", "1970", "1975"]
    assert [labels[k] for k in at] == [f"{name}Q1" for name in names]
    assert ticks(["a", "b", "c"], 2) == ([0, 2], ["a", "c"])


@pytest.fixture
def file(tmp_path):
    def write(content):
        (tmp_path / "data.csv").write_text(content)
        return tmp_path / "data.csv"

    return write


def test_series(file):
    path = file("day, a ,note,b\nx,1,hello,4\n\ny,NA,,5e0\nz,3,world,\n")
    series = read_series(path, None, "day")
    assert series.columns == ("a", "b")
    assert series.labels == ("x", "y", "z")
    np.testing.assert_array_equal(series.values, [[1, 4], [np.nan, 5], [3, np.nan]])
    assert read_series(path, ["b", "a"], None).columns == ("b", "a")
    assert read_series(path, ["b"], None).labels == ("0", "1", "2")


def test_what_was_chosen_is_said(file):
    found = read_series(
        file("x;when;note;flat\n1.234,5;2001-02-03;a;1\n2,5;2001-02-04;b;1\n3;2001-02-05;c;1\n"), None, None
    )
    assert found.columns == ("x",)
    assert found.labels == ("2001-02-03", "2001-02-04", "2001-02-05")
    np.testing.assert_array_equal(found.values[:, 0], [1234.5, 2.5, 3.0])
    said = " ".join(found.chosen)
    for words in (
        "semicolons, a comma is the decimal point",
        "'when'",
        "'note', which does not hold numbers",
        "'flat', which is constant at 1",
    ):
        assert words in said


def test_parquet_needs_a_library_and_says_which(tmp_path):
    path = tmp_path / "data.parquet"
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"y": [1.0, None, 3.0]}, index=pd.date_range("2001-01-01", periods=3, name="day"))
    try:
        table.to_parquet(path)
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ExptiltError, match=re.escape("exptilt[parquet]")):
            read_series(path, None, None)
        return
    found = read_series(path, None, None)
    assert (found.columns, found.index) == (("y",), "day")
    assert found.labels == ("2001-01-01", "2001-01-02", "2001-01-03")
    np.testing.assert_array_equal(found.values[:, 0], [1.0, np.nan, 3.0])


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("a,b\n1,2\n\n\n3,x\n", ["b"], "line 5 of column 'b' holds 'x'"),
        ('a,b\n"1\n",2\n3\n', ["b"], "line 4 has 1 cells"),
        ("a,a\n1,2\n3,4\n", None, "has 2 columns called 'a'"),
        ("a,a\n1,2\n3,4\n", ["a"], "has 2 columns called 'a'"),
        ("a\n1\n", None, "has 1 observed values"),
        ("t,y\n1,inf\n2,-Inf\n3,2\n4,5\n", None, "line 2 of column 'y' holds 'inf', not a finite"),
    ],
)
def test_series_that_are_refused(file, content, columns, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        read_series(file(content), columns, None)


@pytest.mark.parametrize(
    ("kind", "column", "center", "deviation", "words"),
    [
        ("level", "price", (0.0, 3.0), (1.0, 1.0), ("low", "high")),
        ("level", "growth", (0.747, 0.816), (1.10, 0.40), ("volatile", "calm")),
        ("level", "return", (-1.0, 0.8), (2.0, 0.7), ("falling, volatile", "rising, calm")),
        ("level", "return", (1.0, 4.0), (1.0, 1.0), ("low", "high")),
        ("level", "y", (0.0, 0.1), (1.0, 1.1), ("", "")),
        ("counts", "calls", (3.0, 25.0), (1.7, 1.8), ("low", "high")),
        ("local-level", "y", (0.1, 3.0), (1.0, 1.0), ("slow", "fast")),
        ("level", "y", (0.0, 3.0, 6.0), (1.0, 1.0, 1.0), ("low", "middle", "high")),
    ],
)
def test_regimes_are_named_by_what_differs(kind, column, center, deviation, words):
    M = len(center)
    found = SimpleNamespace(
        kind=kind,
        columns=(column,),
        share=np.ones(M),
        center=np.array(center)[:, None],
        center_error=np.full((M, 1), 0.1),
        deviation=np.array(deviation)[:, None],
    )
    assert tuple(words_of(found)) == words
    assert name_of(found, 0) == (f"0 ({words[0]})" if words[0] else "0")


@pytest.mark.parametrize(
    ("labels", "unit"),
    [
        (("2009Q3", "2009Q4"), "quarter"),
        (("2001-01-31", "2001-02-28", "2001-03-31"), "month"),
        (("Jan 2001", "Feb 2001", "Mar 2001"), "month"),
        (("1998", "1999"), "year"),
        (("13/02/2020", "14/02/2020"), "day"),
        (("2020-01-01 00:00", "2020-01-01 01:00"), "hour"),
        (("2001-01-01", "2001-01-03", "2001-02-28", "2001-03-01"), "row"),
        (("3", "4", "5"), "row"),
        (tuple(f"2024-01-{d:02d}" for d in (15, 16, 17, 18, 19, 22, 23, 24, 25, 26)), "trading day"),
    ],
)
def test_the_period_of_rows(labels, unit):
    assert read_times(labels).unit == unit


def test_a_counter_has_the_period_of_its_name():
    assert read_times(("1", "2", "3"), "Quarter").unit == "quarter"
    assert read_times(("a", "b")) is None


@pytest.mark.parametrize(
    ("text", "labels", "said"),
    [
        ("date,y\n2001Q3,3\n2001Q2,2\n2001Q1,1.5\n", ("2001Q1", "2001Q2", "2001Q3"), "newest row came first"),
        ("date,y\n2001Q2,2\n2001Q1,1.5\n2001Q3,3\n", ("2001Q1", "2001Q2", "2001Q3"), "they were sorted"),
        (
            "1/31/2020,3\n12/31/2019,2\n11/30/2019,1.5\n",
            ("11/30/2019", "12/31/2019", "1/31/2020"),
            "first line holds",
        ),
        (
            "year,quarter,y\n2001.0,1.0,1.5\n2001.0,2.0,2\n2001.0,3.0,3\n",
            ("2001Q1", "2001Q2", "2001Q3"),
            "'year' and 'quarter'",
        ),
        ("t,y\n2001.0,1.5\n2002.0,2\n2003.0,3\n", ("2001", "2002", "2003"), "'t'"),
        ('date,y\n2001,"1.5"\n2002,$2\n2003,3 %\n', ("2001", "2002", "2003"), "'date'"),
    ],
)
def test_rows_in_order_of_time_whatever_the_file(file, text, labels, said):
    found = read_series(file(text), None, None)
    assert found.labels == labels
    np.testing.assert_array_equal(found.values[:, 0], [1.5, 2.0, 3.0])
    assert said in " ".join(found.chosen)


def test_thousands_in_quotes(file):
    found = read_series(file('d,y\n2001,"1,234.50"\n2002,"-12,345"\n2003,7\n'), None, None)
    np.testing.assert_array_equal(found.values[:, 0], [1234.5, -12345.0, 7.0])


def test_marked_rows_are_not_modelled(file):
    found = read_series(file("d,y,rec\n2001,1,0\n2002,2,1\n2003,7,0\n"), None, None, "rec")
    assert found.columns == ("y",)
    assert found.marked.tolist() == [False, True, False]


def test_what_is_said_of_residuals_stands_by_the_forecast(tmp_path):
    found = replace(make_regimes(columns=("y",)), tests=({"Ljung–Box, 8 lags": (50.0, 0.0)},), unit="quarter")
    html = write_regimes(found, tmp_path)[0].read_text("utf-8")
    section = html[html.index("What comes next</h2>") : html.index("Diagnostics</h2>")]
    assert "and so its forecast, misses" in section
    assert "Such a spell has no end in these data; this one has lasted 13." in html


def test_the_most_tried_is_said():
    fits = {k: SimpleNamespace(status=None) for k in (1, 2)}
    given = np.array([1.0, 0.0])
    found = Comparison((1, 2), -given, given, given, np.array([2, 6]), -given, {}, fits)
    assert "2 was the most tried: more may be better" in found.said


def test_columns_of_marks_are_not_modelled_beside_others(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{x:.3f},{int(x < 0)}" for x in rng.normal(size=30)]
    path = tmp_path / "series.csv"
    path.write_text("growth,recession\n" + "\n".join(rows))
    series = read_series(path, None, None)
    assert series.columns == ("growth",)
    assert "'recession', which holds only 0 and 1 (--shade recession marks its rows)" in series.chosen[-1]
    assert read_series(path, ["growth", "recession"], None).columns == ("growth", "recession")
    path.write_text("up\n" + "\n".join(str(k // 5 % 2) for k in range(30)))
    assert read_series(path, None, None).columns == ("up",)


def test_a_column_that_another_tells_but_for_rounding_is_named(tmp_path):
    y = np.random.default_rng(0).normal(size=60)
    path = tmp_path / "series.csv"
    path.write_text("a,b\n" + "\n".join(f"{x:.3f},{2 * x + 1:.9f}" for x in y))
    with pytest.raises(ValueError, match=r"column 'b' is a combination of \['a'\] and a constant"):
        find_regimes(path)


def test_several_columns_name_the_one_that_tells_regimes_apart():
    found = make_regimes(rows=40)
    center = found.center.copy()
    center[:, 0], center[:, 1] = 1.0, [30.0, 20.0, 10.0]
    told = replace(found, center=center, index=None)
    assert [word.split(",")[0] for word in words_of(told)] == ["volume high", "volume middle", "volume low"]
    assert f"since row {found.labels[27][:4]}" in now(told)
