"""The page of a series that switches regime: its numbers, its table, and names that try to break out."""

import csv
import re
import warnings

import numpy as np
import pytest

from exptilt._support.errors import ArgumentError
from exptilt.report.regimes import text, write_regimes
from exptilt.report.regimes.page import probabilities
from exptilt.report.regimes.series import read_series
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
    assert html.count("<svg") == 3
    assert {"level": "variance[regime_t]", "local-level": "pace[regime_t]²"}[kind] in html
    assert "n/a" in html  # the standard error that is not known
    assert "∞" in html  # the regime that never ends


def test_names_from_the_file_stay_text(tmp_path):
    found = make_regimes(columns=(HOSTILE, "\x1b[2J\u202e"))
    html = write_regimes(found, tmp_path)[0].read_text("utf-8")
    assert html.count("<script>") == 1
    assert "window.bad=1" in html
    said = text(found)
    assert HOSTILE in said
    assert "␛[2J⟨U+202E⟩" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", said)


@pytest.mark.parametrize("name", ["US$ per A$", r"$\frac$", "a_b^c", "%"])
def test_names_are_no_formulas(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html = write_regimes(make_regimes(columns=(name, "b")), tmp_path)[0].read_text("utf-8")
    plain = write_regimes(make_regimes(columns=("n" * len(name), "b")), tmp_path)[0].read_text("utf-8")
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


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("a,b\n1,2\n\n\n3,x\n", ["b"], "line 5 of column 'b' holds 'x'"),
        ('a,b\n"1\n",2\n3\n', ["b"], "line 4 has 1 cells"),
        ("a,a\n1,2\n3,4\n", None, "has 2 columns called 'a'"),
        ("a,a\n1,2\n3,4\n", ["a"], "has 2 columns called 'a'"),
        ("a\n1\n", None, "has 1 observed values"),
    ],
)
def test_series_that_are_refused(file, content, columns, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        read_series(file(content), columns, None)
