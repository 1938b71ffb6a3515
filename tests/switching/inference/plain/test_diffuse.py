"""Exact diffuse starts: against statsmodels, against ever wider priors, and what follows from them."""

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingLinearGaussian

METHODS = ["gpb2", "imm", "gpb1", "exact"]


def trend(M=1, start="first"):
    """A local linear trend; with several modes all are alike."""
    return SwitchingLinearGaussian(
        transition=np.full((M, M), 1 / M),
        dynamics=[[1.0, 1.0], [0.0, 1.0]],
        process_noise=np.diag([0.4, 0.1]),
        observation=[[1.0, 0.0]],
        observation_noise=[[0.7]],
        initial_mean=[0.0, 0.0],
        initial_covariance=np.diag([np.inf, np.inf]),
        initial_probability=np.full(M, 1 / M),
        start=start,
    )


def walks(seed, length):
    rng = np.random.default_rng(seed)
    return np.cumsum(np.cumsum(0.3 * rng.normal(size=length))) + rng.normal(size=length)


def modes(variance=np.inf, start="before"):
    """Three states, the last two diffuse, seen by two sensors; modes differ in all but H."""
    rng = np.random.default_rng(2)
    covariance = np.diag([1.0, 0.0, 0.0])
    covariance[[1, 2], [1, 2]] = variance
    W = np.eye(3) + 0.2 * rng.normal(size=(2, 3, 3))
    return SwitchingLinearGaussian(
        transition=[[0.9, 0.1], [0.3, 0.7]],
        dynamics=W,
        process_noise=np.array([0.1, 0.5])[:, None, None] * np.eye(3),
        observation=rng.normal(size=(2, 3)),
        observation_noise=[[[1.0, 0.4], [0.4, 0.6]], [[0.5, 0.1], [0.1, 2.0]]],
        initial_mean=[0.3, 1.0, -1.0],
        initial_covariance=covariance,
        initial_probability=[0.6, 0.4],
        start=start,
    )


@pytest.mark.parametrize("level", [0.0, 1e5])
@pytest.mark.parametrize("missing", [[], [0], [1], [0, 1, 3]])
def test_filter_and_smoother_are_those_of_statsmodels(level, missing):
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    y = level + walks(0, 40)
    y[missing] = np.nan
    want = UnobservedComponents(y, "local linear trend", use_exact_diffuse=True).smooth([0.7, 0.4, 0.1])
    model = trend()
    post, back = model.filter(y), model.smooth(y)
    assert post.log_likelihood == pytest.approx(want.llf, abs=1e-8)
    assert model.filter(y, store="last").log_likelihood == pytest.approx(want.llf, abs=1e-8)
    assert np.sum(post.log_likelihood_terms) == pytest.approx(want.llf, abs=1e-8)
    np.testing.assert_allclose(post.mean[6:], want.filtered_state.T[6:], rtol=0, atol=1e-8)
    np.testing.assert_allclose(back.mean, want.smoothed_state.T, rtol=0, atol=1e-8)
    np.testing.assert_allclose(back.covariance, want.smoothed_state_cov.transpose(2, 0, 1), atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_modes_that_are_alike_are_one(method):
    y = walks(1, 6)
    y[1] = np.nan
    one, three = trend(), trend(3)
    want = one.filter(y).log_likelihood
    assert three.filter(y, method=method).log_likelihood == pytest.approx(want, abs=1e-10)
    np.testing.assert_allclose(three.smooth(y, method=method).mean, one.smooth(y).mean, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", ["before", "first"])
@pytest.mark.parametrize("missing", [[], [(0, 0)], [(0, 0), (0, 1), (1, 1)]])
def test_it_is_the_limit_of_wide_priors(method, start, missing):
    y = np.random.default_rng(5).normal(size=(6, 2))
    for where in missing:
        y[where] = np.nan
    model, errors = modes(start=start), []
    post, back = model.filter(y, method=method), model.smooth(y, method=method)
    for variance in (1e4, 1e6):
        wide = modes(variance, start)
        want, later = wide.filter(y, method=method), wide.smooth(y, method=method)
        gap = 2 * (post.log_likelihood - want.log_likelihood) / np.log(variance)
        pairs = [
            (post.mode_probability, want.mode_probability),
            (post.mode_mean[3:], want.mode_mean[3:]),
            (post.mode_covariance[3:], want.mode_covariance[3:]),
            (back.mode_probability, later.mode_probability),
            (back.pair_probability, later.pair_probability),
            (back.mean, later.mean),
        ]
        pairs += [] if method == "exact" else [(back.covariance, later.covariance)]  # cancels if wide
        errors.append([np.abs(mine - theirs).max() for mine, theirs in pairs])
    small, large = np.array(errors[1]), np.array(errors[0])
    assert (small < 0.15 * large + 1e-7).all()  # 1/100 in the end; the first prior is not very wide
    if method == "exact":
        assert gap == pytest.approx(2, abs=1e-5)
        np.testing.assert_allclose(
            back.covariance, modes(1e4, start).smooth(y, method=method).covariance, atol=2e-3
        )
    else:  # a collapse of modes that move apart may add directions
        assert gap == pytest.approx(round(gap), abs=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_never_seen_costs_nothing(method):
    post = trend(2).filter(np.full(4, np.nan), method=method)
    assert post.log_likelihood == 0.0
    assert np.isposinf(post.mode_covariance[-1, 0].diagonal()).all()
    half = trend().filter(np.array([np.nan, 1.0, np.nan]))
    assert half.log_likelihood == pytest.approx(-0.5 * np.log(2 * np.pi * 2.0))  # D of y_2 is 1 + 1
    assert np.isposinf(half.covariance[-1, 0, 0])
    assert np.isposinf(half.innovation_covariance).all()
    np.testing.assert_allclose(half.innovation[1], 1.0)
    ahead = half.forecast(2)
    assert np.isneginf(ahead.lower).all()
    assert np.isposinf(ahead.upper).all()
    assert np.isfinite(trend().filter(walks(0, 5)).forecast(2).upper).all()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_diffuse_is_infinite_on_any_scale(method):
    one = np.ones((1, 1))
    model = SwitchingLinearGaussian(
        transition=one,
        dynamics=1e-11 * one,
        process_noise=one,
        observation=one,
        observation_noise=one,
        initial_mean=[0.0],
        initial_covariance=[[np.inf]],
        initial_probability=[1.0],
    )
    assert np.isposinf(model.filter([np.nan, np.nan], method=method).mode_covariance).all()


def test_a_series_does_not_feel_the_others():
    y = np.stack([walks(3, 20), 1e6 * walks(4, 20)])[..., None]
    model = trend()
    together, alone = model.smooth(y), [model.smooth(one) for one in y]
    for k, one in enumerate(alone):
        assert together.log_likelihood[k] == one.log_likelihood
        np.testing.assert_array_equal(together.mean[k], one.mean)


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1", "exact"])
def test_gradients_are_those_of_differences(method):
    y = torch.from_numpy(np.random.default_rng(6).normal(size=(4, 2)))
    y[0, 1] = torch.nan
    base = modes()
    names = ("transition", "dynamics", "process_noise", "observation", "observation_noise", "initial_mean")
    leaves = {name: torch.tensor(getattr(base, name), requires_grad=True) for name in names}

    def value(post):
        moments = post.mean.sum() + (post.mode_probability[:, 0] ** 2).sum() + post.covariance[-1].sum()
        return post.log_likelihood + moments

    total = value(base.replace(**leaves).filter(y, method=method))
    slopes = torch.autograd.grad(total, list(leaves.values()))
    rng = np.random.default_rng(7)
    for name, slope in zip(names, slopes, strict=True):
        direction = rng.normal(size=slope.shape)
        if name in ("process_noise", "observation_noise"):
            direction = direction + direction.swapaxes(-1, -2)
        if name == "transition":
            direction -= direction.mean(-1, keepdims=True)
        up, down = (
            base.replace(**{name: getattr(base, name) + h * direction}).filter(y, method=method)
            for h in (1e-4, -1e-4)  # values of gpb1 and imm are rounded to about 1e-10 here
        )
        difference = (value(up) - value(down)) / 2e-4
        assert float((slope * torch.from_numpy(direction)).sum()) == pytest.approx(
            float(difference), rel=1e-5, abs=1e-6
        ), name


@pytest.mark.slow
def test_em_rises_from_a_diffuse_start():
    """One mode, where EM is exact: no step lowers the likelihood, and it ends where the gradient is zero."""
    y = walks(8, 80)
    fit = trend().fit(y, fixed=("dynamics", "observation", "transition"), tolerance=1e-9, max_steps=3000)
    assert fit.decreases == 0
    noise = torch.tensor(fit.model.observation_noise, requires_grad=True)
    total = fit.model.replace(observation_noise=noise).filter(torch.from_numpy(y)).log_likelihood
    (slope,) = torch.autograd.grad(total, noise)
    assert abs(float(slope)) < 1e-3


@pytest.mark.parametrize("start", ["before", "first"])
def test_the_most_likely_path_is_that_of_a_very_wide_prior(start):
    rng = np.random.default_rng(8)
    y = rng.normal(size=(9, 2)).cumsum(0)
    y[1, 0] = np.nan
    model = modes(start=start)
    wide = modes(1e8, start)
    np.testing.assert_array_equal(model.most_likely_path(y), wide.most_likely_path(y))
    np.testing.assert_array_equal(
        model.most_likely_path(y[:4], method="exact"), wide.most_likely_path(y[:4], method="exact")
    )


def test_draws_of_a_diffuse_state_are_refused():
    y = np.zeros((4, 2))
    with pytest.raises(ValueError, match="posterior_draws: the initial state is diffuse"):
        modes().posterior_draws(y, 3)
    with pytest.raises(ValueError, match="filter: the initial state is diffuse"):
        modes().filter(y, method="rbpf")
