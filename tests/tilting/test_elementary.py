"""exp and tanh of the compiled kernels against extended precision."""

import numpy as np
import pytest
from numba import njit

from exptilt.tilting.cpu.elementary import exp_of_negative, hyperbolic_tangent


@njit
def all_exp(x, out):
    for i in range(x.size):
        out[i] = exp_of_negative(x[i])


@njit
def all_tanh(x, out):
    for i in range(x.size):
        out[i] = hyperbolic_tangent(x[i])


def units(found, exact):
    """Largest error in units of the last place."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(found.dtype))).max())


@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, -87.3), (np.float64, -708.0)])
def test_exp(dtype, lowest):
    x = np.concatenate([np.linspace(lowest, 0, 400_001), -np.logspace(-12, 1.9, 10_000)]).astype(dtype)
    found = np.empty_like(x)
    all_exp(x, found)
    assert units(found, np.exp(x.astype(np.longdouble))) < 1.1
    ends = np.array([0.0, -np.inf, -1e30, 1.05 * lowest - 1], dtype)
    found = np.empty_like(ends)
    all_exp(ends, found)
    assert found.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh(dtype):
    x = np.concatenate([np.linspace(-30, 30, 400_001), np.logspace(-12, 1, 10_000)]).astype(dtype)
    x = x[x != 0]
    found = np.empty_like(x)
    all_tanh(x, found)
    assert units(found, np.tanh(x.astype(np.longdouble))) < 2
