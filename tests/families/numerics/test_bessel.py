"""Bessel functions against SciPy and recurrences."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from exptilt.families.numerics.bessel import log_bessel

F64 = torch.float64


@pytest.mark.parametrize("order", [-0.5, 0, 0.5, 1, 4.5, 9, 31, 63.5, 500])
def test_bessel_against_scipy(order: float) -> None:
    kappa = np.array([1e-3, 0.1, 1, 5, 20, 100, 700, 1e4])
    with np.errstate(divide="ignore", invalid="ignore"):
        reference = np.log(scipy.special.ive(order, kappa)) + kappa - order * np.log(kappa)
        ratio = scipy.special.ive(order + 1, kappa) / scipy.special.ive(order, kappa) / kappa
    known = np.isfinite(reference) & np.isfinite(ratio) & (ratio > 0)
    value, found, above = log_bessel(order, torch.as_tensor(kappa) ** 2)
    np.testing.assert_allclose(value.numpy()[known], reference[known], rtol=3e-14, atol=3e-14)
    np.testing.assert_allclose(found.numpy()[known], ratio[known], rtol=5e-13)
    # The recurrence ties neighbouring orders together, also where SciPy under- or overflows.
    np.testing.assert_allclose(found.numpy(), 1 / (2 * (order + 1) + kappa**2 * above.numpy()), rtol=1e-13)


def test_bessel_at_zero_and_far_out() -> None:
    value, ratio, _ = log_bessel(2.0, torch.tensor([0.0, 1e16], dtype=F64))
    assert float(value[0]) == pytest.approx(-2 * math.log(2) - math.lgamma(3), rel=1e-14)
    assert float(ratio[0]) == pytest.approx(1 / 6, rel=1e-14)
    assert float(value[1]) == pytest.approx(1e8 - 2.5 * math.log(1e8) - math.log(2 * math.pi) / 2, rel=1e-14)


@pytest.mark.parametrize("order", [0.0, 1.5, 40.0])
def test_bessel_derivatives(order: float) -> None:
    s = torch.tensor([0.0, 0.3, 7.0, 400.0], dtype=F64, requires_grad=True)
    value, ratio, _ = log_bessel(order, s)
    (slope,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(slope, ratio / 2, rtol=1e-11, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: log_bessel(order, x)[1], (s[1:].detach().requires_grad_(),))
