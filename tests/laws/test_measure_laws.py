"""What holds for every measure: THEORY A2, A3, A9, A10."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from exptilt.families import inverse_mean
from exptilt.families.estimate import Estimate, EstimateKind
from exptilt.families.measure import Base
from laws.registry import CASES, EXTREMES, LAWS, Case, f, randn

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
seeds = st.integers(0, 2**31)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every
def test_gradient_is_mean(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    eta = case.tilt(h, g)
    close(h.mean(eta), inverse_mean.gradient(h.log_normalizer, eta))
    step = 1e-5 * randn(g, h.dimension)
    slope = (h.log_normalizer(eta + step) - h.log_normalizer(eta - step)) / 2
    torch.testing.assert_close(slope, (h.mean(eta) * step).sum(-1), rtol=1e-6, atol=1e-11)


@every
def test_hessian_is_covariance(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    eta = case.tilt(h, g)
    covariance = h.covariance(eta)
    assert covariance.shape == (2, h.dimension, h.dimension)
    close(covariance, inverse_mean.hessian(h.log_normalizer, eta), 1e-8)
    assert float(torch.linalg.eigvalsh(covariance).min()) > -1e-12


@every
def test_sample_moments(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    count = 20000
    x = h.coordinate(h.sample((count,), generator=g))
    assert x.shape == (count, 2, h.dimension)
    mean, covariance = h.mean(), h.covariance()
    error = (covariance.diagonal(dim1=-2, dim2=-1) / count).sqrt()
    assert bool(((x.mean(0) - mean).abs() <= 5.5 * error + 1e-12).all())
    offset = x - mean
    products = offset.unsqueeze(-1) * offset.unsqueeze(-2)
    spread = products.std(0) / math.sqrt(count)
    assert bool(((products.mean(0) - covariance).abs() <= 6 * spread + 1e-12).all())


@every
def test_round_trip(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    eta = case.tilt(h, g)
    solution = h.natural(h.mean(eta))
    assert solution.converged, solution.status
    close(h.mean(solution.value), h.mean(eta), 1e-8)
    if case.cls not in (f.Categorical, f.Multinomial):
        close(solution.value, eta, 1e-7)


@every
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=seeds, scale=st.floats(0.01, 1.0))
def test_round_trip_property(case: Case, seed: int, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    h = case.make(g)
    eta = case.tilt(h, g) * scale
    mean = h.mean(eta)
    solution = h.natural(mean)
    assert solution.converged, solution.status
    close(h.mean(solution.value), mean, 1e-7)
    fenchel = h.log_normalizer(eta) + h.conjugate(mean) - (eta * mean).sum(-1)
    assert abs(float(fenchel)) < 1e-8 * (
        1 + float(h.log_normalizer(eta).abs()) + float((eta * mean).abs().sum())
    )


@every
def test_tilting_composes(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    a, b = case.tilt(h, g) / 2, case.tilt(h, g) / 2
    twice, once = h.tilt(a).tilt(b), h.tilt(a + b)
    assert type(twice) is type(h)
    for left, right in zip(pytree.tree_leaves(twice), pytree.tree_leaves(once), strict=True):
        if (
            case.cls in (f.Mixture, f.GaussianMixture, f.Empirical, f.FromDensity)
            and left.ndim
            and left.shape == twice.log_weight.shape
        ):
            left, right = torch.log_softmax(left, -1), torch.log_softmax(right, -1)
        close(left, right, 1e-8)
    close(
        h.tilt(a).log_normalizer(b) - h.tilt(a).log_normalizer(0 * b),
        h.log_normalizer(a + b) - h.log_normalizer(a),
        1e-8,
    )
    close(h.tilt(a).mean(), h.mean(a), 1e-8)


@every
def test_tilted_density(case: Case, g: torch.Generator) -> None:
    """A3: the tilted measure is h e^{<t,η>} up to its normaliser, whatever the class stores."""
    h = case.make(g, (3,))
    eta = case.tilt(h, g)
    x = h.sample((5,), generator=g)
    total = h.log_normalizer(eta) - h.log_normalizer(torch.zeros_like(eta))
    close(h.tilt(eta).log_prob(x), h.log_prob(x) + (h.coordinate(x) * eta).sum(-1) - total, 1e-7)


@every
def test_kl_is_bregman_swapped(case: Case, g: torch.Generator) -> None:
    """A10: B_G(a, b) = KL(p_b ‖ p_a), and not the other way round."""
    h = case.make(g, (3,))
    a, b = case.tilt(h, g), case.tilt(h, g) * 0.3
    bregman = h.bregman(a, b)
    divergence = f.kl(h.tilt(b), h.tilt(a), samples=4000, generator=g)
    assert bool((bregman > 0).all())
    swapped = h.bregman(b, a)
    if divergence.kind is EstimateKind.EXACT:
        close(divergence.value, bregman, 1e-7)
        close(f.kl(h.tilt(a), h.tilt(a)).value, torch.zeros_like(bregman), 1e-8)
    else:
        assert bool(((divergence.value - bregman).abs() <= 5 * divergence.standard_error + 1e-6).all())
        assert bool((divergence.lower <= bregman + 1e-9).all())
        assert bool((bregman <= divergence.upper + 1e-9).all())
    if case.cls not in (f.Gaussian, f.DiagonalGaussian):
        assert bool((swapped - bregman).abs().max() > 1e-4)


@every
def test_fenchel(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (4,))
    eta, other = case.tilt(h, g), case.tilt(h, g)
    mean = h.mean(other)
    gap = h.log_normalizer(eta) + h.conjugate(mean) - (eta * mean).sum(-1)
    assert bool((gap > 0).all())
    tight = h.log_normalizer(other) + h.conjugate(mean) - (other * mean).sum(-1)
    close(tight, torch.zeros_like(tight), 1e-8)


@pytest.mark.parametrize("case", [c for c in CASES if c.boundary], ids=lambda case: case.name)
def test_conjugate_on_the_boundary_is_the_limit_from_inside(case: Case, g: torch.Generator) -> None:
    """G* is closed: along a segment that ends on the boundary of the hull it tends to its value there.

    Be that infinite.
    """
    assert case.boundary is not None
    h = case.make(g, (3,))
    edge, inside = case.boundary(h), h.mean()
    assert h.natural(edge).code.tolist() == [f.Status.BOUNDARY.code] * 3
    value = h.conjugate(edge)
    finite = h.base is Base.COUNTING or case.cls is f.Empirical
    near, nearer = (
        h.conjugate(edge + share * (inside - edge)) for share in ((1e-5, 1e-8) if finite else (1e-2, 1e-4))
    )
    assert bool((near.isfinite() & nearer.isfinite()).all())
    if finite:
        close(nearer, value, 1e-5)
        assert bool(((near - value).abs() > (nearer - value).abs()).all())
    else:
        assert value.tolist() == [math.inf] * 3
        assert bool((nearer > near + 1).all())


@pytest.mark.parametrize("case", [c for c in LAWS if c.integral], ids=lambda case: case.name)
def test_density_integrates_to_one(case: Case) -> None:
    assert case.integral is not None
    assert case.integral() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("case", LAWS, ids=lambda case: case.name)
def test_entropy_is_expected_surprise(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    surprise = -h.log_prob(h.sample((20000,), generator=g))
    entropy = h.entropy()
    value, error = (
        (entropy.value, entropy.standard_error) if isinstance(entropy, Estimate) else (entropy, 0.0)
    )
    allowed = 5 * (surprise.std(0) / math.sqrt(20000) + error) + 1e-9
    if case.name == "FromDensity-draws":
        allowed = allowed + 0.05  # resampled from 2000 draws, the log_prob of a density
    assert bool(((surprise.mean(0) - value).abs() <= allowed).all())
    if isinstance(entropy, Estimate):
        assert bool((entropy.lower <= surprise.mean(0) + allowed).all())
        assert bool((entropy.upper >= surprise.mean(0) - allowed).all())


@every
def test_float32_follows_float64(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    eta = case.tilt(h, g)
    single = h.to(torch.float32)
    assert single.dtype == torch.float32
    for method in ("log_normalizer", "mean", "covariance"):
        exact, rounded = getattr(h, method)(eta), getattr(single, method)(eta.float())
        assert rounded.dtype == torch.float32
        assert float((rounded - exact).abs().max()) <= 2e-4 * (1 + float(exact.abs().max()))
    mean = h.mean(eta)
    solution = single.natural(mean.float())
    assert solution.converged, solution.status
    assert float((single.mean(solution.value) - mean).abs().max()) <= 2e-4 * (1 + float(mean.abs().max()))


@pytest.mark.parametrize(
    ("name", "h", "case"), EXTREMES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(EXTREMES)]
)
def test_extreme_members(name: str, h: f.Measure, case: Case) -> None:
    zero = torch.zeros(h.dimension, dtype=h.dtype)
    assert all(bool(value.isfinite().all()) for value in (h.log_normalizer(zero), h.mean(), h.covariance()))
    entropy = h.entropy()
    value = entropy.value if isinstance(entropy, Estimate) else entropy
    assert bool(value.isfinite())
    x = h.sample((100,), generator=torch.Generator().manual_seed(0))
    assert bool(h.log_prob(x).isfinite().all())
    start = h.natural(h.mean())
    assert start.status in (f.Status.CONVERGED, f.Status.BOUNDARY)
    if isinstance(h, f.ExponentialFamily):
        found = type(h).from_mean(h.mean_parameter, **case.known(h))
        assert found.converged, found.status
        close(found.value.mean_parameter, h.mean_parameter, 1e-6)
        back = type(h).from_natural(h.natural_parameter, **case.known(h))
        close(back.natural_parameter, h.natural_parameter, 1e-6)
