"""`fit_mixture`: stationary by autograd, as high as SciPy climbs, and honest where there is no maximum."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch.utils import _pytree as pytree

from exptilt import families as f
from exptilt.families import mixture_fit

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*laws: Any, count: int = 60) -> torch.Tensor:
    g = generator()
    x: torch.Tensor = torch.cat([law.sample(count, generator=g) for law in laws])
    return x


SIGMA = torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=F64)
EYE = torch.eye(2, dtype=F64)
PAIRS: list[tuple[Any, Any]] = [
    (f.Gaussian(t(0.0, 0.0), SIGMA), f.Gaussian(t(4.0, -1.0), EYE)),
    (f.DiagonalGaussian(t(1e5), t(1.0)), f.DiagonalGaussian(t(1e5 + 5), t(4.0))),
    (f.Gamma(t(2.0), t(1.0)), f.Gamma(t(30.0), t(2.0))),
    (f.Beta(t(4.0), t(30.0)), f.Beta(t(30.0), t(4.0))),
    (f.LogNormal(t(0.0), t(0.2)), f.LogNormal(t(3.0), t(0.3))),
    (f.Poisson(t(2.0)), f.Poisson(t(15.0))),
    (f.BernoulliProduct(t(2.0, 2, 2, 2, 2)), f.BernoulliProduct(t(-2.0, -2, -2, -2, -2))),
    (f.Binomial(t(50.0), t(-2.0)), f.Binomial(t(50.0), t(2.0))),
    (f.Laplace(t(0.0), t(0.1)), f.Laplace(t(0.0), t(9.0))),
    (f.VonMisesFisher(t(30.0, 0.0)), f.VonMisesFisher(t(0.0, -30.0))),
    (f.Wishart(t(9.0)[0], EYE), f.Wishart(t(9.0)[0], 9 * EYE)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_a_fit_that_converged_has_no_gradient(pair: tuple[Any, Any]) -> None:
    family, x = type(pair[0]), drawn(*pair)
    options = {"known": getattr(pair[0], family.known_field)} if hasattr(family, "known_field") else {}
    found = f.fit_mixture(x, family, 2, starts=1, generator=generator(), **options)
    assert found.status is f.Status.CONVERGED
    learnt = [leaf.clone().requires_grad_() for leaf in pytree.tree_leaves(found.value)]
    mixture = pytree.tree_unflatten(learnt, pytree.tree_structure(found.value))
    whole = mixture.log_prob(x).mean()
    # In units of each field's own size, but for what is known: a shift of x by 1e5 changes nothing.
    fields = ["log_weight", *found.value.family.event_dims]
    for name, leaf, slope in zip(
        fields, learnt, torch.autograd.grad(whole, learnt, allow_unused=True), strict=True
    ):
        if name != getattr(family, "known_field", None):
            size = 1.0 if name == "mean_vector" else leaf.detach().abs().clamp_min(1.0)
            assert slope is not None
            assert float((slope * size).detach().abs().max()) < 1e-4, name
    truth = f.Mixture(t(0.0, 0.0), type(pair[0]).stack(list(pair)))
    assert float(whole.detach()) > float(truth.log_prob(x).mean())


def test_as_high_as_scipy_climbs() -> None:
    x = drawn(f.Poisson(t(2.0)), f.Poisson(t(9.0)), count=80)

    def loss(p: Any) -> float:
        weight = 1 / (1 + math.exp(-p[0]))
        k = x[:, 0].numpy()
        both = weight * scipy.stats.poisson.pmf(k, np.exp(p[1])) + (1 - weight) * scipy.stats.poisson.pmf(
            k, np.exp(p[2])
        )
        return -float(np.log(both).mean())

    best = scipy.optimize.minimize(
        loss, [0.0, math.log(2), math.log(9)], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}
    )
    found = f.fit_mixture(x, f.Poisson, 2, tolerance=1e-8, generator=generator())
    assert float(found.value.log_prob(x).mean()) == pytest.approx(-best.fun, abs=1e-10)


def test_the_residual_is_the_length_of_the_gradient() -> None:
    """In the metric of complete data: of coins with known p, g²/(w(1 − w)) for the weight alone."""
    x = drawn(f.Poisson(t(2.0)), f.Poisson(t(4.0)))
    found = f.fit_mixture(x, f.Poisson, 2, max_steps=40, starts=1, tolerance=1e-12, generator=generator())
    assert found.status is f.Status.MAX_STEPS
    log_weight = found.value.log_weight.clone().requires_grad_()
    rate = found.value.family.rate.clone().requires_grad_()
    value = f.Mixture(log_weight, f.Poisson(rate)).log_prob(x).mean()
    by_weight, by_rate = torch.autograd.grad(value, [log_weight, rate])
    weight = found.value.log_probability.exp()
    # Fisher: of log-weights diag(w) − ww', whose pseudo-inverse leaves g²/w; of rates w/λ.
    length = (by_weight**2 / weight).sum() + (by_rate[:, 0] ** 2 * rate[:, 0].detach() / weight).sum()
    # The residual is that of the step before.
    assert float(found.residual) == pytest.approx(float(length.sqrt()), rel=0.1)


def test_a_likelihood_without_a_maximum_is_said_so() -> None:
    near = torch.randn(30, dtype=F64, generator=generator()) + 10
    piled = f.fit_mixture(torch.cat([torch.zeros(30, dtype=F64), near]), f.Gaussian, 2, generator=generator())
    assert piled.status is f.Status.UNBOUNDED
    assert "without end" in str(piled.status)
    with pytest.raises(RuntimeError, match="unbounded"):
        piled.or_raise()
    line = torch.cat(
        [torch.stack([near, 2 * near], -1), torch.randn(30, 2, dtype=F64, generator=generator()) - 30]
    )
    assert f.fit_mixture(line, f.Gaussian, 2, generator=generator()).status is f.Status.UNBOUNDED
    for family in (f.Gamma, f.LogNormal, f.DiagonalGaussian):
        x = torch.cat([torch.full((30,), 2.0, dtype=F64), near])
        assert f.fit_mixture(x, family, 2, generator=generator()).status is f.Status.UNBOUNDED, family
    assert (
        f.fit_mixture(t(0.0, 1.0, 5.0, 9.0), f.Gaussian, 3, generator=generator()).status
        is f.Status.UNBOUNDED
    )


def test_starts_that_collapse_give_way_to_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(f.Gaussian(t(0.0), t(1.0)[:, None]), f.Gaussian(t(9.0), t(1.0)[:, None]))
    usual = mixture_fit._Problem.start

    def bad_but_for_the_last(self: Any, starts: int, components: int, g: Any) -> torch.Tensor:
        share = usual(self, starts, components, g)
        share[:, :-1] = torch.nn.functional.one_hot((torch.arange(len(x)) == 0).long(), 2).to(share)[:, None]
        return share

    monkeypatch.setattr(mixture_fit._Problem, "start", bad_but_for_the_last)
    found = f.fit_mixture(x, f.Gaussian, 2, starts=4, generator=generator())
    assert found.status is f.Status.CONVERGED
    assert sorted(found.value.log_probability.exp().tolist()) == pytest.approx([0.5, 0.5], abs=1e-3)


def test_a_coin_that_never_falls_otherwise_is_on_the_boundary() -> None:
    x = drawn(*[f.BernoulliProduct(sign * t(3.0, 3, 3, 3)) for sign in (1, -1)])
    found = f.fit_mixture(
        torch.cat([x, torch.ones(120, 1, dtype=F64)], -1), f.BernoulliProduct, 2, generator=generator()
    )
    assert found.status is f.Status.BOUNDARY
    mean = found.value.family.mean_parameter
    assert bool((mean[:, -1] > 1 - 1e-8).all())
    assert bool(((mean[:, :-1] - 0.5).abs() > 0.4).all())


@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_a_component_without_points(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets log-weight −inf, unless weight on it would raise the likelihood: then it grows."""
    x = torch.tensor([8.0, 9.0, 10.0, 11.0] * 20, dtype=F64)[:, None]
    x = torch.cat([x, x + spread])

    def start(self: Any, starts: int, components: int, g: Any) -> torch.Tensor:
        second = 1e-10 * (self.x[:, 0] == self.x.max()).to(self.x)
        return torch.stack([1 - second, second], -1)[:, None]

    monkeypatch.setattr(mixture_fit._Problem, "start", start)
    found = f.fit_mixture(x, f.Poisson, 2, starts=1)
    assert found.converged
    assert bool(found.value.log_weight[1] == -math.inf) == (spread == 0)
    gain = (found.value.components.log_prob(x[:, None]) - found.value.log_prob(x)[:, None]).exp().mean(0)
    assert bool((gain < 1 + 1e-5).all())  # ∂L/∂w_k − 1: at most 0 at a maximum
    assert float(found.value.mean()) == pytest.approx(float(x.mean()), rel=1e-6)


def test_numbers_dtypes_and_refusals() -> None:
    x = drawn(f.Gaussian(t(0.0), t(1.0)[:, None]), f.Gaussian(t(9.0), t(1.0)[:, None]))[:, 0].float()
    found = f.fit_mixture(x, f.Gaussian, 2, generator=generator(), progress=True)
    assert found.converged
    assert found.value.dtype == torch.float32
    again = f.fit_mixture(x, f.Gaussian, 2, generator=generator())
    assert torch.equal(found.value.log_weight, again.value.log_weight)
    for arguments, words in (
        ((x, f.Mixture, 2), "family must be an exponential family of vectors or matrices"),
        ((x, f.NormalGamma, 2), "family must be an exponential family of vectors or matrices"),
        ((x, f.Gaussian, 0), "components is 0"),
        ((x[:2], f.Gaussian, 2), "2 points are too few for 2 components"),
        ((x, f.Gamma, 2), r"in the support of Gamma"),
        ((x, f.Binomial, 2), r"pass known=total"),
        ((x[None, None], f.Gaussian, 2), r"x must be \(N, D\); got \(1, 1, 120\)"),
        ((x.tolist(), f.Gaussian, 2), "x must be a floating-point tensor; got list"),
    ):
        with pytest.raises(ValueError, match=words):
            f.fit_mixture(*arguments)  # type: ignore[arg-type, type-var]


@pytest.mark.parametrize("family", [f.Gaussian, f.DiagonalGaussian])
@pytest.mark.parametrize("place", [0.0, 0.3, 1.0, 1e8])
def test_equal_points_are_unbounded_whatever_rounding_says(family: Any, place: float) -> None:
    x = torch.full((50, 1), place, dtype=torch.float64)
    assert f.fit_mixture(x, family, 2, generator=generator()).status is f.Status.UNBOUNDED


def test_the_total_of_a_multinomial_is_that_of_the_data() -> None:
    x = f.Multinomial(torch.tensor([[3.0, 0, 0], [0, 0, 3.0]], dtype=torch.float64), 10.0).sample(
        100, generator=generator()
    )
    rows = x.flatten(0, 1)
    found = f.fit_mixture(rows, f.Multinomial, 2, generator=generator())
    known = f.fit_mixture(rows, f.Multinomial, 2, known=torch.tensor(10.0).double(), generator=generator())
    assert torch.equal(found.value.log_weight, known.value.log_weight)
    with pytest.raises(ValueError, match="support of Multinomial"):
        f.fit_mixture(torch.cat([rows, rows[:1] + 1]), f.Multinomial, 2)
