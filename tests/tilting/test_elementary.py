"""exp and tanh of the compiled kernels against extended precision."""

import numpy as np
import pytest
from numba import njit

from exptilt._support.elementary import exp_of_negative
from exptilt.tilting.backends.numba.machine import machine
from exptilt.tilting.backends.numba.vector_math import exp, row_loop, tanh


@row_loop(reads=1, writes=(1,))
def exp_row(x, zero):
    return exp(x)


@row_loop(reads=1, writes=(1,))
def tanh_row(x, zero):
    return tanh(x)[0]


@row_loop(reads=1, writes=(1,))
def slope_row(x, zero):
    return tanh(x)[1]


@njit
def vector_exp(zero, x, out, vectors):
    exp_row(zero, (x, out), vectors, (zero,))


@njit
def vector_tanh(zero, x, out, vectors):
    tanh_row(zero, (x, out), vectors, (zero,))


@njit
def vector_slope(zero, x, out, vectors):
    slope_row(zero, (x, out), vectors, (zero,))


@njit
def plain_exp(x, out):
    for i in range(x.size):
        out[i] = exp_of_negative(x[i])


def by_vectors(kernel, x):
    """The kernel's result for each number of x, filled up to an odd number of vectors."""
    lanes = machine().lanes(x.itemsize)
    whole = np.zeros((-(-x.size // lanes) | 1) * lanes, x.dtype)
    whole[: x.size] = x
    found = np.full_like(whole, np.nan)
    kernel(x.dtype.type(0), whole.ctypes.data, found.ctypes.data, whole.size // lanes)
    return found[: x.size]


def one_by_one(x):
    found = np.empty_like(x)
    plain_exp(x, found)
    return found


def units(found, exact):
    """Largest error in units of the last place."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(found.dtype))).max())


@pytest.mark.parametrize(
    "ours", [lambda x: by_vectors(vector_exp, x), one_by_one], ids=["vectors", "plain loop"]
)
@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, -87.3), (np.float64, -708.0)])
def test_exp(ours, dtype, lowest):
    x = np.concatenate([np.linspace(lowest, 0, 400_001), -np.logspace(-12, 1.9, 10_000)]).astype(dtype)
    assert units(ours(x), np.exp(x.astype(np.longdouble))) < 1.1
    ends = np.array([0.0, -np.inf, -1e30, 1.05 * lowest - 1], dtype)
    assert ours(ends).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert np.isnan(ours(np.array([np.nan], dtype))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh(dtype):
    x = np.concatenate([np.linspace(-30, 30, 400_001), np.logspace(-12, 1, 10_000)]).astype(dtype)
    x = x[x != 0]
    assert units(by_vectors(vector_tanh, x), np.tanh(x.astype(np.longdouble))) < 2
    ends = by_vectors(vector_tanh, np.array([0.0, np.inf, -np.inf, np.nan], dtype))
    assert ends[:3].tolist() == [0.0, 1.0, -1.0]
    assert np.isnan(ends[3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slope_of_tanh(dtype):
    """1 − tanh² to a few units in the last place, also where tanh is 1 to the last of them."""
    x = np.concatenate([np.linspace(-30, 30, 400_001), np.logspace(-12, 1, 10_000)]).astype(dtype)
    assert units(by_vectors(vector_slope, x), np.cosh(x.astype(np.longdouble)) ** -2) < 6
    assert by_vectors(vector_slope, np.array([0.0, np.inf, -np.inf], dtype)).tolist() == [1.0, 0.0, 0.0]
