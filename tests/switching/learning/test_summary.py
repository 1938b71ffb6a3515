"""Intervals of a summary: on a scale where they are nearly normal, and within the bounds of the parameter."""

import numpy as np
import pytest

from exptilt.switching import markov_regression
from exptilt.switching.learning.summary import interval


@pytest.mark.parametrize(
    ("value", "low", "high", "onto"),
    [
        (3.0, -np.inf, np.inf, lambda x: x),
        (0.2, 0.0, np.inf, np.log),
        (2.5, 1.0, np.inf, lambda x: np.log(x - 1)),
        (0.97, 0.0, 1.0, lambda x: np.log(x / (1 - x))),
        (0.3, 0.1, 0.5, lambda x: np.log((x - 0.1) / (0.5 - x))),
    ],
)
def test_intervals_are_symmetric_on_their_scale(value, low, high, onto):
    """The half-width there is `reach` times the derivative of the scale."""
    reach = 0.05
    ends = interval(value, reach, low, high)
    slope = (onto(value + 1e-6) - onto(value - 1e-6)) / 2e-6
    np.testing.assert_allclose(
        [onto(end) - onto(value) for end in ends], [-slope * reach, slope * reach], rtol=1e-6
    )
    assert low < ends[0] < value < ends[1] < high


def test_a_summary_keeps_to_bounds():
    rng = np.random.default_rng(0)
    y = np.where((np.arange(60) // 30) % 2, 4.0, 0.0) + rng.normal(size=60) * 0.5
    table = markov_regression(y, switching=("intercept", "deviation"), starts=1).summary().to_frame()
    chances = table.loc[[name for name in table.index if name.startswith("transition")]]
    assert ((chances["low"] > 0) & (chances["high"] < 1)).all()
    row = table.loc["deviation[0]"]
    assert row["low"] * row["high"] == pytest.approx(row["estimate"] ** 2)
    level = table.loc["intercept[0]"]
    assert level["low"] + level["high"] == pytest.approx(2 * level["estimate"])
