"""Where fits end: proper maxima, whatever the units; saddles left, flat and unbounded directions named."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from exptilt.switching import (
    FitStatus,
    SwitchingLinearGaussian,
    fit_named_model,
    fit_parameters,
    local_level,
    markov_autoregression,
    markov_regression,
    markov_var,
    unobserved_cycle,
)
from exptilt.switching.learning.climb import climb, hessian

DATA = Path(__file__).parents[2] / "data"
HAMILTON = json.loads((DATA / "reference_hamilton_growth.json").read_text("utf-8"))


def switching_series(seed, levels, deviations, T, stay=(0.95, 0.9)):
    """A series of two regimes."""
    rng = np.random.default_rng(seed)
    regime = np.zeros(T, dtype=int)
    for t in range(1, T):
        regime[t] = regime[t - 1] if rng.random() < stay[regime[t - 1]] else 1 - regime[t - 1]
    return np.array(levels)[regime] + np.array(deviations)[regime] * rng.normal(size=T)


def level_model(offsets, variances):
    """No state: a level and a variance a regime."""
    return SwitchingLinearGaussian(
        transition=[[0.9, 0.1], [0.1, 0.9]],
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=np.reshape(variances, (2, 1, 1)),
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=[0.5, 0.5],
        observation_offset=np.reshape(offsets, (2, 1)),
        start="first",
    )


NO_STATE = ("dynamics", "process_noise", "observation")


@pytest.mark.parametrize("starts", [1, 5])
def test_hamiltons_series_ends_at_a_maximum(starts):
    """One start ends at the published maximum, the default starts at the higher one of statsmodels."""
    fit = markov_autoregression(HAMILTON["growth"], order=4, switching="intercept", starts=starts)
    want = HAMILTON["published_log_likelihood" if starts == 1 else "higher_maximum_log_likelihood"]
    assert fit.log_likelihood == pytest.approx(want, abs=2e-5)
    assert fit.status is FitStatus.CONVERGED
    assert fit.reason == ""
    assert fit.gradient_norm < 1e-4
    assert (fit.eigenvalues > 0).all()
    assert fit.same_end == sum(abs(end - fit.log_likelihood) < 1e-4 for end in fit.restarts) >= 1
    assert all(np.isfinite(fit.standard_errors[name]).all() for name in ("intercept", "autoregression"))
    assert f"{fit.same_end} of {starts} starts ended here" in fit.summary()


def test_a_saddle_is_left():
    """At 0 the slope vanishes, as every climb that looks at slopes or rises alone would stop there."""

    def evaluate(x):
        value = (x[0] ** 2 - 1) ** 2 + 10 * x[1] ** 2
        return float(value), np.array([4 * x[0] * (x[0] ** 2 - 1), 20 * x[1]])

    end = climb(evaluate, np.zeros(2), 100, 1e-9, False)
    assert end.status is FitStatus.CONVERGED
    np.testing.assert_allclose(np.abs(end.point), [1.0, 0.0], atol=1e-4)
    np.testing.assert_allclose(end.inverse, np.diag([1 / 8, 1 / 20]), rtol=1e-3, atol=1e-6)


def test_a_flat_direction_is_no_maximum():
    end = climb(lambda x: (float(x[0] + x[1]) ** 2, 2 * x.sum() * np.ones(2)), np.ones(2), 100, 1e-9, False)
    assert end.status is FitStatus.STALLED
    assert "cannot be told apart" in end.reason
    end = climb(lambda x: (float(x[0] ** 2), np.array([2 * x[0], 0.0])), np.ones(2), 100, 1e-9, False)
    assert (end.status, end.which) == (FitStatus.STALLED, 1)
    assert "does not depend on" in end.reason


def test_a_number_without_effect_is_not_at_a_bound():
    """Flat wherever it is put: not determined. Flat one way only: at its bound, and no fault."""
    bounded = np.array([False, True])
    flat = climb(lambda x: (x[0] ** 2, 2 * x * [1, 0]), np.ones(2), 100, 1e-9, False, None, bounded)
    assert (flat.status, flat.which) == (FitStatus.STALLED, 1)
    assert np.isnan(flat.inverse).all()

    def at_bound(x):
        return x[0] ** 2 + np.logaddexp(0, x[1]), np.array([2 * x[0], np.exp(-np.logaddexp(0, -x[1]))])

    end = climb(at_bound, np.array([1.0, -40.0]), 100, 1e-9, False, None, bounded)
    assert end.status is FitStatus.CONVERGED
    assert end.inverse[0, 0] == pytest.approx(0.5)


def test_a_number_without_effect_is_moved_if_that_shows_a_way_on():
    """At x₀ = 0 the second number does nothing, but x₀² falls where it is above 2."""

    def evaluate(x):
        share = np.exp(-np.logaddexp(0, 2 - x[1]))
        value = (1 - 2 * share) * x[0] ** 2 + x[0] ** 4
        slope = [2 * (1 - 2 * share) * x[0] + 4 * x[0] ** 3, -2 * share * (1 - share) * x[0] ** 2]
        return value, np.array(slope)

    end = climb(evaluate, np.array([0.01, -3.0]), 100, 1e-9, False, None, np.array([False, True]))
    assert end.status is FitStatus.CONVERGED
    assert end.value == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("regimes", [2, 3])
def test_regimes_that_are_the_same_are_named(regimes):
    """One regime is in the data: an end where all are the same is no maximum, and says so."""
    same = []
    for seed in (1, 11, 20):
        y = np.random.default_rng(seed).normal(size=150)
        one = markov_regression(y, regimes=1)
        fits = [markov_regression(y, regimes=regimes, switching="intercept", starts=1)]
        if regimes == 2:
            fits.append(markov_autoregression(y, order=1, switching="intercept", starts=1))
            fits.append(level_model(np.zeros(2) + y.mean(), np.ones(2)).fit(y, fixed=NO_STATE, method="mle"))
        assert fits[0].log_likelihood > one.log_likelihood - 1e-6
        for fit in fits:
            level = fit.estimates.get("intercept", fit.estimates.get("observation_offset"))
            if np.ptp(level) < 1e-3:
                same.append(fit)
                assert fit.status is FitStatus.STALLED
                assert "are the same: the transition probabilities are not determined" in fit.reason
                assert np.isnan(fit.standard_errors["transition"]).all()
    assert same


def test_fits_show_how_far_they_are(monkeypatch):
    """Drawn starts and climbs are counted; a single climb counts its steps."""
    shown = []

    def track(items, description, *, show=None, **_):
        if show is not False:
            shown.append((description, show))
        yield from items

    monkeypatch.setattr("exptilt.switching.learning.climb.track", track)
    y = switching_series(2, (0.0, 3.0), (1.0, 1.0), 60)
    fit_named_model(y, progress=True, starts=2)
    markov_regression(y, starts=2)
    markov_regression(y, starts=1)
    assert shown == [
        ("starts", True),
        ("climbs", True),
        ("starts", None),
        ("climbs", None),
        ("starts", None),
        ("maximum likelihood", None),
    ]
    shown.clear()
    fit_named_model(y, progress=False, starts=2)
    assert not shown


def test_lams_series_leaves_the_point_where_drifts_are_the_same():
    """It was called converged at −220.4355, where any transition probabilities do."""
    level = json.loads((DATA / "reference_lam_gnp.json").read_text("utf-8"))["level"]
    y = 100 * np.log(level[:152])
    fit = unobserved_cycle(y, order=2, fixed={"irregular": 0.0, "level": 0.0}, starts=1)
    assert fit.log_likelihood > -218.7
    assert np.ptp(fit.estimates["drift"]) > 0.1


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_hessian_whatever_the_units(scale):
    """Central differences with steps of each number's own size, beside a level of 1e5."""

    def evaluate(x):
        z = (x - 1e5 * scale) / scale
        return float(np.cosh(z).sum() + z[0] * z[1] / 2), (np.sinh(z) + z[::-1] / 2) / scale

    found, told = hessian(evaluate, np.full(2, 1e5 * scale))
    np.testing.assert_allclose(found * scale**2, [[1.0, 0.5], [0.5, 1.0]], rtol=1e-4)
    assert told.all()


@pytest.mark.parametrize(
    ("times", "plus"),
    [(1e6, 0.0), (1.0, 1000.0), *(pytest.param(x, 0.0, marks=pytest.mark.slow) for x in (1e-3, 2.0**20))],
)
def test_units_and_origin_do_not_matter(times, plus):
    """The likelihood changes by the Jacobian alone, whichever start wins."""
    rng = np.random.default_rng(3)
    y = np.repeat(rng.normal(0, 2, 12), 12) + rng.normal(size=144)
    options = {"regimes": 3, "switching": ("intercept", "deviation"), "starts": 3}
    one, other = markov_regression(y, **options), markov_regression(times * y + plus, **options)
    assert other.log_likelihood + 144 * np.log(times) == pytest.approx(one.log_likelihood, abs=1e-6)
    want = times * one.estimates["intercept"] + plus
    np.testing.assert_allclose(other.estimates["intercept"], want, rtol=1e-5)
    assert other.status is one.status


@pytest.mark.parametrize("method", ["em", "mle"])
def test_units_of_a_general_fit(method):
    y = switching_series(1, (0.0, 2.0), (1.0, 1.5), 120)
    ends = []
    for times in (1.0, 1e6):
        model = level_model(np.array([0.5, 1.0]) * times, np.array([1.0, 1.2]) * times**2)
        options = {"fixed": NO_STATE, "restarts": 2, "generator": torch.Generator().manual_seed(0)}
        fit = model.fit(times * y, method=method, **options)
        assert fit.status is FitStatus.CONVERGED
        ends.append(np.array(fit.restarts) + 120 * np.log(times))
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-4)


@pytest.mark.parametrize("level", [1e5, 1e8])
def test_standard_errors_beside_a_large_level(level):
    y = switching_series(2, (0.0, 3.0), (1.0, 1.0), 200)
    y = np.round(y * 2**20) / 2**20
    near, far = (markov_regression(y + shift, switching="intercept", starts=1) for shift in (0.0, level))
    model = level_model([0.0, 3.0], [1.0, 1.0])
    em_near, em_far = (
        model.replace(observation_offset=model.observation_offset + shift).fit(y + shift, fixed=NO_STATE)
        for shift in (0.0, level)
    )
    for one, other in ((near, far), (em_near, em_far)):
        for name, errors in one.standard_errors.items():
            assert np.isfinite(errors).all()
            np.testing.assert_allclose(other.standard_errors[name], errors, rtol=1e-3, err_msg=name)


def test_standard_errors_of_numbers_with_a_large_level():
    """One Gaussian: errors are s / √T and s / √(2T)."""
    y = np.random.default_rng(0).normal(size=400) + 1e5

    def build(x):
        one = torch.ones(1, 1, dtype=torch.float64)
        return SwitchingLinearGaussian(
            transition=one,
            dynamics=0 * one,
            process_noise=0 * one,
            observation=0 * one,
            observation_noise=x[1].exp().reshape(1, 1) ** 2,
            initial_mean=0 * one[0],
            initial_covariance=0 * one,
            initial_probability=one[0],
            observation_offset=x[:1],
        )

    fit = fit_parameters(build, [1e5 + 3, 0.0], y)
    assert fit.status is FitStatus.CONVERGED
    np.testing.assert_allclose(fit.standard_errors, [y.std() / 20, 1 / np.sqrt(800)], rtol=1e-4)


def test_regressors_with_a_large_mean():
    rng = np.random.default_rng(5)
    x = rng.normal(size=150)
    y = switching_series(5, (0.0, 4.0), (1.0, 1.0), 150) + 2 * x
    near, far = (markov_regression(y, x + shift, switching="intercept", starts=2) for shift in (0.0, 1e5))
    assert far.log_likelihood == pytest.approx(near.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(
        far.standard_errors["coefficients"], near.standard_errors["coefficients"], rtol=1e-3
    )


def test_an_unbounded_likelihood_is_named_and_a_bounded_fit_returned():
    """Three equal points: a regime of theirs has any likelihood one likes."""
    y = np.random.default_rng(10).normal(size=100)
    y[[20, 50, 80]] = 3.0
    fit = markov_regression(y, switching=("intercept", "deviation"))
    assert fit.status is FitStatus.DEGENERATE
    assert "deviation of regime 1 (intercept 3 there) has shrunk" in fit.reason
    assert "at least 0.05 of the data's deviation" in fit.reason
    assert fit.estimates["deviation"].min() > 0.01
    assert fit.log_likelihood < -100
    found = fit.model.filter(fit.y, method="imm").log_likelihood
    assert found == pytest.approx(fit.log_likelihood, abs=1e-3)
    assert np.isfinite(fit.standard_errors["intercept"]).all()
    for method in ("em", "mle"):
        start = level_model([0.0, 3.0], [1.0, 1e-4])
        fit = start.fit(y, fixed=NO_STATE, method=method)
        assert fit.status is FitStatus.DEGENERATE
        assert "observation_noise of regime 1" in fit.reason
        assert np.isfinite(fit.log_likelihood)


@pytest.mark.slow
def test_an_unbounded_likelihood_of_several_series_is_named_though_a_climb_stalls_on_the_way():
    """Forty equal rows: a regime of theirs has no noise, and the climb stops before it is quite gone."""
    y = np.random.default_rng(0).normal(size=(100, 2))
    y[20:60] = y[20]
    fit = markov_var(y, order=1)
    assert fit.status is FitStatus.DEGENERATE
    assert "covariance of regime" in fit.reason
    assert "still rises" in fit.reason
    assert np.diagonal(fit.estimates["covariance"], axis1=1, axis2=2).min() > 1e-3
    assert np.isfinite(fit.log_likelihood)


def test_a_noise_of_zero_may_be_a_maximum():
    """A wandering level seen without noise: the irregular variance goes to 0, and that is no fault."""
    y = np.cumsum(np.random.default_rng(1).normal(size=200))
    y = y - 0.3 * np.concatenate([[0], np.diff(y)])
    fit = local_level(y, regimes=1, switching=(), starts=1)
    assert fit.status is FitStatus.CONVERGED
    assert fit.estimates["irregular"][0] < 1e-3 * fit.estimates["level"][0]
    assert np.isfinite(fit.standard_errors["level"]).all()


def test_regressors_that_cannot_be_told_apart_are_named():
    rng = np.random.default_rng(6)
    y, x = rng.normal(size=60), rng.normal(size=(60, 3))
    x[:, 2] = 2 * x[:, 0] - x[:, 1] + 5
    with pytest.raises(ValueError, match=r"column 2 is a combination of \[0, 1\] and a constant"):
        markov_regression(y, x)
    x[:, 2] = 7.0
    with pytest.raises(ValueError, match="column 'c' is constant"):
        markov_regression(y, pd.DataFrame(x, columns=list("abc")))
    with pytest.raises(ValueError, match="transition_inputs: column 0 is constant"):
        markov_regression(y, transition_inputs=np.ones(60))
    model = level_model([0.0, 1.0], [1.0, 1.0]).replace(observation_input=np.zeros((2, 1, 2)))
    with pytest.raises(ValueError, match=r"inputs: column 1 is a combination of \[0\]"):
        model.fit(y, inputs=np.stack([x[:, 0], 3 * x[:, 0]], 1), fixed=NO_STATE, method="mle")


def test_circular_constraints_are_refused_and_others_put_in_order():
    y = switching_series(7, (0.0, 3.0), (1.0, 2.0), 120)
    circle = ["intercept[0] = -intercept[1]", "intercept[1] = 2 * intercept[0] + 1"]
    with pytest.raises(ValueError, match="depend on each other in a circle"):
        markov_regression(y, constraints=circle, switching=("intercept", "deviation"))
    texts = ["deviation[0] = intercept[1]", "intercept[1] = intercept[0] + 3"]
    for order in (texts, texts[::-1]):
        fit = markov_regression(y, constraints=order, switching=("intercept", "deviation"), starts=1)
        assert fit.estimates["deviation"][0] == pytest.approx(fit.estimates["intercept"][1], rel=1e-9)


@pytest.mark.parametrize("regimes", [1, 2])
def test_two_observations_are_too_few(regimes):
    with pytest.raises(ValueError, match="parameters from 2 observations"):
        markov_regression([1.0, 2.0], regimes=regimes)
    with pytest.raises(ValueError, match="parameters from 2 observations"):
        local_level([1.0, 2.0], regimes=2)
    with pytest.raises(ValueError, match="parameters from 2 observations"):
        level_model([0.0, 1.0], [1.0, 1.0]).fit([1.0, 2.0], fixed=NO_STATE)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
    """500 series of 600 steps: intervals of 95 % hold the truth between 93 and 97 times in 100."""
    truth = np.array([0.0, 5.0, 1.0, 1.5, 0.85, 0.75])
    inside = np.zeros(6)
    for seed in range(500):
        y = switching_series(seed, truth[:2], truth[2:4], 600, truth[4:])
        fit = markov_regression(y, switching=("intercept", "deviation"), starts=1)
        values, errors = (
            np.concatenate([table["intercept"], table["deviation"], np.diagonal(table["transition"])])
            for table in (fit.estimates, fit.standard_errors)
        )
        assert fit.status is FitStatus.CONVERGED
        inside += np.abs(values - truth) < 1.959964 * errors
    assert ((inside / 500 > 0.93) & (inside / 500 < 0.97)).all(), inside / 500


@pytest.mark.slow
def test_intervals_cover_beside_a_lag():
    """60 series with a lag, default starts: all converge, errors are of the size of the scatter."""
    truth = np.array([0.0, 3.0, 1.0, 1.5, 0.95, 0.9, 0.5])
    names = [f"{name}[{k}]" for name in ("intercept", "deviation") for k in (0, 1)]
    names += ["transition[0, 0]", "transition[1, 1]", "autoregression[0]"]
    values, errors = np.empty((2, 60, 7))
    held = np.zeros(7)
    for seed in range(60):
        rng, y, regime, carried = np.random.default_rng(7000 + seed), np.zeros(400), 0, 0.0
        for t in range(400):
            regime = regime if rng.random() < truth[4 + regime] else 1 - regime
            carried = truth[6] * carried + truth[2 + regime] * rng.normal()
            y[t] = truth[regime] + carried
        fit = markov_autoregression(y, order=1, switching=("intercept", "deviation"))
        assert fit.status is FitStatus.CONVERGED
        for out, table in ((values, fit.estimates), (errors, fit.standard_errors)):
            stay, lag = np.diagonal(table["transition"]), np.ravel(table["autoregression"])[:1]
            out[seed] = np.concatenate([table["intercept"], table["deviation"], stay, lag])
        low, high = fit.summary().to_frame().loc[names, ["low", "high"]].to_numpy().T
        held += (low < truth) & (truth < high)
    assert (held / 60 > 0.85).all(), held  # 3.6 standard errors of a share of 60 below 0.95
    assert held.sum() / 420 > 0.93, held
    share = (np.abs(values - truth) < 1.959964 * errors).mean(0)
    ratio = values.std(0) / np.sqrt((errors**2).mean(0))
    assert (share > 0.85).all()
    assert share.mean() > 0.92, share
    assert ((ratio > 0.7) & (ratio < 1.3)).all(), ratio
