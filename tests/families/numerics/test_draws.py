"""Draws against SciPy's distribution functions; what a seed decides and what it does not."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from exptilt import families as f
from exptilt.families.numerics.draws import poisson, standard_gamma, standard_normal

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_three(g: torch.Generator | None) -> list[torch.Tensor]:
    like = torch.full((3, 7001), 2.5, dtype=F64)
    return [standard_normal(like, like.shape, g), standard_gamma(like, g), poisson(like, g)]


def test_a_seed_decides_and_threads_do_not() -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(all_three(generator(5)))
    finally:
        torch.set_num_threads(threads)
    for drawn in zip(*found, strict=True):
        assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    g = generator(5)
    for first, second, other in zip(all_three(g), all_three(g), all_three(generator(6)), strict=True):
        assert not torch.equal(first, second)
        assert not torch.equal(first, other)
    torch.manual_seed(3)
    once = all_three(None)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(once, all_three(None), strict=True))


def test_the_page_names_the_families_whose_draws_carry_derivatives() -> None:
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    found = re.search(r"Draws of ([\w, \n]+?) carry their\s+derivatives in the parameters", page)
    assert found is not None
    named = set(re.findall(r"\w+", found[1])) - {"and"}
    public = [getattr(f, name) for name in f.__all__]
    members = [x for x in public if isinstance(x, type) and issubclass(x, f.ExponentialFamily)]
    assert named == {member.__name__ for member in members if member._differentiable_draws}


def test_normal_law() -> None:
    for dtype in (F64, torch.float32):
        x = standard_normal(torch.empty(0, dtype=dtype), (20000,), generator(1))
        assert x.dtype == dtype
        assert scipy.stats.kstest(x.numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("shape", [0.05, 0.4, 1.0, 1.7, 30.0, 1e5])
def test_gamma_law(shape: float) -> None:
    x = standard_gamma(torch.full((20000,), shape, dtype=F64), generator(2))
    assert scipy.stats.kstest(x.numpy(), scipy.stats.gamma(shape).cdf).pvalue > 1e-3
    single = standard_gamma(torch.full((20000,), shape), generator(2))
    torch.testing.assert_close(single, x.float(), rtol=1e-5 + (0 if shape > 0.1 else 1), atol=1e-30)


def test_gamma_is_never_zero() -> None:
    for dtype in (F64, torch.float32):
        x = standard_gamma(torch.full((1000,), 1e-4, dtype=dtype), generator())
        assert float(x.min()) == torch.finfo(dtype).tiny


def test_many_gammas_carry_the_slope_of_torch() -> None:
    a = torch.linspace(0.3, 9, 10_000, dtype=F64)
    leaf = a.clone().requires_grad_()
    drawn = standard_gamma(leaf, generator())
    assert torch.equal(
        drawn.detach(), standard_gamma(a, generator())
    )  # asking for a gradient changes nothing
    (slope,) = torch.autograd.grad(drawn.sum(), leaf)
    torch.testing.assert_close(slope, torch._standard_gamma_grad(a, drawn.detach()))


@pytest.mark.parametrize("rate", [0.01, 3.0, 9.9, 11.0, 500.0])
def test_poisson_law(rate: float) -> None:
    x = poisson(torch.full((20000,), rate, dtype=F64), generator(3))
    law = scipy.stats.poisson(rate)
    edges = np.unique(law.ppf([0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95]).astype(int))
    counts = np.bincount(np.searchsorted(edges, x.numpy(), side="left"), minlength=len(edges) + 1)
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * len(x)
    keep = expected > 1e-6
    assert counts[~keep].sum() == 0
    assert scipy.stats.chisquare(counts[keep], expected[keep]).pvalue > 1e-3


@pytest.mark.parametrize("rate", [1e15, 1e17, 1e25])
def test_poisson_beyond_integers(rate: float) -> None:
    x = (poisson(torch.full((20000,), rate, dtype=F64), generator()) - rate) / math.sqrt(rate)
    assert scipy.stats.kstest(x.numpy(), "norm").pvalue > 1e-3 or rate > 1e24  # there counts are 2^31 apart
    assert float(x.mean().abs()) < 5 / math.sqrt(20000)
    assert float(x.std()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0, 50.0])
def test_gamma_draws_carry_their_derivative(shape: float) -> None:
    """dx/da = −∂_a F / ∂_x F, by a difference of SciPy's incomplete gamma function."""
    a = torch.full((200,), shape, dtype=F64, requires_grad=True)
    x = standard_gamma(a, generator(4))
    (slope,) = torch.autograd.grad(x.sum(), a)
    value, step = x.detach().numpy(), 1e-5 * shape
    rise = (scipy.special.gammainc(shape + step, value) - scipy.special.gammainc(shape - step, value)) / (
        2 * step
    )
    np.testing.assert_allclose(
        slope.numpy(), -rise / scipy.stats.gamma(shape).pdf(value), rtol=1e-3, atol=1e-7
    )
    assert torch.equal(x.detach(), standard_gamma(a.detach(), generator(4)))


def test_where_values_cannot_be_seen_torch_draws() -> None:
    rate = torch.rand(4, 3, dtype=F64) + 1
    drawn = torch.func.vmap(lambda r: f.Gamma(r, r).sample((5,)), randomness="different")(rate)
    assert drawn.shape == (4, 5, 3)
    assert bool((drawn > 0).all())
    assert all(x.is_meta for x in all_of_meta())


def all_of_meta() -> list[torch.Tensor]:
    rate = torch.ones(3, device="meta")
    return [
        f.Poisson(rate).sample(),
        f.Gamma(rate, rate).sample(),
        f.DiagonalGaussian(rate, rate).sample((2,)),
    ]


@pytest.mark.parametrize("dimension", [2, 3, 4, 7, 512])
@pytest.mark.parametrize("kappa", [0.0, 0.1, 5.0, 300.0, 1e8])
def test_directions(dimension: int, kappa: float) -> None:
    """Unit length to the last bit; along the mean direction the fall 1 − <x,μ> has the mean.

    Variance that Bessel functions say.
    """
    g = generator(dimension)
    unit = torch.nn.functional.normalize(torch.randn(dimension, dtype=F64, generator=g), dim=0)
    h = f.VonMisesFisher(kappa * unit)
    x = h.sample((5000,), generator=g)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(5000, dtype=F64), rtol=0, atol=2e-15)
    fall = ((x - unit) ** 2).sum(-1) / 2
    if kappa < 1e6:
        mean, variance = 1 - float(h.mean() @ unit), float(unit @ h.covariance() @ unit)
    else:  # κ · fall is Gamma((D − 1)/2, 1)
        mean, variance = (dimension - 1) / 2 / kappa, (dimension - 1) / 2 / kappa**2
    assert abs(float(fall.mean()) - mean) < 4.5 * math.sqrt(variance / 5000)
    assert float(fall.var()) / variance == pytest.approx(1, abs=0.25)
    across = x - (x @ unit)[:, None] * unit
    spread = across.mT @ across / 5000
    level = float((across**2).sum(-1).mean()) / (dimension - 1)
    expected = level * (torch.eye(dimension, dtype=F64) - torch.outer(unit, unit))
    assert float((spread - expected).abs().max()) < 0.12 * level


def test_small_parameters_go_to_the_corners() -> None:
    """Beta(a, a) and Dirichlet(a, a, a) for a = 0.001: their gammas underflow, they do not."""
    a = torch.full((3,), 1e-3, dtype=F64, requires_grad=True)
    x = f.Beta(a[:1], a[:1]).sample((20000,), generator=generator(6))
    middle = scipy.stats.beta(1e-3, 1e-3).cdf(0.99) - scipy.stats.beta(1e-3, 1e-3).cdf(0.01)
    inside = float(((x > 0.01) & (x < 0.99)).double().mean())
    assert abs(inside - middle) < 5 * math.sqrt(middle / 20000)
    assert float(x.detach().mean()) == pytest.approx(0.5, abs=0.02)
    y = f.Dirichlet(a).sample((20000,), generator=generator(7))
    assert float((y.amax(-1) < 0.9).double().mean()) < 0.01
    assert y.mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    (slope,) = torch.autograd.grad(y[:, 0].clamp(1e-9, 1 - 1e-9).logit().sum(), a)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize(("a", "b"), [(0.07, 0.2), (0.3, 2.0), (2.0, 0.6)])
def test_shares_are_beta_distributed(a: float, b: float) -> None:
    """On both sides of where the logarithms are drawn."""
    x = f.Dirichlet(torch.tensor([a, b], dtype=F64)).sample(20000, generator=generator(8))
    torch.testing.assert_close(x.sum(-1), torch.ones(20000, dtype=F64))
    assert scipy.stats.kstest(x[:, 0].numpy(), scipy.stats.beta(a, b).cdf).pvalue > 1e-3
    alpha = torch.tensor([a, b], dtype=F64, requires_grad=True)
    drawn = f.Dirichlet(alpha).sample(20000, generator=generator(9))[:, 0]
    (slope,) = torch.autograd.grad(drawn.mean(), alpha)  # of a / (a + b), within the spread of 20000 draws
    torch.testing.assert_close(slope, torch.tensor([b, -a], dtype=F64) / (a + b) ** 2, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_of_a_tiny_shape_stay_in_the_open_support(dtype: torch.dtype) -> None:
    """A draw that underflows must not become 0, where no density is defined.

    A divergence of mixtures would be NaN.
    """
    shape, rate = torch.tensor([[1e-4], [1.0]], dtype=dtype), torch.tensor([[1e20], [1.0]], dtype=dtype)
    x = f.Gamma(shape, rate).sample((500,), generator=torch.Generator().manual_seed(0))
    assert bool((x > 0).all())
    pair = f.NormalGamma(shape[0], shape[1], shape[0], rate[0]).sample(
        (500,), generator=torch.Generator().manual_seed(0)
    )
    assert bool((pair.precision > 0).all())
    p = f.Mixture(torch.zeros(2, dtype=dtype), f.Gamma(shape, rate))
    q = f.Mixture(torch.zeros(2, dtype=dtype), f.Gamma(2 * shape, torch.ones_like(rate)))
    assert bool(f.kl(p, q, generator=torch.Generator().manual_seed(0)).value.isfinite())
