"""What holds for every exponential family with a finite statistic, and SciPy's numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from exptilt.families import inverse_mean
from exptilt.families.estimate import EstimateKind
from laws.registry import FAMILIES, LAWS, Case, f

every = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every
def test_mean_parameter_is_gradient(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))

    def partition(theta: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = case.cls.log_partition(theta, **case.known(h))
        return value

    close(h.mean_parameter, inverse_mean.gradient(partition, h.natural_parameter), 1e-8)
    close(h.mean(), h.mean_parameter[..., : h.dimension])


@every
def test_parameters_both_ways(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2, 3))
    back = case.cls.from_natural(h.natural_parameter, **case.known(h))
    found = case.cls.from_mean(h.mean_parameter, **case.known(h))
    assert found.converged
    for mine, natural, mean in zip(*map(pytree.tree_leaves, (h, back, found.value)), strict=True):
        close(natural, mine, 1e-8)
        close(
            mean - mean.mean(-1, keepdim=True) if not h.minimal else mean,
            mine - mine.mean(-1, keepdim=True) if not h.minimal else mine,
            1e-7,
        )


@every
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_kl_property(case: Case, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = case.make(g, (4,)), case.make(g, (4,))
    there = f.kl(p, q)
    assert there.kind is EstimateKind.EXACT
    assert bool((there.value >= -1e-10).all())
    dual = (
        p._log_partition()
        - q._log_partition()
        - (q.mean_parameter * (p.natural_parameter - q.natural_parameter)).sum(-1)
    )
    close(f.kl(q, p).value, dual, 1e-8)


@every
def test_float32_follows_float64(case: Case, g: torch.Generator) -> None:
    p, q = (case.make(g, (3,)).to(torch.float32) for _ in range(2))
    x = p.sample((4,), generator=g)
    exact, other = p.to(torch.float64), q.to(torch.float64)
    double = pytree.tree_map(lambda leaf: leaf.double(), x)
    pairs = (
        (p.log_prob(x), exact.log_prob(double)),
        (p.entropy(), exact.entropy()),
        (f.kl(p, q).value, f.kl(exact, other).value),
    )
    for rounded, value in pairs:
        assert rounded.dtype == torch.float32
        assert float((rounded - value).abs().max()) <= 2e-5 * (1 + float(value.abs().max()))


@every
def test_kl_against_samples(case: Case, g: torch.Generator) -> None:
    p, q = case.make(g, (2,)), case.make(g, (2,))
    x = p.sample((20000,), generator=g)
    ratio = p.log_prob(x) - q.log_prob(x)
    error = ratio.std(0) / 20000**0.5
    assert bool(((ratio.mean(0) - f.kl(p, q).value).abs() <= 5 * error + 1e-12).all())


@every
def test_fisher_information(case: Case, g: torch.Generator) -> None:
    h = case.make(g)
    fisher = h.fisher_information()
    x = h.statistic(h.sample((40000,), generator=g)) - h.mean_parameter
    products = x.unsqueeze(-1) * x.unsqueeze(-2)
    assert bool(((products.mean(0) - fisher).abs() <= 6 * products.std(0) / 200 + 1e-12).all())
    other = h.fisher_information("mean")
    close(fisher @ other @ fisher, fisher, 1e-7)
    with pytest.raises(ValueError, match="natural"):
        h.fisher_information("moment")  # type: ignore[arg-type]


@every
def test_statistic_leads_with_coordinate(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    x = h.sample((3,), generator=g)
    statistic = h.statistic(x)
    assert statistic.shape == h.natural_parameter.expand(3, 2, -1).shape
    close(statistic[..., : h.dimension], h.coordinate(x))
    by_definition = (statistic * h.natural_parameter).sum(-1) - h._log_partition() + h._log_base(x)
    close(h.log_prob(x), by_definition, 1e-8)


@pytest.mark.parametrize("case", [c for c in LAWS if c.scipy], ids=lambda case: case.name)
def test_scipy(case: Case, g: torch.Generator) -> None:
    assert case.scipy is not None
    h = case.make(g)
    twin = case.scipy(h)
    x = h.sample((7,), generator=g)
    points = case.scipy_x(x)
    density = twin.logpdf(points) if hasattr(twin, "logpdf") else twin.logpmf(points)
    univariate = density.ndim > 1
    np.testing.assert_allclose(
        h.log_prob(x).numpy(), density.sum(-1) if univariate else density, rtol=1e-9, atol=1e-9
    )
    expected = np.sum(twin.entropy())
    np.testing.assert_allclose(float(h.entropy()), expected, rtol=1e-8, atol=1e-8)
    if univariate:
        np.testing.assert_allclose(h.to_torch().mean.numpy(), twin.mean(), rtol=1e-12)


@every
def test_natural_domain_is_guarded(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    theta = h.natural_parameter.clone()
    theta[1] = torch.nan
    with pytest.raises(ValueError, match=r"theta\[1\].*natural domain"):
        case.cls.from_natural(theta, **case.known(h))


@every
def test_conjugate_updating_adds(case: Case, g: torch.Generator) -> None:
    p, q = case.make(g, (2,)), case.make(g, (2,))
    amount = 0.5 * (q.natural_parameter - p.natural_parameter)
    close(p.update(amount).natural_parameter, p.natural_parameter + amount, 1e-9)
