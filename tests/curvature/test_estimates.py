"""Estimates from products, against the dense matrix in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Status
from exptilt.curvature import Curvature


def problem(kind="ggn", width=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4)).double()
    data = [(torch.randn(n, 3).double(), torch.arange(n) % 4) for n in (9, 5)]
    found = Curvature(model, "cross_entropy", data, kind)
    return found, found.dense()


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_outermost_eigenvalues(method, which):
    found, dense = problem("hessian")
    wanted = torch.linalg.eigvalsh(dense)
    pairs = found.eigenvalues(3, which=which, method=method, tolerance=1e-9)
    ends = wanted[-3:] if which == "largest" else wanted[:3]
    torch.testing.assert_close(pairs.values, ends.flip(0), rtol=1e-6, atol=1e-8)
    assert float(pairs.residuals.max()) < 1e-5
    apart = dense @ pairs.vectors - pairs.vectors * pairs.values
    torch.testing.assert_close(apart.norm(dim=0), pairs.residuals, rtol=1e-3, atol=1e-12)


def test_eigenvalues_of_largest_magnitude_and_all_of_them():
    found, dense = problem("hessian")
    wanted = torch.linalg.eigvalsh(dense)
    outer = wanted[wanted.abs().argsort(descending=True)[:4]].sort(descending=True).values
    torch.testing.assert_close(found.eigenvalues(4, which="magnitude").values, outer)
    torch.testing.assert_close(found.eigenvalues(len(wanted)).values, wanted.flip(0))
    with pytest.raises(ArgumentError, match=r"k is 53, the matrix has 52 rows"):
        found.eigenvalues(53)


def test_spectral_density_is_exact_when_the_space_is_exhausted():
    """A probe then has as many nodes as eigenvalues that are not 0, and moments come out exactly."""
    found, dense = problem()
    spectrum = found.spectral_density(steps=52, probes=3)
    signs = found._signs(3, 0)
    for power in (1, 2, 5):
        each = torch.stack([z @ torch.linalg.matrix_power(dense, power) @ z / 52 for z in signs])
        got = spectrum.mean(lambda x, power=power: x**power)
        torch.testing.assert_close(got.value, each.mean(), rtol=1e-9, atol=0)
        torch.testing.assert_close(got.standard_error, each.std() / 3**0.5, rtol=1e-6, atol=1e-12)


def test_spectral_density_covers_the_truth():
    found, dense = problem()
    values = torch.linalg.eigvalsh(dense)
    spectrum = found.spectral_density(steps=12, probes=24)
    torch.testing.assert_close(spectrum.weights.sum(-1), torch.ones(24).double())
    grid = torch.linspace(0, float(values[-1]), 9).double()
    got = spectrum.density(grid, 0.02)
    true = torch.exp(-((grid[:, None] - values) ** 2) / (2 * 0.02**2)).mean(1) / (0.02 * (2 * np.pi) ** 0.5)
    assert float(((got.value - true).abs() - 5 * got.standard_error - 1e-3 * true.max()).max()) < 0


def test_log_determinant():
    found, dense = problem()
    wanted = torch.logdet(dense + 0.01 * torch.eye(52).double())
    got = found.log_determinant(0.01, steps=44, probes=8)
    assert abs(float(got.value - wanted)) < 4 * float(got.standard_error)
    assert float(got.standard_error) < 0.1 * abs(float(wanted))
    with pytest.raises(ArgumentError, match=r"Pass damping > "):
        problem("hessian")[0].log_determinant(0.0)


@pytest.mark.parametrize("method", ["hutch++", "hutchinson"])
def test_trace_and_diagonal(method):
    found, dense = problem("hessian")
    trace = found.trace(probes=40, method=method)
    assert abs(float(trace.value - dense.trace())) <= 4 * float(trace.standard_error) + 1e-9
    diagonal = found.diagonal(probes=40, method=method)
    apart = (diagonal.value - dense.diagonal()).abs()
    assert float((apart / (diagonal.standard_error + 1e-12)).max()) < 6
    assert float(apart.max()) < 0.5 * float(dense.diagonal().max())


def test_hutch_plus_plus_is_exact_for_a_small_rank():
    """14 items with 4 classes: a rank of at most 42, and 45 leading directions hold all of it."""
    found, dense = problem(width=8)
    trace = found.trace(probes=90)
    torch.testing.assert_close(trace.value, dense.trace(), rtol=1e-9, atol=0)
    assert float(trace.standard_error) < 1e-9
    torch.testing.assert_close(found.diagonal(probes=90).value, dense.diagonal(), rtol=1e-6, atol=1e-9)


def test_solve_and_the_natural_gradient():
    found, dense = problem()
    b = torch.randn(52, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    damped = dense + 0.01 * torch.eye(52).double()
    solution = found.solve(b, damping=0.01, tolerance=1e-10)
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(solution.value, torch.linalg.solve(damped, b), rtol=1e-7, atol=1e-8)
    assert float(solution.residual) < 1e-9
    short = found.solve(b, damping=0.01, tolerance=1e-10, max_steps=2)
    assert short.status is Status.MAX_STEPS
    torch.testing.assert_close(short.residual, (b - damped @ short.value).norm() / b.norm())
    step = found.natural_gradient(damping=0.01, tolerance=1e-10)
    torch.testing.assert_close(step.value, torch.linalg.solve(damped, found.gradient()), rtol=1e-6, atol=1e-8)
    with pytest.raises(ArgumentError, match=r"not positive: its curvature along a direction is -"):
        problem("hessian")[0].solve(b, damping=0.0)


def test_natural_gradient_steps_train():
    found, _ = problem()
    x, y = (torch.cat([batch[i] for batch in found.batches]) for i in (0, 1))
    before = nn.functional.cross_entropy(found.model(x), y).detach()
    for _ in range(10):
        found.move(found.natural_gradient(damping=0.1).value, rate=0.5)
    assert float(nn.functional.cross_entropy(found.model(x), y).detach()) < 0.8 * float(before)
