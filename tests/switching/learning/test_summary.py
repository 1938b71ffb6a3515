"""Intervals of a summary keep within the bounds of the parameter."""

import numpy as np

from exptilt.switching import markov_regression


def test_a_summary_keeps_to_bounds():
    rng = np.random.default_rng(0)
    y = np.where((np.arange(60) // 30) % 2, 4.0, 0.0) + rng.normal(size=60) * 0.5
    summary = markov_regression(y, switching=("intercept", "deviation"), starts=1).summary
    table, narrow = summary().to_frame(), summary(level=0.5).to_frame()
    chances = table.loc[[name for name in table.index if name.startswith("transition")]]
    assert ((chances["low"] > 0) & (chances["high"] < 1)).all()
    assert ((table["low"] < narrow["low"]) & (narrow["low"] < table["estimate"])).all()
    assert ((table["high"] > narrow["high"]) & (narrow["high"] > table["estimate"])).all()
