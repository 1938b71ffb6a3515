"""Outliers, absorbing chains, missing steps, near-singular noises, long runs: where filters break."""

import ctypes
import itertools

import mpmath
import numpy as np
import pytest
import torch

from exptilt._support import native
from exptilt._support.errors import ArgumentError
from exptilt.switching import SwitchingLinearGaussian
from exptilt.switching.inference import run
from exptilt.switching.inference.problem import prepare
from oracles.switching import collapsing_filter, kalman
from oracles.switching_models import random_data, random_model, simplex

METHODS = ["gpb2", "imm", "gpb1"]


@pytest.mark.parametrize("method", [*METHODS, "exact", "rbpf"])
def test_outliers_still_rank_modes(method):
    """With the identity as transition each mode keeps its own likelihood, here some 1e5 nats apart."""
    rng = np.random.default_rng(0)
    model = random_model(
        rng, 3, 1, 1, transition=np.eye(3), initial_probability=np.full(3, 1 / 3), start="first"
    )
    y = np.array([[0.0], [900.0], [1.0]])
    totals = np.array([kalman(model, y, k)[0] for k in range(3)]) + np.log(1 / 3)
    assert np.ptp(totals) > 1e3
    assert totals.max() < -1e4
    post = model.filter(y, method=method, particles=200)
    best = totals.max() + np.log(np.exp(totals - totals.max()).sum())
    if method in ("gpb2", "imm", "exact"):
        assert post.log_likelihood == pytest.approx(best, rel=1e-9)
        np.testing.assert_allclose(post.log_mode_probability[-1], totals - best, rtol=1e-7)
    assert np.isfinite(post.log_likelihood)
    assert post.mode_probability[-1].argmax() == totals.argmax()


@pytest.mark.parametrize("method", METHODS)
def test_huge_log_likelihoods(method):
    rng = np.random.default_rng(1)
    model = random_model(rng, 2, 2, 1)
    y = rng.normal(size=(50, 1))
    y[25] = 3e3
    post = model.filter(y, method=method)
    assert -1e8 < post.log_likelihood < -1e5
    assert np.isfinite(post.mean).all()
    assert np.isfinite(model.smooth(y, method=method).covariance).all()


@pytest.mark.parametrize("method", [*METHODS, "exact"])
@pytest.mark.parametrize("start", ["before", "first"])
def test_a_missing_step_is_a_prediction(method, start):
    rng = np.random.default_rng(2)
    model = random_model(rng, 3, 2, 2, start=start)
    y = rng.normal(size=(4, 2))
    y[2] = np.nan
    post = model.filter(y, method=method)
    np.testing.assert_allclose(
        post.mode_probability[2], post.mode_probability[1] @ model.transition, atol=1e-12
    )
    np.testing.assert_allclose(post.mode_mean[2], post.predicted_mode_mean[2], atol=1e-10)
    np.testing.assert_allclose(post.mode_covariance[2], post.predicted_mode_covariance[2], atol=1e-10)
    assert post.log_likelihood_terms[2] == pytest.approx(0.0, abs=1e-12)
    nothing = model.filter(np.full((3, 2), np.nan), method=method)
    assert nothing.log_likelihood == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_one_missing_component_is_the_smaller_model(method):
    rng = np.random.default_rng(3)
    model = random_model(rng, 2, 2, 3)
    y = rng.normal(size=(30, 3))
    y[:, 1] = np.nan
    small = model.replace(
        observation=model.observation[:, [0, 2]],
        observation_noise=model.observation_noise[:, [0, 2]][:, :, [0, 2]],
        observation_offset=model.observation_offset[:, [0, 2]],
    )
    a, b = model.filter(y, method=method), small.filter(y[:, [0, 2]], method=method)
    assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-10)
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-11)


@pytest.mark.parametrize("method", [*METHODS, "exact", "rbpf"])
def test_absorbing_chain_and_zero_probability_modes_stay_finite(method):
    rng = np.random.default_rng(4)
    model = random_model(
        rng,
        3,
        2,
        1,
        transition=[[0.8, 0.2, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]],
        initial_probability=[1.0, 0.0, 0.0],
    )
    T = 6 if method == "exact" else 300
    y = rng.normal(size=(T, 1))
    post = model.filter(y, method=method, particles=50)
    for value in (
        post.log_likelihood,
        post.mean,
        post.covariance,
        post.mode_mean,
        post.mode_covariance,
        post.predicted_mean,
        post.innovation,
    ):
        assert np.isfinite(value).all()
    assert (post.mode_probability[:, 2] == 0).all()
    if method != "rbpf":
        back = model.smooth(y, method=method)
        for value in (back.mean, back.covariance, back.mode_mean, back.mode_probability):
            assert np.isfinite(value).all()
        np.testing.assert_allclose(back.mode_probability.sum(1), 1.0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tiny", [1e-14, 1e-9])
def test_near_singular_noises(method, tiny):
    """Noises of 1e-14 beside states of size 1: covariances stay symmetric and positive semi-definite, and the
    likelihood is that of 60 digits.
    """
    rng = np.random.default_rng(5)
    model = random_model(
        rng,
        1,
        3,
        2,
        process_noise=np.diag([tiny, tiny, 1.0]),
        observation_noise=tiny * np.eye(2),
        initial_covariance=np.eye(3),
    )
    y = model.sample(12, generator=torch.Generator().manual_seed(0)).y
    total = kalman_precise(model, y)
    post, back = model.filter(y, method=method), model.smooth(y, method=method)
    assert post.log_likelihood == pytest.approx(
        total, rel=1e-4 if tiny == 1e-14 else 1e-8
    )  # 1e-14 is where float64 ends
    for cov in (post.mode_covariance, back.mode_covariance):
        assert (cov == cov.swapaxes(-1, -2)).all()
        assert np.linalg.eigvalsh(cov).min() > -1e-12


def kalman_precise(model, y):
    """Log p(y) of a one-mode model by the Kalman filter in 60 digits."""
    with mpmath.workdps(60):
        names = ("dynamics", "process_noise", "observation", "observation_noise", "initial_covariance")
        W, Q, H, R, P = (mpmath.matrix(getattr(model, name)[0].tolist()) for name in names)
        x, c, d = (
            mpmath.matrix(getattr(model, name)[0].tolist())
            for name in ("initial_mean", "dynamics_offset", "observation_offset")
        )
        total = mpmath.mpf(0)
        for row in y:
            x, P = W * x + c, W * P * W.T + Q
            e, S = mpmath.matrix(row.tolist()) - d - H * x, H * P * H.T + R
            inverse = S**-1
            total -= (
                len(row) * mpmath.log(2 * mpmath.pi) + mpmath.log(mpmath.det(S)) + (e.T * inverse * e)[0]
            ) / 2
            K = P * H.T * inverse
            x, P = x + K * e, P - K * S * K.T
        return float(total)


@pytest.mark.parametrize("method", ["gpb2", "imm"])
def test_a_million_steps(method):
    """Positive definite to the end, with noises far apart and a badly scaled state."""
    rng = np.random.default_rng(6)
    model = random_model(
        rng,
        2,
        2,
        1,
        dynamics=[[[1.0, 1.0], [0.0, 1.0]]] * 2,
        process_noise=[np.diag([1e-8, 1e-10]), np.diag([1.0, 1e-2])],
        observation=[[1.0, 0.0]],
        observation_noise=[[[1e-6]], [[1e2]]],
        offsets=False,
        transition=[[0.99, 0.01], [0.02, 0.98]],
        initial_mean=np.zeros(2),
    )
    y = np.cumsum(rng.normal(size=1_000_000))[:, None]
    y[rng.random(len(y)) < 0.1] = np.nan
    post = model.filter(y, method=method, store="last")
    assert np.isfinite(post.log_likelihood)
    assert (post.mode_covariance == post.mode_covariance.swapaxes(-1, -2)).all()
    assert np.linalg.eigvalsh(post.mode_covariance).min() > 0
    tail = model.filter(y[:20_000], method=method)
    assert np.linalg.eigvalsh(tail.mode_covariance).min() > 0


def test_singular_innovations_are_refused():
    rng = np.random.default_rng(7)
    model = random_model(
        rng,
        2,
        1,
        1,
        process_noise=[[0.0]],
        observation_noise=np.zeros((1, 1)),
        initial_covariance=np.zeros((1, 1)),
        initial_mean=[0.0],
    )
    for method in [*METHODS, "exact", "rbpf"]:
        with pytest.raises(ValueError, match="mode 0 is not positive definite"):
            model.filter(rng.normal(size=(4, 1)), method=method)
    with pytest.raises(ValueError, match="mode 0 is not positive definite"):
        model.most_likely_path(rng.normal(size=(4, 1)))
    with pytest.raises(ValueError, match="step 1 of series 0 the observation has zero density in every mode"):
        random_model(rng, 2, 1, 1).most_likely_path([0.0, 1e200])


# Sizes with loops unrolled and without, one mode of many states (worked on without lanes), groups of four
# modes that are full and not.
SIZES = [
    ((1, 1, 1), {}),
    ((1, 9, 2), {"start": "first"}),
    ((2, 2, 2), {"maps": True}),
    ((3, 4, 2), {"maps": True, "start": "first"}),
    ((3, 3, 1), {"steps": 12}),
    ((4, 5, 3), {"start": "first"}),
    ((5, 2, 1), {"steps": 12, "maps": True, "start": "first"}),
    ((6, 4, 1), {"transition": np.eye(6)[[1, 2, 3, 4, 5, 5]]}),
    ((9, 7, 3), {}),
]


@pytest.mark.parametrize(("sizes", "options"), SIZES)
@pytest.mark.parametrize("method", [*METHODS, "viterbi"])
def test_filters_are_the_plain_recursions(sizes, options, method):
    """Modes lie in the lanes of vectors, some of them empty; components are missing one by one."""
    rng = np.random.default_rng(sum(sizes))
    model, y = random_model(rng, *sizes, **options), random_data(rng, 12, sizes[2])
    problem = prepare(model, y, None, "filter")
    out = run.run_filter(problem.parameters, problem.data.rows, problem.data.starts, method).out
    for got, wanted in zip(out.steps, collapsing_filter(model, y, method), strict=True):
        np.testing.assert_allclose(got, wanted.reshape(got.shape), rtol=1e-8, atol=1e-9)
    if method == "viterbi":
        return
    last = model.filter(y, method=method, store="last")
    np.testing.assert_array_equal(last.log_mode_probability, out.log_mode[-1])
    assert last.log_likelihood == pytest.approx(out.terms.sum(), rel=1e-12)
    state = model.online(method=method)
    for row in y:
        state = state.step(row)
    np.testing.assert_allclose(state.log_mode_probability, out.log_mode[-1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state.mode_mean, out.mode_mean[-1].reshape(sizes[:2]), rtol=1e-12, atol=1e-12)


def test_parameters_that_are_written_into_have_their_effect():
    """The kernels' form of a model is kept with it."""
    rng = np.random.default_rng(3)
    model, y = random_model(rng, 2, 2, 1), random_data(rng, 9, 1)
    model.filter(y)
    for name in ("dynamics", "initial_probability", "initial_covariance", "observation_offset"):
        getattr(model, name)[...] *= [0.5, 1.5] if name == "initial_probability" else 1.5
        getattr(model, name)[...] /= getattr(model, name).sum() if name == "initial_probability" else 1.0
        again = model.replace()
        assert model.filter(y).log_likelihood == again.filter(y).log_likelihood
    with pytest.raises(ArgumentError, match="cover 9 steps"):
        random_model(rng, 2, 2, 1, steps=9).filter(random_data(rng, 10, 1))


def test_smoother_and_slopes_of_a_batch_are_those_of_its_series():
    rng = np.random.default_rng(8)
    model, y = random_model(rng, 2, 2, 1, transition=simplex(rng, 2, 2)), random_data(rng, 3000, 1)
    parts = [y[:1500], y[1500:]]
    long, lengths = model.smooth(np.stack(parts)), [model.smooth(part) for part in parts]
    for k in range(2):
        np.testing.assert_allclose(long.mode_mean[k], lengths[k].mode_mean, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(
            long.pair_probability[k], lengths[k].pair_probability, rtol=1e-8, atol=1e-9
        )
    slopes = []
    for data in ([np.stack(parts)], parts):
        W = torch.tensor(model.dynamics).requires_grad_()
        total = sum(model.replace(dynamics=W).filter(part).log_likelihood.sum() for part in data)
        slopes.append(torch.autograd.grad(total, W)[0])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-8, atol=1e-8)


def test_a_wide_prior_does_not_blur_the_smoother():
    """Smoothed states against the normal equations in extended precision; the prior's variance is 10¹³."""
    rng = np.random.default_rng(0)
    T, q, wide = 40, np.array([0.09, 0.01]), 1e13
    y = np.cumsum(np.cumsum(0.1 * rng.normal(size=T)) + 0.3 * rng.normal(size=T)) + rng.normal(size=T)
    F = np.array([[1.0, 1.0], [0.0, 1.0]])
    model = SwitchingLinearGaussian(
        transition=[[1.0]],
        dynamics=F,
        process_noise=np.diag(q),
        observation=[[1.0, 0.0]],
        observation_noise=[[1.0]],
        initial_mean=[0.0, 0.0],
        initial_covariance=wide * np.eye(2),
        initial_probability=[1.0],
        start="first",
    )
    A, h = np.zeros((2 * T, 2 * T)), np.zeros(2 * T)
    A[:2, :2] = np.eye(2) / wide
    for t in range(T):
        A[2 * t, 2 * t] += 1.0
        h[2 * t] = y[t]
        if t:
            move = np.concatenate([-F, np.eye(2)], 1)
            A[2 * t - 2 : 2 * t + 2, 2 * t - 2 : 2 * t + 2] += move.T @ np.diag(1 / q) @ move
    np.testing.assert_allclose(model.smooth(y).mean, np.linalg.solve(A, h).reshape(T, 2), atol=2e-3)


def test_a_posterior_is_accepted_as_an_initial_law():
    """An observation without noise leaves a variance of rounding, of either sign."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        W, H = rng.normal(size=(3, 3)), rng.normal(size=(2, 3))
        model = SwitchingLinearGaussian(
            transition=[[1.0]],
            dynamics=W,
            process_noise=np.eye(3),
            observation=H,
            observation_noise=np.zeros((2, 2)),
            initial_mean=np.zeros(3),
            initial_covariance=np.eye(3),
            initial_probability=[1.0],
        )
        post = model.filter(rng.normal(size=(30, 2)))
        again = model.replace(initial_mean=post.mode_mean[-1], initial_covariance=post.mode_covariance[-1])
        assert again.filter(rng.normal(size=(3, 2))).log_likelihood < 0
    known = model.replace(initial_covariance=-2.4e-15 * np.eye(3))
    assert np.isfinite(known.filter(rng.normal(size=(3, 2))).log_likelihood)
    with pytest.raises(ArgumentError, match="positive semi-definite"):
        model.replace(initial_covariance=-1e-6 * np.eye(3))


@pytest.mark.parametrize("method", [*METHODS, "exact", "rbpf"])
@pytest.mark.parametrize("seed", range(4))
def test_a_singular_innovation_is_refused_whatever_its_rounding(method, seed):
    """The same combination of states without noise, at two steps or by two sensors: one rule for all."""
    rng = np.random.default_rng(seed)
    h, L = rng.normal(size=(1, 3)), rng.normal(size=(3, 3))
    parts = {
        "transition": [[0.9, 0.1], [0.2, 0.8]],
        "dynamics": np.eye(3),
        "process_noise": np.zeros((3, 3)),
        "initial_mean": np.zeros(3),
        "initial_covariance": L @ L.T,
        "initial_probability": [0.5, 0.5],
        "start": "first",
    }
    twice = SwitchingLinearGaussian(observation=h, observation_noise=[[0.0]], **parts)
    with pytest.raises(ArgumentError, match=r"at step 1 .*not positive definite"):
        twice.filter(np.ones(3), method=method)
    both = SwitchingLinearGaussian(
        observation=np.concatenate([h, 3 * h]), observation_noise=np.zeros((2, 2)), **parts
    )
    with pytest.raises(ArgumentError, match=r"at step 0 .*not positive definite"):
        both.filter(np.array([[1.0, 3.0]]), method=method)
    little = twice.replace(observation_noise=[[1e-9]])
    s = float((h @ (L @ L.T) @ h.T).item())
    first = -0.5 * (np.log(2 * np.pi * (s + 1e-9)) + 1 / (s + 1e-9))
    second = -0.5 * np.log(2 * np.pi * 2e-9)
    assert little.filter(np.ones(2), method=method).log_likelihood == pytest.approx(first + second, abs=1e-5)


def precise(F, Q, R, P, y):
    """Kalman's filter of a level with a slope in sixty digits: log-likelihood, last mean and covariance."""
    with mpmath.workdps(60):
        F, P = mpmath.matrix(F), mpmath.eye(2) * P
        x, H, total = mpmath.matrix([0, 0]), mpmath.matrix([[1, 0]]), mpmath.mpf(0)
        for value in y[:, 0].tolist():
            x, P = F * x, F * P * F.T + mpmath.eye(2) * Q
            e, S = value - x[0], P[0, 0] + R
            total -= (mpmath.log(2 * mpmath.pi * S) + e * e / S) / 2
            K = P * H.T / S
            x, P = x + K * e, P - K * H * P
        return float(total), *(np.array(value.tolist(), float) for value in (x, P))


EXTREMES = {"R": (1e-12, 1.0), "P": (1.0, 1e12), "Q": (0.0, 1e-12, 1.0)}


@pytest.mark.parametrize(("R", "P", "Q"), list(itertools.product(*EXTREMES.values())))
def test_extreme_scales_are_right_or_said_to_be_lost(R, P, Q):
    """Against sixty digits; covariances stay positive, and a prior of 1e24 times the noise is told of."""
    F = [[1.0, 1.0], [0.0, 1.0]]
    options = {
        "transition": [[1.0]],
        "dynamics": F,
        "process_noise": Q * np.eye(2),
        "observation": [[1.0, 0.0]],
        "observation_noise": [[R]],
        "initial_mean": [0.0, 0.0],
        "initial_covariance": P * np.eye(2),
        "initial_probability": [1.0],
    }
    y = np.cumsum(np.random.default_rng(0).normal(size=(60, 1)) * max(Q, 1e-12) ** 0.5, 0)
    if P / R > 1e15:
        with pytest.warns(UserWarning, match="1.0e\\+24 times the variance"):
            SwitchingLinearGaussian(**options)
        return
    total, x, cov = precise(F, Q, R, P, y)
    deviation = np.sqrt(cov.diagonal())
    kept = max(1e-9, 10 * np.finfo(float).eps * P / R)  # what covariances in float64 can keep
    for method in ("imm", "gpb2", "gpb1"):
        post = SwitchingLinearGaussian(**options).filter(y, method=method)
        assert post.log_likelihood == pytest.approx(total, abs=kept)
        np.testing.assert_allclose((post.mean[-1] - x[:, 0]) / deviation, 0.0, atol=kept)
        np.testing.assert_allclose(
            (post.covariance[-1] - cov) / np.outer(deviation, deviation), 0.0, atol=1e-4
        )
        low, high = np.linalg.eigvalsh(post.mode_covariance[:, 0]).T
        assert (low > -1e-15 * high).all()


def test_a_posterior_of_float32_is_accepted_as_an_initial_law():
    rng = np.random.default_rng(0)
    given = {
        "transition": [[1.0]],
        "dynamics": [[0.9, 0.7], [0.0, 0.9]],
        "process_noise": np.eye(2),
        "observation": rng.normal(size=(1, 2)),
        "observation_noise": [[1e-12]],
        "initial_mean": [0.0, 0.0],
        "initial_covariance": np.eye(2),
        "initial_probability": [1.0],
    }
    model = SwitchingLinearGaussian(
        **{k: torch.tensor(np.array(v), dtype=torch.float32) for k, v in given.items()}
    )
    y = torch.tensor(rng.normal(size=(30, 1)), dtype=torch.float32)
    cov = model.filter(y).mode_covariance
    assert cov.dtype is torch.float32
    for step in cov:
        model.replace(initial_covariance=step)


def test_memory_that_runs_out_on_a_thread_is_an_error(monkeypatch):
    """Of a filter too, whose other threads have found nothing wrong with their series."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: -1)
    place, own = ctypes.cast(callback, ctypes.c_void_p).value, native.address
    monkeypatch.setattr(native, "address", lambda name: place if name == "filter_series" else own(name))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rng = np.random.default_rng(0)
    with pytest.raises(MemoryError, match="no memory is left for filter_series"):
        random_model(rng, 2, 1, 1).filter(rng.normal(size=(2, 600, 1)), method="imm")
