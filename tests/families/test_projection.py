"""M-projection: nothing in the family is nearer; SciPy's fits; conjugate updating against a grid."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

from exptilt import families as f
from exptilt.families.projection import expected_statistic
from laws.registry import FAMILIES, Case


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_projection_matches_statistics_and_is_nearest(case: Case) -> None:
    g = torch.Generator().manual_seed(7)
    parts = case.make(g, (2, 3))
    log_weight = torch.randn(2, 3, dtype=torch.float64, generator=g)
    mixture = f.Mixture(log_weight, parts)
    best = f.project(mixture, case.cls)
    assert type(best) is case.cls
    weight = torch.softmax(log_weight, -1).unsqueeze(-1)
    expected = (weight * parts.mean_parameter).sum(-2)
    torch.testing.assert_close(best.mean_parameter, expected, rtol=1e-7, atol=1e-8)
    # KL(p‖q_θ) = const − <E_p u, θ> + A(θ): smaller at the projection than at any random member.
    cost = best._log_partition() - (expected * best.natural_parameter).sum(-1)
    for _ in range(5):
        other = case.make(g, (2,))
        assert bool(
            (other._log_partition() - (expected * other.natural_parameter).sum(-1) >= cost - 1e-9).all()
        )


def test_gaussian_mixture_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    mean, root = (
        torch.randn(4, 3, generator=g, dtype=torch.float64),
        torch.randn(4, 3, 3, generator=g, dtype=torch.float64),
    )
    covariance = root @ root.mT + torch.eye(3, dtype=torch.float64)
    log_weight = torch.tensor([0.0, 1.0, -700.0, -torch.inf], dtype=torch.float64)
    best = f.project(f.GaussianMixture(log_weight, mean, covariance), f.Gaussian)
    w = torch.softmax(log_weight, 0)
    m = (w[:, None] * mean).sum(0)
    c = sum(w[i] * (covariance[i] + torch.outer(mean[i] - m, mean[i] - m)) for i in range(4))
    torch.testing.assert_close(best.mean_vector, m)
    torch.testing.assert_close(best.covariance_matrix, c)
    diagonal = f.project(f.GaussianMixture(log_weight, mean, covariance), f.DiagonalGaussian)
    torch.testing.assert_close(diagonal.variance, c.diagonal())


def test_projection_keeps_digits_far_from_the_origin() -> None:
    mean, one = torch.tensor([[1e8], [1e8 + 2]], dtype=torch.float64), torch.eye(1, dtype=torch.float64)
    mixture = f.GaussianMixture(torch.zeros(2, dtype=torch.float64), mean, one)
    assert float(f.project(mixture, f.Gaussian).covariance_matrix) == pytest.approx(2, rel=1e-12)


def test_points_give_the_maximum_likelihood_fit() -> None:
    x = scipy.stats.gamma(3.0, scale=0.5).rvs(500, random_state=0)
    fit = f.project(f.Empirical(torch.as_tensor(x)[:, None]), f.Gamma)
    shape, _, scale = scipy.stats.gamma.fit(x, floc=0)
    assert float(fit.shape) == pytest.approx(shape, rel=1e-6)
    assert float(1 / fit.rate) == pytest.approx(scale, rel=1e-6)
    y = scipy.stats.beta(2, 5).rvs(500, random_state=0)
    beta = f.project(f.Empirical(torch.as_tensor(y)[:, None]), f.Beta)
    a, b, _, _ = scipy.stats.beta.fit(y, floc=0, fscale=1)
    np.testing.assert_allclose([float(beta.alpha), float(beta.beta)], [a, b], rtol=1e-5)
    z = scipy.stats.vonmises_fisher([0, 0, 1], 20).rvs(300, random_state=0)
    sphere = f.project(f.Empirical(torch.as_tensor(z)), f.VonMisesFisher)
    direction, kappa = scipy.stats.vonmises_fisher.fit(z)
    assert float(sphere.concentration) == pytest.approx(kappa, rel=1e-6)
    np.testing.assert_allclose((sphere.vector / sphere.concentration).numpy(), direction, rtol=1e-6)


def test_density_by_quadrature() -> None:
    h = f.FromDensity.quadrature(
        lambda x: -x[..., 0] + 1.5 * x[..., 0].log(), lower=[0.0], upper=[float("inf")]
    )
    fit = f.project(h, f.Gamma)
    assert float(fit.shape) == pytest.approx(2.5, rel=1e-8)
    assert float(fit.rate) == pytest.approx(1, rel=1e-8)
    assert float(f.kl(h, fit).value) == pytest.approx(0, abs=1e-10)


def test_what_cannot_be_projected() -> None:
    mixture = f.Mixture(torch.zeros(2), f.Gamma(torch.ones(2, 1), torch.ones(2, 1)))
    with pytest.raises(ValueError, match=r"Beta statistic of a Gamma mixture"):
        f.project(mixture, f.Beta)
    with pytest.raises(ValueError, match="family must be"):
        f.project(mixture, torch.Tensor)  # type: ignore[type-var]
    line = f.Empirical(torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]))
    with pytest.raises(ValueError, match=r"not positive definite"):
        f.project(line, f.Gaussian)
    with pytest.raises(RuntimeError, match="boundary"):
        f.project(f.Empirical(torch.ones(3, 1)), f.Gamma)


def grid_posterior(log_prior: torch.Tensor, log_likelihood: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(log_prior + log_likelihood, 0)


@pytest.mark.parametrize(
    ("prior", "likelihood", "x", "member"),
    [
        (
            f.Beta(torch.tensor([2.0]), torch.tensor([3.0])),
            f.BernoulliProduct,
            [1.0, 0, 1, 1],
            lambda p: f.BernoulliProduct(p.logit()),
        ),
        (f.Gamma(torch.tensor([2.0]), torch.tensor([3.0])), f.Poisson, [1.0, 0, 4, 2], f.Poisson),
        (f.Gamma(torch.tensor([2.0]), torch.tensor([3.0])), f.Exponential, [0.3, 1.0, 0.1], f.Exponential),
    ],
)
def test_posterior_on_a_grid(
    prior: f.ExponentialFamily, likelihood: type, x: list[float], member: Callable[[torch.Tensor], f.Measure]
) -> None:
    prior = prior.to(torch.float64)
    grid = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)[:, None]
    data = torch.tensor(x, dtype=torch.float64)[:, None]
    likelihoods = member(grid).log_prob(data[:, None]).sum(0)
    found = f.posterior(prior, likelihood, data)
    torch.testing.assert_close(
        grid_posterior(found.log_prob(grid), torch.zeros(99)),
        grid_posterior(prior.log_prob(grid), likelihoods),
    )


def test_posterior_of_gaussians() -> None:
    g = torch.Generator().manual_seed(0)
    data = torch.randn(20, 2, dtype=torch.float64, generator=g) + 1
    weight = torch.rand(20, dtype=torch.float64, generator=g)
    eye = torch.eye(2, dtype=torch.float64)
    prior = f.NormalInverseWishart(torch.zeros(2), torch.tensor(2.0), torch.tensor(5.0), torch.eye(2)).to(
        torch.float64
    )
    found = f.posterior(prior, f.Gaussian, data, weight=weight)
    draws = prior.sample((50,), generator=g)
    gaussians = f.Gaussian(draws.mean, draws.covariance)
    total = (weight[:, None] * gaussians.log_prob(data[:, None])).sum(0)
    difference = found.log_prob(draws) - prior.log_prob(draws) - total
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=1e-8, atol=1e-8)
    diagonal = f.NormalGamma(*(torch.full((2,), v, dtype=torch.float64) for v in (0.0, 2, 3, 1.5)))
    pair = diagonal.sample((50,), generator=g)
    total = f.DiagonalGaussian(pair.mean, 1 / pair.precision).log_prob(data[:, None]).sum(0)
    difference = (
        f.posterior(diagonal, f.DiagonalGaussian, data).log_prob(pair) - diagonal.log_prob(pair) - total
    )
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=1e-8, atol=1e-8)
    wishart = f.Wishart(torch.tensor(4.0, dtype=torch.float64), eye)
    precision = wishart.sample((50,), generator=g)
    total = (
        f.Gaussian(torch.zeros(2, dtype=torch.float64), torch.linalg.inv(precision))
        .log_prob(data[:, None])
        .sum(0)
    )
    difference = (
        f.posterior(wishart, f.Gaussian, data).log_prob(precision) - wishart.log_prob(precision) - total
    )
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=1e-7, atol=1e-7)
    counts = f.posterior(f.Dirichlet(torch.ones(3)), f.Categorical, torch.eye(3)[[0, 0, 2]])
    assert counts.concentration.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="Known: Beta with BernoulliProduct"):
        f.posterior(f.Dirichlet(torch.ones(3)), f.Gaussian, torch.ones(3, 3))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("points", "family", "message"),
    [
        (
            column(1.0, -2.5),
            f.BernoulliProduct,
            r"points\[1\] must be in the support of BernoulliProduct.*got \[-2.5\]",
        ),
        (column(5.0, -0.2), f.Exponential, r"points\[1\] must be in the support of Exponential"),
        (column(0.5, 2.0), f.Poisson, r"points\[0\] must be in the support of Poisson"),
        (column(2.0, -1.0), f.Gamma, r"points\[1\] must be in the support of Gamma"),
        (column(0.5, 1.0), f.Beta, r"points\[1\] must be in the support of Beta"),
        (torch.eye(3) * 1.1, f.VonMisesFisher, r"points\[0\] must be in the support of VonMisesFisher"),
        (torch.eye(3), f.Wishart, "Wishart is no family of vectors"),
        (torch.eye(3), f.NormalGamma, "NormalGamma is no family of vectors"),
        (torch.eye(3), f.NormalInverseWishart, "NormalInverseWishart is no family of vectors"),
    ],
)
def test_points_off_the_support(
    points: torch.Tensor, family: type[f.ExponentialFamily], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        f.project(f.Empirical(points), family)


def test_points_that_do_not_count_may_be_anywhere() -> None:
    points = column(2.0, -1.0, 3.0).requires_grad_()
    weight = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64)
    fit = f.project(f.Empirical(points, weight), f.Gamma)
    torch.testing.assert_close(fit.shape, f.project(f.Empirical(points[::2]), f.Gamma).shape)
    (slope,) = torch.autograd.grad(fit.shape.sum(), points)
    assert bool(slope.isfinite().all())
    assert float(slope[1]) == 0
    with pytest.raises(ValueError, match=r"points\[1, 1\] must be"):
        f.project(f.Empirical(points, torch.stack([weight, 0 * weight.nan_to_num()])), f.Gamma)
    with pytest.raises(ValueError, match=r"must be in the support of Gamma"):
        f.project(f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2)), f.Gamma)
    box = f.project(
        f.FromDensity.quadrature(lambda x: 0 * x[..., 0], lower=[0.0], upper=[1.0]), f.Beta
    )  # whose last nodes round to 1
    torch.testing.assert_close(torch.cat([box.alpha, box.beta]), torch.ones(2, dtype=torch.float64))


def test_waiting_times_are_gammas() -> None:
    g = torch.Generator().manual_seed(0)
    weight, rate = torch.tensor([0.0, 1.0, -torch.inf], dtype=torch.float64), column(1.0, 4.0, 9.0)
    times, gammas = (
        f.Mixture(weight, f.Exponential(rate)),
        f.Mixture(weight, f.Gamma(2 * torch.ones_like(rate), rate)),
    )
    same = f.Mixture(weight, f.Gamma(torch.ones_like(rate), rate))
    torch.testing.assert_close(f.project(times, f.Gamma).shape, f.project(same, f.Gamma).shape)
    assert float(f.project(gammas, f.Exponential).rate) == pytest.approx(1 / float(gammas.mean()))
    single = f.project(f.Exponential(rate[1]), f.Gamma)
    torch.testing.assert_close(
        torch.cat([single.shape, single.rate]), torch.tensor([1.0, 4.0], dtype=torch.float64)
    )
    assert float(f.project(f.Gamma(rate[1], rate[2]), f.Exponential).rate) == pytest.approx(9 / 4)
    drawn = f.project(f.Empirical(times.sample((20_000,), generator=g)), f.Gamma)
    assert float(drawn.shape) == pytest.approx(float(f.project(times, f.Gamma).shape), rel=0.05)


def test_observations_off_the_support() -> None:
    coin, rate = f.Beta(torch.ones(1), torch.ones(1)), f.Gamma(torch.ones(1), torch.ones(1))
    bad: list[tuple[Callable[[], object], str]] = [
        (
            lambda: f.posterior(rate, f.Poisson, torch.tensor([[2.0], [-1.0]])),
            r"x\[1\] must be in the support of Poisson; got \[-1.0\]",
        ),
        (
            lambda: f.posterior(coin, f.BernoulliProduct, torch.tensor([[3.0]])),
            r"x\[0\] must be in the support of BernoulliProduct",
        ),
        (
            lambda: f.posterior(coin, f.BernoulliProduct, torch.ones(2, 1), weight=torch.tensor([1.0, -1])),
            r"weight\[1\] must be finite",
        ),
        (lambda: f.posterior(rate, f.Poisson, torch.tensor([[torch.nan]])), r"x\[0, 0\] must be finite"),
        (lambda: f.posterior(rate, f.Poisson(torch.ones(1)), torch.ones(1, 1)), "got an instance of Poisson"),
        (lambda: expected_statistic(coin, 3), "expected_statistic: family must be"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
    padded = f.posterior(
        coin, f.BernoulliProduct, torch.tensor([[1.0], [-1.0]]), weight=torch.tensor([1.0, 0.0])
    )
    assert float(padded.alpha) == 2


def test_data_are_projected() -> None:
    g = torch.Generator().manual_seed(0)
    x = f.Gamma(2.0, 1.0).to(torch.float64).sample(200, generator=g)
    fitted, same = f.project(x, f.Gamma), f.project(f.Empirical(x), f.Gamma)
    assert torch.equal(fitted.shape, same.shape)
    assert torch.equal(f.project(x[:, 0], f.Gamma).shape, same.shape)
    shape, _, scale = scipy.stats.gamma.fit(x[:, 0].numpy(), floc=0)
    assert float(fitted.shape) == pytest.approx(shape, rel=1e-6)
    assert float(fitted.rate) == pytest.approx(1 / scale, rel=1e-6)
    counts = torch.tensor([3.0, 5.0, 9.0], dtype=torch.float64)
    coins = f.project(counts, f.Binomial, known=torch.tensor([9.0], dtype=torch.float64))
    assert float(torch.sigmoid(coins.logit)) == pytest.approx(17 / 27)
    about = f.project(counts, f.Laplace, known=torch.tensor([4.0], dtype=torch.float64))
    assert float(about.scale) == pytest.approx(7 / 3)
    with pytest.raises(ValueError, match=r"points\[2\] must be in the support of Binomial"):
        f.project(counts, f.Binomial, known=torch.tensor([8.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"pass known=total"):
        f.project(counts, f.Binomial)


T = torch.tensor


@pytest.mark.parametrize(
    "h",
    [
        f.Beta(T([2.0, 0.7]), T([3.0, 1.5])),
        f.Gamma(T([2.0, 0.7]), T([3.0, 1.5])),
        f.LogNormal(T([0.2, -0.7]), T([0.3, 0.5])),
        f.InverseGamma(T([7.0, 9.0]), T([0.3, 0.5])),
        f.Laplace(T([0.2, -0.7]), T([0.3, 0.5])),
        f.Mixture(T([0.0, 1.0]), f.Beta(T([[2.0, 0.7], [1.0, 9.0]]), T([[3.0, 1.5], [2.0, 2.0]]))),
    ],
    ids=lambda h: type(h).__name__,
)
def test_onto_a_gaussian_by_moments(h: f.Measure) -> None:
    """Moments of draws, and the least KL(h ‖ ·) among Gaussians near by: by E log p of the same draws."""
    h = h.to(torch.float64)
    x = h.sample(100_000, generator=torch.Generator().manual_seed(0))
    best = f.project(h, f.Gaussian)
    error = x.std(0) / len(x) ** 0.5
    assert bool(((x.mean(0) - best.mean_vector).abs() < 5 * error).all())
    offset = x - best.mean_vector
    products = offset.unsqueeze(-1) * offset.unsqueeze(-2)
    spread = products.std(0) / len(x) ** 0.5
    assert bool(((products.mean(0) - best.covariance_matrix).abs() < 5 * spread).all())
    diagonal = f.project(h, f.DiagonalGaussian)
    torch.testing.assert_close(diagonal.variance, best.covariance_matrix.diagonal())
    cost = best.log_prob(x).mean()
    for scale in (0.8, 1.25):
        assert f.Gaussian(best.mean_vector, scale * best.covariance_matrix).log_prob(x).mean() < cost


def test_a_dirichlet_has_no_nearest_full_gaussian() -> None:
    h = f.Dirichlet(T([2.0, 0.7, 4.0], dtype=torch.float64))
    x = h.sample(50_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(x.mT.cov(), h._event_covariance(), rtol=0.05, atol=1e-3)
    nearest = f.project(h, f.DiagonalGaussian)
    torch.testing.assert_close(nearest.variance, h.event_variance)
    with pytest.raises(ValueError, match="sum to 1, and no Gaussian has their singular covariance"):
        f.project(h, f.Gaussian)


def test_a_projection_asks_for_the_known_parameter() -> None:
    points = torch.tensor([[1.0], [4.0]])
    with pytest.raises(ValueError, match=r"failures of a NegativeBinomial: pass known=failures"):
        f.project(f.Empirical(points), f.NegativeBinomial)
    member = f.project(f.Empirical(points), f.NegativeBinomial, known=torch.tensor([2.0]))
    assert float(member.mean()) == pytest.approx(2.5, rel=1e-5)
