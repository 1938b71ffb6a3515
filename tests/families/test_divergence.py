"""KL where no closed form exists: brackets, estimates, and what kind of number comes back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exptilt import families as f
from exptilt.families.estimate import Estimate, EstimateKind

F64 = torch.float64


def mixture(g: torch.Generator, count: int, batch: tuple[int, ...] = ()) -> f.GaussianMixture:
    spread = 0.2 + torch.rand(*batch, count, 1, 1, dtype=F64, generator=g)
    mean = 2 * torch.randn(*batch, count, 1, dtype=F64, generator=g)
    return f.GaussianMixture(torch.randn(*batch, count, dtype=F64, generator=g), mean, spread)


def kl_by_quadrature(p: f.Measure, q: f.Measure) -> float:
    x = torch.linspace(-30, 30, 6001, dtype=F64)[:, None]
    log_p, log_q = p.log_prob(x), q.log_prob(x)
    return float((log_p.exp() * (log_p - log_q)).sum() * (60 / 6000))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), a=st.integers(1, 5), b=st.integers(1, 5))
def test_mixture_bracket_and_estimate(seed: int, a: int, b: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = mixture(g, a), mixture(g, b)
    found = f.kl(p, q, generator=g)
    truth = kl_by_quadrature(p, q)
    assert found.kind is EstimateKind.ESTIMATED
    assert 0 <= float(found.lower) <= truth + 1e-7
    assert truth <= float(found.upper) + 1e-7
    assert abs(float(found.value) - truth) <= 5 * float(found.standard_error) + 1e-9
    bounds = f.kl(p, q, samples=0)
    assert bounds.kind is EstimateKind.BOUNDED
    assert math.isnan(float(bounds.standard_error))
    assert (float(bounds.lower), float(bounds.upper)) == (float(found.lower), float(found.upper))


def test_brackets_are_tight_where_they_should_be() -> None:
    g = torch.Generator().manual_seed(3)
    far = f.GaussianMixture(
        torch.tensor([0.0, 1.0], dtype=F64),
        torch.tensor([[-50.0], [50.0]], dtype=F64),
        torch.eye(1, dtype=F64),
    )
    moved = f.GaussianMixture(
        torch.tensor([1.0, 0.0], dtype=F64),
        torch.tensor([[-50.5], [50.0]], dtype=F64),
        torch.eye(1, dtype=F64),
    )
    found = f.kl(far, moved, generator=g)
    # Far apart components: KL = KL(weights) + Σ π KL(components), and the upper bound reaches it.
    w = torch.softmax(far.log_weight, 0)
    truth = float(
        (w * (torch.log_softmax(far.log_weight, 0) - torch.log_softmax(moved.log_weight, 0))).sum()
        + w[0] * 0.125
    )
    assert float(found.upper) == pytest.approx(truth, rel=1e-9)
    assert float(f.kl(far, far, samples=0).upper) == pytest.approx(0, abs=1e-9)
    entropy = far.entropy(generator=g)
    exact = float(f.Categorical(far.log_weight).entropy() + far.components.entropy()[0])
    assert float(entropy.upper) == pytest.approx(exact, rel=1e-9)
    assert far.entropy(0).kind is EstimateKind.BOUNDED


def test_from_and_to_a_single_gaussian() -> None:
    g = torch.Generator().manual_seed(1)
    p = f.Gaussian(torch.tensor([0.5], dtype=F64), torch.tensor([[1.5]], dtype=F64))
    q = mixture(g, 3)
    for first, second in ((p, q), (q, p)):
        found = f.kl(first, second, generator=g)
        truth = kl_by_quadrature(first, second)
        assert float(found.lower) <= truth <= float(found.upper)
        assert abs(float(found.value) - truth) <= 5 * float(found.standard_error)


def test_batches_and_generic_mixtures() -> None:
    g = torch.Generator().manual_seed(2)
    p, q = mixture(g, 3, (4,)), mixture(g, 2, (4,))
    found = f.kl(p, q, generator=g)
    assert found.value.shape == found.lower.shape == (4,)
    gammas = f.Mixture(
        torch.zeros(2, dtype=F64),
        f.Gamma(torch.tensor([[2.0], [5.0]], dtype=F64), torch.ones(2, 1, dtype=F64)),
    )
    one = f.Mixture(
        torch.tensor([1.0, 0.0], dtype=F64),
        f.Gamma(torch.tensor([[2.5], [4.0]], dtype=F64), torch.ones(2, 1, dtype=F64)),
    )
    found = f.kl(gammas, one, generator=g)
    assert 0 <= float(found.lower) <= float(found.value) + 5 * float(found.standard_error)
    assert float(found.upper) >= float(found.value) - 5 * float(found.standard_error)
    counts = f.Mixture(torch.zeros(2, dtype=F64), f.Poisson(torch.tensor([[2.0], [9.0]], dtype=F64)))
    other = f.Mixture(torch.zeros(2, dtype=F64), f.Poisson(torch.tensor([[3.0], [8.0]], dtype=F64)))
    x = torch.arange(100.0, dtype=F64)[:, None]
    truth = float((counts.log_prob(x).exp() * (counts.log_prob(x) - other.log_prob(x))).sum())
    found = f.kl(counts, other, generator=g)
    assert float(found.lower) <= truth <= float(found.upper)
    assert abs(float(found.value) - truth) <= 5 * float(found.standard_error)


def test_families_within_families() -> None:
    diagonal = f.DiagonalGaussian(torch.tensor([0.3, 1.0]), torch.tensor([0.5, 2.0]))
    full = f.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.4], [0.4, 1.0]]))
    same = f.Gaussian(diagonal.mean_vector, torch.diag(diagonal.variance))
    assert f.kl(diagonal, full).kind is EstimateKind.EXACT
    torch.testing.assert_close(f.kl(diagonal, full).value, f.kl(same, full).value)
    torch.testing.assert_close(f.kl(full, diagonal).value, f.kl(full, same).value)
    twin = torch.distributions.kl_divergence(full.to_torch(), same.to_torch())
    torch.testing.assert_close(f.kl(full, same).value, twin)
    times = f.Exponential(torch.tensor([2.0]))
    torch.testing.assert_close(
        f.kl(times, f.Gamma(torch.tensor([1.0]), torch.tensor([3.0]))).value,
        f.kl(times, f.Exponential(torch.tensor([3.0]))).value,
    )


def test_points() -> None:
    points = torch.tensor([[0.0], [1.0], [2.0]])
    p, q = f.Empirical(points, torch.tensor([0.0, 0.0, -torch.inf])), f.Empirical(points)
    assert float(f.kl(p, q).value) == pytest.approx(math.log(1.5), rel=1e-6)
    assert float(f.kl(q, p).value) == math.inf
    with pytest.raises(ValueError, match="same points"):
        f.kl(p, f.Empirical(points + 1))
    with pytest.raises(ValueError, match=r"infinite\. Project first"):
        f.kl(p, f.Gaussian(torch.zeros(1), torch.eye(1)))
    with pytest.raises(
        ValueError, match=r"different spaces, Poisson \(counts, events \(\(1,\),\)\) and Poisson"
    ):
        f.kl(f.Poisson(torch.ones(1)), f.Poisson(torch.ones(2)))
    with pytest.raises(ValueError, match="samples must be"):
        f.kl(mixture(torch.Generator(), 2), mixture(torch.Generator(), 2), samples=1)


def test_any_density() -> None:
    gaussian = f.Gaussian(torch.tensor([0.5], dtype=F64), torch.tensor([[1.5]], dtype=F64))
    wide = f.Gaussian(torch.zeros(1, dtype=F64), torch.tensor([[4.0]], dtype=F64))
    rule = f.FromDensity.quadrature(lambda x: gaussian.log_prob(x) + 3)
    found = f.kl(rule, wide)
    assert float(found.value) == pytest.approx(float(f.kl(gaussian, wide).value), abs=1e-9)
    draws = f.FromDensity.monte_carlo(
        lambda x: gaussian.log_prob(x) + 3, wide, samples=4000, generator=torch.Generator().manual_seed(0)
    )
    sampled = f.kl(draws, wide)
    assert abs(float(sampled.value) - float(f.kl(gaussian, wide).value)) < 5 * float(sampled.standard_error)
    assert abs(float(draws.log_normalizer(torch.zeros(1, dtype=F64))) - 3) < 5 * float(
        draws.log_normalizer_error(torch.zeros(1, dtype=F64))
    )
    towards = f.kl(gaussian, rule, generator=torch.Generator().manual_seed(0))
    assert abs(float(towards.value)) < 1e-8


def test_what_cannot_be_compared() -> None:
    counts, times = f.Poisson(torch.ones(1)), f.Gamma(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"different spaces.*Gamma \(a density, events"):
        f.kl(counts, times)
    with pytest.raises(ValueError, match=r"different spaces"):
        f.kl(f.Mixture(torch.zeros(1), f.Poisson(torch.ones(1, 1))), times)
    with pytest.raises(ValueError, match=r"p is torch.float64, q is torch.float32"):
        f.kl(counts.to(F64), counts)
    with pytest.raises(ValueError, match=r"do not broadcast together; got \(3,\) and \(2,\)"):
        f.kl(f.Poisson(torch.ones(3, 1)), f.Poisson(torch.ones(2, 1)))
    with pytest.raises(ValueError, match=r"q must be a measure; got int"):
        f.kl(counts, 3)  # type: ignore[arg-type]
    for direction in (
        f.Gaussian(torch.zeros(3), torch.eye(3)),
        f.Dirichlet(torch.ones(3)),
        f.Categorical(torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match=r"different spaces.*on the sphere, events"):
            f.kl(direction, f.VonMisesFisher(torch.ones(3)))
    inside = f.kl(
        f.Beta(torch.ones(1), torch.ones(1)), times, generator=torch.Generator().manual_seed(0)
    )  # (0, 1) is part of (0, ∞)
    assert abs(float(inside.value) - 0.5) < 5 * float(inside.standard_error)  # E x


@pytest.mark.parametrize("diagonal", [True, False])
def test_brackets_keep_their_digits_far_from_the_origin(diagonal: bool) -> None:
    g = torch.Generator().manual_seed(4)
    weight, other = torch.randn(2, 3, dtype=F64, generator=g)
    means, variance = (
        torch.randint(-3, 4, (2, 3, 2), generator=g).to(F64),
        torch.rand(2, 3, 2, dtype=F64, generator=g) + 0.5,
    )

    def moved(shift: float) -> list[f.Measure]:
        if diagonal:
            return [
                f.Mixture(w, f.DiagonalGaussian(m + shift, v))
                for w, m, v in zip((weight, other), means, variance, strict=True)
            ]
        return [
            f.GaussianMixture(w, m + shift, torch.diag_embed(v))
            for w, m, v in zip((weight, other), means, variance, strict=True)
        ]

    here, there = f.kl(*moved(0.0), samples=0), f.kl(*moved(2.0**26), samples=0)
    torch.testing.assert_close(there.lower, here.lower, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(there.upper, here.upper, rtol=1e-10, atol=1e-12)
    assert float(here.lower) < float(here.upper)
    entropies = [measure.entropy(0) for measure in (moved(0.0)[0], moved(2.0**26)[0])]
    torch.testing.assert_close(entropies[1].lower, entropies[0].lower, rtol=1e-10, atol=1e-12)


def test_standard_errors_are_those_of_repetition() -> None:
    """Importance sampling 300 times over.

    The spread of G, of the entropy and of KL is what each says of itself.
    """
    proposal = f.Gaussian(torch.zeros(1, dtype=F64), torch.tensor([[2.0]], dtype=F64))
    other = f.Gaussian(torch.tensor([1.0], dtype=F64), torch.tensor([[3.0]], dtype=F64))
    target = f.Gaussian(torch.tensor([0.5], dtype=F64), torch.tensor([[1.0]], dtype=F64))
    found: dict[str, list[tuple[float, float]]] = {"G": [], "tilted": [], "entropy": [], "KL": []}
    for seed in range(300):
        g = torch.Generator().manual_seed(seed)
        h = f.FromDensity.monte_carlo(lambda x: target.log_prob(x) + 1, proposal, samples=400, generator=g)
        for name, eta in (("G", torch.zeros(1, dtype=F64)), ("tilted", torch.full((1,), -0.5, dtype=F64))):
            found[name].append((float(h.log_normalizer(eta)), float(h.log_normalizer_error(eta))))
        for name, estimate in (("entropy", h.entropy()), ("KL", f.kl(h, other))):
            found[name].append((float(estimate.value), float(estimate.standard_error)))
    truth = {
        "G": 1.0,
        "tilted": 1 - 0.25 + 0.125,
        "entropy": float(target.entropy()),
        "KL": float(f.kl(target, other).value),
    }
    for name, pairs in found.items():
        values, errors = torch.tensor(pairs, dtype=F64).unbind(-1)
        assert float(values.std()) == pytest.approx(float(errors.mean()), rel=0.2), name
        assert abs(float(values.mean()) - truth[name]) < 5 * float(values.std()) / 300**0.5 + 2 / 400, name


def test_quadrature_knows_when_it_is_coarse() -> None:
    eta = torch.tensor([0.7], dtype=F64)
    for nodes, close in ((15, False), (25, False), (401, True)):
        h = f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2) / 2, nodes=nodes)
        error = abs(float(h.log_normalizer(eta)) - (math.log(2 * math.pi) + 0.49) / 2)
        assert error <= float(h.log_normalizer_error(eta)) + 1e-13
        assert (float(h.log_normalizer_error(eta)) < 1e-10) == close


def test_what_an_estimate_says_of_its_sample() -> None:
    draws = torch.tensor([[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]], dtype=F64)
    found = Estimate.sampled(draws, torch.zeros(2, dtype=F64), torch.full((2,), 9.0, dtype=F64))
    assert found.value.tolist() == [3, 5]
    assert found.standard_error.tolist() == pytest.approx(
        [(7 / 3) ** 0.5, 0]
    )  # variance 7 of one draw, three draws
    middle = Estimate.bounded(torch.tensor([1.0]), torch.tensor([4.0]))
    assert middle.value.tolist() == [2.5]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize(
    ("p", "q", "lower", "upper"),
    [
        (f.Gamma(numbers(2.0), numbers(3.0)), f.Gamma(numbers(4.0), numbers(1.5)), 0.0, math.inf),
        (f.Exponential(numbers(2.0)), f.Exponential(numbers(0.7)), 0.0, math.inf),
        (f.Beta(numbers(2.0), numbers(3.0)), f.Beta(numbers(1.5), numbers(0.8)), 0.0, 1.0),
        (
            f.DiagonalGaussian(numbers(0.5), numbers(2.0)),
            f.DiagonalGaussian(numbers(-1.0), numbers(0.7)),
            -math.inf,
            math.inf,
        ),
        (
            f.Gaussian(numbers(0.5), numbers(2.0)[None]),
            f.Gaussian(numbers(-1.0), numbers(0.7)[None]),
            -math.inf,
            math.inf,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_overlap_is_the_integral_of_the_product(
    p: f.ExponentialFamily, q: f.ExponentialFamily, lower: float, upper: float
) -> None:
    product = f.FromDensity.quadrature(lambda x: p.log_prob(x) + q.log_prob(x), lower=[lower], upper=[upper])
    assert float(p._overlap(q)) == pytest.approx(float(product.log_normalizer(numbers(0.0))), abs=1e-9)


def test_overlap_of_outcomes() -> None:
    p, q = f.Categorical(numbers(0.3, -1.0, 2.0)), f.Categorical(numbers(1.0, 0.0, -0.5))
    one_hot = torch.eye(3, dtype=F64)
    assert float(p._overlap(q)) == pytest.approx(
        float(torch.logsumexp(p.log_prob(one_hot) + q.log_prob(one_hot), 0)), abs=1e-12
    )


def test_infinite_where_the_support_is_too_small() -> None:
    """Infinite for certain, so without a standard error; never negative."""
    generator = torch.Generator().manual_seed(0)
    line = f.Gaussian(torch.zeros(2), torch.eye(2))
    coins, outcomes = f.BernoulliProduct(torch.zeros(2)), f.Categorical(torch.tensor([0.0, 1.0]))
    counts = f.Poisson(torch.ones(2))
    for p, q in (
        (line, f.Gamma(torch.ones(2), torch.ones(2))),
        (coins, outcomes),
        (counts, coins),
        (counts, outcomes),
    ):
        found = f.kl(p, q, generator=generator)
        assert (float(found.value), float(found.standard_error), float(found.lower)) == (
            math.inf,
            0.0,
            math.inf,
        )
    finite = f.kl(outcomes, coins, generator=generator)  # Σ p log p + 2 log 2
    assert abs(float(finite.value) - (2 * math.log(2) - float(outcomes.entropy()))) < 5 * float(
        finite.standard_error
    )
    box = f.FromDensity.quadrature(lambda x: torch.zeros_like(x[..., 0]), lower=(0.0,), upper=(1.0,))
    shifted = f.FromDensity.quadrature(lambda x: torch.zeros_like(x[..., 0]), lower=(0.5,), upper=(2.0,))
    assert (float(f.kl(box, shifted).value), float(f.kl(box, shifted).standard_error)) == (math.inf, 0.0)


def test_draws_on_a_sphere_are_compared_with_the_sphere() -> None:
    uniform, tilted = (
        f.VonMisesFisher(torch.zeros(3, dtype=F64)),
        f.VonMisesFisher(torch.tensor([0.0, 1.0, 2.0], dtype=F64)),
    )
    drawn = f.FromDensity.monte_carlo(
        tilted.log_prob, uniform, samples=20_000, generator=torch.Generator().manual_seed(0)
    )
    found = f.kl(drawn, uniform)
    assert abs(float(found.value) - float(f.kl(tilted, uniform).value)) < 5 * float(found.standard_error)
    assert drawn.tilt(torch.ones(3, dtype=F64)).base is drawn.base is uniform.base
    with pytest.raises(ValueError, match=r"different spaces, FromDensity \(a density on the sphere"):
        f.kl(drawn, f.Gaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64)))


def test_points_that_are_listed_twice() -> None:
    points = numbers(1.0, 1.0, 2.0)[:, None]
    p, q = (
        f.Empirical(points, numbers(0.0, -math.inf, 0.0)),
        f.Empirical(points, numbers(-math.inf, 0.0, 0.0)),
    )
    assert float(f.kl(p, q).value) == float(f.kl(q, p).value) == 0
    g = torch.Generator().manual_seed(0)
    x, (a, b) = (
        torch.randint(0, 3, (4, 6, 2), generator=g).to(F64),
        torch.randn(2, 4, 6, dtype=F64, generator=g),
    )
    a[0, 0] = -math.inf
    found = f.kl(f.Empirical(x, a), f.Empirical(x, b))
    for i in range(4):
        places = x[i].unique(dim=0)
        log_p, log_q = f.Empirical(x[i], a[i]).log_prob(places), f.Empirical(x[i], b[i]).log_prob(places)
        expected = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum()
        assert float(found.value[i]) == pytest.approx(float(expected), rel=1e-12)
    by_vmap = torch.func.vmap(lambda x, a, b: f.kl(f.Empirical(x, a), f.Empirical(x, b)).value)(x, a, b)
    torch.testing.assert_close(by_vmap, found.value)
    far = f.kl(
        f.Empirical(points, numbers(-1.0, 0.0, -900.0)), f.Empirical(points, numbers(-900.0, -901.0, 0.0))
    )
    assert 890 < float(far.value) < 900  # in logarithms throughout: e^−900 is no number


def test_points_and_counts() -> None:
    x, weight = numbers(0.0, 3.0, 3.0, 1.0)[:, None], numbers(0.0, 1.0, 2.0, -math.inf)
    rates = numbers(1.0, 2.0, 5.0)[:, None]
    found = f.kl(f.Empirical(x, weight), f.Poisson(rates))
    p = torch.softmax(weight, 0)
    p = torch.stack([p[0], p[1] + p[2]])
    expected = (p * (p.log() - f.Poisson(rates[:, None]).log_prob(numbers(0.0, 3.0)[:, None]))).sum(-1)
    torch.testing.assert_close(found.value, expected)
    assert found.kind is EstimateKind.EXACT
    assert float(f.kl(f.Empirical(x + 0.5), f.Poisson(rates[0])).value) == math.inf
    mixture = f.Mixture(numbers(0.0, 0.0, 0.0), f.Poisson(rates))
    assert float(f.kl(f.Empirical(x[:1]), mixture).value) == pytest.approx(-float(mixture.log_prob(x[0])))
    drawn = f.FromDensity.monte_carlo(
        f.Poisson(rates[1]).log_prob,
        f.Poisson(rates[2]),
        samples=2000,
        generator=torch.Generator().manual_seed(0),
    )
    estimate = f.kl(f.Empirical(x, weight), drawn)
    assert abs(float(estimate.value - expected[1])) < 5 * float(estimate.standard_error) < 0.5
    with pytest.raises(
        ValueError, match=r"KL\(Poisson ‖ Empirical\) is infinite unless the points are all the outcomes"
    ):
        f.kl(f.Poisson(rates[0]), f.Empirical(x))
    with pytest.raises(
        ValueError, match=r"a density.*KL\(Exponential ‖ Empirical\) is infinite\. Project first"
    ):
        f.kl(f.Exponential(rates[0]), f.Empirical(x))


def test_batches_of_p_and_q_broadcast() -> None:
    g = torch.Generator().manual_seed(5)
    one = f.Gaussian(numbers(0.5), numbers(1.5)[None])
    others = f.Gaussian(torch.arange(3, dtype=F64).reshape(3, 1, 1), numbers(2.0)[None])
    tilts = torch.tensor([[0.1], [0.2]], dtype=F64)
    truth = f.kl(one.tilt(tilts), others).value
    assert truth.shape == (3, 2)
    rule = f.FromDensity.quadrature(one.log_prob)
    torch.testing.assert_close(f.kl(rule.tilt(tilts), others).value, truth)
    torch.testing.assert_close(f.kl(rule, others).value, f.kl(one, others).value)
    assert f.kl(rule, others).standard_error.shape == (3, 1)
    same = f.GaussianMixture(
        torch.zeros(2, 2, dtype=F64),
        one.tilt(tilts).mean_vector[:, None].expand(2, 2, 1),
        one.covariance_matrix,
    )
    for p in (same, f.FromDensity.monte_carlo(one.log_prob, one, samples=2000, generator=g).tilt(tilts)):
        found = f.kl(p, others, generator=g)
        assert found.value.shape == found.lower.shape == found.standard_error.shape == (3, 2)
        assert bool(((found.value - truth).abs() < 5 * found.standard_error).all())
    for q in (one, same):
        assert (
            f.kl(
                f.GaussianMixture(numbers(0.0), numbers(0.0)[:, None], numbers(1.0)[None]), q, generator=g
            ).value.shape
            == q.batch_shape
        )


def test_nodes_on_the_edge_of_a_support() -> None:
    """The last nodes of (0, 1) round to 1, where a Beta has no density: they weigh nothing."""
    box = f.FromDensity.quadrature(lambda x: 0 * x[..., 0], lower=[0.0], upper=[1.0])
    exact = f.kl(f.Beta(numbers(1.0), numbers(1.0)), f.Beta(numbers(2.0), numbers(0.5))).value
    assert float(f.kl(box, f.Beta(numbers(2.0), numbers(0.5))).value) == pytest.approx(
        float(exact), rel=1e-10
    )


def line(mean: float, dtype: torch.dtype = F64) -> f.Gaussian:
    return f.Gaussian(torch.tensor([mean], dtype=dtype), torch.eye(1, dtype=dtype))


def one(kind: type, *values: float) -> f.Measure:
    return kind(*(torch.tensor([value], dtype=F64) for value in values))


NORMAL_DENSITY = f.FromDensity.quadrature(lambda x: -((x[..., 0] - 10) ** 2) / 2, center=[10.0])
HALF_LINE = f.FromDensity.quadrature(lambda x: -x[..., 0], lower=[0.0], upper=[math.inf])
MULTINOMIALS = f.Mixture(
    torch.tensor([0.0, -20.0], dtype=F64),
    f.Multinomial(torch.zeros(2, dtype=F64), torch.tensor([3.0, 4.0], dtype=F64)),
)
TRIPLE = f.Multinomial(torch.zeros(2, dtype=F64), torch.tensor(3.0, dtype=F64))
TWO_GAMMAS = f.Mixture(torch.zeros(2, dtype=F64), f.Gamma(*[torch.full((2, 1), 9.0, dtype=F64)] * 2))


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (line(10.0), one(f.Gamma, 100.0, 10.0)),
        (line(10.0), TWO_GAMMAS),
        (line(10.0), HALF_LINE),
        (NORMAL_DENSITY, one(f.Gamma, 100.0, 10.0)),
        (one(f.Gamma, 1.0, 1e3), one(f.Beta, 2.0, 2.0)),
        (one(f.Poisson, 1e-5), one(f.BernoulliProduct, 0.0)),
        (one(f.NegativeBinomial, 1.0, -12.0), one(f.BernoulliProduct, 0.0)),
        (
            f.BernoulliProduct(torch.tensor([30.0, -30.0], dtype=F64)),
            f.Categorical(torch.zeros(2, dtype=F64)),
        ),
        (MULTINOMIALS, TRIPLE),
    ],
)
def test_mass_that_no_draw_shows_off_the_other_support_is_infinite(p: f.Measure, q: f.Measure) -> None:
    found = f.kl(p, q, generator=torch.Generator().manual_seed(0))
    assert found.value.item() == math.inf
    assert found.standard_error.item() == 0


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (one(f.Gamma, 100.0, 10.0), line(10.0)),
        (TWO_GAMMAS, line(10.0)),
        (one(f.Beta, 2.0, 2.0), one(f.Gamma, 1.0, 1.0)),
        (one(f.BernoulliProduct, 0.0), one(f.Poisson, 1.0)),
        (f.Categorical(torch.zeros(2, dtype=F64)), f.BernoulliProduct(torch.zeros(2, dtype=F64))),
        (TRIPLE, MULTINOMIALS),
        (line(10.0), NORMAL_DENSITY),
    ],
)
def test_a_smaller_support_is_no_hindrance(p: f.Measure, q: f.Measure) -> None:
    assert bool(f.kl(p, q, generator=torch.Generator().manual_seed(0)).value.isfinite())


def test_draws_that_x_cannot_hold_are_refused_where_the_other_needs_x() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        f.kl(one(f.Beta, 0.001, 1.0), one(f.Gamma, 1.0, 1.0))


def vector(*entries: float) -> torch.Tensor:
    return torch.tensor(entries, dtype=F64)


@pytest.mark.parametrize(
    ("p", "q", "finite"),
    [
        (f.InverseGamma(vector(1.0), vector(1.0)), f.Exponential(vector(1.0)), False),
        (f.InverseGamma(vector(1.1), vector(1.0)), f.Exponential(vector(1.0)), True),
        (f.InverseGamma(vector(2.0), vector(1.0)), f.DiagonalGaussian(vector(0.0), vector(1.0)), False),
        (f.InverseGamma(vector(1.5), vector(1.0)), f.Laplace(vector(0.0), vector(1.0)), True),
        (f.Gamma(vector(0.9, 5.0), vector(1.0, 1.0)), f.InverseGamma(vector(1, 1), vector(1, 1)), False),
        (f.Gamma(vector(1.5), vector(1.0)), f.InverseGamma(vector(1.0), vector(1.0)), True),
        (f.Exponential(vector(1.0)), f.InverseGamma(vector(1.0), vector(1.0)), False),
        (f.Beta(vector(1.0), vector(3.0)), f.InverseGamma(vector(1.0), vector(1.0)), False),
        (
            f.InverseWishart(torch.tensor(3.0), torch.eye(2)),
            f.Wishart(torch.tensor(3.0), torch.eye(2)),
            False,
        ),
        (f.Wishart(torch.tensor(3.5), torch.eye(2)), f.InverseWishart(torch.tensor(3.0), torch.eye(2)), True),
    ],
)
def test_tails_without_a_mean_are_infinite(p: f.ExponentialFamily, q: f.Measure, finite: bool) -> None:
    """E_p[−log q] is infinite where q falls as e^{−x} and p has no mean: no sample shows that."""
    assert math.isfinite(float(f.kl(p, q))) is finite
    pair = f.Mixture(torch.tensor([0.0, -3.0], dtype=p.dtype), type(p).stack([p, p]))
    assert math.isfinite(float(f.kl(pair, q))) is finite
