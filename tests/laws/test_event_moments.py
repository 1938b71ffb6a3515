"""E[x] and Var[x] of every measure against its draws, and SciPy's where it has them."""

import math

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from laws.registry import LAWS, Case, f, t

HEAVY = {
    "InverseGamma",
    "InverseWishart",
    "NormalGamma",
    "NormalInverseWishart",
    "StudentT",
}  # a fourth moment need not exist


def light(case: Case, g: torch.Generator) -> f.Measure:
    h = case.make(g, (2,))
    for name in ("shape", "degrees"):
        if case.name in HEAVY and hasattr(h, name):
            object.__setattr__(h, name, getattr(h, name) + 6)
    return h


@pytest.mark.parametrize("case", LAWS, ids=lambda case: case.name)
def test_moments_of_draws(case: Case, g: torch.Generator) -> None:
    h, count = light(case, g), 20000
    draws = pytree.tree_leaves(h.sample((count,), generator=g))
    means, variances = pytree.tree_leaves(h.event_mean), pytree.tree_leaves(h.event_variance)
    for x, mean, variance in zip(draws, means, variances, strict=True):
        assert mean.shape == variance.shape == x.shape[1:]
        assert bool(((x.mean(0) - mean).abs() <= 5.5 * x.std(0) / math.sqrt(count) + 1e-12).all())
        square = (x - mean) ** 2
        assert bool(((square.mean(0) - variance).abs() <= 6 * square.std(0) / math.sqrt(count) + 1e-9).all())


@pytest.mark.parametrize(
    "name", ["Beta", "Dirichlet", "InverseGamma", "Laplace", "LogNormal", "NegativeBinomial"]
)
def test_scipy(name: str, g: torch.Generator) -> None:
    case = next(case for case in LAWS if case.name == name)
    assert case.scipy is not None
    h = light(case, g)[0]
    twin = case.scipy(h)
    np.testing.assert_allclose(h.event_mean.numpy(), twin.mean(), rtol=1e-10)
    np.testing.assert_allclose(h.event_variance.numpy(), twin.var(), rtol=1e-10)


def test_moments_that_do_not_exist() -> None:
    h = f.InverseGamma(t(0.5, 1.5, 3.0), t(2.0, 2.0, 2.0))
    torch.testing.assert_close(h.event_mean, t(math.inf, 4.0, 1.0))
    torch.testing.assert_close(h.event_variance, t(math.nan, math.inf, 1.0), equal_nan=True)
    pair = f.NormalGamma(t(7.0, 7.0, 7.0), *(t(*v) for v in ((2.0,) * 3, (0.4, 0.8, 3.0), (1.0, 1.0, 8.0))))
    torch.testing.assert_close(pair.event_mean.mean, t(math.nan, 7.0, 7.0), equal_nan=True)
    torch.testing.assert_close(pair.event_variance.mean, t(math.nan, math.inf, 2.0), equal_nan=True)


def test_a_mixture_of_betas() -> None:
    h = f.Mixture(t(0.0, -math.inf), f.Beta(t(1.0, 5.0)[:, None], t(1.0, 2.0)[:, None]))
    torch.testing.assert_close(h.event_mean, t(0.5))
    torch.testing.assert_close(h.event_variance, t(1 / 12))
