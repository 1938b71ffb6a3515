r"""exp that LLVM turns into vector code, for kernels written as plain loops.

It works on one number; called in a loop it becomes eight float32 or four float64 lanes at a time, with no
maths library behind them.

exp(x) for x <= 0, by range reduction and a polynomial:

    x = n log 2 + r,  |r| <= (log 2)/2,      e^x = 2^n · (1 + r + r² P(r)),

where log 2 is split into a part with few bits (n times it is exact) and the rest (Cody and Waite), and 2^n is
made by writing n into the exponent bits. Below the smallest normal number the result is 0, not a denormal (n
= −127 leaves exponent bits of 0): a score that far under the maximum weighs nothing, and a masked score of
−inf weighs exactly nothing. Largest error: about 1 unit in the last place in float32, 2 in float64.

These functions keep strict arithmetic except for fused multiply-add: reassociation would merge the two parts
of log 2.
"""

import math

import numpy as np
from numba import float32
from numba.extending import overload

from exptilt._support.kernels import helper

STRICT = {"contract"}
# Sums may be reordered (so that they vectorise) and products fused; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}


_F = np.float32
# (e^r − 1 − r)/r² on |r| <= (log 2)/2 with the least largest error (float32, Cephes);
# its Taylor series to r^13 (float64: the rest is below 1e-17)
_E32 = tuple(
    map(_F, (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.50000001201))
)
_E64 = tuple(1.0 / math.factorial(k) for k in range(13, 1, -1))
_LOG2_HIGH32, _LOG2_LOW32 = _F(0.693359375), _F(-2.12194440e-4)
_LOG2_HIGH64, _LOG2_LOW64 = 6.93145751953125e-1, 1.42860682030941723212e-6
_INVERSE_LOG2 = 1.0 / math.log(2.0)
# Here n = −127 (−1023): the exponent bits are 0, and so is 2^n.
_LOWEST32, _LOWEST64 = _F(-127 * math.log(2.0)), -1023 * math.log(2.0)
# 1.5 times 2^23 (2^52): adding it rounds to an integer, which then stands in the low bits.
_ROUND32, _ROUND64 = _F(1.5 * 2**23), 1.5 * 2.0**52


@helper(fastmath=STRICT)
def _exp32(x):
    y = _LOWEST32 if x < _LOWEST32 else x  # NaN stays NaN
    t = y * _F(_INVERSE_LOG2) + _ROUND32
    n = t - _ROUND32
    r = y - n * _LOG2_HIGH32
    r = r - n * _LOG2_LOW32
    p = _E32[0]
    p = p * r + _E32[1]
    p = p * r + _E32[2]
    p = p * r + _E32[3]
    p = p * r + _E32[4]
    p = p * r + _E32[5]
    p = p * (r * r) + r + _F(1)
    exponent = (np.float32(t).view(np.int32) + np.int32(127)) << np.int32(23)
    return p * np.int32(exponent).view(np.float32)


@helper(fastmath=STRICT)
def _exp64(x):
    y = _LOWEST64 if x < _LOWEST64 else x
    t = y * _INVERSE_LOG2 + _ROUND64
    n = t - _ROUND64
    r = y - n * _LOG2_HIGH64
    r = r - n * _LOG2_LOW64
    p = _E64[0]
    p = p * r + _E64[1]
    p = p * r + _E64[2]
    p = p * r + _E64[3]
    p = p * r + _E64[4]
    p = p * r + _E64[5]
    p = p * r + _E64[6]
    p = p * r + _E64[7]
    p = p * r + _E64[8]
    p = p * r + _E64[9]
    p = p * r + _E64[10]
    p = p * r + _E64[11]
    p = p * (r * r) + r + 1.0
    exponent = (np.float64(t).view(np.int64) + 1023) << 52
    return p * np.int64(exponent).view(np.float64)


def exp_of_negative(x):
    """e^x for x <= 0; exactly 0 below the smallest normal number."""
    raise TypeError("exp_of_negative is compiled: call it inside a numba function")


@overload(exp_of_negative, inline="always")
def _choose_exp(x):
    return (lambda x: _exp32(x)) if x == float32 else (lambda x: _exp64(x))
