r"""Compiled loops for many entries: divergences of gammas and counts, differences of ψ.

They compute what the functions of the same names in torch compute, several times faster, on all threads; they
are used where there are many numbers in main memory and nobody asks for derivatives (`suits`).

**KL of two gammas at equal means**, log Γ(b) − log Γ(a) − g ψ(a) − D(b, a) with g = b − a. From 8 on, with
u = 1/a and v = 1/b, it is half of gu − log(b/a) and the rest of Stirling's series, R(b) − R(a) − g R'(a), of
which each term has the factor g²:

    v^n − u^n + n g u^{n+1} = g²u²v S_n,     P_n = u P_{n−1} + v^{n−1},   S_n = u S_{n−1} + P_n

Below 8 the same at z = a + 8 and w = b + 8, and Σ_{i<8} [g/(a+i) − log((b+i)/(a+i))] + D(w, z) − D(b, a).
Near to each other (|g| < a/5) each of these has a series; else the logarithms are put together.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from exptilt._support.elementary import STRICT
from exptilt._support.kernels import kernel, run_chunks
from exptilt._support.transforms import derivatives_wanted, is_concrete

Array = np.ndarray[Any, Any]
MANY = 16384  # entries from which a kernel is used: a millisecond of torch's time
_UNIT = 1024  # entries that one thread takes at least
NEAR = 0.2  # |d| up to which the series is used: nine terms are right to 1e-17; beyond it four bits are lost
LEAST_CHANGE = 0.99  # 1 − ρ up to which ρ − 1 is used: beyond it ρ = e^{log ρ} has more digits
SERIES = tuple(2 / (2 * k + 3) for k in range(9))
_NUMERATORS = (1, -1, 1, -1, 5, -691, 7, -3617, 43867, -174611)
_DENOMINATORS = (6, 30, 42, 30, 66, 2730, 6, 510, 798, 330)
BERNOULLI = tuple(n / d for n, d in zip(_NUMERATORS, _DENOMINATORS, strict=True))
STIRLING = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))
SLOPE = tuple(b / (2 * k) for k, b in enumerate(BERNOULLI, 1))


def suits(*tensors: Tensor) -> bool:
    """Whether kernels are used: many entries, in main memory, and nobody asks for derivatives."""
    if max(tensor.numel() for tensor in tensors) < MANY or not is_concrete(*tensors):
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors) and not derivatives_wanted(tensors)


def entrywise(sweep: Callable[..., None], *tensors: Tensor) -> Tensor:
    """What a kernel of flat arrays and their result gives for tensors of one shape, on all threads."""
    flat = [tensor.detach().double().reshape(-1).contiguous().numpy() for tensor in tensors]
    arrays = [*flat, np.empty(tensors[0].numel())]

    def work(start: int, stop: int) -> None:
        sweep(*(x[start * _UNIT : stop * _UNIT] for x in arrays))

    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, -(-arrays[-1].size // _UNIT))
    return torch.from_numpy(arrays[-1]).to(tensors[0].dtype).reshape(tensors[0].shape)


@njit(fastmath=STRICT, error_model="numpy")
def _log_ratio(x: float, y: float) -> float:
    return math.log(x) - math.log(y) if x > 1e290 * y or y > 1e290 * x else math.log(x / y)


@njit(fastmath=STRICT, error_model="numpy")
def _near_deviance(x: float, gap: float) -> float:
    v = gap / (2.0 * x + gap)
    q = v * v
    series = SERIES[8]
    for k in range(7, -1, -1):
        series = series * q + SERIES[k]
    return v * (gap - x * q * series)


@kernel("the kernel of divergences of counts", fastmath=STRICT)
def deviance(x: Array, m: Array, result: Array) -> None:
    """`deviance.deviance_of`."""
    for i in range(x.size):
        gap = m[i] - x[i]
        near = abs(gap) < NEAR * x[i]
        result[i] = _near_deviance(x[i], gap) if near else gap - x[i] * _log_ratio(m[i], x[i])


@njit(fastmath=STRICT, error_model="numpy")
def _stirling_rest(gap: float, u: float, v: float) -> float:
    p, s, power, total = 1.0, 1.0, v, STIRLING[0]
    for k in range(1, 10):
        p = u * p + power
        s = u * s + p
        power *= v
        p = u * p + power
        s = u * s + p
        power *= v
        total += STIRLING[k] * s
    return (gap * u) * (gap * v) * u * total


@njit(fastmath=STRICT, error_model="numpy")
def _far_shapes(a: float, b: float, gap: float) -> float:
    if min(a, b) >= 8.0:
        return 0.5 * (gap / a - _log_ratio(b, a)) + _stirling_rest(gap, 1.0 / a, 1.0 / b)
    u, v = 1.0 / (a + 8.0), 1.0 / (b + 8.0)
    p, slope, q = 1.0, 0.0, 1.0  # Π (a+i)u, its derivative, Π (b+i)v, without i = 0
    for i in range(1, 8):
        factor = (a + i) * u
        slope = slope * factor + p
        p *= factor
        q *= (b + i) * v
    logs = b * _log_ratio(a * u, b * v) - _log_ratio(q * (b * v), p * (a * u))
    stirling = 0.5 * (gap * u - _log_ratio(u, v)) + _stirling_rest(gap, u, v)
    return stirling + gap / a + gap * u * slope / p + logs


@njit(fastmath=STRICT, error_model="numpy")
def _near_shapes(a: float, b: float, gap: float) -> float:
    if min(a, b) >= 8.0:
        return 0.5 * _near_deviance(a, gap) / a + _stirling_rest(gap, 1.0 / a, 1.0 / b)
    below = _near_deviance(b + 8.0, -gap) - _near_deviance(b, -gap)
    for i in range(8):
        below += _near_deviance(a + i, gap) / (a + i)
    u, v = 1.0 / (a + 8.0), 1.0 / (b + 8.0)
    return 0.5 * _near_deviance(a + 8.0, gap) * u + _stirling_rest(gap, u, v) + below


@kernel("the kernel of divergences", fastmath=STRICT)
def gamma_kl(a: Array, b: Array, change: Array, log_rate: Array, result: Array) -> None:
    """`deviance.gamma_kl`."""
    for i in range(a.size):
        gap = b[i] - a[i]
        away = a[i] * change[i] - gap
        if change[i] < -LEAST_CHANGE:
            away = a[i] * math.exp(log_rate[i]) - b[i]
        if abs(away) < NEAR * b[i]:
            result[i] = _near_deviance(b[i], away)
        else:
            result[i] = away - b[i] * (log_rate[i] - _log_ratio(b[i], a[i]))
        near = abs(gap) < NEAR * a[i]
        result[i] += _near_shapes(a[i], b[i], gap) if near else _far_shapes(a[i], b[i], gap)


@kernel("the kernel of digamma", fastmath=STRICT)
def digamma_rise(a: Array, b: Array, result: Array) -> None:
    """`gamma_functions.digamma_rise`."""
    for j in range(a.size):
        c = a[j] + b[j]
        rise = 0.0
        for i in range(8):
            rise += 1.0 / ((a[j] + i) * (c + i))
        u, v = 1.0 / (a[j] + 8.0), 1.0 / (c + 8.0)
        q, p = u * u, v * v
        shared, power, series = 1.0, p, SLOPE[0]
        for k in range(1, 10):
            shared = shared * q + power
            power *= p
            series += SLOPE[k] * shared
        result[j] = b[j] * (rise + u * v * (0.5 + (u + v) * series)) + math.log1p(b[j] * u)
