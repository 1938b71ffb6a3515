r"""Compiled loops for many entries: divergences of gammas, differences of ψ, Dirichlet means, small inverses.

They compute what the functions of the same names in torch compute, several times faster, on all threads; they
are used where there are many numbers in main memory and nobody asks for derivatives (`suits`).

**KL of two gammas at equal means**, log Γ(b) − log Γ(a) − g ψ(a) − D(b, a) with g = b − a. From 8 on, with
u = 1/a and v = 1/b, it is half of gu − log(b/a) and the rest of Stirling's series, R(b) − R(a) − g R'(a), of
which each term has the factor g²:

    v^n − u^n + n g u^{n+1} = g²u²v S_n,     P_n = u P_{n−1} + v^{n−1},   S_n = u S_{n−1} + P_n

Below 8 the same at z = a + 8 and w = b + 8, and Σ_{i<8} [g/(a+i) − log((b+i)/(a+i))] + D(w, z) − D(b, a).
Near to each other (|g| < a/5) each of these has a series; else the logarithms are put together into two.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from exptilt._support.elementary import STRICT
from exptilt._support.kernels import helper, kernel, run_chunks
from exptilt._support.transforms import derivatives_wanted, is_concrete

Array = np.ndarray[Any, Any]
MANY = 16384  # entries from which a kernel is used: a millisecond of torch's time
_UNIT = 1024  # rows that one thread takes at least
_BLOCK = 512  # entries whose intermediate results stay in the fastest memory
LARGE = 8  # dimension from which a library's calls are worth their cost
NEAR = 0.2  # |d| up to which the series is used: nine terms are right to 1e-17; beyond it four bits are lost
LEAST_CHANGE = 0.99  # 1 − ρ up to which ρ − 1 is used: beyond it ρ = e^{log ρ} has more digits
SERIES = tuple(2 / (2 * k + 3) for k in range(9))
_NUMERATORS = (1, -1, 1, -1, 5, -691, 7, -3617, 43867, -174611)
_DENOMINATORS = (6, 30, 42, 30, 66, 2730, 6, 510, 798, 330)
BERNOULLI = tuple(n / d for n, d in zip(_NUMERATORS, _DENOMINATORS, strict=True))
STIRLING = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))
SLOPE = tuple(b / (2 * k) for k, b in enumerate(BERNOULLI, 1))
# √½ as bits: a float less this, and more 1, has the exponent of its power of two and the fraction of a number
# in [√½, √2). 2^52 as bits: an integer in the low bits of it is added to it.
_ROOT_HALF, _ONE, _TWO_52 = 0x3FE6A09E667F3BCD, 0x3FF0000000000000, 0x4330000000000000
_FRACTION, _EXPONENT = 0x000FFFFFFFFFFFFF, 0x7FF0000000000000
_LOG2_HIGH, _LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ODD = (
    6.666666666666735130e-01,
    2.857142874366239149e-01,
    1.818357216161805012e-01,
    1.479819860511658591e-01,
)
_EVEN = (3.999999999940941908e-01, 2.222219843214978396e-01, 1.531383769920937332e-01)


def suits(*tensors: Tensor) -> bool:
    """Whether kernels are used: many entries, in main memory, and nobody asks for derivatives."""
    if max(tensor.numel() for tensor in tensors) < MANY or not is_concrete(*tensors):
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors) and not derivatives_wanted(tensors)


def array(tensor: Tensor, *shape: int) -> Array:
    """The numbers of a tensor in float64, in this shape."""
    found: Array = tensor.detach().double().reshape(shape).contiguous().numpy()
    return found


def run(sweep: Callable[..., None], *arrays: Array) -> None:
    """Call a kernel on pieces of the arrays along their first axis, on all threads."""

    def work(start: int, stop: int) -> None:
        sweep(*(x[start * _UNIT : stop * _UNIT] for x in arrays))

    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, -(-len(arrays[0]) // _UNIT))


def suits_logarithms(*tensors: Tensor) -> bool:
    """`suits`, and the numbers are positive and so far from the ends of float64 that quotients are normal."""
    if not suits(*tensors):
        return False
    ends = [torch.aminmax(tensor) for tensor in tensors]
    return all(bool((least > 1e-290) & (most < 1e290)) for least, most in ends)


def entrywise(sweep: Callable[..., None], *tensors: Tensor) -> Tensor:
    """What a kernel of flat arrays and their result gives for tensors of one shape."""
    result = np.empty(tensors[0].numel())
    run(sweep, *(array(tensor, -1) for tensor in tensors), result)
    return torch.from_numpy(result).to(tensors[0].dtype).reshape(tensors[0].shape)


# ---- logarithms that become vector code


@njit(inline="always")
def _from_bits(bits: Any) -> Any:
    return np.int64(bits).view(np.float64)


@helper(fastmath=STRICT)
def _log(x: float) -> float:
    """log x of a positive normal number, within one unit in the last place, as fdlibm's e_log.c."""
    bits = np.float64(x).view(np.int64) + (_ONE - _ROOT_HALF)
    n: float = _from_bits(((bits & _EXPONENT) >> 52) | _TWO_52) - (2.0**52 + 1023.0)
    f: float = _from_bits((bits & _FRACTION) + _ROOT_HALF) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = z * (_ODD[0] + w * (_ODD[1] + w * (_ODD[2] + w * _ODD[3])))
    even = w * (_EVEN[0] + w * (_EVEN[1] + w * _EVEN[2]))
    half = 0.5 * f * f
    return n * _LOG2_HIGH - ((half - (s * (half + (odd + even)) + n * _LOG2_LOW)) - f)


@helper(fastmath=STRICT)
def _log_of_ratio(x: float, y: float) -> float:
    """log x/y of positive normal numbers, exponents apart from fractions: no quotient is too large."""
    one, two = np.float64(x).view(np.int64), np.float64(y).view(np.int64)
    n: float = _from_bits(((one & _EXPONENT) >> 52) | _TWO_52) - _from_bits(
        ((two & _EXPONENT) >> 52) | _TWO_52
    )
    quotient = _from_bits((one & _FRACTION) | _ONE) / _from_bits((two & _FRACTION) | _ONE)
    return n * _LOG2_HIGH + (n * _LOG2_LOW + _log(quotient))


# ---- divergences of gammas


@helper(fastmath=STRICT)
def _near_deviance(x: float, gap: float) -> float:
    v = gap / (2.0 * x + gap)
    q = v * v
    series = SERIES[8]
    for k in range(7, -1, -1):
        series = series * q + SERIES[k]
    return v * (gap - x * q * series)


@kernel("the kernel of divergences of counts", fastmath=STRICT)
def deviance(x: Array, m: Array, result: Array) -> None:
    """`deviance.deviance_of`, for numbers between 1e-290 and 1e290."""
    for i in range(x.size):
        gap = m[i] - x[i]
        far, near = gap - x[i] * _log_of_ratio(m[i], x[i]), _near_deviance(x[i], gap)
        result[i] = near if abs(gap) < NEAR * x[i] else far


@njit(inline="always", fastmath=STRICT, error_model="numpy")  # a call would not become vector code
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


@njit(inline="always", fastmath=STRICT, error_model="numpy")  # a call would not become vector code
def _far_shapes(a: float, b: float, gap: float) -> float:
    small = (a if a < b else b) < 8.0
    z = a + 8.0 if small else a
    w = b + 8.0 if small else b
    u, v = 1.0 / z, 1.0 / w
    p, slope, q = 1.0, 0.0, 1.0  # Π (a+i)/z, its derivative, Π (b+i)/w, without i = 0
    for i in range(1, 8):
        factor = (a + i) * u
        slope = slope * factor + p
        p *= factor
        q *= (b + i) * v
    logs = b * _log_of_ratio(w / b, z / a) - _log_of_ratio(q * (b * v), p * (a * u))
    below = gap / a + gap * u * slope / p + logs
    stirling = 0.5 * (gap * u - _log_of_ratio(w, z)) + _stirling_rest(gap, u, v)
    return stirling + (below if small else 0.0)


@njit(inline="always", fastmath=STRICT, error_model="numpy")
def _near_shapes(a: float, b: float, gap: float) -> float:
    small = (a if a < b else b) < 8.0
    z = a + 8.0 if small else a
    w = b + 8.0 if small else b
    below = _near_deviance(w, -gap) - _near_deviance(b, -gap)
    for i in range(8):
        below += _near_deviance(a + i, gap) / (a + i)
    stirling = 0.5 * _near_deviance(z, gap) / z + _stirling_rest(gap, 1.0 / z, 1.0 / w)
    return stirling + (below if small else 0.0)


@helper(fastmath=STRICT)
def _gamma_block(
    a: Array, b: Array, change: Array, log_rate: Array, result: Array, place: Array, near: Array
) -> None:
    """Plain loops one after the other, so that they become vector code."""
    for i in range(a.size):
        away = a[i] * change[i] - (b[i] - a[i])
        far = away - b[i] * (log_rate[i] - _log_of_ratio(b[i], a[i]))
        close = _near_deviance(b[i], away)
        result[i] = close if abs(away) < NEAR * b[i] else far
    x, y, value = near[0], near[1], near[2]
    count = 0
    for i in range(a.size):
        if change[i] < -LEAST_CHANGE:
            away = a[i] * np.exp(log_rate[i]) - b[i]
            far = away - b[i] * (log_rate[i] - _log_of_ratio(b[i], a[i]))
            result[i] = _near_deviance(b[i], away) if abs(away) < NEAR * b[i] else far
        place[count], x[count], y[count], value[count] = i, a[i], b[i], result[i]
        count += abs(b[i] - a[i]) < NEAR * a[i]  # those near to each other are put together
    for i in range(a.size):
        result[i] += _far_shapes(a[i], b[i], b[i] - a[i])
    for i in range(count):
        value[i] += _near_shapes(x[i], y[i], y[i] - x[i])
    for i in range(count):
        result[place[i]] = value[i]


@kernel("the kernel of divergences", fastmath=STRICT)
def gamma_kl(a: Array, b: Array, change: Array, log_rate: Array, result: Array) -> None:
    """`deviance.gamma_kl`, for shapes between 1e-290 and 1e290."""
    place, near = np.empty(_BLOCK, np.int64), np.empty((3, _BLOCK))
    for start in range(0, a.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        _gamma_block(a[part], b[part], change[part], log_rate[part], result[part], place, near)


# ---- ψ and its inverse


@njit(inline="always", fastmath=STRICT, error_model="numpy")  # a call would not become vector code
def rise(a: Any, b: Any) -> Any:
    """`gamma_functions.digamma_rise` less log(1 + x), and x; its `py_func` takes tensors."""
    c = a + b
    total = 1.0 / (a * c)
    for i in range(1, 8):
        total = total + 1.0 / ((a + i) * (c + i))
    u, v = 1.0 / (a + 8.0), 1.0 / (c + 8.0)
    q, p = u * u, v * v
    shared, power, series = 1.0, p, SLOPE[0]
    for k in range(1, 10):  # q^k − p^k = (q − p) (q^{k−1} + q^{k−2} p + ⋯)
        shared = shared * q + power
        power = power * p
        series = series + SLOPE[k] * shared
    return b * (total + u * v * (0.5 + (u + v) * series)), b * u


@njit(inline="always", fastmath=STRICT, error_model="numpy")
def _rise(a: float, b: float) -> float:
    value, x = rise(a, b)
    y = 1.0 + x
    whole: float = value + (_log(y) + (x - (y - 1.0)) / y)
    return whole


@kernel("the kernel of digamma", fastmath=STRICT)
def digamma_rise(a: Array, b: Array, result: Array) -> None:
    """`gamma_functions.digamma_rise`."""
    for i in range(a.size):
        result[i] = _rise(a[i], b[i])


@helper(fastmath=STRICT)
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


@helper(fastmath=STRICT)
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


@njit(fastmath=STRICT, error_model="numpy")  # its `py_func` takes tensors too
def fall(a: Any, b: Any) -> Any:
    """ψ'(a) − ψ'(a + b) of positive a and b, as `rise`."""
    c = a + b
    total = 0.0
    for i in range(8):
        product = (a + i) * (c + i)
        total = total + (a + c + 2.0 * i) / product / product
    u, v = 1.0 / (a + 8.0), 1.0 / (c + 8.0)
    q, p = u * u, v * v
    shared, power, series = 0.0, 1.0, 1.0 + 0.5 * (u + v)
    for k in range(10):
        shared = shared * q + power
        power = power * p
        series = series + BERNOULLI[k] * ((u + v) * u * shared + power)
    return b * (total + u * v * series)


@helper(fastmath=STRICT)
def _inverse_digamma(y: float) -> float:
    a = np.exp(y) + 0.5 if y >= -2.22 else 1.0 / (-0.5772156649015329 - y)
    for _ in range(4):
        step = (_digamma(a) - y) / _trigamma(a)
        a -= step
        if abs(step) < 1e-5 * a:
            break
    return a


@helper(fastmath=STRICT)
def _rest_for(total: float, s: float) -> tuple[float, float]:
    """The r with ψ(τ) − ψ(τ − r) = s, and τ − r."""
    r = min(-total * np.expm1(-s), total * (s * total / (1.0 + s * total)))
    x = max(total * np.exp(-s), total / (1.0 + s * total))
    for _ in range(3):
        step = (_rise(x, r) - s) / _trigamma(x)
        x, r = x + step, r - step
    return r, x


@helper(fastmath=STRICT)
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
        steep = _trigamma(total) * slopes / rest - fall(alpha[top], wanted) / _trigamma(alpha[top]) / wanted
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
                spare += -fall(alpha[k], rest[k]) / (slope[k] * whole) if k == top else 1.0 / slope[k]
                shared += error[k] / slope[k]
            for k in range(size):
                new = max(alpha[k] - (error[k] - shared / spare) / slope[k], alpha[k] / 4.0)
                if np.isfinite(new):
                    alpha[k] = new


# ---- small positive definite matrices


@kernel("the kernel of small inverses")
def invert(matrices: Array, inverses: Array, pivots: Array) -> None:
    """M⁻¹ = L'⁻¹L⁻¹ and the least L_ii² of each M = LL'; NaN and −1 where there is no L."""
    count, size, _ = matrices.shape
    low, half = np.zeros((size, size)), np.zeros((size, size))
    for b in range(count):
        m, inverse = matrices[b], inverses[b]
        least = np.inf
        for j in range(size):
            s = m[j, j]
            for k in range(j):
                s -= low[j, k] * low[j, k]
            if not s > 0.0 or s == np.inf:
                least = -1.0
                break
            least = min(least, s)
            low[j, j] = np.sqrt(s)
            for i in range(j + 1, size):
                t = m[i, j]
                for k in range(j):
                    t -= low[i, k] * low[j, k]
                low[i, j] = t / low[j, j]
        pivots[b] = least
        if least < 0.0:
            inverse[:] = np.nan
            continue
        for j in range(size):  # L⁻¹, column by column
            half[j, j] = 1.0 / low[j, j]
            for i in range(j + 1, size):
                t = 0.0
                for k in range(j, i):
                    t += low[i, k] * half[k, j]
                half[i, j] = -t / low[i, i]
        for i in range(size):
            for j in range(i + 1):
                t = 0.0
                for k in range(i, size):
                    t += half[k, i] * half[k, j]
                inverse[i, j] = t
                inverse[j, i] = t
