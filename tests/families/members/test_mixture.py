"""Mixtures at their edges: components without weight, outside their domain, or shared by many mixtures.

Components of every kind.
"""

import math
from collections.abc import Callable

import pytest
import torch

from exptilt import families as f
from exptilt._support.linalg import pack

F64 = torch.float64
OUT = -math.inf


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def gaussians(weight: torch.Tensor) -> f.GaussianMixture:
    return f.GaussianMixture(weight, t(-1.0, 1.0, 4.0)[:, None], torch.eye(1, dtype=F64))


def directions(weight: torch.Tensor) -> f.Mixture:
    return f.Mixture(weight, f.VonMisesFisher(torch.tensor([[2.0, 0, 0], [0, -1, 3], [0, 0, 0]], dtype=F64)))


def counts(weight: torch.Tensor) -> f.Mixture:
    return f.Mixture(weight, f.Poisson(t(2.0, 9.0, 4.0)[:, None]))


def matrices(weight: torch.Tensor) -> f.Mixture:
    scale = t(0.5, 0.2, 0.1)[:, None, None] * torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=F64)
    return f.Mixture(weight, f.Wishart(t(4.0, 5.0, 6.0), scale))


KINDS: list[Callable[[torch.Tensor], f.Measure]] = [gaussians, directions, counts, matrices]
WEIGHTS = [
    (t(0.0, OUT, 1.0), t(0.0, 0.5, 0.0)),
    (t(0.0, 0.5, 0.0), t(1.0, 0.0, OUT)),
    (t(0.0, 0.0, OUT), t(0.0, OUT, OUT)),
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=["out of p", "out of q", "out of both"])
def test_brackets_hold_without_some_components(
    make: Callable[[torch.Tensor], f.Mixture], weights: tuple[torch.Tensor, ...]
) -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (make(weight) for weight in weights)
    found = f.kl(p, q, samples=500, generator=g)
    slack = 5 * float(found.standard_error) + 1e-12
    assert 0 <= float(found.lower) <= float(found.value) + slack
    assert float(found.value) - slack <= float(found.upper) < math.inf
    entropy = p.entropy(500, generator=g)
    slack = 5 * float(entropy.standard_error)
    assert float(entropy.lower) - slack <= float(entropy.value) <= float(entropy.upper) + slack
    moving = [weight.clone().requires_grad_() for weight in weights]
    bounds, own = f.kl(make(moving[0]), make(moving[1]), samples=0), make(moving[0]).entropy(0)
    for gradient in torch.autograd.grad(bounds.lower + bounds.upper + own.lower + own.upper, moving):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("make", KINDS)
def test_leaving_out_is_having_less(make: Callable[[torch.Tensor], f.Mixture]) -> None:
    """Bounds of a mixture without its last component are those of the mixture of the others."""
    p, q = make(t(0.0, 0.5, OUT)), make(t(1.0, OUT, OUT))

    def fewer(h: f.Mixture, count: int) -> f.Mixture:
        parts = h.components.map(lambda leaf, event: leaf[:count] if leaf.shape[0] > 1 else leaf)
        return f.Mixture(h.log_weight[:count], parts)

    some, all_of_them = f.kl(fewer(p, 2), fewer(q, 1), samples=0), f.kl(p, q, samples=0)
    torch.testing.assert_close(all_of_them.upper, some.upper)
    torch.testing.assert_close(all_of_them.lower, some.lower)
    torch.testing.assert_close(p.entropy(0).lower, fewer(p, 2).entropy(0).lower)
    torch.testing.assert_close(p.entropy(0).upper, fewer(p, 2).entropy(0).upper)


def test_components_that_are_infinitely_far() -> None:
    single = f.GaussianMixture(torch.zeros(1), torch.zeros(1, 1), torch.eye(1))
    far = f.GaussianMixture(torch.zeros(1), torch.full((1, 1), 1e30), torch.eye(1))  # KL overflows
    assert float(f.kl(single, far, samples=0).upper) == math.inf


@pytest.mark.parametrize("make", KINDS)
def test_gradient_is_mean(make: Callable[[torch.Tensor], f.Mixture]) -> None:
    h = make(t(0.3, OUT, 1.0))
    eta = (
        0.1 * torch.randn(h.dimension, dtype=F64, generator=torch.Generator().manual_seed(1))
    ).requires_grad_()
    (slope,) = torch.autograd.grad(h.log_normalizer(eta), eta)
    torch.testing.assert_close(h.mean(eta), slope)
    columns = torch.autograd.functional.jacobian(h.mean, eta)
    torch.testing.assert_close(h.covariance(eta), columns, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(h.tilt(eta).mean(), slope)


def test_a_component_without_weight_may_be_outside_its_domain() -> None:
    small = torch.eye(2, dtype=F64)
    family = f.Wishart(t(4.0, 4.0), torch.stack([0.1 * small, small]))
    h, alone = f.Mixture(t(0.0, OUT), family), f.Wishart(t(4.0)[0], 0.1 * small)
    eta = pack(2 * small).requires_grad_()  # beyond ½V⁻¹ of the second
    torch.testing.assert_close(h.log_normalizer(eta), alone.log_normalizer(eta))
    torch.testing.assert_close(h.mean(eta), alone.mean(eta))
    torch.testing.assert_close(h.covariance(eta), alone.covariance(eta))
    torch.testing.assert_close(h.tilt(eta).mean(), alone.mean(eta))
    (slope,) = torch.autograd.grad(h.mean(eta).sum(), eta)
    assert bool(slope.isfinite().all())
    with pytest.raises(ValueError, match="inside the natural domain"):
        f.Mixture(t(0.0, -50.0), family).mean(eta)
    torch.testing.assert_close(torch.func.vmap(h.mean)(eta[None]), alone.mean(eta)[None])


@pytest.mark.parametrize("shared", [True, False])
def test_mixtures_that_share_components_draw_their_own(shared: bool) -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.tensor([[0.0, OUT], [0.0, OUT], [OUT, 0.0]], dtype=F64)
    rate = t(1.0) if shared else t(1.0, 2.0)[:, None]
    many = [
        f.GaussianMixture(weight, t(-9.0, 9.0)[:, None], torch.eye(1, dtype=F64)),
        f.Mixture(weight, f.Gamma(t(1.0, 900.0)[:, None], rate)),
    ]
    for h in many:
        x = h.sample((50,), generator=g)
        assert x.shape == (50, 3, 1)
        assert x.unique().numel() == 150
        assert bool((x[:, :2].mean((0, 2)) < x[:, 2].mean()).all())
        found = f.kl(h, h, samples=100, generator=g)
        assert found.value.shape == h.entropy(100, generator=g).value.shape == (3,)
        torch.testing.assert_close(found.value, torch.zeros(3, dtype=F64))
        twin = h.to_torch()
        torch.testing.assert_close(twin.log_prob(x), h.log_prob(x))


def test_a_field_that_all_components_share() -> None:
    h = f.Mixture(torch.zeros(3), f.Wishart(torch.tensor([4.0, 5.0, 6.0]), torch.eye(2)))
    assert h.batch_shape == ()
    torch.testing.assert_close(h.mean(), torch.tensor([5.0, 0.0, 5.0]))
    assert h.sample((4,)).shape == (4, 2, 2)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2), r"log_weight is torch.float32 on cpu, Poisson.rate is torch.float64"),
        (
            torch.zeros(2, dtype=torch.int64),
            r"log_weight must be a tensor of float32, float64; got torch.int64",
        ),
        (
            torch.zeros(4, 2, dtype=F64),
            r"do not broadcast together; got log_weight \(4, 2\), Poisson.rate \(3, 2, 1\)",
        ),
        (torch.zeros((), dtype=F64), r"log_weight has shape \(\). Pass at least 1 axes"),
        (torch.zeros(3, 3, dtype=F64), r"log_weight must be \(..., K\).*got \(3, 3\) and \(3, 2\)"),
    ],
)
def test_bad_weights(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        f.Mixture(weight, f.Poisson(torch.ones(3, 2, 1, dtype=F64)))


def test_distribution_function_is_the_average() -> None:
    h = f.Mixture(torch.tensor([0.0, 1.0]), f.Gamma(torch.tensor([[1.0], [4.0]]), torch.ones(2, 1)))
    x = torch.tensor([[0.5], [3.0]])
    weight = h.log_probability.exp()
    parts = torch.stack([part.cdf(x) for part in h.components], -1)
    torch.testing.assert_close(h.cdf(x), (weight * parts).sum(-1))
