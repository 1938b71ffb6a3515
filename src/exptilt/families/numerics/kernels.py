r"""Compiled loops for many entries: divergences of gammas and counts, differences of ψ, Dirichlet means.

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


def swept(sweep: Callable[..., None], *tensors: Tensor, rows: bool = False) -> Tensor:
    """What a kernel of flat arrays, or of rows, gives for tensors of one shape, on all threads."""
    first, shape = tensors[0], (-1, tensors[0].shape[-1]) if rows else (-1,)
    arrays = [tensor.detach().double().reshape(shape).contiguous().numpy() for tensor in tensors]
    arrays.append(np.empty(arrays[0].shape))

    def work(start: int, stop: int) -> None:
        sweep(*(x[start * _UNIT : stop * _UNIT] for x in arrays))

    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, -(-len(arrays[0]) // _UNIT))
    return torch.from_numpy(arrays[-1]).to(first.dtype).reshape(first.shape)


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


@njit(fastmath=STRICT, error_model="numpy")
def _rise(a: float, b: float) -> float:
    c = a + b
    rise = 0.0
    for i in range(8):
        rise += 1.0 / ((a + i) * (c + i))
    u, v = 1.0 / (a + 8.0), 1.0 / (c + 8.0)
    q, p = u * u, v * v
    shared, power, series = 1.0, p, SLOPE[0]
    for k in range(1, 10):
        shared = shared * q + power
        power *= p
        series += SLOPE[k] * shared
    return b * (rise + u * v * (0.5 + (u + v) * series)) + math.log1p(b * u)


@kernel("the kernel of digamma", fastmath=STRICT)
def digamma_rise(a: Array, b: Array, result: Array) -> None:
    """`gamma_functions.digamma_rise`."""
    for i in range(a.size):
        result[i] = _rise(a[i], b[i])


@njit(fastmath=STRICT, error_model="numpy")
def _digamma(a: float) -> float:
    below = 0.0
    while a < 8.0:
        below += 1.0 / a
        a += 1.0
    q = 1.0 / (a * a)
    series = SLOPE[9]
    for k in range(8, -1, -1):
        series = series * q + SLOPE[k]
    return math.log(a) - 0.5 / a - q * series - below


@njit(fastmath=STRICT, error_model="numpy")
def _trigamma(a: float) -> float:
    below = 0.0
    while a < 8.0:
        below += 1.0 / (a * a)
        a += 1.0
    u = 1.0 / a
    q = u * u
    series = BERNOULLI[9]
    for k in range(8, -1, -1):
        series = series * q + BERNOULLI[k]
    return below + u * (1.0 + 0.5 * u + q * series)


@njit(fastmath=STRICT, error_model="numpy")
def _fall(a: float, b: float) -> float:
    c = a + b
    fall = 0.0
    for i in range(8):
        product = (a + i) * (c + i)
        fall += (a + c + 2.0 * i) / product / product
    u, v = 1.0 / (a + 8.0), 1.0 / (c + 8.0)
    q, p = u * u, v * v
    shared, power, series = 0.0, 1.0, 1.0 + 0.5 * (u + v)
    for k in range(10):
        shared = shared * q + power
        power *= p
        series += BERNOULLI[k] * ((u + v) * u * shared + power)
    return b * (fall + u * v * series)


@njit(fastmath=STRICT, error_model="numpy")
def _inverse_digamma(y: float) -> float:
    a = np.exp(y) + 0.5 if y >= -2.22 else 1.0 / (-0.5772156649015329 - y)
    for _ in range(4):
        step = (_digamma(a) - y) / _trigamma(a)
        a -= step
        if abs(step) < 1e-5 * a:
            break
    return a


@njit(fastmath=STRICT, error_model="numpy")
def _rest_for(total: float, s: float) -> tuple[float, float]:
    """The r with ψ(τ) − ψ(τ − r) = s, and τ − r."""
    r = min(-total * np.expm1(-s), total * (s * total / (1.0 + s * total)))
    x = max(total * np.exp(-s), total / (1.0 + s * total))
    for _ in range(3):
        step = (_rise(x, r) - s) / _trigamma(x)
        x, r = x + step, r - step
    return r, x


@njit(fastmath=STRICT, error_model="numpy")
def _start(mean: Array, top: int, alpha: Array) -> None:
    s, others = -mean[top], 0.0
    for k in range(mean.size):
        others += np.exp(mean[k]) if k != top else 0.0
    share = -np.expm1(-s)
    left, limit = share - others, others / share
    target, total = np.log(left / share), mean.size / (2.0 * left)
    low, high = 1e-300, 1e300
    for _ in range(60):
        psi, rest, slopes = _digamma(total), 0.0, 0.0
        for k in range(mean.size):
            if k != top:
                alpha[k] = _inverse_digamma(mean[k] + psi)
                rest += alpha[k]
                slopes += 1.0 / _trigamma(alpha[k])
        wanted, alpha[top] = _rest_for(total, s)
        ratio = rest / wanted
        if ratio > 1.0:
            low = total / 2.0
        else:
            high = 2.0 * total
        steep = _trigamma(total) * slopes / rest - _fall(alpha[top], wanted) / _trigamma(alpha[top]) / wanted
        change = (target - np.log(ratio - limit)) * (ratio - limit) / (total * ratio * steep)
        new = total * np.exp(min(max(change, -16.0), 16.0))
        if not (low <= new <= high):  # also where it is NaN
            new = np.sqrt(low) * np.sqrt(high)
        settled = abs(new - total) < 1e-3 * total
        total = new
        if settled:
            break
    psi = _digamma(total)
    for k in range(mean.size):
        alpha[k] = _inverse_digamma(mean[k] + psi) if k != top else _rest_for(total, s)[1]


@kernel("the kernel of Dirichlet means", fastmath=STRICT)
def invert_dirichlet(means: Array, alphas: Array) -> None:
    """`gamma_functions.invert_dirichlet`, row by row."""
    size = means.shape[1]
    rest, error, slope = np.empty(size), np.empty(size), np.empty(size)
    for row in range(len(means)):
        mean, alpha = means[row], alphas[row]
        top = int(np.argmax(mean))
        _start(mean, top, alpha)
        for _ in range(3):
            total = 0.0
            for k in range(size):  # the sum of all others, not as a difference from the whole
                rest[k] = total
                total += alpha[k]
            after = 0.0
            for k in range(size - 1, -1, -1):
                rest[k] += after
                after += alpha[k]
            whole, spare, shared = _trigamma(total), 0.0, 0.0
            for k in range(size):
                error[k] = -_rise(alpha[k], rest[k]) - mean[k]
                slope[k] = _trigamma(alpha[k])
                spare += -_fall(alpha[k], rest[k]) / (slope[k] * whole) if k == top else 1.0 / slope[k]
                shared += error[k] / slope[k]
            for k in range(size):
                new = max(alpha[k] - (error[k] - shared / spare) / slope[k], alpha[k] / 4.0)
                if np.isfinite(new):
                    alpha[k] = new
