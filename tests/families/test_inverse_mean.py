"""The dual map of mixtures whose natural domain ends.

A mean as large as one likes has a tilt, and Newton's method finds it.
"""

import math

import pytest
import torch

from exptilt import families as f

F64 = torch.float64


def mixture(size: int, dtype: torch.dtype = F64) -> f.Mixture:
    g = torch.Generator().manual_seed(size)
    shape, rate = (4 * torch.rand(4, size, generator=g, dtype=F64) + 0.5 for _ in range(2))
    return f.Mixture(2 * torch.randn(4, generator=g, dtype=F64), f.Gamma(shape, rate)).to(dtype)


def check(h: f.Mixture, mean: torch.Tensor) -> None:
    """Converged, and the mean is off by no more than a few units in the last place of η make it."""
    found = h.natural(mean)
    assert found.converged, found.status
    last = (
        torch.finfo(mean.dtype).eps * (h.covariance(found.value).abs() @ found.value.abs()[..., None])[..., 0]
    )
    scale = mean + h.covariance().diagonal().sqrt()
    assert bool(((h.mean(found.value) - mean).abs() <= 1e-11 * scale + 8 * last).all())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tilts_close_to_the_end(size: int) -> None:
    """Rates that all but vanish, in some coordinates or in all of them."""
    h = mixture(size)
    end = h.family.rate.amin(0)
    left = 10 ** (-10 * torch.rand(20, size, dtype=F64, generator=torch.Generator().manual_seed(1)))
    left[:3] = torch.tensor([1e-5, 1e-8, 1e-10], dtype=F64)[:, None]
    left[3:6, 1:] = 0.5
    check(h, h.mean(end - left * end))


def test_means_that_no_representable_tilt_has() -> None:
    """Near the end one unit in the last place of η changes the mean by more than its own rounding."""
    check(mixture(2), torch.tensor([[3e7, 5e9], [1.0, 7e10], [123456.7, 0.3]], dtype=F64))


def test_single_precision_and_exponentials() -> None:
    h = mixture(2, torch.float32)
    eta = h.family.rate.amin(0) - torch.tensor([[1e-3, 0.4], [1e-4, 1e-4]])
    found = h.natural(h.mean(eta))
    assert found.converged, found.status
    e = f.Mixture(torch.zeros(2, dtype=F64), f.Exponential(torch.tensor([[1.0], [3.0]], dtype=F64)))
    mean = torch.tensor([[1e3], [1e7]], dtype=F64)
    found = e.natural(mean)
    assert found.converged, found.status
    torch.testing.assert_close(
        (1 - found.value) * mean, torch.ones_like(mean), rtol=3e-3, atol=0
    )  # the first has all the weight there


def test_running_out_of_steps_is_not_the_boundary() -> None:
    h = mixture(3)
    mean = h.mean(h.family.rate.amin(0) - 1e-6)
    assert h.natural(mean, max_steps=2).status.name == "MAX_STEPS"


@pytest.mark.parametrize("mean", [1e-12, 1e-9, 1e-4, 1e9, 1e12])
def test_means_far_below_the_spread_are_found_too(mean: float) -> None:
    """½ Exp(1) + ½ Exp(1e-6): near 0 the tilted law is a million times narrower than the spread."""
    h = f.Mixture(torch.zeros(2, dtype=F64), f.Exponential(torch.tensor([[1.0], [1e-6]], dtype=F64)))
    found = h.natural(torch.tensor([mean], dtype=F64))
    assert found.status is f.Status.CONVERGED
    assert float(h.mean(found.value)) == pytest.approx(mean, rel=1e-9)
    if mean < 1e-3:  # only Exp(1) is left: η = 1 − 1/m
        expected = mean - 1 - math.log(mean)
        assert float(h.conjugate(torch.tensor([mean], dtype=F64))) == pytest.approx(expected, rel=1e-5)
