"""Large empirical measures: exact against dense sums, and no second copy of the points."""

import subprocess
import sys

import pytest
import torch

from exptilt import families as f

F64 = torch.float64


def test_rough_covariance_still_gives_the_exact_answer() -> None:
    """More than 8192 points: Newton's direction comes from a part of them, the certificate from all."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(30000, 5, dtype=F64, generator=g) ** 3
    h = f.Empirical(points, torch.randn(30000, dtype=F64, generator=g))
    eta = 0.2 * torch.randn(3, 5, dtype=F64, generator=g)
    weight = torch.softmax(eta @ points.T + h.log_weight, -1)
    mean = weight @ points
    torch.testing.assert_close(h.mean(eta), mean, rtol=1e-11, atol=1e-11)
    offset = points - mean[:, None]
    torch.testing.assert_close(
        h.covariance(eta), (weight[..., None] * offset).mT @ offset, rtol=1e-10, atol=1e-10
    )
    found = h.natural(mean)
    assert found.converged
    torch.testing.assert_close(found.value, eta, rtol=1e-8, atol=1e-9)
    for row in range(3):
        alone = h.natural(mean[row])
        assert alone.converged, alone.status
        torch.testing.assert_close(alone.value, eta[row], rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_memory() -> None:
    """G, mean, covariance and the dual map of 400,000 points (100 MB) add less than 60 MB to them."""
    code = """
import resource, torch
from exptilt import families as f
torch.manual_seed(0)
small = f.Empirical(torch.randn(9000, 64))
small.natural(small.mean(torch.full((64,), 0.05)))  # libraries loaded
points = torch.randn(400_000, 64)
h = f.Empirical(points)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
eta = torch.full((64,), 0.05)
mean = h.mean(eta); h.covariance(eta); h.log_normalizer(eta)
assert h.natural(mean).converged
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60


def test_batch_shapes() -> None:
    """Batches of the measure, of the tilt, and both; points shared by many weights."""
    g = torch.Generator().manual_seed(1)
    points = torch.randn(2, 3, 20, 4, dtype=F64, generator=g)
    h = f.Empirical(points)
    for shape in ((2, 3), (3,), (5, 2, 3), (5, 1, 3), (1, 1), ()):
        eta = torch.randn(*shape, 4, dtype=F64, generator=g)
        spread = torch.broadcast_shapes(shape, (2, 3))
        for index in (tuple(0 for _ in spread), tuple(n - 1 for n in spread)):
            one = f.Empirical(points.expand(*spread, 20, 4)[index])
            which = eta.expand(*spread, 4)[index]
            torch.testing.assert_close(h.log_normalizer(eta)[index], one.log_normalizer(which))
            torch.testing.assert_close(h.mean(eta)[index], one.mean(which))
            torch.testing.assert_close(h.covariance(eta)[index], one.covariance(which))
    shared = f.Empirical(points[0, 0])
    tilted = shared.tilt(torch.randn(7, 4, dtype=F64, generator=g))
    assert tilted.points.shape == (20, 4)
    assert tilted.batch_shape == (7,)
    assert tilted.natural(tilted.mean()).converged


def spread(count: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(size)
    root = torch.randn(count, size, size, dtype=F64, generator=g)
    scale = 10 ** (4 * torch.rand(count, size, dtype=F64, generator=g) - 2)
    return (root @ root.mT + 0.1 * torch.eye(size, dtype=F64)) * scale[..., None] * scale[..., None, :]
