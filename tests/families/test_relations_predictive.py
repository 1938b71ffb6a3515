"""Predictives and marginal likelihoods: the chain rule, integrals over the parameter, SciPy, mpmath."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import scipy.stats
import torch

from exptilt import families as f
from exptilt.families.members.normal_gamma import MeanPrecision
from exptilt.families.relations import Predictive

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def spd(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


SIGMA = spd((1.0, 0.3), (0.3, 0.5))
NIW = f.NormalInverseWishart(t(0.5, -1.0), t(2.0)[0], t(5.0)[0], spd((2.0, 0.5), (0.5, 1.0)))
PAIRS: dict[str, tuple[f.ExponentialFamily, Any, Any]] = {
    "coin": (f.Beta(t(0.7, 2.0), t(1.5, 0.4)), f.BernoulliProduct, f.BernoulliProduct(t(0.3, -0.5))),
    "failures": (f.Beta(t(0.7, 2.0), t(3.5, 2.4)), *[f.NegativeBinomial(t(2.5, 1.0), t(-0.5, -1.0))] * 2),
    "categories": (f.Dirichlet(t(0.5, 2.0, 1.0)), f.Categorical, f.Categorical(t(0.0, 1.0, 0.5))),
    "counts": (f.Dirichlet(t(0.5, 2.0, 1.0)), *[f.Multinomial(t(0.0, 1.0, 0.5), t(4.0)[0])] * 2),
    "events": (f.Gamma(t(1.5, 3.0), t(0.8, 2.0)), f.Poisson, f.Poisson(t(2.0, 1.0))),
    "times": (f.Gamma(t(2.5, 3.0), t(0.8, 2.0)), f.Exponential, f.Exponential(t(2.0, 1.0))),
    "diagonal": (
        f.NormalGamma(t(0.5, -1.0), t(2.0, 1.0), t(2.5, 3.0), t(1.0, 2.0)),
        f.DiagonalGaussian,
        f.DiagonalGaussian(t(1.0, 0.0), t(1.0, 2.0)),
    ),
    "full": (NIW, f.Gaussian, f.Gaussian(t(1.0, 0.0), SIGMA)),
    "precision": (f.Wishart(t(4.0)[0], SIGMA), f.Gaussian, f.Gaussian(t(0.0, 0.0), SIGMA)),
    "mean": (f.Gaussian(t(1.0, 2.0), 3 * SIGMA), *[f.Gaussian(t(0.0, 0.0), SIGMA)] * 2),
}
every = pytest.mark.parametrize("name", PAIRS)


def data(name: str, count: int = 6) -> torch.Tensor:
    x: torch.Tensor = PAIRS[name][2].sample((count,), generator=torch.Generator().manual_seed(len(name)))
    return x


@every
def test_chain_rule(name: str) -> None:
    """log p(x_1, ..., x_n) = Σ_i log p(x_i | x_1, ..., x_{i−1})."""
    prior, likelihood, _ = PAIRS[name]
    x = data(name)
    steps = [f.predictive(prior, likelihood, x[:i] if i else None).log_prob(x[i]) for i in range(len(x))]
    together = f.log_marginal_likelihood(prior, likelihood, x)
    torch.testing.assert_close(together, torch.stack(steps).sum(0), rtol=1e-11, atol=1e-11)
    empty = f.log_marginal_likelihood(prior, likelihood, x[:0])
    torch.testing.assert_close(empty, t(0.0)[0], atol=1e-12, rtol=0)


@every
def test_average_over_the_parameter(name: str) -> None:
    """p(x) = E_prior[p(x|ξ)], by draws of ξ."""
    from exptilt.families.relations import pair_of

    prior, likelihood, _ = PAIRS[name]
    x = data(name, 2)
    parameter = prior.sample((100_000,), generator=torch.Generator().manual_seed(0))
    given = pair_of(prior, likelihood).given(likelihood, parameter)
    weight = (given.log_prob(x[0]) + given.log_prob(x[1])).exp()
    error = float(weight.std()) / math.sqrt(len(weight))
    exact = float(f.log_marginal_likelihood(prior, likelihood, x).exp())
    assert abs(float(weight.mean()) - exact) <= 5 * error
    assert error < 0.05 * exact


@every
def test_draws_follow_the_density(name: str) -> None:
    """E[q(x)/p(x)] = 1 under draws of p, q being the predictive after some data."""
    prior, likelihood, _ = PAIRS[name]
    p, q = f.predictive(prior, likelihood), f.predictive(prior, likelihood, data(name, 3))
    x = p.sample((40_000,), generator=torch.Generator().manual_seed(1))
    ratio = (q.log_prob(x) - p.log_prob(x)).exp()
    assert abs(float(ratio.mean()) - 1) <= 5 * float(ratio.std()) / 200
    assert float(ratio.std()) > 0.05


def test_integral_over_the_parameter() -> None:
    """The mean and precision of a normal-gamma integrated out on a grid."""
    prior = f.NormalGamma(t(0.5), t(2.0), t(3.0), t(1.5))
    x = t(0.3, 1.9, -0.4)[:, None]

    def joint(xi: torch.Tensor) -> torch.Tensor:
        mean, precision = xi[..., :1], xi[..., 1:]
        likelihood = torch.zeros_like(mean[..., 0])
        for each in x:
            likelihood = likelihood + (precision.log() - math.log(2 * math.pi)).sum(-1) / 2
            likelihood = likelihood - (precision * (each - mean) ** 2).sum(-1) / 2
        return prior.log_prob(MeanPrecision(mean, precision)) + likelihood

    rule = f.FromDensity.quadrature(joint, lower=[-math.inf, 0.0], upper=[math.inf] * 2)
    exact = rule.log_normalizer(t(0.0, 0.0))
    got = f.log_marginal_likelihood(prior, f.DiagonalGaussian, x)
    torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)


def test_laws_that_scipy_has() -> None:
    x = t(0.3, -2.0)
    full = scipy.stats.multivariate_t(
        NIW.location.numpy(), (NIW.scale * (3 / (2 * 4))).numpy(), df=4
    )  # ν − D + 1 = 4, Ψ (κ + 1)/(κ 4)
    assert float(f.predictive(NIW, f.Gaussian).log_prob(x)) == pytest.approx(
        full.logpdf(x.numpy()), rel=1e-12
    )
    gamma = PAIRS["times"][0]
    assert isinstance(gamma, f.Gamma)
    lomax = scipy.stats.lomax(gamma.shape.numpy(), scale=gamma.rate.numpy())
    y = t(0.7, 3.0)
    got = f.predictive(gamma, f.Exponential).log_prob(y)
    np.testing.assert_allclose(float(got), lomax.logpdf(y.numpy()).sum(), rtol=1e-12)
    prior, likelihood, _ = PAIRS["counts"]
    assert isinstance(prior, f.Dirichlet)
    twin = scipy.stats.dirichlet_multinomial(prior.concentration.numpy(), 4)
    for counts in ((4, 0, 0), (1, 2, 1)):
        value = f.predictive(prior, likelihood).log_prob(t(*map(float, counts)))
        assert float(value) == pytest.approx(twin.logpmf(counts), rel=1e-12)
    next_count = f.predictive(f.Gamma(t(2.5), t(4.0)), f.Poisson)
    assert isinstance(next_count, f.NegativeBinomial)
    assert float(next_count.log_prob(t(3.0))) == pytest.approx(
        scipy.stats.nbinom(2.5, 0.8).logpmf(3), rel=1e-12
    )


@pytest.mark.parametrize(("a", "b"), [(1e12, 3e12), (1e-6, 1e-3), (2.0, 5e8)])
def test_a_prior_worth_many_observations(a: float, b: float) -> None:
    """log B(a + k, b + n − k) − log B(a, b) in sixty digits: in float64 it would be all rounding."""
    x = torch.tensor([1.0] * 3 + [0.0] * 4, dtype=F64)[:, None]
    with mp.workdps(60):
        exact = float(mp.log(mp.beta(mp.mpf(a) + 3, mp.mpf(b) + 4) / mp.beta(mp.mpf(a), mp.mpf(b))))
    got = f.log_marginal_likelihood(f.Beta(t(a), t(b)), f.BernoulliProduct, x)
    assert float(got) == pytest.approx(exact, rel=1e-11)


def test_far_from_the_origin() -> None:
    """A shift of data and prior changes nothing."""
    x = data("full")
    moved = f.NormalInverseWishart(NIW.location + 2.0**30, NIW.count, NIW.degrees, NIW.scale)
    near = f.log_marginal_likelihood(NIW, f.Gaussian, x)
    far = f.log_marginal_likelihood(moved, f.Gaussian, x + 2.0**30)
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)
    here, there = f.posterior(NIW, f.Gaussian, x), f.posterior(moved, f.Gaussian, x + 2.0**30)
    torch.testing.assert_close(there.scale, here.scale, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(there.location - 2.0**30, here.location, rtol=1e-6, atol=1e-6)


def test_batches_and_gradients() -> None:
    prior = f.Gamma(t(1.5, 3.0, 2.0)[:, None], t(0.8, 2.0, 1.0)[:, None])
    x = t(2.0, 0.0, 5.0)[:, None]
    both = f.log_marginal_likelihood(prior, f.Poisson, x)
    torch.testing.assert_close(both, torch.stack([f.log_marginal_likelihood(p, f.Poisson, x) for p in prior]))
    shape = prior.shape.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a: f.log_marginal_likelihood(f.Gamma(a, prior.rate), f.Poisson, x), (shape,)
    )
    location = NIW.location.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m, y: f.log_marginal_likelihood(
            f.NormalInverseWishart(m, NIW.count, NIW.degrees, NIW.scale), f.Gaussian, y
        ),
        (location, data("full", 3).requires_grad_()),
    )


def test_errors_and_supports() -> None:
    gamma = f.Gamma(t(2.5), t(1.0))
    assert f.predictive(gamma, f.Exponential).log_prob(t(-1.0)) == -math.inf
    with pytest.raises(ValueError, match=r"predictive: prior Gamma is not conjugate to likelihood Gaussian"):
        f.predictive(gamma, f.Gaussian)
    with pytest.raises(ValueError, match=r"log_marginal_likelihood: .*got an instance of Poisson"):
        f.log_marginal_likelihood(gamma, f.Poisson(t(1.0)), t(1.0)[:, None])
    with pytest.raises(ValueError, match=r"in the support of Poisson"):
        f.log_marginal_likelihood(gamma, f.Poisson, t(1.5)[:, None])
    with pytest.raises(ValueError, match=r"Multinomial needs its total"):
        f.predictive(f.Dirichlet(t(1.0, 1.0)), f.Multinomial)
    counts = t(3.0, 1.0, 0.0, 9.0).reshape(2, 2)
    after = f.posterior(f.Dirichlet(t(1.0, 1.0)), f.Multinomial, counts)
    torch.testing.assert_close(after.concentration, t(4.0, 11.0))


LAWS: dict[str, Any] = {
    "times": scipy.stats.lomax(np.array([2.5, 3.0]), scale=np.array([0.8, 2.0])),
    "diagonal": scipy.stats.t(np.array([5.0, 6.0]), [0.5, -1.0], np.sqrt([1.0 * 1.5 / 2.5, 2.0 * 2 / 3])),
    "failures": scipy.stats.betanbinom(np.array([2.5, 1.0]), np.array([3.5, 2.4]), np.array([0.7, 2.0])),
}


@every
def test_moments_are_those_of_draws(name: str) -> None:
    """And SciPy's, where it has the law; a variance of heavy tails is compared with SciPy's alone."""
    prior, likelihood, _ = PAIRS[name]
    law = f.predictive(prior, likelihood)
    mean, variance = law.event_mean, law.event_variance
    x = law.sample(40_000, generator=torch.Generator().manual_seed(2))
    assert mean.shape == variance.shape == x.shape[1:]
    assert bool(((x.mean(0) - mean).abs() <= 5 * (variance / len(x)).sqrt()).all())
    if name in LAWS:
        known = ~np.isnan(LAWS[name].mean())  # SciPy's betanbinom takes whole failures alone
        assert known.any()
        np.testing.assert_allclose(mean.numpy()[known], LAWS[name].mean()[known], rtol=1e-11)
        np.testing.assert_allclose(variance.numpy()[known], LAWS[name].var()[known], rtol=1e-9)
    elif name not in ("full", "precision"):
        square = (x - mean) ** 2
        assert bool(((square.mean(0) - variance).abs() <= 6 * square.std(0) / len(x) ** 0.5).all())


def test_moments_of_student_laws() -> None:
    free = 4.0  # ν − D + 1
    scale = NIW.scale * (3 / (2 * free))
    law = f.predictive(NIW, f.Gaussian)
    torch.testing.assert_close(law.event_variance, (scale * free / (free - 2)).diagonal())
    wishart = f.predictive(f.Wishart(t(4.0)[0], SIGMA), f.Gaussian)
    torch.testing.assert_close(
        wishart.event_variance, torch.linalg.inv(SIGMA).diagonal()
    )  # V⁻¹/3 · 3/(3 − 2)
    heavy = f.predictive(
        f.NormalGamma(*(t(*v) for v in ((7.0,) * 3, (1.0,) * 3, (0.4, 0.9, 3.0), (2.0,) * 3))),
        f.DiagonalGaussian,
    )
    torch.testing.assert_close(heavy.event_mean, t(math.nan, 7.0, 7.0), equal_nan=True)
    torch.testing.assert_close(heavy.event_variance, t(math.nan, math.inf, 2.0), equal_nan=True)
    lomax = f.predictive(f.Gamma(t(0.5, 1.5), t(1.0, 1.0)), f.Exponential)
    torch.testing.assert_close(lomax.event_mean, t(math.inf, 2.0))
    torch.testing.assert_close(lomax.event_variance, t(math.nan, math.inf), equal_nan=True)
    by_hand = Predictive(f.Beta(t(2.0), t(3.0)), f.BernoulliProduct)
    torch.testing.assert_close(by_hand.event_mean, t(0.4))
