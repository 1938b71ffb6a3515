"""Every measure under vmap, grad, compile, `.to`, pickle, and back and forth to torch.distributions."""

import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from laws.registry import CASES, FAMILIES, LAWS, Case, f

NOT_IN_TORCH = {
    *(f.VonMisesFisher, f.NormalGamma, f.NormalInverseWishart, f.InverseWishart),
    *(f.Empirical, f.FromDensity),
}
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def axes(h: f.Measure) -> f.Measure:
    """in_dims for vmap: the first axis of every field that has the batch."""
    return h.map(lambda leaf, event: 0 if leaf.ndim > event else None)  # type: ignore[arg-type, return-value]


@every
def test_vmap_over_members(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (3,))
    eta = case.tilt(h, g)
    mean = h.mean(eta)

    def everything(member: f.Measure, e: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tilted = member.tilt(e)
        return (
            member.log_normalizer(e),
            member.mean(e),
            member.covariance(e),
            tilted.mean(),
            member.natural(m).value,
            member.bregman(e, 0 * e),
        )

    dims = pytree.tree_map(lambda x: x, axes(h))
    got = torch.func.vmap(everything, in_dims=(dims, 0, 0))(h, eta, mean)
    expected = (
        h.log_normalizer(eta),
        mean,
        h.covariance(eta),
        mean,
        h.natural(mean).value,
        h.bregman(eta, 0 * eta),
    )
    for left, right in zip(got, expected, strict=True):
        close(left, right, 1e-7)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_vmap_of_densities(case: Case, g: torch.Generator) -> None:
    p, q = case.make(g, (3,)), case.make(g, (3,))
    x = p.sample(generator=g)

    def everything(
        mine: f.ExponentialFamily, other: f.ExponentialFamily, event: object
    ) -> tuple[torch.Tensor, ...]:
        return mine.log_prob(event), mine.entropy(), f.kl(mine, other).value

    got = torch.func.vmap(everything, in_dims=(axes(p), axes(q), 0))(p, q, x)
    for left, right in zip(got, everything(p, q, x), strict=True):
        assert left.shape == (3,)
        close(left, right, 1e-12)


@every
def test_vmap_over_tilts_alone(case: Case, g: torch.Generator) -> None:
    h = case.make(g)
    eta = torch.stack([case.tilt(h, g) for _ in range(3)])
    mean = h.mean(eta)
    close(torch.func.vmap(h.mean)(eta), mean)
    close(torch.func.vmap(lambda m: h.natural(m).value)(mean), h.natural(mean).value, 1e-7)


@every
def test_natural_is_differentiable_twice(case: Case, g: torch.Generator) -> None:
    """dη/dm = Cov⁻¹ (Legendre), and the second derivative agrees with a finite difference of the first."""
    h = case.make(g)
    mean = h.mean(case.tilt(h, g))

    def loss(m: torch.Tensor) -> torch.Tensor:
        return (h.mean(h.natural(m).value * 0.9) ** 2).sum()

    def slope(m: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(loss)(m)
        return found

    direction = 1e-5 * (h.mean() - mean)
    first = (loss(mean + direction) - loss(mean - direction)) / 2
    torch.testing.assert_close((slope(mean) * direction).sum(), first, rtol=1e-4, atol=1e-12)
    _, second = torch.func.jvp(slope, (mean,), (direction,))
    torch.testing.assert_close(
        second, (slope(mean + direction) - slope(mean - direction)) / 2, rtol=1e-3, atol=1e-10
    )
    m = mean.clone().requires_grad_()
    loss(m).backward()
    assert m.grad is not None
    close(m.grad, slope(mean), 1e-7)


@every
def test_natural_is_differentiable_in_the_measure(case: Case, g: torch.Generator) -> None:
    h = case.make(g)
    mean = h.mean(case.tilt(h, g))
    other = h.map(lambda leaf, _: leaf)
    leaves, spec = pytree.tree_flatten(h)
    whole = [getattr(h, name) for name in case.whole]
    moving = [leaf * (0.0 if any(leaf is field for field in whole) else 1e-6) for leaf in leaves]

    def eta(*parts: torch.Tensor) -> torch.Tensor:
        member = pytree.tree_unflatten(list(parts), spec)
        return member.natural(mean).value

    _, tangent = torch.func.jvp(eta, tuple(leaves), tuple(moving))
    ahead = eta(*(leaf + step for leaf, step in zip(leaves, moving, strict=True)))
    behind = eta(*(leaf - step for leaf, step in zip(leaves, moving, strict=True)))
    torch.testing.assert_close(tangent, (ahead - behind) / 2, rtol=1e-3, atol=1e-9)
    assert type(other) is type(h)


@every
def test_grad_reaches_the_fields(case: Case, g: torch.Generator) -> None:
    h = case.make(g)
    eta = case.tilt(h, g)
    member = h.map(lambda leaf, _: leaf.clone().requires_grad_())
    value = member.log_normalizer(eta) + member.mean(eta).sum() + member.covariance(eta).sum()
    leaves = pytree.tree_leaves(member)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    assert any(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients)
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


QUICK = {"Gaussian", "Gamma", "Mixture", "Categorical"}
TO_COMPILE = [pytest.param(c, marks=[pytest.mark.slow] * (c.name not in QUICK)) for c in CASES]


@pytest.mark.parametrize("case", TO_COMPILE, ids=lambda case: case.name)
def test_compile(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    eta = case.tilt(h, g)
    x = h.sample((2,), generator=g)

    def function(member: f.Measure, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return member.log_normalizer(e), member.mean(e), member.tilt(e).log_prob(x)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    for left, right in zip(compiled(h, eta), function(h, eta), strict=True):
        close(left, right, 1e-9)


@pytest.mark.parametrize("case", LAWS, ids=lambda case: case.name)
def test_moves_and_pickles(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    assert h.to(torch.float32).to("cpu").dtype == torch.float32
    assert h.to("cpu", torch.float32).dtype == h.to(device="cpu", dtype=torch.float32).dtype == torch.float32
    assert all(leaf.is_meta for leaf in pytree.tree_leaves(h.to("meta")))
    other = pickle.loads(pickle.dumps(h))
    assert type(other) is type(h)
    for left, right in zip(pytree.tree_leaves(h), pytree.tree_leaves(other), strict=True):
        close(left, right)
    buffer = io.BytesIO()
    torch.save(h, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is type(h)


@pytest.mark.parametrize("case", [c for c in CASES if c.cls not in NOT_IN_TORCH], ids=lambda case: case.name)
def test_torch_distributions(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2,))
    twin = h.to_torch()
    x = h.sample((4,), generator=g)
    close(twin.log_prob(x), h.log_prob(x), 1e-8)
    entropy = h.entropy()
    # torch has no entropy of counts, and that of Multinomial has a lgamma in float32; see test_scipy.
    counts = (f.Poisson, f.NegativeBinomial, f.Multinomial, f.Binomial)
    if isinstance(entropy, torch.Tensor) and case.cls not in counts:
        close(twin.entropy(), entropy, 1e-8)


@pytest.mark.parametrize("case", [c for c in CASES if c.cls in NOT_IN_TORCH], ids=lambda case: case.name)
def test_what_torch_does_not_have(case: Case, g: torch.Generator) -> None:
    with pytest.raises(ValueError, match=r"torch.distributions has no"):
        case.make(g).to_torch()
