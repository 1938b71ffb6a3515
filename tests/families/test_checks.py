"""Matrices that are repaired, densities off the support, and checks under transforms of torch."""

import pytest
import torch

from exptilt import families as f
from exptilt._support.errors import ExptiltWarning
from exptilt._support.linalg import repaired


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
    ).exp().tolist() == pytest.approx([0, 1], abs=1e-5)
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
