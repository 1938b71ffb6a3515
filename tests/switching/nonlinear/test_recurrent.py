"""Recurrent switching: without recurrence it is GPB2, with it the plain version and particles agree."""

import itertools

import numpy as np
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.switching import SwitchingLinearGaussian
from exptilt.switching.nonlinear import RecurrentSwitching, fit_nonlinear
from oracles.recurrent import passes, tilted


def _modes(M=2, n=2, start="before", seed=0):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(M, n, n))
    return SwitchingLinearGaussian(
        transition=rng.dirichlet(np.ones(M), M),
        dynamics=0.7 * np.linalg.qr(A)[0],
        dynamics_offset=rng.normal(size=(M, n)),
        process_noise=0.2 * np.eye(n) + 0.05 * A @ A.swapaxes(1, 2),
        observation=rng.normal(size=(M, 1, n)),
        observation_noise=np.array([[0.4]]),
        initial_mean=rng.normal(size=(M, n)),
        initial_covariance=np.eye(n),
        initial_probability=rng.dirichlet(np.ones(M)),
        start=start,
    )


@pytest.mark.parametrize("start", ["before", "first"])
@pytest.mark.parametrize("M", [1, 2, 3])
def test_without_recurrence_it_is_gpb2(start, M):
    model = _modes(M, start=start)
    y = np.random.default_rng(1).normal(size=(7, 1))
    y[2] = np.nan
    own = RecurrentSwitching(model=model, recurrence=np.zeros((M, 2)))
    for got, want in ((own.filter(y), model.filter(y)), (own.smooth(y), model.smooth(y))):
        for name in (
            "log_likelihood",
            "mode_probability",
            "mean",
            "covariance",
            "mode_mean",
            "mode_covariance",
        ):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(own.smooth(y).pair_probability, model.smooth(y).pair_probability, atol=1e-10)


@pytest.mark.parametrize("start", ["before", "first"])
@pytest.mark.parametrize(
    ("M", "n", "scale"), [(2, 1, 1.0), (2, 3, 4.0), (3, 1, 1.0), (3, 2, 1.5), (5, 2, 1.0)]
)
def test_filter_and_smoother_against_the_plain_version(M, n, scale, start):
    """The core's grid has other directions and another spacing: both have to be fine enough."""
    model, rng = _modes(M, n, start, seed=3), np.random.default_rng(3)
    R = scale * rng.normal(size=(M, n))
    own = RecurrentSwitching(model=model, recurrence=R)
    y = own.sample(5, generator=torch.Generator().manual_seed(1)).y
    y[2] = np.nan
    total, steps, back = passes(model, R, y)
    filtered, smoothed = own.filter(y), own.smooth(y)
    assert filtered.log_likelihood == pytest.approx(total, abs=1e-9)
    for got, want in ((filtered, steps), (smoothed, back)):
        for name, column in zip(
            ("mode_probability", "mode_mean", "mode_covariance"), zip(*want, strict=True), strict=True
        ):
            np.testing.assert_allclose(getattr(got, name), np.array(column), atol=2e-7)


def test_three_directions_against_the_plain_version():
    """With four modes the grid has three directions, and is coarser: the error is bounded, not rounding."""
    model, rng = _modes(4, 3, seed=3), np.random.default_rng(3)
    R = 0.5 * rng.normal(size=(4, 3))
    mean, cov = model.initial_mean, model.initial_covariance
    chance, means, _ = tilted(R, model.transition, mean, cov)
    ahead = np.einsum("jab,ijb->ija", model.dynamics, means) + model.dynamics_offset
    joint = model.initial_probability[:, None] * chance
    got = RecurrentSwitching(model=model, recurrence=R).filter(np.full((1, 1), np.nan))
    np.testing.assert_allclose(got.mode_probability[0], joint.sum(0), atol=1e-6)
    np.testing.assert_allclose(
        got.mode_mean[0], np.einsum("ij,ijk->jk", joint / joint.sum(0), ahead), atol=2e-6
    )


def test_as_many_modes_as_there_are_no_directions_for():
    """Six modes over two states: three of five score differences follow from the others."""
    model, R = _modes(6, 2, seed=5), np.random.default_rng(5).normal(size=(6, 2))
    R[4] = R[1]
    y = np.array([[0.3], [-0.2], [1.0]])
    total, steps, _ = passes(model, R, y)
    got = RecurrentSwitching(model=model, recurrence=R).filter(y)
    assert got.log_likelihood == pytest.approx(total, abs=1e-8)
    np.testing.assert_allclose(got.mode_probability, [step[0] for step in steps], atol=1e-7)


def test_series_of_a_batch_are_those_one_by_one():
    own = RecurrentSwitching(model=_modes(3), recurrence=np.random.default_rng(0).normal(size=(3, 2)))
    y = np.random.default_rng(1).normal(size=(4, 6, 1))
    many = own.smooth(y)
    for k, one in enumerate(y):
        np.testing.assert_array_equal(many.mode_mean[k], own.smooth(one).mode_mean)


def _particles(own, y, N, seed):
    """A bootstrap filter: log-likelihood, and the last step's mode probabilities and mean."""
    rng, model = np.random.default_rng(seed), own.model
    mode = rng.choice(model.modes, N, p=model.initial_probability)
    x = model.initial_mean[mode] + rng.normal(size=(N, model.states))
    factor, total = np.linalg.cholesky(model.process_noise), 0.0
    for row in y:
        p = model.transition[mode] * np.exp(x @ own.recurrence.T)
        mode = (rng.random((N, 1)) * p.sum(1, keepdims=True) > np.cumsum(p, 1)).sum(1)
        x = np.einsum("nij,nj->ni", model.dynamics[mode], x) + model.dynamics_offset[mode]
        x += np.einsum("nij,nj->ni", factor[mode], rng.normal(size=x.shape))
        e = row[0] - np.einsum("ni,ni->n", model.observation[mode, 0], x)
        w = np.exp(-0.5 * e**2 / 0.4) / np.sqrt(2 * np.pi * 0.4)
        total += np.log(w.mean())
        pick = rng.choice(N, N, p=w / w.sum())
        x, mode = x[pick], mode[pick]
    return total, np.bincount(mode, minlength=model.modes) / N, x.mean(0)


@pytest.mark.parametrize("seed", [0, 1])
def test_filter_against_particles(seed):
    own = RecurrentSwitching(
        model=_modes(3, seed=seed), recurrence=np.random.default_rng(seed).normal(size=(3, 2))
    )
    y = own.sample(20, generator=torch.Generator().manual_seed(seed)).y
    post = own.filter(y)
    total, modes, mean = _particles(own, y, 40_000, seed)
    assert post.log_likelihood == pytest.approx(total, abs=0.3)
    np.testing.assert_allclose(post.mode_probability[-1], modes, atol=0.03)
    np.testing.assert_allclose(post.mean[-1], mean, atol=0.06)
    plain = own.model.filter(y)
    assert abs(plain.log_likelihood - total) > 3 * abs(post.log_likelihood - total)  # the recurrence matters


def test_draws_keep_to_transitions_that_can_happen():
    """The mode that the state calls for by e^5000 cannot be reached: the others are left."""
    model = _modes(2, n=1).replace(transition=np.eye(2), initial_probability=[0.0, 1.0])
    model = model.replace(dynamics=np.ones((2, 1, 1)), initial_mean=np.full((2, 1), 1000.0))
    own = RecurrentSwitching(model=model, recurrence=[[5.0], [0.0]])
    assert (own.sample(4, generator=torch.Generator().manual_seed(0)).modes == 1).all()
    assert (own.filter(np.full((4, 1), 1000.0)).mode_probability[:, 1] == 1).all()


def test_smoother_against_weighted_paths():
    """Whole paths drawn from the model, weighted by the data: smoothed modes and means."""
    own = RecurrentSwitching(model=_modes(2, seed=4), recurrence=np.array([[0.8, -0.5], [-0.8, 0.5]]))
    y = own.sample(5, generator=torch.Generator().manual_seed(2)).y
    rng, model, N = np.random.default_rng(0), own.model, 100_000
    mode = rng.choice(2, N, p=model.initial_probability)
    x = model.initial_mean[mode] + rng.normal(size=(N, 2))
    factor, score, modes, states = np.linalg.cholesky(model.process_noise), np.zeros(N), [], []
    for row in y:
        p = model.transition[mode] * np.exp(x @ own.recurrence.T)
        mode = (rng.random(N) * p.sum(1) > p[:, 0]).astype(int)
        x = np.einsum("nij,nj->ni", model.dynamics[mode], x) + model.dynamics_offset[mode]
        x = x + np.einsum("nij,nj->ni", factor[mode], rng.normal(size=x.shape))
        score -= 0.5 * (row[0] - np.einsum("ni,ni->n", model.observation[mode, 0], x)) ** 2 / 0.4
        modes.append(mode)
        states.append(x)
    weight = np.exp(score - score.max())
    weight /= weight.sum()
    back = own.smooth(y)
    np.testing.assert_allclose(back.mode_probability[:, 1], np.array(modes) @ weight, atol=0.05)
    np.testing.assert_allclose(back.mean, np.einsum("tni,n->ti", np.array(states), weight), atol=0.12)
    filtered = own.filter(y)
    gap = np.abs(filtered.mode_probability[:, 1] - np.array(modes) @ weight).max()
    assert gap > 2 * np.abs(back.mode_probability[:, 1] - np.array(modes) @ weight).max()


def test_one_step_against_a_grid():
    """One state, two modes, one step: the likelihood is an integral that a fine grid gives."""
    model = SwitchingLinearGaussian(
        transition=[[0.7, 0.3], [0.4, 0.6]],
        dynamics=[[[0.9]], [[0.4]]],
        dynamics_offset=[[1.0], [-1.0]],
        process_noise=[[0.3]],
        observation=[[1.0]],
        observation_noise=[[0.2]],
        initial_mean=[0.3],
        initial_covariance=[[1.5]],
        initial_probability=[0.6, 0.4],
    )
    own = RecurrentSwitching(model=model, recurrence=[[2.0], [-1.0]])
    x = np.linspace(-12, 12, 20001)
    prior, total = np.exp(-0.5 * (x - 0.3) ** 2 / 1.5) / np.sqrt(2 * np.pi * 1.5), 0.0
    for i, j in itertools.product(range(2), repeat=2):
        p = model.transition[i] * np.exp(np.outer(x, [2.0, -1.0]))
        ahead = model.dynamics[j, 0, 0] * x + model.dynamics_offset[j, 0]
        density = np.exp(-0.5 * (0.8 - ahead) ** 2 / 0.5) / np.sqrt(2 * np.pi * 0.5)
        total += [0.6, 0.4][i] * (prior * p[:, j] / p.sum(1) * density).sum() * (x[1] - x[0])
    got = own.filter(
        [[0.8]]
    ).log_likelihood  # a tilted law is no Gaussian: an error of its projection is left
    assert got == pytest.approx(np.log(total), abs=0.08)
    assert abs(model.filter([[0.8]]).log_likelihood - np.log(total)) > 2 * abs(got - np.log(total))


@pytest.mark.slow
def test_recurrence_is_learned():
    model = SwitchingLinearGaussian(
        transition=np.full((2, 2), 0.5),
        dynamics=[[1.0]],
        dynamics_offset=[[0.5], [-0.5]],
        process_noise=[[0.05]],
        observation=[[1.0]],
        observation_noise=[[0.1]],
        initial_mean=[0.0],
        initial_covariance=[[1.0]],
        initial_probability=[0.5, 0.5],
    )

    def build(theta):
        return RecurrentSwitching(model=model, recurrence=np.array([[0.0], [float(theta[0])]]))

    y = build([3.0]).sample(120, generator=torch.Generator().manual_seed(0)).y
    fit = fit_nonlinear(build, [0.5], y, progress=False)
    assert float(fit.model.recurrence[1, 0]) == pytest.approx(3.0, abs=1.5)
    assert fit.log_likelihood > build([3.0]).filter(y).log_likelihood - 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RecurrentSwitching(model=3, recurrence=[[0.0]]), "model is a int"),
        (
            lambda: RecurrentSwitching(model=_modes(), recurrence=[[0.0, 1.0]]),
            r"shape \(1, 2\). Pass \(2, 2\)",
        ),
        (lambda: RecurrentSwitching(model=_modes(), recurrence=np.full((2, 2), np.nan)), "finite"),
        (lambda: RecurrentSwitching(model=_modes(), recurrence=np.eye(2)).sample(0), "at least 1"),
        (lambda: RecurrentSwitching(model=_modes(), recurrence=np.eye(2)).filter([[np.inf]]), "infinite"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("sharpness", [30.0, 31.0, 200.0])
def test_scores_as_sharp_as_the_grid_is_long(sharpness):
    """Two equal modes, told apart by the sign of the state: each has a half, and the variance stays."""
    model = SwitchingLinearGaussian(
        transition=np.full((2, 2), 0.5),
        dynamics=np.ones((2, 1, 1)),
        process_noise=np.ones((2, 1, 1)),
        observation=np.ones((2, 1, 1)),
        observation_noise=np.array([[1.0]]),
        initial_mean=np.zeros((2, 1)),
        initial_covariance=np.eye(1),
        initial_probability=[0.5, 0.5],
        start="before",
    )
    recurrent = RecurrentSwitching(model=model, recurrence=np.array([[0.0], [sharpness]]))
    got = recurrent.filter(np.array([[np.nan]]))
    np.testing.assert_allclose(got.mode_probability, [[0.5, 0.5]], atol=1e-9)
    np.testing.assert_allclose(got.mean, [[0.0]], atol=1e-9)
    np.testing.assert_allclose(got.covariance, [[[2.0]]], atol=1e-6)
