"""Compiled loops for many entries: against many digits, and against torch, which does the same for few."""

import mpmath
import numpy as np
import pytest
import torch

from exptilt import families as f
from exptilt._support.linalg import indefiniteness
from exptilt.families.members import gaussian
from exptilt.families.numerics import kernels
from exptilt.families.numerics.deviance import deviance_of, gamma_kl
from exptilt.families.numerics.gamma_functions import digamma_rise, invert_dirichlet

F64 = torch.float64


def powers(low: float, high: float, *size: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose logarithms are evenly spread."""
    return torch.as_tensor(10 ** np.random.default_rng(seed).uniform(low, high, size))


def many(x: torch.Tensor) -> torch.Tensor:
    """So many copies that kernels are used."""
    return x.repeat(-(-kernels.MANY // x.numel()), *[1] * (x.ndim - 1))


def shapes() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of all sizes: far from each other, at the border of the series, near, very near."""
    generator = np.random.default_rng(1)
    first, second = [], []
    for low, high in ((-280, -5), (-5, 0), (0, 1), (1, 3), (3, 12)):
        a = 10 ** generator.uniform(low, high, 100)
        side = generator.choice([-1, 1], 100)
        wide = [a * (1 + side * generator.uniform(*ends, 100)) for ends in ((0.0, 0.19), (0.19, 0.3))]
        others = [10 ** generator.uniform(low, high, 100), 10 ** generator.uniform(-20, 10, 100), *wide]
        others.append(a * (1 + side * 10 ** generator.uniform(-7, -2, 100)))
        first += [a] * len(others)
        second += others
    return torch.as_tensor(np.concatenate(first)), torch.as_tensor(np.concatenate(second))


def test_divergences_of_shapes_against_many_digits() -> None:
    """At equal means, where nothing but the difference of log Γ is left; by the kernel and by torch."""
    a, b = shapes()
    change, log_rate = (b - a) / a, b.log() - a.log()
    with mpmath.workdps(60):
        exact = []
        for x, y in zip(map(mpmath.mpf, a.tolist()), map(mpmath.mpf, b.tolist()), strict=True):
            gammas = mpmath.loggamma(y) - mpmath.loggamma(x) - (y - x) * mpmath.digamma(x)
            exact.append(float(gammas - (y * mpmath.log(y / x) - y + x)))
    true = torch.tensor(exact, dtype=F64)
    by_torch = gamma_kl(a, b, change, log_rate)
    by_kernel = gamma_kl(*map(many, (a, b, change, log_rate)))[: len(a)]
    assert float((by_kernel / true - 1).abs().max()) < 1e-12
    assert float((by_torch / true - 1).abs().max()) < 1e-11


def test_divergences_of_counts_against_many_digits() -> None:
    x, m = shapes()
    with mpmath.workdps(60):
        pairs = zip(map(mpmath.mpf, x.tolist()), map(mpmath.mpf, m.tolist()), strict=True)
        true = torch.tensor([float(a * mpmath.log(a / b) - a + b) for a, b in pairs], dtype=F64)
    assert float((deviance_of(many(x), many(m))[: len(x)] / true - 1).abs().max()) < 2e-14
    assert float((deviance_of(x, m) / true - 1).abs().max()) < 1e-11


def test_numbers_at_the_ends_of_the_range_are_left_to_torch() -> None:
    a, b = torch.tensor([1e-300, 3.0, 1e300], dtype=F64), torch.tensor([2e-300, 3e-300, 2e300], dtype=F64)
    change, log_rate = torch.zeros_like(a), torch.zeros_like(a)
    found = gamma_kl(*map(many, (a, b, change, log_rate)))[:3]
    torch.testing.assert_close(found, gamma_kl(a, b, change, log_rate), rtol=1e-14, atol=0)
    assert bool(found.isfinite().all())


def test_differences_of_digamma_do_not_depend_on_how_many() -> None:
    a, b = powers(-150, 20, 500), powers(-150, 20, 500, seed=1)
    found = digamma_rise(many(a), many(b))[: len(a)]
    torch.testing.assert_close(found, digamma_rise(a, b), rtol=2e-15, atol=0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_inverse_of_dirichlet_means(size: int) -> None:
    """As by torch, row for row; and the concentrations come back."""
    alpha = torch.cat([powers(-8, 8, 200, size), powers(-1, 1, 200, size), powers(-30, 3, 100, size)])
    mean = f.Dirichlet(alpha).mean_parameter
    by_torch, by_kernel = invert_dirichlet(mean), invert_dirichlet(many(mean))[: len(mean)]
    for found in (by_torch, by_kernel):
        reached = f.Dirichlet(found).mean_parameter
        torch.testing.assert_close(reached, mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(by_kernel[200:400], alpha[200:400], rtol=1e-11, atol=0)
    single = invert_dirichlet(many(mean[200:400]).float())
    assert single.dtype == torch.float32


def test_derivatives_of_many_are_those_of_few() -> None:
    alpha = powers(-2, 2, 50, 3)
    mean = f.Dirichlet(alpha).mean_parameter
    few, lots = mean.clone().requires_grad_(), many(mean).requires_grad_()
    (slope,) = torch.autograd.grad(invert_dirichlet(few).log().sum(), few)
    (slopes,) = torch.autograd.grad(invert_dirichlet(lots).log().sum(), lots)
    torch.testing.assert_close(slopes[:50], slope, rtol=1e-8, atol=1e-8)
    batched = torch.func.vmap(invert_dirichlet)(many(mean))
    torch.testing.assert_close(batched[:50], alpha, rtol=1e-9, atol=0)


def spread(count: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(size)
    root = torch.randn(count, size, size, dtype=F64, generator=g)
    scale = 10 ** (4 * torch.rand(count, size, dtype=F64, generator=g) - 2)
    return (root @ root.mT + 0.1 * torch.eye(size, dtype=F64)) * scale[..., None] * scale[..., None, :]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_small_inverses_against_torch(size: int) -> None:
    matrix = spread(20000, size).reshape(4, 5000, size, size)
    swept = gaussian._swept(matrix)
    assert swept is not None
    found, least = swept
    assert torch.equal(found, found.mT)
    scale = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    product = (found @ matrix) * (scale[..., None] / scale[..., None, :])
    eye = torch.eye(size, dtype=F64).expand_as(matrix)
    torch.testing.assert_close(product, eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(-least, indefiniteness(matrix), rtol=1e-9, atol=0)
    assert gaussian._inverse(matrix.float()).dtype == torch.float32


def test_a_matrix_without_inverse_spoils_no_other() -> None:
    matrix = spread(20000, 2)
    matrix[3] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    matrix[4, 0, 0] = torch.nan
    found = gaussian._inverse(matrix)
    assert found.isnan().all((-1, -2)).nonzero().squeeze(-1).tolist() == [3, 4]


def test_derivatives_of_inverses_come_from_torch() -> None:
    matrix = spread(20000, 2).requires_grad_()
    (slope,) = torch.autograd.grad(gaussian._inverse(matrix).diagonal(dim1=-2, dim2=-1).sum(), matrix)
    inverse = gaussian._inverse(matrix.detach())
    torch.testing.assert_close((slope + slope.mT) / 2, -inverse @ inverse, rtol=1e-7, atol=1e-7)
