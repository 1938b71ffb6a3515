"""exp and tanh of the compiled kernels against extended precision."""

import ctypes

import numpy as np
import pytest

from exptilt._support import native


def by_vectors(place, x):
    """exp (0), tanh (1) or its slope (2) of each number of x, filled up to an odd number of vectors."""
    lanes = getattr(native.load(), f"exptilt_lanes_{x.dtype}")()
    whole = np.zeros((-(-x.size // lanes) | 1) * lanes, x.dtype)
    whole[: x.size] = x
    found = np.full((3, whole.size), np.nan, x.dtype)
    function = getattr(native.load(), f"exptilt_elementary_{x.dtype}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(whole.ctypes.data, found.ctypes.data, whole.size // lanes)
    return found[place, : x.size]


def units(found, exact):
    """Largest error in units of the last place."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(found.dtype))).max())


@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, -87.3), (np.float64, -708.0)])
def test_exp(dtype, lowest):
    x = np.concatenate([np.linspace(lowest, 0, 400_001), -np.logspace(-12, 1.9, 10_000)]).astype(dtype)
    assert units(by_vectors(0, x), np.exp(x.astype(np.longdouble))) < 1.1
    ends = np.array([0.0, -np.inf, -1e30, 1.05 * lowest - 1], dtype)
    assert by_vectors(0, ends).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert np.isnan(by_vectors(0, np.array([np.nan], dtype))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh(dtype):
    x = np.concatenate([np.linspace(-30, 30, 400_001), np.logspace(-12, 1, 10_000)]).astype(dtype)
    x = x[x != 0]
    assert units(by_vectors(1, x), np.tanh(x.astype(np.longdouble))) < 2
    ends = by_vectors(1, np.array([0.0, np.inf, -np.inf, np.nan], dtype))
    assert ends[:3].tolist() == [0.0, 1.0, -1.0]
    assert np.isnan(ends[3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slope_of_tanh(dtype):
    """1 − tanh² to a few units in the last place, also where tanh is 1 to the last of them."""
    x = np.concatenate([np.linspace(-30, 30, 400_001), np.logspace(-12, 1, 10_000)]).astype(dtype)
    assert units(by_vectors(2, x), np.cosh(x.astype(np.longdouble)) ** -2) < 6
    assert by_vectors(2, np.array([0.0, np.inf, -np.inf], dtype)).tolist() == [1.0, 0.0, 0.0]
