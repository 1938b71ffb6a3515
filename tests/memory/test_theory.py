"""Theorems on a memory: the constants of the storage bound, and the bound on the error of a step."""

import math

import pytest
import torch
from scipy.special import lambertw

from exptilt.memory import Hopfield, retrieval_error_bound, storage_bound

F64 = torch.float64


def test_constants_of_the_modern_theory():
    """C2: c = 3.1546 (K = 3, d = 20), 1.3718 (K = 1, d = 75; cut off in the paper), and W's equation."""
    first, second = (
        storage_bound(20, beta=1.0, radius=3.0, failure=0.001),
        storage_bound(75, beta=1.0, radius=1.0, failure=0.001),
    )
    assert round(first.base, 4) == 3.1546
    assert math.floor(second.base * 1e4) / 1e4 == 1.3718
    assert first.log_argument > 1.27  # as the paper states beside them
    assert second.log_argument < -0.94
    assert first.holds
    assert second.holds
    for bound, K, d in ((first, 3.0, 20), (second, 1.0, 75)):
        b = 2 * K**2 / 5
        w = b / bound.base
        assert w * math.exp(w) == pytest.approx(math.exp(bound.log_argument))
        assert w == pytest.approx(lambertw(math.exp(bound.log_argument)).real)
        assert bound.count == pytest.approx(math.sqrt(0.001) * bound.base ** ((d - 1) / 4))
    assert not storage_bound(4).holds


def test_the_bound_of_large_and_tiny_numbers():
    """Logarithms on the way: nothing overflows but what is returned."""
    large = storage_bound(4096, radius=3.0)
    assert large.count == math.inf
    assert large.log_count == pytest.approx(0.5 * math.log(0.001) + 4095 / 4 * math.log(large.base))
    assert storage_bound(20, beta=1e300).log_count > storage_bound(20, beta=1e299).log_count
    a, b = 2 / 19 * (1 + math.log(2e-3 * 19) - 300 * math.log(10)), 0.4e-300
    assert storage_bound(20, beta=1e-300).base == pytest.approx(
        math.exp(-a)
    )  # W₀(x) = x for small x: c = b / (e^a b)
    assert storage_bound(20, beta=1e-300).log_argument == pytest.approx(a + math.log(b))


def test_a_step_keeps_the_bound_on_its_error():
    x = 6 * torch.eye(8, dtype=F64)
    memory = Hopfield(x, 1.0)
    gap = memory.separation()
    start = x + 0.02 * torch.randn(8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    distance = (start - x).norm(dim=-1)
    error = (memory.step(start) - x).norm(dim=-1)
    bound = retrieval_error_bound(gap, distance, count=8, beta=1.0, size=6.0)
    assert (error <= bound).all()
    assert bound.max() < 1e-9
    assert (retrieval_error_bound(gap, 2 * distance, count=8, beta=1.0, size=6.0) > bound).all()


def test_metastable_states():
    """Two groups of near patterns: at β = ½ each is recalled as the mean of its group, at β = 200 alone."""
    near = 0.3 * torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    near[:3, 0] += 3.0
    near[3:, 1] += 3.0
    blunt = Hopfield(near, 0.5).retrieve(near).value
    for group in (slice(3), slice(3, 6)):
        assert torch.pdist(blunt[group]).max() < 1e-8
        weight = torch.softmax(0.5 * blunt[group][0] @ near.T, -1)
        assert weight[group].sum() > 0.9
    sharp = Hopfield(near, 200.0, similarity="euclidean").retrieve(near).value
    assert torch.allclose(sharp, near, atol=1e-3)
