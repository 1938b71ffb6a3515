"""Maximum entropy against a general convex solver, and its certificates (THEORY A11)."""

import cvxpy
import numpy as np
import pytest
import torch

from exptilt import families as f


def by_cvxpy(a: np.ndarray, b: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, float]:
    v = cvxpy.Variable(len(b), nonneg=True)
    problem = cvxpy.Problem(
        cvxpy.Maximize(b @ v + cvxpy.sum(cvxpy.entr(v))), [cvxpy.sum(v) == 1, a.T @ v == mean]
    )
    value = problem.solve(solver=cvxpy.CLARABEL)
    return v.value, float(value)


@pytest.mark.parametrize("seed", range(4))
def test_against_cvxpy(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(60, 4, dtype=torch.float64, generator=g)
    b = torch.randn(60, dtype=torch.float64, generator=g)
    mean = f.Empirical(a).mean(torch.randn(4, dtype=torch.float64, generator=g))
    found = f.maximum_entropy(a, b, mean=mean)
    probability, value = by_cvxpy(a.numpy(), b.numpy(), mean.numpy())
    assert found.converged
    np.testing.assert_allclose(found.value.probability.numpy(), probability, atol=2e-5)
    assert float(found.value.primal) == pytest.approx(value, abs=1e-6)
    assert float(found.value.dual) == pytest.approx(value, abs=1e-6)
    assert abs(float(found.value.gap)) < 1e-10
    assert float(found.residual) < 1e-10


def test_the_papers_form() -> None:
    """Min log Σ e^{Ax+b}: the primal's optimum by brute force on a grid, c = 0."""
    a = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    b = torch.tensor([0.3, -0.1, 0.7], dtype=torch.float64)
    found = f.maximum_entropy(a, b)
    x = torch.linspace(-5, 5, 200001, dtype=torch.float64)
    values = torch.logsumexp(x[:, None] * a[:, 0] + b, -1)
    assert float(found.value.primal) == pytest.approx(float(values.min()), abs=1e-9)
    assert float(found.value.multiplier) == pytest.approx(float(x[values.argmin()]), abs=1e-4)
    assert float((a * found.value.probability[:, None]).sum()) == pytest.approx(0, abs=1e-12)


def test_batched_and_redundant_constraints() -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randn(3, 40, 2, dtype=torch.float64, generator=g)
    mean = 0.1 * torch.randn(3, 2, dtype=torch.float64, generator=g)
    plain = f.maximum_entropy(a, mean=mean)
    doubled = f.maximum_entropy(
        torch.cat([a, a[..., :1] + a[..., 1:]], -1), mean=torch.cat([mean, mean.sum(-1, keepdim=True)], -1)
    )
    assert plain.converged
    assert doubled.converged
    torch.testing.assert_close(doubled.value.probability, plain.value.probability, rtol=1e-6, atol=1e-9)
    for i in range(3):
        single = f.maximum_entropy(a[i], mean=mean[i])
        torch.testing.assert_close(single.value.probability, plain.value.probability[i])


def test_infeasible_constraints_are_named() -> None:
    g = torch.Generator().manual_seed(1)
    a = torch.rand(50, 4, dtype=torch.float64, generator=g)
    mean = torch.tensor([0.5, 1.7, 0.5, 0.5], dtype=torch.float64)
    found = f.maximum_entropy(a, mean=mean, names=["width", "height", "depth", "mass"])
    assert found.status is f.Status.OUTSIDE
    assert found.value.conflict == {(): ("height",)}
    assert float(found.distance) >= 0.7
    # Each can be met alone; together they contradict: the second column is the first turned round.
    b = torch.stack([a[:, 0], 1 - a[:, 0], a[:, 2]], -1)
    both = f.maximum_entropy(
        b, mean=torch.tensor([0.4, 0.4, 0.5], dtype=torch.float64), names=["x", "not x", "z"]
    )
    assert both.status is f.Status.OUTSIDE
    assert both.value.conflict == {(): ("x", "not x")}


def test_boundary_is_told() -> None:
    dice = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    found = f.maximum_entropy(dice, mean=torch.tensor([[3.5], [6.0], [6.5]], dtype=torch.float64))
    assert found.code.tolist() == [f.Status.CONVERGED.code, f.Status.BOUNDARY.code, f.Status.OUTSIDE.code]
    torch.testing.assert_close(found.value.probability[0], torch.full((6,), 1 / 6, dtype=torch.float64))
    assert float(found.distance[2]) == pytest.approx(0.5)


def test_forbidden_outcomes() -> None:
    dice = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    b = torch.zeros(6, dtype=torch.float64)
    b[5] = -torch.inf
    found = f.maximum_entropy(dice, b, mean=torch.tensor([4.5], dtype=torch.float64))
    assert found.converged
    assert float(found.value.probability[5]) == 0
    assert bool(found.value.dual.isfinite())
    assert abs(float(found.value.gap)) < 1e-10


def test_gradient_of_the_optimum_is_the_multiplier() -> None:
    """D (dual optimum) / d mean = −multiplier, by the envelope theorem."""
    g = torch.Generator().manual_seed(2)
    a = torch.randn(30, 3, dtype=torch.float64, generator=g)
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    found = f.maximum_entropy(a, mean=mean)
    (slope,) = torch.autograd.grad(found.value.dual, mean)
    torch.testing.assert_close(slope, -found.value.multiplier.detach(), rtol=1e-8, atol=1e-9)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="2 names for 1 constraints"):
        f.maximum_entropy(torch.ones(3, 1), names=["a", "b"])
    with pytest.raises(ValueError, match="outcomes, constraints"):
        f.maximum_entropy(torch.ones(3))


@pytest.mark.parametrize("gap", [1e-6, 1e-9, 1e-11])
def test_small_contradictions_are_named(gap: float) -> None:
    """Equal columns with unequal means.

    A mean that two constraints together put just beyond a side of the hull.
    """
    g = torch.Generator().manual_seed(3)
    a = torch.rand(200, 4, dtype=torch.float64, generator=g)
    a[:, 2] = a[:, 0]
    mean = a.mean(0)
    mean[2] += gap
    found = f.maximum_entropy(a, mean=mean)
    assert found.status is f.Status.OUTSIDE
    assert found.value.conflict == {(): ("0", "2")}
    assert float(found.distance) == pytest.approx(gap / 2**0.5, rel=1e-3)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 3)
    turned = torch.eye(3, dtype=torch.float64)
    turned[:2, :2] = torch.tensor([[1.0, 0.3], [0.2, 1.0]])
    normal = torch.tensor([1.0, -0.2, 0.0], dtype=torch.float64)
    beyond = f.maximum_entropy(
        corners @ turned, mean=torch.tensor([1.1, 0.8, 0.5], dtype=torch.float64) + gap * normal
    )
    assert beyond.value.conflict == {(): ("0", "1")}


def test_distance_far_from_the_origin() -> None:
    square = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 2)
    found = f.Empirical(square + 1e7).natural(torch.tensor([3.0, 0.5], dtype=torch.float64) + 1e7)
    assert found.status is f.Status.OUTSIDE
    assert float(found.distance) == pytest.approx(2, rel=1e-7)


def test_under_vmap() -> None:
    a = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    mean = a.mean(0) + torch.tensor([[0.0], [0.01]], dtype=torch.float64)
    found = torch.func.vmap(lambda m: f.maximum_entropy(a, mean=m).value.probability)(mean)
    torch.testing.assert_close(found, f.maximum_entropy(a, mean=mean).value.probability)


def test_arguments_by_their_own_names() -> None:
    a = torch.rand(6, 2)
    nan = torch.full((6,), torch.nan)
    bad = [
        ((a.numpy(),), {}, r"A must be a floating-point tensor; got ndarray"),
        ((a * torch.nan,), {}, r"maximum_entropy: A\[0, 0\] must be finite"),
        ((a, nan), {}, r"maximum_entropy: b\[0\] must be a number below \+inf; got nan"),
        ((a, torch.zeros(5)), {}, r"b must be \(..., 6\), one per row of A; got shape \(5,\)"),
        ((a, torch.zeros(6).double()), {}, "A is torch.float32 on cpu, b is torch.float64"),
        ((a, torch.full((2, 6), -torch.inf)), {}, r"b\[0\] must be above −inf for some outcome"),
        ((a,), {"mean": torch.zeros(3)}, r"mean must be \(..., 2\), one per column of A; got shape \(3,\)"),
        ((a,), {"mean": nan[:2]}, r"maximum_entropy: mean\[0\] must be finite"),
    ]
    for arguments, named, message in bad:
        with pytest.raises(ValueError, match=message):
            f.maximum_entropy(*arguments, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_the_residual_is_that_of_the_returned_law(size: float) -> None:
    """Columns far from 0 in float32: against the constraints in float64."""
    g = torch.Generator().manual_seed(0)
    a = (1e4 + size * torch.randn(40, 3, dtype=torch.float64, generator=g)).float()
    mean = a[:5].mean(0)
    found = f.maximum_entropy(a, mean=mean)
    offset = a.double() - mean.double()
    broken = (found.value.probability.double().unsqueeze(-1) * offset).sum(0).abs().max()
    assert found.converged
    assert float(broken) < 1e-5 * size
    assert float((found.residual - broken).abs()) < 1e-6 * size
    assert abs(float(found.value.gap)) < 1e-5
