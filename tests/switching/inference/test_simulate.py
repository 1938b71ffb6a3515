"""Particles, sampling and posterior draws, against exact results within their standard errors."""

import numpy as np
import pytest
import torch

from oracles.switching_models import random_data, random_model


@pytest.mark.parametrize("start", ["before", "first"])
def test_particle_likelihood_is_unbiased(start):
    """The mean of exp(log-likelihood estimate − truth) over 400 runs is 1 within four standard errors; with
    few particles, so that resampling matters.
    """
    rng = np.random.default_rng(0)
    model = random_model(rng, 3, 1, 1, start=start)
    y = random_data(rng, 8, 1, missing=0.1) * 1.5
    truth = model.filter(y, method="exact").log_likelihood
    generator = torch.Generator().manual_seed(0)
    many = model.filter(np.repeat(y[None], 400, 0), method="rbpf", particles=8, generator=generator)
    ratio = np.exp(many.log_likelihood - truth)
    assert ratio.std() > 0.05
    assert ratio.mean() == pytest.approx(1.0, abs=4 * ratio.std() / 20)
    assert (many.ess <= 8 + 1e-9).all()
    assert (many.ess >= 1 - 1e-9).all()


def test_many_particles_are_exact():
    rng = np.random.default_rng(1)
    model = random_model(rng, 2, 2, 2, maps=True)
    y = random_data(rng, 6, 2)
    want = model.filter(y, method="exact")
    got = model.filter(y, method="rbpf", particles=40_000, generator=torch.Generator().manual_seed(0))
    assert got.log_likelihood == pytest.approx(want.log_likelihood, abs=0.02)
    np.testing.assert_allclose(got.mode_probability, want.mode_probability, atol=0.02)
    np.testing.assert_allclose(got.mean, want.mean, atol=0.05)
    np.testing.assert_allclose(got.covariance, want.covariance, atol=0.1)
    np.testing.assert_allclose(got.mixing_probability, want.mixing_probability, atol=0.05)


def test_the_same_seed_gives_the_same_run():
    rng = np.random.default_rng(2)
    model = random_model(rng, 2, 1, 1)
    y = random_data(rng, 20, 1)
    runs = [
        model.filter(
            y, method="rbpf", particles=30, generator=torch.Generator().manual_seed(3)
        ).log_likelihood
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert (
        runs[0]
        != model.filter(
            y, method="rbpf", particles=30, generator=torch.Generator().manual_seed(4)
        ).log_likelihood
    )


def test_samples_have_the_models_law():
    rng = np.random.default_rng(3)
    model = random_model(rng, 2, 2, 1, maps=True)
    generator = torch.Generator().manual_seed(0)
    draws = [model.sample(3, generator=generator) for _ in range(3000)]
    nothing = model.filter(np.full((3, 1), np.nan), method="exact")
    modes, states, y = (
        np.stack([getattr(draw, name) for draw in draws]) for name in ("modes", "states", "y")
    )
    np.testing.assert_allclose((modes == 1).mean(0), nothing.mode_probability[:, 1], atol=0.04)
    scale = np.sqrt(np.diagonal(nothing.covariance, axis1=1, axis2=2))
    assert (np.abs(states.mean(0) - nothing.mean) < 4.5 * scale / np.sqrt(3000)).all()
    np.testing.assert_allclose(states.std(0), scale, rtol=0.1)
    predicted = model.filter(np.full((1, 1), np.nan), method="exact")
    assert y[:, 0, 0].var() == pytest.approx(predicted.innovation_covariance[0, 0, 0], rel=0.12)


@pytest.mark.parametrize("start", ["before", "first"])
def test_posterior_draws(start):
    """With the exact filter's mode-conditioned moments two steps are exact; longer series are close."""
    rng = np.random.default_rng(4)
    model = random_model(rng, 2, 2, 1, start=start)
    y = random_data(rng, 5, 1, missing=0.0)
    want = model.smooth(y, method="exact")
    draws = model.posterior_draws(y, 20_000, method="exact", generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose((draws.modes == 1).mean(0), want.mode_probability[:, 1], atol=0.05)
    np.testing.assert_allclose(draws.states.mean(0), want.mean, atol=0.1)
    # with particles nothing is collapsed
    draws = model.posterior_draws(
        y, 3000, method="rbpf", particles=1500, generator=torch.Generator().manual_seed(2)
    )
    np.testing.assert_allclose((draws.modes == 1).mean(0), want.mode_probability[:, 1], atol=0.04)
    np.testing.assert_allclose(draws.states.mean(0), want.mean, atol=0.1)
    gap = draws.states - draws.states.mean(0)
    np.testing.assert_allclose(np.einsum("dti,dtj->tij", gap, gap) / 3000, want.covariance, atol=0.2)
    one = random_model(rng, 1, 2, 1, start=start)
    want = one.smooth(y)
    draws = one.posterior_draws(y, 40_000, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(draws.states.mean(0), want.mean, atol=0.03)
    spread = np.einsum("dti,dtj->tij", draws.states - want.mean, draws.states - want.mean) / 40_000
    np.testing.assert_allclose(spread, want.covariance, atol=0.04)
    # neighbours in time: Cov(x_t, x_{t+1}) from the dense joint Gaussian
    from oracles.switching import dense_path

    _, _, joint = dense_path(one, y, (0,) * (len(y) + (start == "before")))
    cross = (
        np.einsum("di,dj->ij", draws.states[:, 1] - want.mean[1], draws.states[:, 2] - want.mean[2]) / 40_000
    )
    np.testing.assert_allclose(cross, joint[1, :, 2], atol=0.04)
