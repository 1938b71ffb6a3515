"""Walking forward sees no future; comparisons of numbers of regimes."""

import numpy as np
import pandas as pd
import pytest

from exptilt.switching import compare, local_level
from oracles.level_regimes import HELD, level_model


def regimes(T=120):
    rng = np.random.default_rng(0)
    regime = (np.arange(T) // 20) % 2
    return np.where(regime, 5.0, 0.0) + rng.normal(size=T), regime


@pytest.mark.parametrize("method", ["em", pytest.param("mle", marks=pytest.mark.slow)])
def test_a_changed_future_changes_nothing_before_it(method):
    y, regime = regimes()
    start = level_model((-1.0, 4.0))
    options = {"fixed": HELD, "method": method, "max_steps": 30}
    walk = start.walk_forward(y, first=60, every=15, options=options)
    assert walk.fits == (60, 75, 90, 105)
    assert np.isnan(walk.mode_probability[:60]).all()
    for cut in (61, 80, 105):
        other = y.copy()
        other[cut:] = 100 * np.sin(np.arange(120 - cut))
        again = start.walk_forward(other, first=60, every=15, options=options)
        for name in ("mode_probability", "predicted_mode_probability", "mean", "lower", "upper", "log_score"):
            np.testing.assert_array_equal(getattr(again, name)[60:cut], getattr(walk, name)[60:cut])
        # what is predicted for the first changed step was known before it
        np.testing.assert_array_equal(again.mean[cut], walk.mean[cut])
        assert again.log_score[cut] != walk.log_score[cut]
    assert ((walk.mode_probability[60:, 1] > 0.5) == regime[60:]).mean() > 0.9
    assert (walk.lower[60:] < walk.mean[60:]).all()
    assert 0.8 < ((walk.lower < y[:, None]) & (y[:, None] < walk.upper))[60:].mean() <= 1


def test_every_stretch_is_a_fit_of_its_past():
    y, _ = regimes()
    table = pd.DataFrame({"x": y}, index=pd.date_range("2001-01-01", periods=120))
    start = level_model((-1.0, 4.0))
    options = {"fixed": HELD, "max_steps": 20}
    walk = start.walk_forward(table, first=80, every=40, options=options)
    fitted = start.fit(y[:80], fixed=HELD, max_steps=20)
    post = fitted.model.filter(y)
    np.testing.assert_allclose(walk.mode_probability.iloc[80:], post.mode_probability[80:])
    np.testing.assert_allclose(walk.log_score.iloc[80:], post.log_likelihood_terms[80:])
    assert walk.mean.columns.tolist() == ["x"]
    assert walk.mean_log_score == pytest.approx(post.log_likelihood_terms[80:].mean())


def test_two_regimes_are_found_to_be_two():
    y, _ = regimes()
    found = compare(y, modes=(1, 2, 3), starts=2)
    assert found.best["bic"] == 2
    assert found.best["log_score"] >= 2
    frame = found.to_frame()
    assert list(frame.index) == [1, 2, 3]
    # one regime: the normal law with its own mean and variance
    T, s2 = len(y), y.var()
    assert frame.loc[1, "log_likelihood"] == pytest.approx(-0.5 * T * (np.log(2 * np.pi * s2) + 1), abs=1e-6)
    terms = []
    for begin, end in ((72, 84), (84, 96), (96, 108), (108, 120)):
        mean, var = y[:begin].mean(), y[:begin].var()
        terms.append(-0.5 * (np.log(2 * np.pi * var) + (y[begin:end] - mean) ** 2 / var))
    assert frame.loc[1, "log_score"] == pytest.approx(np.concatenate(terms).mean(), abs=1e-5)
    assert "best: " in str(found)
    assert "2 by BIC" in str(found)


def test_any_function_that_fits_may_be_compared():
    y, _ = regimes(60)
    found = compare(y, modes=(1, 2), kind=lambda part, k: local_level(part, regimes=k, starts=1), folds=0)
    assert found.log_likelihood[1] > found.log_likelihood[0]
    assert np.isnan(found.log_score).all()
