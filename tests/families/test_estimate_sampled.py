"""Sampled divergences and entropies.

Their derivatives against quadrature, sums over counts, and closed forms.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exptilt import families as f
from exptilt.families.estimate import Estimate

F64 = torch.float64


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def gaussians(weight: Tensor, mean: Tensor, variance: Tensor) -> f.GaussianMixture:
    return f.GaussianMixture(weight, mean[:, None], variance[:, None, None])


def poissons(weight: Tensor, rate: Tensor) -> f.Mixture:
    return f.Mixture(weight, f.Poisson(rate[:, None]))


def directions(weight: Tensor, x: Tensor) -> f.Mixture:
    return f.Mixture(weight, f.VonMisesFisher(torch.stack([x, 0 * x], -1)))


LINE = torch.linspace(-14, 14, 20001, dtype=F64)[:, None], t(28 / 20000).log()
COUNTS = torch.arange(60, dtype=F64)[:, None], t(0.0)
ANGLE = torch.linspace(0, 2 * torch.pi, 4001, dtype=F64)[:-1]
CIRCLE = torch.stack([ANGLE.cos(), ANGLE.sin()], -1), t(2 * torch.pi / 4000).log()
CASES: list[
    tuple[Callable[..., f.Measure], tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, Tensor]]
] = [
    (gaussians, (t(0.3, -0.4), t(-2.0, 2.0), t(0.5, 1.0)), (t(0.0, 1.5), t(-1.5, 1.0), t(1.0, 1.0)), LINE),
    (poissons, (t(0.2, -0.5), t(2.0, 9.0)), (t(1.0, -0.5), t(3.0, 7.0)), COUNTS),
    (directions, (t(0.4, 0.0), t(3.0, -1.0)), (t(-0.5, 0.5), t(2.0, -2.0)), CIRCLE),
    (lambda rate: f.Poisson(rate), (t(4.0),), (t(0.0, 0.0), t(3.0, 7.0)), COUNTS),
]
NAMES = ["gaussians", "poissons", "directions", "one poisson"]


def leaves(values: tuple[Tensor, ...]) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


def gradient(value: Tensor, inputs: list[Tensor]) -> Tensor:
    return torch.cat(torch.autograd.grad(value, inputs))


@pytest.mark.parametrize(("make", "p", "q", "rule"), CASES, ids=NAMES)
def test_sampled_divergences_have_their_derivative(make, p, q, rule) -> None:  # type: ignore[no-untyped-def]
    """In weights and in parameters, of counts and directions too, whose draws carry none themselves."""
    x, log_volume = rule
    other = {1: poissons}.get(len(p), make)(*q)
    mine = leaves(p)
    log_p = make(*mine).log_prob(x)
    exact = ((log_p + log_volume).exp() * (log_p - other.log_prob(x))).sum()
    wanted = gradient(exact, mine)
    mine = leaves(p)
    found = f.kl(make(*mine), other, samples=40000, generator=torch.Generator().manual_seed(0))
    assert abs(float(found.value.detach()) - float(exact.detach())) < 4 * float(found.standard_error.detach())
    torch.testing.assert_close(gradient(found.value, mine), wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("make", "p", "q", "rule"), CASES[:3], ids=NAMES[:3])
def test_sampled_entropies_have_their_derivative(make, p, q, rule) -> None:  # type: ignore[no-untyped-def]
    x, log_volume = rule
    mine = leaves(p)
    log_p = make(*mine).log_prob(x)
    wanted = gradient(-((log_p + log_volume).exp() * log_p).sum(), mine)
    mine = leaves(p)
    found = make(*mine).entropy(40000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gradient(found.value, mine), wanted, rtol=0.05, atol=0.02)


def test_second_derivatives_of_a_sampled_entropy() -> None:
    def entropy(weight: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(2)
        return f.Mixture(weight, f.Poisson(t(2.0, 9.0)[:, None])).entropy(100_000, generator=g).value

    def exact(weight: Tensor) -> Tensor:
        log_p = f.Mixture(weight, f.Poisson(t(2.0, 9.0)[:, None])).log_prob(COUNTS[0])
        return -(log_p.exp() * log_p).sum()

    weight = t(0.2, -0.5)
    found, wanted = (torch.autograd.functional.hessian(h, weight) for h in (entropy, exact))
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.02)


def test_an_infinite_divergence_has_no_nan_in_its_derivative() -> None:
    weight = t(0.0, 0.0).requires_grad_()
    p = f.Mixture(weight, f.Exponential(t(1.0, 2.0)[:, None]))
    q = f.FromDensity.quadrature(lambda x: 0 * x[..., 0], lower=[0.0], upper=[1.0])
    found = f.kl(p, q, generator=torch.Generator().manual_seed(0)).value
    assert float(found.detach()) == torch.inf
    assert bool(torch.autograd.grad(found, weight)[0].isfinite().all())


def spread_out(name: str, small: float, dtype: torch.dtype) -> f.ExponentialFamily:
    """A member so spread out that most of its draws round to the edge of the support."""
    one = torch.full((2,), small, dtype=dtype)
    nu, unit = torch.tensor(1 + small, dtype=dtype), torch.eye(2, dtype=dtype)
    return {
        "Beta": lambda: f.Beta(one, one),
        "Gamma": lambda: f.Gamma(one, one + 1),
        "InverseGamma": lambda: f.InverseGamma(one, one + 1),
        "Dirichlet": lambda: f.Dirichlet(one),
        "LogNormal": lambda: f.LogNormal(one, 40 / one),
        "Exponential": lambda: f.Exponential(one),
        "NormalGamma": lambda: f.NormalGamma(one, one + 1, one, one + 1),
        "Wishart": lambda: f.Wishart(nu, unit * (1 + small)),
        "NormalInverseWishart": lambda: f.NormalInverseWishart(one, nu, nu, unit * (1 + small)),
    }[name]()


SPREAD_OUT = ["Beta", "Gamma", "InverseGamma", "Dirichlet", "LogNormal", "Exponential"]
SPREAD_OUT += ["NormalGamma", "Wishart", "NormalInverseWishart"]


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", SPREAD_OUT)
def test_draws_at_the_edge_of_the_support_count(name: str, dtype: torch.dtype) -> None:
    p, q = (spread_out(name, small, dtype) for small in (0.01, 0.02))
    alone = torch.zeros(1, dtype=dtype)
    mixtures = [f.Mixture(alone, type(member).stack([member])) for member in (p, q)]
    g = torch.Generator().manual_seed(3)
    y, score = mixtures[0]._sample_scored(4096, g)
    surprise = -mixtures[0]._log_prob_inner(y)
    ratio = -surprise - mixtures[1]._log_prob_inner(y)
    for drawn, exact in ((surprise, p.entropy()), (ratio, f.kl(p, q).value)):  # no bracket helps here
        free = torch.full_like(exact, torch.inf)
        found = Estimate.sampled(drawn, -free, free, score)
        assert float((found.value - exact).abs()) < 4.5 * float(found.standard_error)
        assert 0 < float(found.standard_error) < 8
    for found in (f.kl(*mixtures, generator=g), mixtures[0].entropy(generator=g)):
        assert float(found.lower) <= float(found.value) <= float(found.upper)
    x = p.sample((2000,), generator=g)
    assert bool(p.log_prob(x).isfinite().all())


@pytest.mark.parametrize("center", [0.3, 9.0, float("nan")])
def test_a_mean_that_contradicts_its_bracket_is_an_error(center: float) -> None:
    draws = center + torch.linspace(-0.01, 0.01, 100, dtype=F64)
    with pytest.raises(RuntimeError, match="contradicts the bracket"):
        Estimate.sampled(draws, torch.tensor(1.0, dtype=F64), torch.tensor(2.0, dtype=F64))


def test_a_mean_that_noise_took_out_of_its_bracket_is_moved_to_its_end() -> None:
    draws = (0.99 + torch.linspace(-1, 1, 100, dtype=F64)).requires_grad_()
    found = Estimate.sampled(draws, torch.tensor(1.0, dtype=F64), torch.tensor(2.0, dtype=F64))
    assert found.value.item() == 1.0
    assert torch.autograd.grad(found.value, draws)[0].allclose(torch.full_like(draws, 0.01))
