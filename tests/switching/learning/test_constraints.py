"""Parameters tied to each other in fits: constraints, stationary starts, driven transitions; the summary."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.switching import (
    SwitchingLinearGaussian,
    fit_parameters,
    markov_autoregression,
    markov_regression,
)
from exptilt.switching.learning.summary import quantile_residuals, residual_tests
from oracles.level_regimes import HELD, level_model

pytestmark = pytest.mark.filterwarnings("ignore")  # statsmodels says much
DATA = Path(__file__).resolve().parents[2] / "data"
LAM = json.loads((DATA / "reference_lam_gnp.json").read_text())
SERIES = json.loads((DATA / "markov_series.json").read_text())


def test_lams_model_without_a_build_function():
    """The published −178.9158 (Kim 1994): both initial laws are stationary and move with the parameters."""
    model = SwitchingLinearGaussian(
        transition=[[0.5, 0.5], [0.2, 0.8]],
        dynamics=[[0.5, 0.0], [1.0, 0.0]],
        process_noise=[[1.0, 0.0], [0.0, 0.0]],
        observation=[[1.0, -1.0]],
        observation_noise=[[0.0]],
        initial_mean=[0.0, 0.0],
        initial_covariance=np.zeros((2, 2)),
        initial_probability=[0.5, 0.5],
        observation_offset=[[0.0], [1.0]],
    )
    y = 100 * np.diff(np.log(np.array(LAM["level"][:152])))
    fit = model.fit(
        y,
        method="mle",
        initial="stationary",
        skip=22,
        fixed={
            "observation": True,
            "observation_noise": True,
            "dynamics": [[False, False], [True, True]],
            "process_noise": [[False, True], [True, True]],
        },
        shared=("dynamics", "process_noise"),
        progress=False,
    )
    assert fit.log_likelihood == pytest.approx(LAM["log_likelihood"], abs=1e-5)
    np.testing.assert_allclose(fit.model.dynamics[0, 0], LAM["phi"], atol=1e-3)
    P = fit.model.transition
    np.testing.assert_allclose(fit.model.initial_probability @ P, fit.model.initial_probability, atol=1e-12)
    W, Q = fit.model.dynamics[0], fit.model.process_noise[0]
    cov = fit.model.initial_covariance[0]
    np.testing.assert_allclose(W @ cov @ W.T + Q, cov, atol=1e-10)


def test_stationary_laws_with_offsets_and_diffuse_states():
    """A level that wanders beside a cycle that does not: the level stays diffuse."""
    model = SwitchingLinearGaussian(
        transition=[[0.9, 0.1], [0.2, 0.8]],
        dynamics=[[[0.5, 0.0], [0.0, 1.0]], [[0.7, 0.0], [0.0, 1.0]]],
        process_noise=np.diag([1.0, 0.1]),
        observation=[[1.0, 1.0]],
        observation_noise=[[0.5]],
        initial_mean=[9.0, 0.0],
        initial_covariance=np.diag([1.0, np.inf]),
        initial_probability=[0.5, 0.5],
        dynamics_offset=[[1.0, 0.0], [-0.3, 0.0]],
    )
    y = model.replace(initial_covariance=np.eye(2)).sample(40, generator=torch.Generator().manual_seed(0)).y
    names = ("transition", "observation", "process_noise", "dynamics", "observation_noise")
    fixed = dict.fromkeys(names, True) | {"dynamics_offset": [False, True]}
    fit = model.fit(y, method="mle", initial="stationary", fixed=fixed, progress=False)
    found = fit.model
    np.testing.assert_allclose(found.initial_probability, [2 / 3, 1 / 3])
    mean = found.dynamics_offset[:, 0] / [0.5, 0.3]
    np.testing.assert_allclose(found.initial_mean, np.stack([mean, [0, 0]], 1), atol=1e-12)
    np.testing.assert_allclose(found.initial_covariance[:, 0, 0], [1 / 0.75, 1 / 0.51])
    assert np.isinf(found.initial_covariance[:, 1, 1]).all()
    assert found.filter(y).log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-9)
    unit = model.replace(initial_covariance=np.eye(2))
    with pytest.raises(ArgumentError, match="eigenvalue of modulus 1"):
        unit.fit(y, method="mle", initial="stationary", fixed=fixed, progress=False)
    feeding = model.replace(dynamics=[[0.5, 0.1], [0.0, 1.0]])
    with pytest.raises(ArgumentError, match="a diffuse state drives"):
        feeding.fit(y, method="mle", initial="stationary", fixed=fixed, progress=False)


def test_constraints_are_those_of_a_build_function():
    y = np.array(SERIES["fedfunds"])
    model = level_model()
    texts = [
        "observation_noise[1] = 4 * observation_noise[0]",
        "transition[1, 0] = transition[0, 1] / 2",
        "observation_offset[1, 0] = observation_offset[0, 0] + 5",
    ]
    fit = model.fit(y, method="mle", fixed=HELD, constraints=texts, initial="stationary", progress=False)

    def build(x):
        p = torch.sigmoid(x[0])
        P = torch.stack([torch.stack([1 - p, p]), torch.stack([p / 2, 1 - p / 2])])
        R = torch.stack([x[1].exp(), 4 * x[1].exp()])[:, None, None]
        d = torch.stack([x[2], x[2] + 5])[:, None]
        third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
        return model.replace(
            transition=P, observation_noise=R, observation_offset=d, initial_probability=third
        )

    p, level = fit.model.transition[0, 1], fit.model.observation_offset[0, 0]
    near = [np.log(p / (1 - p)) + 0.2, np.log(fit.model.observation_noise[0, 0, 0]) - 0.1, level + 0.3]
    want = fit_parameters(build, near, y, progress=False)
    assert fit.log_likelihood == pytest.approx(want.log_likelihood, abs=1e-7)
    assert fit.free_parameters == 3
    R, P, d = fit.model.observation_noise, fit.model.transition, fit.model.observation_offset
    assert R[1, 0, 0] == pytest.approx(4 * R[0, 0, 0], rel=1e-12)
    assert P[1, 0] == pytest.approx(P[0, 1] / 2, rel=1e-12)
    assert d[1, 0] == pytest.approx(d[0, 0] + 5, rel=1e-12)
    errors = fit.standard_errors
    assert errors["observation_offset"][0, 0] == pytest.approx(want.standard_errors[2], rel=1e-4)
    assert errors["observation_noise"][1, 0, 0] == pytest.approx(4 * errors["observation_noise"][0, 0, 0])
    held = model.fit(
        y, method="mle", fixed={**dict.fromkeys(HELD, True), "transition": [[0, 0], [1, 1]]}, progress=False
    )
    np.testing.assert_allclose(held.model.transition[1], [0.1, 0.9])
    assert held.model.transition[0, 0] != 0.9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("observation_noise[0]", "not of the form"),
        ("level[0] = 1", "no parameter 'level'"),
        ("observation_offset[2] = 1", "whole numbers"),
        ("observation_offset[0] = max(1, 2)", "not arithmetic"),
        ("observation_offset[0] = 2 * observation_offset[0]", "also appears on the right"),
        ("observation_offset[0] = observation_noise", "shape"),
        (["observation_offset[0] = 1", "observation_offset[0, 0] = 2"], "another constraint"),
    ],
)
def test_constraints_that_cannot_be_used(text, said):
    with pytest.raises(ArgumentError, match=said):
        level_model().fit(SERIES["fedfunds"], method="mle", fixed=HELD, constraints=text)


def test_em_refuses_what_is_tied():
    for options in (
        {"constraints": "observation_offset[0] = 1"},
        {"initial": "stationary"},
        {"durations": 2},
    ):
        with pytest.raises(ArgumentError, match='method="mle"'):
            level_model().fit(SERIES["fedfunds"], fixed=HELD, **options)


def test_driven_transitions_and_durations_in_fit_are_those_of_the_chain():
    """Two ways to the same likelihood: the filter of the expanded model, and the chain's own recursion."""
    y = np.array(SERIES["fedfunds"])
    z = (y - y.mean())[:-1]
    options = {"method": "mle", "fixed": HELD, "initial": "stationary", "filter": "imm", "progress": False}
    for more, size in ({"transition_inputs": z}, 8), ({"durations": 4}, 8):
        chain = markov_regression(y[1:], switching=("intercept", "deviation"), starts=1, **more)
        fit = level_model().fit(y[1:], **options, **more)
        assert fit.log_likelihood == pytest.approx(chain.log_likelihood, abs=1e-5)
        assert fit.free_parameters == chain.free_parameters == size
        np.testing.assert_allclose(
            fit.model.observation_offset[0], chain.estimates["intercept"][0], atol=1e-2
        )
        probability = chain.regime_probability()
        assert probability.shape == (len(y) - 1, 2)
        np.testing.assert_allclose(fit.regime_probability(), probability, atol=1e-2)
    assert fit.model.modes == 8
    # the mean of a law by its hazards
    p, b = chain.estimates["transition"][0, 1], chain.estimates["transition_age"][0]
    odds = p / (1 - p) * np.exp(b * np.minimum(np.arange(4000), 3))
    want = np.cumprod(np.concatenate([[1.0], 1 / (1 + odds)])).sum()
    assert chain.duration[0] == pytest.approx(want, rel=1e-6)


def test_filardos_model_of_output_is_that_of_statsmodels():
    """Transitions driven by a leading indicator; −586.5718, the estimates, and smoothed probabilities."""
    import statsmodels.tsa.regime_switching.tests as there

    table = pd.read_csv(Path(there.__file__).parent / "results" / "mar_filardo.csv")
    y, z = table["dlip"].to_numpy()[1:], table["dmdlleading"].to_numpy()[:-1]
    fit = markov_autoregression(y, order=4, switching="intercept", starts=1, transition_inputs=z)
    assert fit.log_likelihood == pytest.approx(-586.5718, abs=1e-4)
    found = fit.estimates
    np.testing.assert_allclose(found["intercept"], [-0.865888, 0.517298], atol=1e-4)
    # staying in the lower regime and leaving the upper one, as logits of the indicator
    assert found["transition_input"][0, 1, 0] == pytest.approx(0.9945672, abs=1e-3)
    assert found["transition_input"][1, 0, 0] == pytest.approx(-1.7702123, abs=1e-3)
    P = found["transition"]
    assert np.log(P[0, 1] / P[0, 0]) == pytest.approx(-1.6493936, abs=1e-3)
    assert np.log(P[1, 0] / P[1, 1]) == pytest.approx(-4.35941747, abs=1e-3)
    np.testing.assert_allclose(fit.regime_probability()[:, 1], table["smoothed_0"].iloc[5:], atol=1e-3)


def test_the_summary_as_text_table_and_html():
    from statsmodels.stats.diagnostic import acorr_ljungbox
    from statsmodels.stats.stattools import jarque_bera

    y = pd.Series(SERIES["rgnp"], index=pd.period_range("1951Q2", periods=len(SERIES["rgnp"]), freq="Q"))
    fit = markov_autoregression(y, order=4, switching="intercept", starts=1)
    text = fit.summary()
    for words in ("intercept[0]", "expected duration", "Ljung–Box", "AIC 380.527", "BIC"):
        assert words in text
    assert text.count("deviation") == 1  # what does not switch stands once
    frame = text.to_frame()
    assert frame.loc["intercept[1]", "estimate"] == fit.estimates["intercept"][1]
    low, error = frame.loc["intercept[1]", "low"], fit.profile_errors["intercept"][1, 0]
    assert low == pytest.approx(frame.loc["intercept[1]", "estimate"] - 1.959964 * error, abs=1e-5)
    assert text.to_html().count("<table>") == 3
    assert "&lt;0.001" in text.to_html()
    np.testing.assert_allclose(fit.ergodic, [0.28108, 0.71892], atol=1e-4)
    residuals = fit.residuals()
    assert list(residuals.index) == list(y.index[4:])
    r = residuals.to_numpy()[:, 0]
    tests = residual_tests(r)
    box = acorr_ljungbox(r, lags=[10])
    assert tests["Ljung–Box, 10 lags"] == pytest.approx(tuple(box.iloc[0]), rel=1e-10)
    assert tests["Jarque–Bera"] == pytest.approx(jarque_bera(r)[:2], rel=1e-10)
    assert residual_tests(np.ones(30)) == {}


def test_residuals_are_quantiles_of_the_mixture():
    from scipy.stats import norm

    model = level_model()
    y = np.array([3.0, 30.0, np.nan, -20.0, 9.0])
    post = model.filter(y)
    found = quantile_residuals(post)
    weight = post.predicted_mode_probability
    below = (weight * norm.cdf((y[:, None] - [3.0, 9.0]) / 2.0)).sum(1)
    np.testing.assert_allclose(found[[0, 4], 0], norm.ppf(below[[0, 4]]), atol=1e-10)
    assert 8 < found[1, 0] < 11  # far out in a tail it is still a number
    assert -12 < found[3, 0] < -11
    assert np.isnan(found[2, 0])


def test_a_fit_of_matrices_has_a_summary_too():
    y = np.array(SERIES["fedfunds"])
    fit = level_model().fit(y, fixed=HELD, shared="observation_noise")
    frame = fit.summary().to_frame()
    assert frame.loc["observation_noise[0, 0]", "estimate"] == fit.model.observation_noise[0, 0, 0]
    assert len(frame) == 4 + 2 + 1
    np.testing.assert_allclose(fit.duration, 1 / (1 - fit.model.transition.diagonal()))
    assert fit.regime_probability().shape == (len(y), 2)


def test_a_stationary_chain_with_a_given_state():
    """The chain starts from its stationary law, the state from the law it was given."""
    rng = np.random.default_rng(0)
    y = np.cumsum(rng.normal(size=60) * np.where((np.arange(60) // 15) % 2, 2.0, 0.3))
    model = level_model().replace(
        dynamics=[[1.0]], observation=[[1.0]], process_noise=[[[0.1]], [[3.0]]], initial_covariance=[[4.0]]
    )
    held = ("dynamics", "observation", "observation_offset")
    fit = model.fit(y, method="mle", fixed=held, initial="stationary chain", progress=False)
    P = fit.model.transition
    np.testing.assert_allclose(fit.model.initial_probability @ P, fit.model.initial_probability, atol=1e-10)
    np.testing.assert_array_equal(fit.model.initial_covariance[0], [[4.0]])
    assert fit.model.filter(y).log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-8)
    # it is a maximum of that likelihood: other chains, with the law that is theirs, are less likely
    for change in (0.004, -0.004):
        other = P + change * np.array([[1.0, -1.0], [0.0, 0.0]])
        law = np.array([other[1, 0], other[0, 1]]) / (other[1, 0] + other[0, 1])
        beside = fit.model.replace(transition=other, initial_probability=law)
        assert beside.filter(y).log_likelihood < fit.log_likelihood


@pytest.mark.parametrize("method", ["em", "mle"])
def test_diagonal_noise_has_variances_alone(method):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(50, 2)) @ [[1.0, 0.5], [0.0, 1.0]]
    model = SwitchingLinearGaussian(
        transition=[[1.0]],
        dynamics=np.zeros((2, 2)),
        process_noise=np.zeros((2, 2)),
        observation=np.zeros((2, 2)),
        observation_noise=np.eye(2),
        observation_offset=[0.0, 0.0],
        initial_mean=[0.0, 0.0],
        initial_covariance=np.zeros((2, 2)),
        initial_probability=[1.0],
    )
    options = {"method": method, "fixed": ("dynamics", "process_noise", "observation", "transition")}
    fit = model.fit(y, **options, diagonal="observation_noise", progress=False)
    np.testing.assert_allclose(fit.model.observation_noise[0], np.diag(y.var(0)), atol=1e-4)
    assert fit.free_parameters == 4
    with pytest.raises(ArgumentError, match="start from a diagonal one"):
        model.replace(observation_noise=[[1.0, 0.2], [0.2, 1.0]]).fit(y, diagonal="observation_noise")
    with pytest.raises(ArgumentError, match="diagonal has 'dynamics'"):
        model.fit(y, diagonal=("dynamics",))
