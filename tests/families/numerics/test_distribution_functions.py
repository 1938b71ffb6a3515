"""Numbers as parameters, draws by number, distribution functions, quantiles and modes against SciPy."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from exptilt import families as f

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


LAWS: list[tuple[Any, Any]] = [
    (f.DiagonalGaussian(t(1.0, -2.0), t(0.3, 9.0)), scipy.stats.norm([1, -2], [0.3**0.5, 3])),
    (f.LogNormal(t(1.0, -2.0), t(0.3, 4.0)), scipy.stats.lognorm([0.3**0.5, 2], scale=np.exp([1, -2]))),
    (f.Gamma(t(0.4, 30.0), t(2.0, 0.1)), scipy.stats.gamma([0.4, 30], scale=[0.5, 10])),
    (f.InverseGamma(t(3.4, 30.0), t(2.0, 0.1)), scipy.stats.invgamma([3.4, 30], scale=[2, 0.1])),
    (f.Exponential(t(0.4, 30.0)), scipy.stats.expon(scale=[2.5, 1 / 30])),
    (f.Beta(t(0.4, 30.0), t(2.0, 7.0)), scipy.stats.beta([0.4, 30], [2, 7])),
    (f.Laplace(t(1.0, -2.0), t(0.3, 4.0)), scipy.stats.laplace([1, -2], [0.3, 4])),
    (f.StudentT(t(3.0)[0], t(1.0, -2.0), t(4.0, 9.0).diag()), scipy.stats.t(3, [1, -2], [2, 3])),
    (f.Poisson(t(0.4, 30.0)), scipy.stats.poisson([0.4, 30])),
    (f.NegativeBinomial(t(0.4, 9.0), t(1.0, -1.0)), scipy.stats.nbinom([0.4, 9], 1 / (1 + np.exp([1, -1])))),
    (f.Binomial(t(1.0, 40.0), t(1.0, -1.0)), scipy.stats.binom([1, 40], 1 / (1 + np.exp([-1, 1])))),
    (f.Geometric(t(1.0, -4.0)), scipy.stats.geom(1 / (1 + np.exp([-1, 4])), loc=-1)),
    (f.BernoulliProduct(t(1.0, -1.0)), scipy.stats.bernoulli(1 / (1 + np.exp([-1, 1])))),
]
every = pytest.mark.parametrize(("h", "twin"), LAWS, ids=[type(h).__name__ for h, _ in LAWS])


@every
def test_distribution_functions_are_those_of_scipy(h: Any, twin: Any) -> None:
    q = torch.linspace(0.001, 0.999, 23, dtype=F64)[:, None].expand(-1, 2)
    np.testing.assert_allclose(h.icdf(q).numpy(), twin.ppf(q.numpy()), rtol=1e-9)
    x = torch.cat([h.icdf(q), t(-3.0, -0.5)[None], t(2.5, 7.5)[None]])
    np.testing.assert_allclose(h.cdf(x).numpy(), twin.cdf(x.numpy()), rtol=1e-10, atol=1e-14)
    assert bool(h.icdf(t(-0.1, 1.1)).isnan().all())
    np.testing.assert_allclose(h.stddev.numpy(), twin.std(), rtol=1e-10)


@every
def test_no_density_is_above_that_of_the_mode(h: Any, twin: Any) -> None:
    q = torch.linspace(0.001, 0.999, 401, dtype=F64)[:, None].expand(-1, 2)
    counts = hasattr(twin, "pmf") and not hasattr(twin, "pdf")
    density = twin.pmf if hasattr(twin.dist, "pmf") or counts else twin.pdf
    assert h.mode.shape == (2,)
    assert bool((density(h.mode.numpy()) >= density(h.icdf(q).numpy()) * (1 - 1e-12)).all())


def test_modes_of_vectors_and_matrices() -> None:
    g = torch.Generator().manual_seed(0)
    scale = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
    laws: list[Any] = [
        f.Gaussian(t(1.0, 2.0), scale),
        f.StudentT(t(3.0)[0], t(1.0, 2.0), scale),
        f.Dirichlet(t(2.0, 1.5, 4.0)),
        f.Wishart(t(5.0)[0], scale),
        f.InverseWishart(t(5.0)[0], scale),
        f.VonMisesFisher(t(1.0, -2.0, 0.5)),
        f.Categorical(t(0.1, 2.0, -1.0)),
    ]
    for h in laws:
        assert bool((h.log_prob(h.mode) >= h.log_prob(h.sample(500, generator=g)) - 1e-12).all()), h
    assert bool(f.Wishart(t(2.5)[0], scale).mode.isnan().all())
    assert bool(f.Dirichlet(t(0.5, 2.0)).mode.isnan().all())
    edges = f.Beta(t(0.5, 2.0, 0.5, 1.0, 1.0), t(2.0, 0.5, 0.5, 1.0, 3.0)).mode
    torch.testing.assert_close(edges, t(0.0, 1.0, math.nan, math.nan, 0.0), equal_nan=True)
    for law in (laws[0], laws[1], laws[3]):
        matrix = law.covariance_matrix if isinstance(law, f.Gaussian) else law.scale
        torch.testing.assert_close(law.scale_tril @ law.scale_tril.mT, matrix)
        assert bool((law.scale_tril.triu(1) == 0).all())
    with pytest.raises(ValueError, match="NormalGamma: the mode has no closed form"):
        f.NormalGamma(t(0.0), t(1.0), t(1.0), t(1.0)).mode  # noqa: B018
    with pytest.raises(ValueError, match="Dirichlet: the distribution function has no closed form"):
        laws[2].cdf(t(0.1, 0.2, 0.7))


def test_numbers_are_one_coordinate() -> None:
    """As in torch.distributions, but that every x has its axis of coordinates."""
    for made in (f.Gamma(2.0, 1.0), f.Gamma(torch.tensor(2.0), torch.tensor(1.0)), f.Gamma(2, torch.ones(1))):
        assert (made.dtype, tuple(made.shape.shape), made.batch_shape) == (
            torch.float32,
            (1,),
            torch.Size([]),
        )
        twin = torch.distributions.Gamma(2.0, 1.0)
        x = made.sample(5, generator=torch.Generator().manual_seed(0))
        assert x.shape == (5, 1)
        torch.testing.assert_close(made.log_prob(x), twin.log_prob(x)[:, 0])
        torch.testing.assert_close(made.log_prob(1.5), twin.log_prob(torch.tensor(1.5)))
        torch.testing.assert_close(made.cdf(torch.tensor(1.5)), twin.cdf(torch.tensor([1.5])))
    torch.testing.assert_close(f.Gamma(t(1.0, 2.0), 3.0).rate, t(3.0, 3.0))
    torch.testing.assert_close(
        f.Gaussian(1.0, 4.0).log_prob(2.0), torch.distributions.Normal(1.0, 2.0).log_prob(torch.tensor(2.0))
    )
    assert f.Binomial(9, 0.5).total.tolist() == [9.0]
    assert tuple(f.StudentT(3.0, 0.0, 1.0).sample((2, 3)).shape) == (2, 3, 1)
    exact = f.Exponential(t(3.0))
    assert float(exact.log_prob(0.1)) == float(exact.log_prob(t(0.1)))  # in the dtype of the law
    assert torch.equal(exact.mean(0.1), exact.mean(t(0.1)))  # type: ignore[arg-type]
    assert torch.equal(exact.tilt(t(0.1)[0]).rate, t(2.9))
    mean = torch.tensor(2.0, requires_grad=True)
    f.Poisson(mean).mean().backward()
    assert float(mean.grad) == 1.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gamma: shape must be a floating-point tensor; got str"):
        f.Gamma("2", 1.0)  # type: ignore[arg-type]
    for bad in (-1, True, 2.5, "3"):
        with pytest.raises(ValueError, match="a number of draws such as 100, or a sequence of sizes"):
            f.Gamma(2.0, 1.0).sample(bad)  # type: ignore[arg-type]


def test_what_scipy_cannot_differentiate_is_refused() -> None:
    shape = t(2.0).requires_grad_()
    with pytest.raises(ValueError, match=r"scipy.special.gammaincinv has neither derivatives nor transforms"):
        f.Gamma(shape, t(1.0)).icdf(t(0.5))
    rate = t(2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: f.Exponential(r).cdf(t(0.7)), (rate,))
    assert torch.autograd.gradcheck(lambda x: f.Gamma(t(2.0), t(1.0)).cdf(x), (t(0.7).requires_grad_(),))
