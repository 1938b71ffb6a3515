"""What results show of themselves in a notebook, and the notebook of the examples, executed."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.plotting import html_curves, html_squares, html_table
from exptilt.switching import SwitchingLinearGaussian


def parsed(text):
    return ElementTree.fromstring(f"<div>{text}</div>")


def cells(text):
    return [[cell.text for cell in row] for row in parsed(text).iter("tr")]


def test_text_of_strangers_is_escaped():
    rows = cells(html_table(["<b>"], [["<script>"], [0.123456]], "a & b"))
    assert rows == [["<b>"], ["<script>"], ["0.1235"]]


def test_curves_span_the_picture_and_say_their_range():
    picture = parsed(html_curves(np.array([[0.0, 1.0], [np.nan, 3.0], [2.0, -1.0]]), "curves"))
    lines = [line.attrib["points"].split() for line in picture.iter("polyline")]
    assert [len(line) for line in lines] == [2, 3]
    heights = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert heights[1] == [36.0, 4.0, 68.0]  # the largest is on top
    assert "from -1 to 3" in picture.find(".//title").text
    assert (
        html_curves(np.ones((1, 2)), "one place") == html_curves(np.full((3, 1), np.nan), "no number") == ""
    )
    assert (
        len(
            next(parsed(html_curves(np.arange(5000.0)[:, None], "")).iter("polyline"))
            .attrib["points"]
            .split()
        )
        == 200
    )


def test_squares_are_where_the_weights_are():
    drawn = list(parsed(html_squares(np.array([[1.0, 0.0], [0.25, 0.75]]), "two")).iter("rect"))
    assert [(r.attrib["x"], r.attrib["y"], r.attrib["fill-opacity"]) for r in drawn] == [
        ("0.00", "0.00", "1.00"),
        ("0.00", "72.00", "0.50"),
        ("72.00", "72.00", "0.87"),
    ]


def test_attend_shows_itself():
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = xt.attend(q, k, v)
    rows = dict(cells(a._repr_html_())[1:])
    assert rows["output"].startswith("(1, 2, 6, 4) float64, ")
    assert {"log_normalizer", "entropy", "score_max"} <= rows.keys()
    assert f"{a.entropy.mean((0, 1)).max():.4g}" in a._repr_html_()
    seen = []
    torch.func.vmap(lambda q: seen.append(xt.attend(q, k, v)._repr_html_()) or q)(q[None])
    assert "polyline" not in seen[0]


@pytest.fixture(scope="module")
def model():
    return SwitchingLinearGaussian(
        transition=[[0.95, 0.05], [0.10, 0.90]],
        dynamics=[[1.0]],
        process_noise=[[[0.01]], [[1.0]]],
        observation=[[1.0]],
        observation_noise=[[0.1]],
        initial_mean=[0.0],
        initial_covariance=[[1.0]],
        initial_probability=[0.5, 0.5],
        start="first",
    )


def test_filters_and_fits_show_themselves(model):
    y = model.sample(60, generator=torch.Generator().manual_seed(0)).y
    post = model.filter(y)
    rows = cells(post._repr_html_())
    assert [row[0] for row in rows[1:]] == ["mode 0", "mode 1"]
    assert float(rows[1][1]) == pytest.approx(post.mode_probability[:, 0].mean(), rel=1e-3)
    assert float(rows[2][2]) == pytest.approx(post.mode_probability[-1, 1], rel=1e-3)
    assert len(re.findall("<polyline", post._repr_html_())) == 2
    assert "polyline" not in model.filter(y, store="last")._repr_html_()
    assert len(re.findall("<polyline", model.smooth(np.stack([y, y]))._repr_html_())) == 2
    fit = model.fit(y, method="mle", fixed=("dynamics", "observation", "observation_noise"), max_steps=3)
    shown = fit._repr_html_()
    assert fit.summary().to_html() in shown
    assert len(re.findall("<polyline", shown)) == 2
