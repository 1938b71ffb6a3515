"""Structural models: with one regime those of statsmodels, with several what the filter says; Lam's model."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from exptilt.switching import (
    FitStatus,
    dynamic_factor,
    local_level,
    local_linear_trend,
    time_varying_regression,
    unobserved_cycle,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # statsmodels says much
DATA = Path(__file__).resolve().parents[1] / "data"


def walk(T=60):
    rng = np.random.default_rng(0)
    y = np.cumsum(rng.normal(size=T)) + rng.normal(size=T)
    y[7] = np.nan
    return y


@pytest.mark.parametrize(
    ("call", "spec", "names", "point"),
    [
        (local_level, {"level": "llevel"}, ("irregular", "level"), (0.7, 1.3)),
        (local_linear_trend, {"level": "lltrend"}, ("irregular", "level", "slope"), (0.7, 1.3, 0.02)),
        (
            unobserved_cycle,
            {"level": "llevel", "cycle": True, "stochastic_cycle": True, "damped_cycle": True},
            ("irregular", "level", "cycle", "frequency", "damping"),
            (0.7, 1.3, 0.4, 0.6, 0.9),
        ),
    ],
)
def test_one_regime_is_the_model_of_statsmodels(call, spec, names, point):
    """A cycle that damps out starts from its stationary law here; there it has to be told to."""
    from statsmodels.tsa.statespace.initialization import Initialization
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    y = walk()
    want = UnobservedComponents(y, use_exact_diffuse=True, cycle_period_bounds=(2.5, 50.0), **spec)
    if call is unobserved_cycle:
        law = Initialization(3)
        law.set(0, "diffuse")
        law.set((1, 3), "stationary")
        want.ssm.initialize(law)
    still = {"drift": 0.0} if call is unobserved_cycle else {}
    held = dict(zip(names, point, strict=True)) | still
    fit = call(y, regimes=1, fixed=held)
    assert fit.log_likelihood == pytest.approx(want.loglike(point), abs=1e-7)
    assert fit.free_parameters == 0
    best = call(y, regimes=1, fixed=still, starts=2)
    theirs = want.fit(disp=False)
    assert best.log_likelihood >= theirs.llf - 1e-4
    found = [float(best.estimates[name][0]) for name in names]
    assert want.loglike(found) == pytest.approx(best.log_likelihood, abs=1e-6)
    assert best.free_parameters == len(names)


def test_an_autoregressive_cycle_is_that_of_statsmodels():
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    y = walk()
    options = {"level": True, "stochastic_level": True, "trend": True, "irregular": True}
    want = UnobservedComponents(y, autoregressive=2, use_exact_diffuse=True, **options)
    held = {"irregular": 0.5, "level": 0.7, "cycle": 0.4, "autoregression": [0.5, 0.2]}
    fit = unobserved_cycle(y, order=2, regimes=1, fixed=held)
    assert fit.free_parameters == 1
    # their drift is a diffuse state: its estimate is ours
    names = {"sigma2.irregular": 0.5, "sigma2.level": 0.7, "sigma2.ar": 0.4, "ar.L1": 0.5, "ar.L2": 0.2}
    state = want.smooth([names[name] for name in want.param_names]).smoothed_state[1, -1]
    assert fit.estimates["drift"][0] == pytest.approx(state, abs=1e-5)


@pytest.mark.parametrize("error_order", [0, 1])
def test_one_factor_is_that_of_statsmodels(error_order):
    from statsmodels.tsa.statespace.dynamic_factor import DynamicFactor

    rng = np.random.default_rng(1)
    f = np.zeros(80)
    for t in range(2, 80):
        f[t] = 0.6 * f[t - 1] + 0.2 * f[t - 2] + rng.normal()
    y = f[:, None] * [1.0, -0.5, 0.8] + rng.normal(size=(80, 3))
    want = DynamicFactor(y, k_factors=1, factor_order=2, error_order=error_order)
    load, error, phi = [0.9, -0.4, 0.7], [1.1, 0.8, 0.9], [0.5, 0.1]
    held = {"loading": load, "error": error, "autoregression": phi}
    point = [*load, *error, *phi]
    if error_order:
        held["error_autoregression"] = np.array([[0.3], [-0.2], [0.1]])
        point += [0.3, -0.2, 0.1]
    options = {"order": 2, "error_order": error_order, "regimes": 1}
    fit = dynamic_factor(y, fixed=held, **options)
    assert fit.log_likelihood == pytest.approx(want.loglike(point), abs=1e-7)
    if not error_order:
        best = dynamic_factor(y, starts=1, **options)
        assert best.log_likelihood >= want.fit(disp=False).llf - 1e-4
        assert best.estimates["loading"][0, 0] > 0


@pytest.mark.slow
def test_lams_model_of_the_level_of_output():
    """Kim (1994): a trend whose drift switches and an autoregressive cycle around it, from the level of GNP.

    The published likelihood is that of differences after 22 steps; a diffuse level says the same.
    """
    reference = json.loads((DATA / "reference_lam_gnp.json").read_text())
    y = 100 * np.log(np.array(reference["level"][:152]))
    y = pd.Series(y, index=pd.period_range("1947Q1", periods=152, freq="Q"))
    held = {
        "irregular": 0.0,
        "level": 0.0,
        "autoregression": reference["phi"],
        "cycle": reference["sigma"] ** 2,
        "drift": reference["offset"],
        "transition": reference["transition"],
    }
    fit = unobserved_cycle(y, order=2, fixed=held)
    terms = fit.model.filter(y).log_likelihood_terms
    assert terms.iloc[-129:].sum() == pytest.approx(reference["log_likelihood"], abs=1e-5)
    cycle = fit.model.filter(y).mean["state 1"].iloc[-129:]
    np.testing.assert_allclose(cycle, reference["cycle"], atol=1e-3)
    assert fit.regime_probability().index[0] == pd.Period("1947Q1")
    free = {"irregular": 0.0, "level": 0.0}
    best = unobserved_cycle(y, order=2, fixed=free, starts=2)
    assert best.log_likelihood >= fit.log_likelihood
    assert best.estimates["drift"][0] < best.estimates["drift"][1]
    assert "drift[1]" in best.summary()


def test_what_switches_and_what_is_tied():
    rng = np.random.default_rng(0)
    regime = (np.arange(150) // 50) % 2
    y = np.cumsum(rng.normal(size=150) * np.where(regime, 3.0, 0.3)) + 0.1 * rng.normal(size=150)
    fit = local_level(y, starts=1)
    calm, wild = fit.estimates["level"]
    assert 0.02 < calm < 0.5 < 4 < wild < 20
    assert fit.estimates["irregular"][0] == fit.estimates["irregular"][1]
    assert fit.free_parameters == 2 + 2 + 1
    assert ((fit.regime_probability()[:, 1] > 0.5) == regime).mean() > 0.9
    assert fit.model.filter(y).log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-8)
    tied = local_level(y, starts=1, constraints="level[1] = 9 * level[0]", fixed={"irregular": 0.01})
    assert tied.estimates["level"][1] == pytest.approx(9 * tied.estimates["level"][0])
    assert tied.free_parameters == 2 + 1
    both = local_linear_trend(y, switching=("level", "slope"), starts=1)
    assert both.log_likelihood > local_linear_trend(y, regimes=1, starts=1).log_likelihood


def test_a_factor_whose_mean_switches():
    rng = np.random.default_rng(0)
    regime = (np.arange(120) // 30) % 2
    f = np.zeros(120)
    for t in range(120):
        f[t] = 0.3 * f[t - 1] + (2.0 if regime[t] else -2.0) + rng.normal()
    y = f[:, None] * [1.0, 0.7, 1.2] + rng.normal(size=(120, 3))
    fit = dynamic_factor(y - y.mean(0), starts=1)
    assert fit.estimates["mean"][0] < 0 < fit.estimates["mean"][1]
    assert ((fit.regime_probability()[:, 1] > 0.5) == regime).mean() > 0.95
    assert fit.estimates["factor"].tolist() == [1.0, 1.0]


def _walks(T=40):
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(T), rng.normal(size=T)], 1)
    y = (x * np.cumsum(rng.normal(size=(T, 2)) * [0.1, 0.3], 0)).sum(1) + rng.normal(size=T)
    return y, x


def test_time_varying_regression_is_generalised_least_squares():
    """One regime: y is Gaussian with the covariance of random walks, their first values integrated out."""
    y, x = _walks()
    R, Q, t = 1.3, (0.2, 0.3), np.arange(len(y))
    fit = time_varying_regression(y, x, regimes=1, fixed={"irregular": R, "coefficients": Q})
    V = R * np.eye(len(y))
    for q, column in zip(Q, x.T, strict=True):
        V += q * np.outer(column, column) * np.minimum.outer(t, t)
    inverse = np.linalg.inv(V)
    A = x.T @ inverse @ x
    e = y - x @ np.linalg.solve(A, x.T @ inverse @ y)
    logs = len(y) * np.log(2 * np.pi) + np.linalg.slogdet(V)[1] + np.linalg.slogdet(A)[1]
    assert fit.log_likelihood == pytest.approx(-0.5 * (logs + e @ inverse @ e), abs=1e-9)
    constant = time_varying_regression(y, x, regimes=1, fixed={"irregular": R, "coefficients": (0, 0)})
    want = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(constant.model.smooth(y).mean, np.tile(want, (len(y), 1)), atol=1e-8)


def test_time_varying_regression_on_a_constant_is_a_local_level():
    y, x = _walks(60)
    held = {"transition": [[0.9, 0.1], [0.2, 0.8]], "irregular": [0.5, 2.0]}
    one = time_varying_regression(y, x[:, 0], fixed=held | {"coefficients": 0.1})
    other = local_level(y, switching="irregular", fixed=held | {"level": 0.1})
    assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-10)
    half = time_varying_regression(y, x, regimes=1, starts=1, fixed={"coefficients": [0.0, np.nan]})
    assert half.free_parameters == 2
    assert half.estimates["coefficients"][0, 0] == 0 < half.estimates["coefficients"][0, 1]


def test_a_factor_that_loads_later_too():
    """A factor that loads with a lag, against a dense joint Gaussian; skipped terms are left out."""
    rng, T, phi = np.random.default_rng(0), 12, 0.6
    y, loading, late, error = rng.normal(size=(T, 2)), np.array([1.0, 0.5]), np.array([0.3, -0.4]), 0.7
    fixed = {"loading": [loading], "lagged_loading": late[:, None], "autoregression": phi, "error": error}
    options = {"loading_lags": 1, "regimes": 1, "switching": ()}
    full, cut = (dynamic_factor(y, fixed=fixed, skip=skip, **options) for skip in (0, 3))
    time = np.arange(T + 1)
    C = phi ** np.abs(np.subtract.outer(time, time)) / (1 - phi**2)  # of f_{−1} … f_{T−1}
    L = np.kron(np.eye(T + 1)[1:], loading[:, None]) + np.kron(np.eye(T + 1)[:-1], late[:, None])

    def log_density(steps):
        V = L[: 2 * steps] @ C @ L[: 2 * steps].T + error * np.eye(2 * steps)
        e = y[:steps].reshape(-1)
        return -0.5 * (len(e) * np.log(2 * np.pi) + np.linalg.slogdet(V)[1] + e @ np.linalg.solve(V, e))

    assert full.log_likelihood == pytest.approx(log_density(T), abs=1e-10)
    assert cut.log_likelihood == pytest.approx(log_density(T) - log_density(3), abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("standard", "published"), [(False, -1280.4266), (True, -2072.8758)])
def test_kim_and_yoos_coincident_index(standard, published):
    """Four series, one factor. They print the likelihood with the initial law one step earlier than here."""
    data = json.loads((DATA / "kim_yoo.json").read_text())
    y = 100 * np.diff(np.log([data[name] for name in ("ip", "gmyxpq", "mtq", "lpnag")])).T
    y = (y - y.mean(0)) / (y.std(0, ddof=1) if standard else 1.0)
    lags = [[0, 0], [0, 0], [0, 0], [np.nan, np.nan]]  # employment alone reacts later too
    tie = "{0}1] = -{0}0] ** 2 / 4"  # roots of their polynomials are double, but for employment
    places = ["autoregression[{}, ", *(f"error_autoregression[{{}}, {a}, " for a in range(3))]
    ties = [tie.format(place.format(r)) for place in places for r in (0, 1)]
    options = {"order": 2, "error_order": 2, "loading_lags": 2, "skip": 1, "starts": 1}
    fit = dynamic_factor(y, **options, fixed={"lagged_loading": lags}, constraints=ties)
    assert fit.status is FitStatus.CONVERGED
    assert fit.log_likelihood == pytest.approx(published, abs=0.01)
    earlier = fit.model.replace(start="before").filter(y).log_likelihood_terms[1:].sum()
    assert earlier == pytest.approx(published, abs=5e-4)
    np.testing.assert_allclose(fit.estimates["mean"], [-1.4416, 0.2378], atol=1e-3)
    np.testing.assert_allclose(fit.estimates["transition"].diagonal(), [0.8341, 0.9720], atol=3e-4)
    np.testing.assert_allclose(fit.estimates["error_autoregression"][0, 3], [0.0196, 0.3216], atol=3e-4)


@pytest.mark.slow
def test_units_of_columns_do_not_move_the_fit_of_a_factor():
    rng = np.random.default_rng(3)
    factor = np.cumsum(rng.normal(size=120)) * 0.1 + np.repeat([-1.0, 1.0, -1.0], 40)
    y = factor[:, None] * [1.0, 0.6, 0.3] + 0.5 * rng.normal(size=(120, 3))
    y = y - y.mean(0)
    units = np.array([1.0, 1e3, 1e-2])
    own, scaled = (dynamic_factor(table, starts=2) for table in (y, y * units))
    apart = len(y) * np.log(units).sum()
    assert scaled.trace[0] == pytest.approx(own.trace[0] - apart, abs=1e-6)
    np.testing.assert_allclose(scaled.restarts, np.array(own.restarts) - apart, atol=1e-4)
    np.testing.assert_allclose(scaled.estimates["loading"], own.estimates["loading"] * units, rtol=1e-3)


@pytest.mark.slow
def test_default_starts_find_the_highest_known_maximum_of_lams_model():
    reference = json.loads((DATA / "reference_lam_gnp.json").read_text())
    y = 100 * np.log(np.array(reference["level"][:152]))
    fit = unobserved_cycle(y, order=2, fixed={"irregular": 0.0, "level": 0.0})
    assert fit.status is FitStatus.CONVERGED
    assert fit.log_likelihood == pytest.approx(-218.3107, abs=1e-3)
    np.testing.assert_allclose(fit.estimates["drift"], [-1.184, 0.963], atol=2e-3)
