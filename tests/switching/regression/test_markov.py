"""Markov regressions: against statsmodels on its own series, and against the model they are."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.switching import local_level, markov_autoregression, markov_regression
from exptilt.switching.regression.hidden_chain import Modes, likelihood, transitions
from exptilt.switching.regression.markov import build

pytestmark = pytest.mark.filterwarnings("ignore")  # statsmodels says much


DATA = Path(__file__).resolve().parents[2] / "data" / "markov_series.json"


def series():
    """The federal funds rate, and growth of output."""
    data = json.loads(DATA.read_text())
    return np.array(data["fedfunds"]), np.array(data["rgnp"])


def test_hamiltons_model_of_output_is_that_of_statsmodels():
    from statsmodels.tsa.api import MarkovAutoregression

    _, y = series()
    table = pd.Series(y, index=pd.period_range("1951Q2", periods=len(y), freq="Q"))
    fit = markov_autoregression(table, order=4, switching="intercept", starts=1)
    # Hamilton (1989), as statsmodels and Stata give it
    assert fit.log_likelihood == pytest.approx(-181.26339, abs=1e-5)
    want = MarkovAutoregression(y, k_regimes=2, order=4, switching_ar=False)
    found = fit.estimates
    P = found["transition"]
    point = [P[0, 0], P[1, 0], *found["intercept"], found["deviation"][0] ** 2, *found["autoregression"][0]]
    assert want.loglike(point) == pytest.approx(fit.log_likelihood, abs=1e-8)
    assert np.abs(want.score(point)).max() < 1e-2
    smoothed = want.smooth(point)
    probability = fit.regime_probability()
    np.testing.assert_allclose(probability, smoothed.smoothed_marginal_probabilities, atol=1e-8)
    np.testing.assert_allclose(
        fit.regime_probability(smoothed=False), smoothed.filtered_marginal_probabilities, atol=1e-8
    )
    assert probability.index[0] == pd.Period("1952Q2")
    errors = fit.standard_errors
    mine = [errors["transition"][0, 0], errors["transition"][1, 0], *errors["intercept"]]
    theirs = want.fit(start_params=point, disp=False).bse
    np.testing.assert_allclose(mine, theirs[:4], rtol=1e-3)
    np.testing.assert_allclose(errors["autoregression"][0], theirs[5:], rtol=1e-3)
    again = fit.model.filter(fit.y, method="gpb2", inputs=fit.inputs)
    assert again.log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-8)
    assert "intercept[0]" in fit.summary()
    assert fit.free_parameters == 9
    assert fit.duration[1] == pytest.approx(10.4, abs=0.1)


@pytest.mark.parametrize(
    ("switching", "options"),
    [
        (("intercept",), {"switching_exog": False}),
        (("intercept", "coefficients"), {}),
        (("intercept", "coefficients", "deviation"), {"switching_variance": True}),
        (("deviation",), {"switching_trend": False, "switching_exog": False, "switching_variance": True}),
    ],
)
def test_regressions_are_those_of_statsmodels(switching, options):
    from statsmodels.tsa.api import MarkovRegression

    y, _ = series()
    fit = markov_regression(y[1:], y[:-1], switching=switching, starts=2)
    want = MarkovRegression(y[1:], k_regimes=2, exog=y[:-1], **options)
    found, pick = fit.estimates, {True: slice(None), False: slice(1)}
    P = found["transition"]
    groups = [("intercept", 1), ("coefficients", 1), ("deviation", 2)]
    values = [found[name].reshape(-1)[pick[name in switching]] ** power for name, power in groups]
    point = np.concatenate([[P[0, 0], P[1, 0]], *values])
    assert want.loglike(point) == pytest.approx(fit.log_likelihood, abs=1e-7)
    assert want.fit(point, disp=False).llf <= fit.log_likelihood + 1e-4
    np.random.seed(0)  # noqa: NPY002  statsmodels draws its starts from it
    try:
        searched = want.fit(search_reps=5, disp=False).llf
    except RuntimeError:  # its starts can end in NaN, which it raises: then it found nothing
        searched = -np.inf
    assert searched <= fit.log_likelihood + 1e-4


@pytest.mark.parametrize("order", [1, 2])
def test_lags_with_regressors_and_their_own_regimes(order):
    """With more than one lag statsmodels (0.15) takes the variance of the regime before: it is held there."""
    from statsmodels.tsa.api import MarkovAutoregression

    _, y = series()
    x = np.sin(np.arange(len(y)))
    parts = ("intercept", "coefficients", "autoregression", "deviation")[: 5 - order]
    fit = markov_autoregression(y, x, order=order, switching=parts, starts=1)
    want = MarkovAutoregression(
        y, k_regimes=2, order=order, exog=x, switching_exog=True, switching_variance=order == 1
    )
    found = fit.estimates
    P = found["transition"]
    point = [P[0, 0], P[1, 0], *found["intercept"], *found["coefficients"][:, 0]]
    point += [*found["deviation"][: 3 - order] ** 2, *found["autoregression"].T.reshape(-1)]
    assert want.loglike(point) == pytest.approx(fit.log_likelihood, abs=1e-7)
    assert (np.diff(found["intercept"]) >= 0).all()


def test_three_regimes_are_the_model_they_give():
    _, y = series()
    three = markov_regression(y, regimes=3, switching=("intercept", "deviation"), starts=2)
    assert three.estimates["transition"].shape == (3, 3)
    again = three.model.filter(three.y, method="imm")
    assert again.log_likelihood == pytest.approx(three.log_likelihood, abs=1e-8)


def test_missing_values_are_left_out():
    y, _ = series()
    y = y.copy()
    y[[3, 10, 11]] = np.nan
    fit = markov_regression(y, switching="intercept", starts=1)
    assert fit.observations == len(y) - 3
    assert fit.model.filter(fit.y).log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-8)
    assert fit.regime_probability().shape == (len(y), 2)


@pytest.mark.parametrize(("order", "durations", "driven"), [(0, 1, False), (1, 3, True), (2, 2, False)])
def test_the_chain_is_the_sum_over_all_paths_and_so_are_its_derivatives(order, durations, driven):
    """Every path of regimes from step 0, ages counted along it, the initial ones from the stationary law."""
    rng = np.random.default_rng(0)
    T, M = 7, 2
    y, x, z = rng.normal(size=T), rng.normal(size=(T, 1)), rng.normal(size=(T, 1))
    modes = Modes.of(M, order, durations)
    lags = [np.arange(order, T) - k for k in range(1, order + 1)]
    inputs = np.concatenate([x[order:], *(y[at][:, None] for at in lags), *(x[at] for at in lags)], 1)
    sizes = {"intercept": (M,), "coefficients": (M, 1), "deviation": (M,), "transition": (M, M)}
    sizes |= {"autoregression": (M, order)} if order else {}
    sizes |= {"transition_age": (M,)} if durations > 1 else {}
    sizes |= {"transition_input": (M, M, 1)} if driven else {}
    raw = {name: rng.normal(size=size) for name, size in sizes.items()}

    def total(named):
        covariates = torch.from_numpy(z) if driven else None
        P, back = transitions(modes, covariates, named)
        value, P_bar, bars = likelihood(modes, y[order:], inputs, P, named)
        return value, bars | back(P_bar)

    weight = np.exp(raw["transition"])
    N = raw | {"deviation": np.exp(raw["deviation"]), "transition": weight / weight.sum(1, keepdims=True)}
    value, slopes = total(N)

    def step(i, d, t):
        logits = np.log(N["transition"][i])
        if driven:
            logits = logits + N["transition_input"][i] @ z[t]
        if durations > 1:
            logits = logits + N["transition_age"][i] * d * (np.arange(M) != i)
        p = np.exp(logits)
        return p / p.sum()

    K = M * durations
    dense = np.zeros((K, K))
    for i, d, j in itertools.product(range(M), range(durations), range(M)):
        dense[i * durations + d, j * durations + (min(d + 1, durations - 1) if i == j else 0)] = step(
            i, d, 0
        )[j]
    law = np.linalg.matrix_power(dense, 10_000)[0].reshape(M, durations)
    want = 0.0
    for path, first in itertools.product(itertools.product(range(M), repeat=T), range(durations)):
        p, d = law[path[0], first], first
        for t in range(T):
            if t:
                p *= step(path[t - 1], d, t)[path[t]]
                d = min(d + 1, durations - 1) if path[t] == path[t - 1] else 0
            if t >= order:
                level = [
                    N["intercept"][path[t - k]] + x[t - k] @ N["coefficients"][path[t - k]]
                    for k in range(order + 1)
                ]
                mean = level[0] + sum(
                    N["autoregression"][path[t], k - 1] * (y[t - k] - level[k]) for k in range(1, order + 1)
                )
                s = N["deviation"][path[t]]
                p *= np.exp(-0.5 * ((y[t] - mean) / s) ** 2) / (s * np.sqrt(2 * np.pi))
        want += p
    assert float(value) == pytest.approx(np.log(want), abs=1e-10)
    for name, slope in slopes.items():
        for k in np.ndindex(slope.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = N | {name: N[name].copy()}
                moved[name][k] += h
                ends.append(total(moved)[0])
            assert slope[k] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=2e-8), name
    model = build(modes, torch.from_numpy(z) if driven else None, N)
    again = model.filter(y[order:], method="imm", inputs=inputs).log_likelihood
    assert again == pytest.approx(float(value), abs=1e-10)


@pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e8, 1e10)])
def test_units_change_nothing(scale, shift):
    """The same series in other units: log p moves by T log(scale), estimates and errors with the units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=120)
    y = np.where((np.arange(120) // 30) % 2, 2.0, 0.0) + 0.5 * x + rng.normal(size=120)
    plain = markov_regression(y, x, switching="intercept", starts=1)
    other = markov_regression(scale * y + shift, x * 1e6, switching="intercept", starts=1)
    assert other.log_likelihood + 120 * np.log(scale) == pytest.approx(plain.log_likelihood, abs=1e-4)
    moved = (other.estimates["intercept"] - shift) / scale
    np.testing.assert_allclose(moved, plain.estimates["intercept"], atol=2e-3)
    errors = other.standard_errors["intercept"] / scale
    np.testing.assert_allclose(errors, plain.standard_errors["intercept"], rtol=1e-2)
    slope = other.estimates["coefficients"] * 1e6 / scale
    np.testing.assert_allclose(slope, plain.estimates["coefficients"], atol=2e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regimes": 2.0}, "regimes is 2.0"),
        ({"starts": "a"}, "starts is"),
        ({"durations": 2.5}, "durations is"),
    ],
)
def test_counts_are_whole_numbers(options, said):
    y = np.random.default_rng(0).normal(size=40)
    for fit in (markov_regression, local_level)[: 1 if "durations" in options else 2]:
        with pytest.raises(ArgumentError, match=said):
            fit(y, **options)
    with pytest.raises(ArgumentError, match=r"order is 1\.5"):
        markov_autoregression(y, order=1.5)
