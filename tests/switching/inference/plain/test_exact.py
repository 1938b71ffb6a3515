"""`exact` against all mode paths as dense joint Gaussians; every filter against a plain Kalman filter and
against Hamilton's.
"""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from exptilt.switching import SwitchingLinearGaussian
from oracles.switching import exact_posterior, hamilton, kalman
from oracles.switching_models import random_data, random_model, simplex

CASES = [
    {"M": 2, "n": 2, "m": 1},
    {"M": 2, "n": 1, "m": 2, "start": "first"},
    {"M": 3, "n": 2, "m": 2, "maps": True},
    {"M": 2, "n": 2, "m": 2, "inputs": 2, "start": "first"},
    {"M": 2, "n": 2, "m": 1, "steps": 5, "maps": True},
    {"M": 3, "n": 1, "m": 1, "steps": 4, "start": "first", "offsets": False},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_exact_is_the_sum_over_paths(case):
    rng = np.random.default_rng(case)
    options = CASES[case]
    model = random_model(rng, **options)
    T = options.get("steps", 4)
    y = random_data(rng, T, model.outputs)
    u = rng.normal(size=(T, options["inputs"])) if "inputs" in options else None
    total, probability, pairs, mean, cov, best = exact_posterior(model, y, u)
    smoothed = model.smooth(y, method="exact", inputs=u)
    assert smoothed.log_likelihood == pytest.approx(total, abs=1e-9)
    np.testing.assert_allclose(smoothed.mode_probability, probability, atol=1e-9)
    np.testing.assert_allclose(smoothed.pair_probability, pairs, atol=1e-9)
    np.testing.assert_allclose(smoothed.mode_mean, mean, atol=1e-8)
    np.testing.assert_allclose(smoothed.mode_covariance, cov, atol=1e-8)
    assert tuple(model.most_likely_path(y, method="exact", inputs=u)) == tuple(best)
    # filtered at t is smoothed on the data up to t
    post = model.filter(y, method="exact", inputs=u)
    for t in range(1, T + 1):
        short, probability, pairs, mean, cov, _ = exact_posterior(model, y[:t], None if u is None else u[:t])
        assert post.log_likelihood_terms[:t].sum() == pytest.approx(short, abs=1e-9)
        np.testing.assert_allclose(post.mode_probability[t - 1], probability[-1], atol=1e-9)
        np.testing.assert_allclose(post.mode_mean[t - 1], mean[-1], atol=1e-8)
        np.testing.assert_allclose(post.mode_covariance[t - 1], cov[-1], atol=1e-8)
        np.testing.assert_allclose(post.mixing_probability[t - 1], pairs[-1] / pairs[-1].sum(0), atol=1e-8)


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_collapsed_filters_are_exact_where_nothing_is_collapsed(case, method):
    """Two steps: GPB2 is exact for terms and moments over both; IMM and GPB1 are for the first."""
    rng = np.random.default_rng(100 + case)
    model = random_model(rng, **CASES[case])
    y = random_data(rng, 2 if method == "gpb2" and model.start == "first" else 1, model.outputs, missing=0.1)
    if method == "imm" and model.start == "before":
        model = model.replace(
            transition=np.broadcast_to(np.eye(model.modes), model.transition.shape)
        )  # mixing then loses nothing
    if method == "gpb1" and model.start == "before":
        same = {"initial_mean": model.initial_mean[0], "initial_covariance": model.initial_covariance[0]}
        model = model.replace(**same, maps=None, map_covariance=None)
    u = rng.normal(size=(2, CASES[case]["inputs"])) if "inputs" in CASES[case] else None
    want, got = model.filter(y, method="exact", inputs=u), model.filter(y, method=method, inputs=u)
    np.testing.assert_allclose(got.log_likelihood_terms, want.log_likelihood_terms, atol=1e-10)
    np.testing.assert_allclose(got.mode_probability, want.mode_probability, atol=1e-10)
    np.testing.assert_allclose(got.mode_mean, want.mode_mean, atol=1e-9)
    np.testing.assert_allclose(got.mode_covariance, want.mode_covariance, atol=1e-9)


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1", "rbpf"])
@pytest.mark.parametrize("start", ["before", "first"])
def test_one_mode_is_the_kalman_filter(method, start):
    rng = np.random.default_rng(5)
    model = random_model(rng, 1, 3, 2, start=start)
    y = random_data(rng, 60, 2)
    y[10] = np.nan
    total, filtered, smoothed = kalman(model, y)
    post = model.filter(y, method=method, particles=3)
    assert post.log_likelihood == pytest.approx(total, abs=1e-9)
    np.testing.assert_allclose(post.mean, [m for m, _ in filtered], atol=1e-10)
    np.testing.assert_allclose(post.covariance, [P for _, P in filtered], atol=1e-10)
    W, H = model.dynamics[0], model.observation[0]
    for t in (1, 5):
        ahead = W @ filtered[t - 1][0] + model.dynamics_offset[0]
        np.testing.assert_allclose(
            post.innovation[t], y[t] - H @ ahead - model.observation_offset[0], atol=1e-9
        )
    if method != "rbpf":
        back = model.smooth(y, method=method)
        np.testing.assert_allclose(back.mean, [m for m, _ in smoothed], atol=1e-9)
        np.testing.assert_allclose(back.covariance, [P for _, P in smoothed], atol=1e-9)


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_no_state_is_hamiltons_filter(method):
    """A state without variance leaves a hidden Markov chain: all collapses are exact, forwards and backwards,
    and Viterbi is too.
    """
    rng = np.random.default_rng(6)
    M, T = 3, 80
    transition, initial = simplex(rng, M, M), simplex(rng, M)
    level, deviation = np.array([-1.0, 0.5, 2.0]), np.array([0.5, 1.0, 0.3])
    model = SwitchingLinearGaussian(
        transition=transition,
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=(deviation**2)[:, None, None],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=initial,
        observation_offset=level[:, None],
        start="first",
    )
    y = rng.normal(size=T) * 1.5
    total, filtered, smoothed = hamilton(transition, initial, norm.pdf(y[:, None], level, deviation))
    post, back = model.filter(y, method=method), model.smooth(y, method=method)
    assert post.log_likelihood == pytest.approx(total, abs=1e-9)
    np.testing.assert_allclose(post.mode_probability, filtered, atol=1e-10)
    np.testing.assert_allclose(back.mode_probability, smoothed, atol=1e-10)
    assert (model.most_likely_path(y[:7]) == model.most_likely_path(y[:7], method="exact")).all()


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_smoothers_given_the_modes(method):
    """A chain that cannot choose follows one path: the smoother is the joint Gaussian given that path."""
    rng = np.random.default_rng(7)
    T = 7
    path = rng.integers(0, 3, T)
    transition = np.zeros((T, 3, 3))
    transition[np.arange(T), :, path] = 1.0
    model = random_model(rng, 3, 2, 2, transition=transition, initial_probability=[0.0, 1.0, 0.0])
    y = random_data(rng, T, 2)
    from oracles.switching import dense_path

    total, mean, cov = dense_path(model, y, (1, *path))
    back = model.smooth(y, method=method)
    assert back.log_likelihood == pytest.approx(total, abs=1e-9)
    np.testing.assert_allclose(back.mean, mean, atol=1e-9)
    np.testing.assert_allclose(back.covariance, cov[np.arange(T), :, np.arange(T)], atol=1e-9)
    np.testing.assert_allclose(back.mode_probability, np.eye(3)[path], atol=1e-12)
    assert (model.most_likely_path(y) == path).all()


def test_exact_smoother_where_states_become_known():
    """Exact observations of a state without noise: predicted covariances lose rank but for rounding.

    Rauch's gain divides by them, and was off by 0.01 here.
    """
    rng = np.random.default_rng(62)
    model = SwitchingLinearGaussian(
        transition=[[0.6, 0.4], [0.3, 0.7]],
        dynamics=0.7 * rng.normal(size=(2, 3, 3)),
        process_noise=[np.diag([1.0, 0.0, 0.0]), np.zeros((3, 3))],
        observation=rng.normal(size=(2, 2, 3)),
        observation_noise=[np.diag([0.1, 3.0]), np.diag([0.9, 0.0])],
        initial_mean=rng.normal(size=(2, 3)),
        initial_covariance=np.eye(3),
        initial_probability=[0.1, 0.9],
        start="first",
    )
    one = model.replace(transition=np.eye(2), initial_probability=[0.0, 1.0])
    y = one.sample(4, generator=torch.Generator().manual_seed(3)).y
    y[0, 1] = np.nan  # three exact numbers of three states, then nothing is left to learn
    _, probability, _, mean, cov, _ = exact_posterior(model, y)
    got = model.smooth(y, method="exact")
    np.testing.assert_allclose(got.mode_probability, probability, atol=1e-9)
    np.testing.assert_allclose(got.mode_mean, mean, atol=1e-8)
    np.testing.assert_allclose(got.mode_covariance, cov, atol=1e-8)


@pytest.mark.parametrize("method", ["exact", "gpb1", "gpb2", "gpb3", "imm"])
def test_what_cannot_happen_is_not_refused(method):
    """Mode 1 has probability 0, and from its law mode 0 would see a number without any variance."""
    model = SwitchingLinearGaussian(
        transition=[[1.0, 0.0], [0.5, 0.5]],
        dynamics=[[1.0]],
        process_noise=[[[0.0]], [[1.0]]],
        observation=[[1.0]],
        observation_noise=[[[0.0]], [[1.0]]],
        initial_mean=[0.0],
        initial_covariance=[[[2.0]], [[0.0]]],
        initial_probability=[1.0, 0.0],
    )
    want = norm.logpdf(0.7, scale=np.sqrt(2.0))
    assert model.filter([[0.7]], method=method).log_likelihood == pytest.approx(want, abs=1e-12)
    assert model.smooth([[0.7]], method=method).mean[0, 0] == pytest.approx(0.7, abs=1e-12)
    if method in ("gpb1", "gpb2", "imm"):
        assert model.online(method=method).step([0.7]).log_likelihood == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("start", ["before", "first"])
def test_paths_that_cannot_happen_do_not_grow(start):
    """Their laws have no weight, but one that overflows would make the moments of their mode NaN."""
    rng = np.random.default_rng(4)
    model = random_model(rng, M=2, n=4, m=2, start=start, transition=np.array([[0.0, 1.0], [0.6, 0.4]]))
    model = model._replaced(observation=10 * np.asarray(model.observation))
    y = 10 * random_data(rng, 7, 2)
    total, probability, _, mean, cov, _ = exact_posterior(model, y)
    post, smooth = model.filter(y, method="exact"), model.smooth(y, method="exact")
    np.testing.assert_allclose(post.log_likelihood, total, rtol=1e-10)
    np.testing.assert_allclose(smooth.mode_probability, probability, atol=1e-9)
    np.testing.assert_allclose(smooth.mode_mean, mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(smooth.mode_covariance, cov, rtol=1e-6, atol=1e-8)
    for mine, known in ((post.mode_mean, mean), (post.mode_covariance, cov)):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine[-1], known[-1], rtol=1e-6, atol=1e-8)
