"""Key mass far from zero, its third derivatives, and whose sums they are."""

import math

import pytest
import torch

import exptilt as xt
from oracles.tilting_fuzz import small_tiles
from tilting.cases import normal


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("size", [1e6, 1e10, 1e20, 1e30])
def test_mass_of_a_large_query(backend, size):
    torch.manual_seed(3)
    q, k = torch.randn(1, 1, 64) * size, torch.randn(1, 128, 64)
    mass = xt.attend(q, k, k, key_mass=True, backend=backend).key_mass
    assert (mass >= 0).all()
    assert (mass <= 1).all()
    assert abs(mass.double().sum().item() - 1) < 1e-6


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("queries", [1, 4, 7, 8, 9, 16, 17, 40])
def test_mass_of_large_queries_whatever_their_number(backend, queries):
    """Last tiles of a few rows, too; the gradient by the values is the mass again."""
    q, k = normal(queries, 1, queries, 64) * 1e6, normal(0, 1, 128, 64)
    v = torch.zeros(1, 128, 1, requires_grad=True)
    a = xt.attend(q, k, v, key_mass=True, backend=backend)
    (slope,) = torch.autograd.grad(a.output.sum(), v)
    for mass in (a.key_mass, slope):
        assert (mass >= 0).all()
        assert (mass <= queries * (1 + 1e-6)).all()
        assert abs(mass.double().sum().item() - queries) < 1e-6 * queries


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("at", [0.3, -math.inf])
def test_third_derivatives_of_key_mass_with_a_sink(backend, at):
    """Backwards three times, with a row that sees nothing; against the reference, which plain torch
    differentiates.
    """
    q0, k0 = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    steps = [normal(i + 2, 1, 3, 2, dtype=torch.float64) for i in range(3)]

    def third(backend):
        q, k = q0.clone().requires_grad_(), k0.clone().requires_grad_()
        sink = torch.tensor([at], dtype=torch.float64, requires_grad=True)
        x = (
            xt.attend(q, k, k, mask=mask, sink=sink, key_mass=True, backend=backend).key_mass
            * torch.arange(1.0, 5.0)
        ).sum()
        for step in steps[:2]:
            (slope,) = torch.autograd.grad(x, q, create_graph=True)
            x = (slope * step).sum()
        return torch.autograd.grad(x, (q, k, sink))

    for name, x, y in zip(("query", "key", "sink"), third(backend), third("reference"), strict=True):
        assert x.isfinite().all(), name
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_third_derivatives_of_key_mass_against_differences(backend):
    """The second derivative's slope, by central differences of the backend's own."""
    q0, k = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2] = False
    a, b, c = (normal(i + 2, 1, 3, 2, dtype=torch.float64) for i in range(3))
    sink = torch.tensor([0.3], dtype=torch.float64)

    def second(q):
        q = q.detach().requires_grad_()
        mass = xt.attend(q, k, k, mask=mask, sink=sink, key_mass=True, backend=backend).key_mass
        (slope,) = torch.autograd.grad((mass * torch.arange(1.0, 5.0)).sum(), q, create_graph=True)
        (slope,) = torch.autograd.grad((slope * a).sum(), q, create_graph=True)
        return (slope * b).sum(), q

    x, q = second(q0)
    (slope,) = torch.autograd.grad(x, q)
    h = 1e-5
    expected = (second(q0 + h * c)[0] - second(q0 - h * c)[0]) / (2 * h)
    torch.testing.assert_close((slope * c).sum(), expected.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("window", "causal"), [(5, True), (7, False)])
def test_a_windows_column_sums_belong_to_their_own_keys(window, causal):
    """The last rows of a tile see none of a tile of keys that the first rows do see."""
    g = torch.Generator().manual_seed(0)
    q, k, v, bar = (torch.randn(2, 700, 8, generator=g, dtype=torch.float64) for _ in range(4))
    weight = torch.randn(2, 700, generator=g, dtype=torch.float64).requires_grad_()

    def gradient(backend):
        found = xt.attend(q, k, v, log_weight=weight, window=window, causal=causal, backend=backend)
        return torch.autograd.grad((found.output * bar).sum() + found.entropy.sum(), weight)[0]

    torch.testing.assert_close(gradient("cpu"), gradient("reference"), rtol=1e-9, atol=1e-9)
    with small_tiles():
        torch.testing.assert_close(gradient("cpu"), gradient("reference"), rtol=1e-9, atol=1e-9)
