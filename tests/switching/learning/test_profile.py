"""Intervals by profile likelihood: their ends against refits, and Student's own with one regime."""

import numpy as np
import pytest
from scipy import stats

from exptilt.switching import markov_autoregression, markov_regression

NAN = np.nan


@pytest.fixture(scope="module")
def fitted():
    rng, y, carried = np.random.default_rng(3), np.zeros(160), 0.0
    regime = (np.arange(160) // 20) % 2
    for t in range(160):
        carried = 0.5 * carried + (1.0, 1.6)[regime[t]] * rng.normal()
        y[t] = (0.0, 3.0)[regime[t]] + carried
    options = {"order": 1, "switching": ("intercept", "deviation"), "starts": 1}
    return y, options, markov_autoregression(y, **options)


@pytest.mark.parametrize(
    ("name", "part", "held"),
    [
        ("intercept[1]", "intercept", lambda end: [NAN, end]),
        ("deviation[0]", "deviation", lambda end: [end, NAN]),
        ("transition[1, 1]", "transition", lambda end: [[NAN, NAN], [1 - end, end]]),
        ("autoregression[0]", "autoregression", lambda end: [[end], [end]]),
    ],
)
def test_the_likelihood_has_fallen_by_the_quantile_at_both_ends(fitted, name, part, held):
    y, options, fit = fitted
    left = fit.observations - fit.free_parameters + 2  # two deviations
    quantile = fit.observations * np.log1p(stats.t.ppf(0.975, left) ** 2 / left)
    row = fit.summary().to_frame().loc[name]
    for end in (row["low"], row["high"]):
        again = markov_autoregression(y, **options, fixed={part: held(end)})
        assert 2 * (fit.log_likelihood - again.log_likelihood) == pytest.approx(quantile, rel=2e-3)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_one_regime_has_students_intervals(level):
    rng = np.random.default_rng(0)
    x = rng.normal(size=25)
    y = 1.0 + 2.0 * x + rng.normal(size=25)
    table = markov_regression(y, x, regimes=1).summary(level=level).to_frame()
    known = stats.linregress(x, y)
    reach = stats.t.ppf((1 + level) / 2, 23) * known.stderr
    row = table.loc["coefficients[0]"]
    np.testing.assert_allclose(
        [row["low"], row["high"]], [known.slope - reach, known.slope + reach], rtol=1e-4
    )


def test_an_end_that_one_large_climb_does_not_find_is_not_taken_from_curvature():
    rng, s, y = np.random.default_rng(137), 0, []
    for _ in range(60):
        s = s if rng.random() < 0.9 else 1 - s
        y.append(1.5 * s + rng.normal() * (1 + 0.5 * s))
    options = {"switching": ("intercept", "deviation"), "starts": 3}
    fit = markov_regression(np.array(y), **options)
    quantile = 60 * np.log1p(stats.t.ppf(0.975, 56) ** 2 / 56)
    end = fit.summary().to_frame().loc["deviation[0]", "low"]
    again = markov_regression(np.array(y), **options, fixed={"deviation": [end, NAN]})
    assert 2 * (fit.log_likelihood - again.log_likelihood) == pytest.approx(quantile, rel=1e-2)
