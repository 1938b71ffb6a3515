"""Intervals of a summary: on a scale where they are nearly normal, and within the bounds of the parameter."""

import numpy as np
import pytest

from exptilt.switching import markov_regression


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
