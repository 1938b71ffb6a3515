"""Vector autoregressions that switch: against least squares, enumeration of all regimes, and drawn paths."""

import itertools

import numpy as np
import pytest

from exptilt.switching import FitStatus, markov_autoregression, markov_regression, markov_var
from exptilt.switching.learning.named import name_parameters
from exptilt.switching.regression.hidden_chain import Modes
from exptilt.switching.regression.vector import LEVELS, _objective, divided_levels, fit_levels

A = np.array([[[0.5, 0.1], [0.0, 0.4]], [[0.2, -0.3], [0.3, 0.5]]])
LEVEL = np.array([[0.0, 0.5], [2.0, -1.0]])
NOISE = np.array([[[1.0, 0.4], [0.4, 0.5]], [[2.0, -0.3], [-0.3, 1.5]]])


def _series(T=160, m=2, seed=0):
    """Two regimes in turn, with an intercept, a lag and a covariance each."""
    rng, y = np.random.default_rng(seed), np.zeros((T, 2))
    for t in range(1, T):
        s = (t // 30) % 2
        y[t] = LEVEL[s] + A[s] @ y[t - 1] + np.linalg.cholesky(NOISE[s]) @ rng.normal(size=2)
    return y[:, :m]


def _log_density(e, cov):
    return -0.5 * (e @ np.linalg.solve(cov, e) + np.log(np.linalg.det(2 * np.pi * cov)))


@pytest.mark.parametrize("level", ["intercept", "mean"])
def test_likelihood_is_the_sum_over_all_regimes(level):
    y, order, P = _series(7), 2, np.array([[0.8, 0.2], [0.3, 0.7]])
    lags = np.stack([A, 0.3 * A[::-1]], 1)
    fixed = {"transition": P, level: LEVEL, "autoregression": lags, "covariance": NOISE}
    fit = markov_var(y, order=order, switching=(level, "autoregression", "covariance"), fixed=fixed)
    first, terms = np.array([0.6, 0.4]), []  # the stationary law of P
    begin = 0 if level == "mean" else order
    for path in itertools.product((0, 1), repeat=len(y) - begin):
        s = dict(zip(range(begin, len(y)), path, strict=True))
        log = np.log(first[path[0]]) + sum(np.log(P[i, j]) for i, j in itertools.pairwise(path))
        for t in range(order, len(y)):
            mean = LEVEL[s[t]].copy()
            for k in (1, 2):
                mean += lags[s[t], k - 1] @ (y[t - k] - (LEVEL[s[t - k]] if level == "mean" else 0.0))
            log += _log_density(y[t] - mean, NOISE[s[t]])
        terms.append(log)
    assert fit.log_likelihood == pytest.approx(np.logaddexp.reduce(terms), abs=1e-10)
    again = fit.model.filter(fit.y, inputs=fit.inputs)
    assert again.log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-10)


@pytest.mark.parametrize("level", ["intercept", "mean"])
def test_slopes_are_differences(level):
    y, rng = _series(30), np.random.default_rng(1)
    values = {"transition": np.array([[0.8, 0.2], [0.3, 0.7]]), level: LEVEL}
    values |= {"autoregression": A[:, None], "covariance": NOISE}
    names, lean = frozenset(values) - {"transition"}, {("intercept", "autoregression"): y.mean(0)}
    named = name_parameters("test", values, names, {}, None, (), {}, {}, lean)
    modes = Modes.of(2, int(level == "mean"), 1)
    evaluate = _objective(modes, y[1:], y[:-1], named, (level, "covariance"))
    theta = 0.1 * rng.normal(size=named.free.size)
    slope = [(evaluate(theta + h)[0] - evaluate(theta - h)[0]) / 2e-5 for h in 1e-5 * np.eye(len(theta))]
    np.testing.assert_allclose(evaluate(theta)[1], slope, atol=1e-5)


@pytest.mark.parametrize("level", ["intercept", "mean"])
def test_one_regime_is_least_squares(level):
    y = _series()
    fit = markov_var(y, order=2, regimes=1, switching=level)
    X = np.concatenate([np.ones((158, 1)), y[1:-1], y[:-2]], 1)
    B = np.linalg.lstsq(X, y[2:], rcond=None)[0]
    e = y[2:] - X @ B
    cov = e.T @ e / len(e)
    total = sum(_log_density(row, cov) for row in e)
    assert fit.log_likelihood == pytest.approx(total, abs=1e-8)
    found, errors = fit.estimates["autoregression"][0], fit.standard_errors["autoregression"][0]
    np.testing.assert_allclose(found, B[1:].reshape(2, 2, 2).mT, atol=1e-5)
    want = np.sqrt(np.outer(np.linalg.inv(X.T @ X).diagonal()[1:], cov.diagonal())).reshape(2, 2, 2).mT
    np.testing.assert_allclose(errors, want, rtol=1e-3)
    np.testing.assert_allclose(fit.estimates["covariance"][0], cov, atol=1e-4)


def test_one_series_is_markov_autoregression():
    y = _series(m=1)[:, 0]
    one = markov_var(y, order=2, switching=("mean", "covariance"), starts=4)
    other = markov_autoregression(y, order=2, switching=("intercept", "deviation"), starts=4)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(one.estimates["mean"][:, 0], other.estimates["intercept"], atol=1e-3)
    np.testing.assert_allclose(
        one.standard_errors["autoregression"][:, :, 0, 0], other.standard_errors["autoregression"], rtol=1e-2
    )
    np.testing.assert_allclose(one.impulse_response(4), other.impulse_response(4), atol=1e-3)


def test_units_and_origin_change_nothing():
    y = _series()
    plain = markov_var(y, switching=("intercept", "autoregression"), starts=1)
    other = markov_var(y * [1e6, 1e-3] + [1e9, 1.0], switching=("intercept", "autoregression"), starts=1)
    assert plain.status is other.status is FitStatus.CONVERGED
    assert other.log_likelihood + 159 * np.log(1e3) == pytest.approx(plain.log_likelihood, abs=1e-4)
    ratio = np.array([[1.0, 1e9], [1e-9, 1.0]])
    np.testing.assert_allclose(
        other.estimates["autoregression"] / ratio, plain.estimates["autoregression"], atol=1e-3
    )


def test_responses_to_shocks():
    """Averaged over drawn regimes, as powers of one regime, and scaled as was asked."""
    y, P = _series(40), np.array([[0.6, 0.4], [0.1, 0.9]])
    lags = np.stack([A, 0.3 * A[::-1]], 1)
    fixed = {"transition": P, "intercept": LEVEL, "autoregression": lags, "covariance": NOISE}
    fit = markov_var(y, order=2, switching=("intercept", "autoregression", "covariance"), fixed=fixed)
    got, rng, N = fit.impulse_response(3, shock=np.eye(2)), np.random.default_rng(0), 40_000
    for first in (0, 1):
        s, x = np.full(N, first), np.zeros((N, 2, 2))
        x[:, 0, 1] = 1.0  # the second component is hit
        np.testing.assert_allclose(got[first, 0], np.eye(2))
        for k in (1, 2, 3):
            s = (rng.random(N) > P[s, 0]).astype(int)
            x = np.stack([np.einsum("noab,nob->na", lags[s], x), x[:, 0]], 1)
            np.testing.assert_allclose(got[first, k, :, 1], x[:, 0].mean(0), atol=0.01)
    lasting = fit.impulse_response(2, stay=True)
    root = np.linalg.cholesky(NOISE)
    np.testing.assert_allclose(lasting[:, 1], A @ root, atol=1e-12)
    np.testing.assert_allclose(lasting[:, 2], (A @ A + lags[:, 1]) @ root, atol=1e-12)
    jointly = fit.impulse_response(1, shock="generalised")[:, 0]
    deviation = np.sqrt(np.diagonal(NOISE, axis1=1, axis2=2))
    np.testing.assert_allclose(jointly * deviation[:, None], NOISE)


def test_futures_of_one_regime():
    """The mean goes to the level by the factor of the lag, the spread is that of the sum."""
    y = np.array([0.3, 1.0, 4.0])
    values = {"intercept": 1.0, "autoregression": 0.5, "covariance": 0.04}
    fit = markov_var(y, regimes=1, switching=(), fixed={k: np.full((1, 1), v) for k, v in values.items()})
    regimes, drawn = fit.future_paths(3, draws=20_000)
    np.testing.assert_allclose(drawn[..., 0].mean(0), [3.0, 2.5, 2.25], atol=0.01)
    np.testing.assert_allclose(drawn[..., 0].var(0), 0.04 * np.cumsum([1, 0.25, 0.0625]), rtol=0.05)
    assert not regimes.any()


def test_levels_on_the_hidden_chain():
    """One column: the likelihood of `markov_regression`; two with gaps: that of the filter."""
    rng = np.random.default_rng(0)
    y = np.where((np.arange(80) // 20) % 2, 3.0, 0.0)[:, None] + rng.normal(size=(80, 2))
    one = fit_levels(y[:, :1], 2, 2, 0)
    other = markov_regression(y[:, 0], switching=("intercept", "deviation"), starts=2)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(
        one.standard_errors["observation_offset"][:, 0], other.standard_errors["intercept"], rtol=1e-3
    )
    y[3, 0] = y[5, 1] = np.nan
    y[7] = np.nan
    fit = fit_levels(y, 2, 1, 0)
    assert fit.status is FitStatus.CONVERGED
    assert fit.log_likelihood == pytest.approx(fit.model.filter(y).log_likelihood, abs=1e-8)
    values = {"transition": fit.estimates["transition"], **divided_levels(y, np.nanstd(y, 0), 2)}
    names = frozenset(("observation_offset", "observation_noise"))
    named = name_parameters("test", values, names, {}, None, (), {}, {})
    evaluate, theta = (
        _objective(Modes.of(2, 0, 1), y, None, named, LEVELS),
        0.3 * rng.normal(size=named.free.size),
    )
    steps = 1e-5 * np.eye(len(theta))
    slope = [(evaluate(theta + h)[0] - evaluate(theta - h)[0]) / 2e-5 for h in steps]
    np.testing.assert_allclose(evaluate(theta)[1], slope, atol=1e-6)
