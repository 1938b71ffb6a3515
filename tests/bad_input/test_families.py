"""Every refusal names the argument, the place and what to pass."""

import pytest
import torch

from exptilt import families as f
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.linalg import repaired, unpack


def bad_covariances() -> torch.Tensor:
    matrices = torch.eye(2).repeat(2, 3, 1, 1)
    matrices[1, 2] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    return matrices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: f.Gaussian(torch.zeros(2, 3, 2), bad_covariances()),
            r"covariance\[1, 2\] is not positive definite: its smallest eigenvalue is -1",
        ),
        (
            lambda: f.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.1, 1.0]])),
            r"covariance is not symmetric: entries differ by up to 0.4",
        ),
        (lambda: f.Gaussian(torch.zeros(2), torch.full((2, 2), torch.nan)), r"covariance holds NaN"),
        (
            lambda: f.Gaussian(torch.zeros(3), torch.eye(2)),
            r"mean must be \(..., D\).*got mean \(3,\), covariance \(2, 2\)",
        ),
        (
            lambda: f.Gaussian(torch.zeros(2, dtype=torch.float64), torch.eye(2)),
            r"Pass the same dtype and device",
        ),
        (
            lambda: f.Gaussian(torch.zeros(2, dtype=torch.int64), torch.eye(2)),
            r"must be a tensor of float32, float64; got torch.int64",
        ),
        (lambda: f.Gaussian([0.0], torch.eye(1)), r"floating-point tensor; got list"),
        (lambda: f.Gaussian(torch.zeros(4, 2), torch.eye(2).repeat(3, 1, 1)), r"do not broadcast"),
        (
            lambda: f.Gaussian(torch.tensor([0.0, torch.inf]), torch.eye(2)),
            r"mean\[1\] must be finite; got inf",
        ),
        (
            lambda: f.Poisson(torch.tensor([[1.0], [-1.0]])),
            r"rate\[1, 0\] must be positive and finite; got -1",
        ),
        (lambda: f.Poisson(torch.tensor([1.0, 0.0])), r"rate\[1\] must be positive and finite; got 0"),
        (
            lambda: f.Poisson(torch.tensor([1.0, torch.nan])),
            r"rate\[1\] must be positive and finite; got nan",
        ),
        (
            lambda: f.Gamma(torch.ones(2), torch.ones(3)),
            r"last axes must be equally long; got shape \(2,\), rate \(3,\)",
        ),
        (lambda: f.Dirichlet(torch.ones(1)), r"at least 2 entries"),
        (lambda: f.VonMisesFisher(torch.ones(1)), r"at least 2 entries"),
        (
            lambda: f.Wishart(torch.tensor([3.0, 0.5]), torch.eye(2)),
            r"degrees\[1\] must be finite and above D − 1 = 1; got 0.5",
        ),
        (
            lambda: f.Empirical(torch.zeros(3, 2), torch.zeros(4)),
            r"same N; got points \(3, 2\), log_weight \(4,\)",
        ),
        (
            lambda: f.Empirical(torch.zeros(2, 3, 2), torch.tensor([[0.0] * 3, [-torch.inf] * 3])),
            r"log_weight\[1\] is all −inf",
        ),
        (
            lambda: f.Empirical(torch.zeros(0, 2)),
            r"points has shape \(0, 2\). Pass .* none of the last 2 empty",
        ),
        (lambda: f.Empirical(torch.zeros(2)), r"points has shape \(2,\). Pass \(..., N, D\)"),
        (
            lambda: f.Empirical(torch.zeros(2, 1), torch.tensor([0.0, torch.nan])),
            r"log_weight\[1\] must be a number",
        ),
        (
            lambda: f.GaussianMixture(torch.full((2,), -torch.inf), torch.zeros(2, 1), torch.eye(1)),
            r"all −inf",
        ),
        (
            lambda: f.GaussianMixture(torch.zeros(3), torch.zeros(2, 1), torch.eye(1)),
            r"got log_weight \(3,\), mean \(2, 1\)",
        ),
        (lambda: f.Mixture(torch.zeros(3), f.Poisson(torch.ones(2, 1))), r"log_weight must be \(..., K\)"),
        (
            lambda: f.Mixture(torch.zeros(3), f.Empirical(torch.ones(3, 2, 1))),
            r"must be an ExponentialFamily",
        ),  # type: ignore[arg-type]
        (
            lambda: f.FromDensity.quadrature(lambda x: x[..., 0], lower=[0.0] * 3, upper=[1.0] * 3),
            r"use monte_carlo",
        ),
        (lambda: f.FromDensity.quadrature(lambda x: x), r"log_density must map \(N, D\) to \(N,\)"),
        (
            lambda: f.Poisson(torch.ones(2)).mean(torch.ones(3)),
            r"eta must be \(..., 2\) for this Poisson; got shape \(3,\)",
        ),
        (
            lambda: f.Poisson(torch.ones(2)).tilt(torch.ones(2, dtype=torch.float64)),
            r"eta is torch.float64, this Poisson is torch.float32",
        ),
        (lambda: f.Poisson(torch.ones(2)).natural(1.0), r"mean must be a tensor \(..., 2\); got float"),
        (
            lambda: f.Exponential(torch.ones(2)).tilt(torch.tensor([[0.0, 0.0], [0.0, 1.5]])),
            r"Exponential: eta\[1, 1\] must be below the rate; got 1.5",
        ),
        (
            lambda: f.Gamma(torch.tensor([2.0]), torch.ones(1)).mean(torch.tensor([[0.5], [3.0]])),
            r"Gamma: eta\[1\] must be inside the natural domain, where the integral converges; got \[3.0\]",
        ),
        (
            lambda: f.Exponential(torch.ones(1)).covariance(torch.tensor([1.0])),
            r"Exponential: eta must be inside the nat.*got \[1.0\]",
        ),
        (
            lambda: f.Beta(torch.ones(1), torch.ones(1)).mean(torch.tensor([0.0, -1.0])),
            r"Beta: eta must be inside the natural domain",
        ),
        (
            lambda: f.Dirichlet(torch.ones(2)).covariance_product(torch.ones(2), torch.tensor([0.0, -1.0])),
            r"Dirichlet: eta must be inside",
        ),
        (
            lambda: f.Wishart(torch.tensor(3.0), torch.eye(1)).mean(torch.tensor([0.5])),
            r"Wishart: eta must be inside",
        ),
        (
            lambda: f.Gamma(torch.ones(1), torch.ones(1)).bregman(torch.tensor([0.5]), torch.tensor([3.0])),
            r"Gamma: b must be inside",
        ),
        (
            lambda: f.Mixture(torch.zeros(2), f.Gamma(torch.ones(2, 1), torch.tensor([[1.0], [4.0]]))).mean(
                torch.tensor([[0.5], [2.0]])
            ),
            r"Mixture: eta\[1\] must be inside",
        ),
        (lambda: f.Gaussian.from_natural(torch.tensor([0.0, 1.0])), r"inside the natural domain"),
        (lambda: f.Poisson(torch.ones(2)).log_prob(torch.ones(3)), r"x must be \(..., 2\); got \(3,\)"),
        (
            lambda: f.Wishart(torch.tensor(3.0), torch.eye(2)).log_prob(torch.ones(3)),
            r"x must be \(..., 2, 2\); got \(3,\)",
        ),
        (
            lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), center=(1.0, 2.0)),
            r"one center and one positive scale",
        ),
        (
            lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), scale=(-1.0,)),
            r"one positive scale.*got.*\(-1.0,\)",
        ),
        (
            lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), nodes=1),
            r"nodes is 1. Pass an integer ≥ 3",
        ),
        (
            lambda: f.FromDensity.quadrature(lambda x: x[..., 0].log()),
            r"log_density must be a number below \+inf",
        ),
        (
            lambda: f.FromDensity.monte_carlo(lambda x: x[..., 0], f.Poisson(torch.ones(2, 1))),
            r"without batch; got batch \(2,\)",
        ),
        (
            lambda: f.FromDensity.monte_carlo(lambda x: x[..., 0], f.Poisson(torch.ones(1)), samples=1),
            r"samples is 1. Pass an integer ≥ 2",
        ),
        (
            lambda: f.Gamma.from_natural(torch.ones(3)),
            r"theta must be \(..., K\) with K one of 2, 4, 6, ...; got shape \(3,\)",
        ),
        (
            lambda: f.Gaussian.from_mean(torch.ones(3)),
            r"mean must be \(..., K\) with K one of 2, 5, 9, ...; got shape \(3,\)",
        ),
        (lambda: f.Wishart.from_mean(torch.ones(3)), r"with K one of 2, 4, 7, ..."),
        (lambda: f.NormalInverseWishart.from_mean(torch.ones(5)), r"with K one of 4, 7, 11, ..."),
        (lambda: f.NormalGamma.from_mean(torch.ones(5)), r"with K one of 4, 8, 12, ..."),
        (lambda: f.Dirichlet.from_mean(torch.ones(1)), r"with K one of 2, 3, 4, ..."),
        (
            lambda: f.Poisson.from_mean(torch.ones(2, dtype=torch.int64)),
            r"floating-point tensor \(..., K\); got torch.int64",
        ),
        (lambda: f.Poisson.from_mean(torch.tensor([1.0, torch.nan])), r"mean\[1\] must be finite; got nan"),
        (
            lambda: f.Empirical(torch.ones(3, 1)).natural(torch.tensor([torch.inf])),
            r"mean\[0\] must be finite; got inf",
        ),
        (
            lambda: f.Poisson(torch.ones(2)).update(torch.ones(3)),
            r"statistic must be \(..., 2\) for this Poisson; got shape \(3,\)",
        ),
        (
            lambda: f.Poisson(torch.ones(2)).sample(3.0),
            r"shape must be a number of draws such as 100, or a sequence of sizes .*; got 3.0",
        ),  # type: ignore[arg-type]
        (lambda: f.Poisson(torch.ones(2)).sample((-1,)), r"sequence of sizes.*got \(-1,\)"),
        (
            lambda: f.GaussianMixture(torch.zeros(1), torch.zeros(1, 1), torch.eye(1)).entropy(1),
            r"samples must be 0 .* at least 2; got 1",
        ),
        (lambda: f.project(3, f.Gaussian), r"measure must be a measure.*got int"),  # type: ignore[arg-type]
        (
            lambda: f.maximum_entropy(torch.ones(3, 0)),
            r"A has shape \(3, 0\). Pass \(..., outcomes, constraints\), none of the last 2 empty",
        ),
        (
            lambda: f.posterior(f.Beta(torch.ones(1), torch.ones(1)), f.BernoulliProduct, torch.ones(3, 2)),
            r"x is \(3, 2\); its last axis",
        ),
        (
            lambda: f.posterior(f.Beta(torch.ones(1), torch.ones(1)), f.BernoulliProduct, torch.ones(3)),
            r"x must be .*n observations",
        ),
        (
            lambda: f.posterior(
                f.Beta(torch.ones(1), torch.ones(1)),
                f.BernoulliProduct,
                torch.ones(3, 1),
                weight=torch.ones(4),
            ),
            r"weight must be \(..., 3\).*got \(4,\)",
        ),
        (lambda: unpack(torch.ones(4)), r"D\(D\+1\)/2 entries .*got 4"),
    ],
)
def test_refusals(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_repair_is_asked_for_and_told() -> None:
    with pytest.warns(
        ExptiltWarning, match=r"added up to 1 to the diagonal and averaged away an asymmetry of up to 0\.5"
    ):
        mended = repaired(torch.tensor([[1.0, 1.75], [2.25, 1.0]]))
    assert float(torch.linalg.eigvalsh(mended)[0]) > 0
    f.Gaussian(torch.zeros(2), mended)


def test_repair_leaves_the_good_alone(recwarn: pytest.WarningsRecorder) -> None:
    good = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    torch.testing.assert_close(repaired(good), good, rtol=0, atol=0)
    assert not recwarn.list


def test_checks_stand_back_inside_transforms() -> None:
    """Under vmap values cannot be looked at: the constructor still works there."""
    rates = torch.tensor([[1.0], [2.0]])
    assert torch.func.vmap(lambda rate: f.Poisson(rate).mean())(rates).tolist() == rates.tolist()


def test_outside_the_natural_domain_inside_transforms() -> None:
    """Where no error can be raised there is no number either; the rest of the batch is not disturbed."""
    gamma = f.Gamma(torch.tensor([2.0]), torch.ones(1))
    eta = torch.tensor([[0.5], [3.0]])
    for method in (
        gamma.mean,
        lambda e: gamma.covariance(e)[..., 0],
        lambda e: gamma.bregman(0 * e, e).unsqueeze(-1),
    ):
        values = torch.func.vmap(method)(eta)
        torch.testing.assert_close(values[0], method(eta[0]))
        assert bool(values[1].isnan().all())
    left_out = f.Mixture(
        torch.tensor([0.0, -torch.inf]), f.Gamma(torch.ones(2, 1), torch.tensor([[4.0], [1.0]]))
    )
    assert float(left_out.mean(torch.tensor([2.0]))) == 0.5
    assert float(gamma.bregman(torch.tensor([3.0]), torch.tensor([0.5]))) == torch.inf


def test_outside_the_support_the_density_is_zero() -> None:
    x = torch.tensor([[-1.0], [0.0], [1.0], [2.5]])
    assert f.Poisson(torch.ones(1)).log_prob(x).exp().tolist() == pytest.approx(
        [0, 1 / torch.e, 1 / torch.e, 0]
    )
    assert f.Beta(torch.ones(1), torch.ones(1)).log_prob(x + 0.25).exp().tolist() == [0, 1, 0, 0]
    assert f.Gamma(torch.ones(1), torch.ones(1)).log_prob(x)[0] == -torch.inf
    assert f.Exponential(torch.ones(1)).log_prob(x)[0] == -torch.inf
    assert f.Dirichlet(torch.ones(2)).log_prob(torch.tensor([[0.5, 0.5], [-0.5, 1.5]])).exp().tolist() == [
        1,
        0,
    ]
    assert f.BernoulliProduct(torch.zeros(2)).log_prob(
        torch.tensor([[0.0, 1.0], [0.5, 1.0], [2.0, 0.0]])
    ).exp().tolist() == [0.25, 0, 0]
    one_hot = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert f.Categorical(torch.zeros(3)).log_prob(one_hot).exp().tolist() == pytest.approx([1 / 3, 0, 0, 0])
    circle = torch.tensor([[0.6, 0.8], [0.6, 0.7], [0.0, 0.0], [3.0, 4.0]])
    assert f.VonMisesFisher(torch.zeros(2)).log_prob(circle).exp().tolist() == pytest.approx(
        [0.5 / torch.pi, 0, 0, 0]
    )
    assert f.Dirichlet(torch.ones(2)).log_prob(
        torch.tensor([[0.5, 0.6], [0.2, 0.8 + 1e-6]])
    ).exp().tolist() == [0, 1]
    assert f.NormalGamma(*torch.ones(4, 1)).log_prob(
        (torch.zeros(2, 1), torch.tensor([[-1.0], [1.0]]))
    ).isinf().tolist() == [True, False]
    matrices = torch.stack(
        [torch.eye(2), -torch.eye(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.ones(2, 2)]
    )
    definite = [True, False, False, False]
    assert f.Wishart(torch.tensor(3.0), torch.eye(2)).log_prob(matrices).isfinite().tolist() == definite
    pairs = f.NormalInverseWishart(
        torch.zeros(2), torch.tensor(1.0), torch.tensor(3.0), torch.eye(2)
    ).log_prob((torch.zeros(4, 2), matrices))
    assert pairs.isfinite().tolist() == definite
    assert not pairs.isnan().any()


def test_off_the_support_nothing_is_disturbed() -> None:
    """Gradients of a batch in which some x have no density are finite.

    NaN is not taken for a value off the support.
    """
    shape = torch.ones(1, requires_grad=True)
    density = f.Gamma(shape, torch.ones(1)).log_prob(torch.tensor([[1.0], [-1.0]]))
    (slope,) = torch.autograd.grad(density.exp().sum(), shape)
    (alone,) = torch.autograd.grad(f.Gamma(shape, torch.ones(1)).log_prob(torch.tensor([1.0])).exp(), shape)
    torch.testing.assert_close(slope, alone)
    scale = torch.eye(2, requires_grad=True)
    density = f.Wishart(torch.tensor(3.0), scale).log_prob(torch.stack([torch.eye(2), -torch.eye(2)]))
    assert bool(torch.autograd.grad(density[0], scale)[0].isfinite().all())
    nothing = torch.tensor([[torch.nan]])
    for family in (
        f.Poisson(torch.ones(1)),
        f.Gamma(torch.ones(1), torch.ones(1)),
        f.BernoulliProduct(torch.zeros(1)),
    ):
        assert bool(family.log_prob(nothing).isnan().all())
    line = f.FromDensity.quadrature(lambda x: -x[..., 0], lower=(0.0,))
    assert line.log_prob(torch.tensor([[-1.0], [1.0]], dtype=torch.float64)).isfinite().tolist() == [
        False,
        True,
    ]


def test_empty_batches() -> None:
    none = f.Gamma(torch.ones(0, 1), torch.ones(0, 1))
    assert f.kl(none, none).value.shape == (0,)
    assert none.sample((3,)).shape == (3, 0, 1)
    assert f.VonMisesFisher(torch.ones(0, 4)).sample((2,)).shape == (2, 0, 4)
    assert f.Gamma.from_mean(torch.ones(0, 4)).converged
    points = f.Empirical(torch.ones(0, 5, 2))
    assert points.mean().shape == (0, 2)
    assert points.natural(torch.ones(0, 2)).converged
