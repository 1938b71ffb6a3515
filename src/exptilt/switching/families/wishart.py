r"""The compiled parts of a normal–inverse-Wishart belief, for `kernel`.

θ = (κm, −½ pack(Ψ + κmm'), −½κ, −½(ν + D + 2)), where entry (i, j ≤ i) of a packed matrix is number
i (i + 1)/2 + j, times √2 off the diagonal, and

    A(θ) = log Γ_D(ν/2) − ½ν log |Ψ/2| − ½D log κ + const,     log Γ_D(a) = Σ_{i<D} log Γ(a − i/2) + const
    ∇A(θ) = (νΨ⁻¹m, pack(νΨ⁻¹), D/κ + νm'Ψ⁻¹m, log |Ψ/2| − Σ_{i<D} ψ((ν − i)/2))
"""

import math
from typing import Any

import numpy as np

from exptilt._support.kernels import helper
from exptilt.families.numerics.kernels import _digamma, _trigamma

Buffer = Any  # a float64 array; numba says more of it
_ROOT = math.sqrt(2.0)


@helper()
def _scale(D: int, theta: Buffer, e: Buffer, seen: float, L: Buffer) -> float:
    """Write the Cholesky factor of the Ψ of θ + seen · e, packed without the √2, and return log |Ψ|."""
    size = D * (D + 1) // 2
    count = -2.0 * (theta[D + size] + seen * e[D + size])
    log_determinant = 0.0
    for i in range(D):
        for j in range(i + 1):
            k, by = i * (i + 1) // 2 + j, 1.0 if i == j else _ROOT
            mean = (theta[i] + seen * e[i]) * (theta[j] + seen * e[j]) / count
            L[k] = -2.0 * (theta[D + k] + seen * e[D + k]) / by - mean
        log_determinant += _row(i, L)
    return log_determinant


@helper()
def _row(i: int, L: Buffer) -> float:
    """Overwrite row i of a packed matrix with that of its Cholesky factor; return 2 log of the pivot."""
    at = i * (i + 1) // 2
    for j in range(i + 1):
        other, s = j * (j + 1) // 2, L[at + j]
        for k in range(j):
            s -= L[at + k] * L[other + k]
        L[at + j] = math.sqrt(s) if i == j else s / L[other + j]
    log: float = 2.0 * np.log(L[at + i])
    return log


@helper()
def _inverse(D: int, L: Buffer, R: Buffer) -> None:
    """Write L⁻¹, packed."""
    for j in range(D):
        for i in range(j, D):
            s = 1.0 if i == j else 0.0
            for k in range(j, i):
                s -= L[i * (i + 1) // 2 + k] * R[k * (k + 1) // 2 + j]
            R[i * (i + 1) // 2 + j] = s / L[i * (i + 1) // 2 + i]


@helper()
def _product(D: int, R: Buffer, i: int, j: int) -> float:
    """Entry (i, j ≤ i) of R'R."""
    s = 0.0
    for k in range(i, D):
        s += R[k * (k + 1) // 2 + i] * R[k * (k + 1) // 2 + j]
    return s


@helper()
def wishart_gain(D: int, theta: Buffer, e: Buffer, work: Buffer) -> float:
    """A(θ + e) − A(θ)."""
    size = D * (D + 1) // 2
    half, more = -theta[D + size + 1] - 0.5 * (D + 2), -e[D + size + 1]
    before, after = _scale(D, theta, e, 0.0, work[0]), _scale(D, theta, e, 1.0, work[1])
    log_two = D * math.log(2.0)
    total: float = half * (before - log_two) - (half + more) * (after - log_two)
    total -= 0.5 * D * np.log(1.0 + e[D + size] / theta[D + size])
    for i in range(D):
        total += math.lgamma(half + more - 0.5 * i) - math.lgamma(half - 0.5 * i)
    return total


@helper()
def wishart_mean(D: int, theta: Buffer, mean: Buffer, work: Buffer) -> None:
    """The expected statistics ∇A(θ)."""
    size = D * (D + 1) // 2
    L, R = work[0], work[1]
    mean[D + size + 1] = _scale(D, theta, theta, 0.0, L) - D * math.log(2.0)
    half, count = -theta[D + size + 1] - 0.5 * (D + 2), -2.0 * theta[D + size]
    _inverse(D, L, R)
    mean[:D] = 0.0
    mean[D + size] = D / count
    for i in range(D):
        mean[D + size + 1] -= _digamma(half - 0.5 * i)
        for j in range(i + 1):
            entry = 2.0 * half * _product(D, R, i, j)
            mean[D + i * (i + 1) // 2 + j] = entry * (1.0 if i == j else _ROOT)
            mean[i] += entry * theta[j] / count
            if j < i:
                mean[j] += entry * theta[i] / count
    for i in range(D):
        mean[D + size] += mean[i] * theta[i] / count


@helper()
def _degrees(D: int, s: float) -> float:
    """The ν > D − 1 with D log(ν/2) − Σ_{i<D} ψ((ν − i)/2) = s, by Newton's method in 1/(ν − D + 1)."""
    free = (D * (D + 1) / 4.0 + 1.0) / s  # half of ν − D + 1: large, D(D + 1)/(4s); small, 1/s
    for _ in range(60):
        half = free + 0.5 * (D - 1)
        gap, slope = D * np.log(half), D / half
        for i in range(D):
            gap -= _digamma(half - 0.5 * i)
            slope -= _trigamma(half - 0.5 * i)
        change = (gap - s) / (free * slope)
        free /= max(1.0 + change, 0.125)
        if not abs(change) >= 1e-7:  # the next one would be below rounding
            break
    return 2.0 * free + D - 1.0


@helper()
def wishart_from_mean(D: int, mean: Buffer, target: Buffer, work: Buffer) -> None:
    """The θ whose expected statistics are `mean`; `work` holds two rows."""
    size = D * (D + 1) // 2
    L, R = work[0], work[1]
    log_determinant = 0.0
    for i in range(D):
        for j in range(i + 1):
            k = i * (i + 1) // 2 + j
            L[k] = mean[D + k] / (1.0 if i == j else _ROOT)
        log_determinant += _row(i, L)
    _inverse(D, L, R)
    for i in range(D):  # E Σ⁻¹ m = E Σ⁻¹μ
        target[i] = 0.0
        for j in range(D):
            target[i] += _product(D, R, max(i, j), min(i, j)) * mean[j]
    square = mean[D + size]
    for i in range(D):
        square -= target[i] * mean[i]
    count, degrees = D / square, _degrees(D, mean[D + size + 1] + log_determinant)
    for i in range(D):
        for j in range(i + 1):
            entry = degrees * _product(D, R, i, j) + count * target[i] * target[j]
            target[D + i * (i + 1) // 2 + j] = -0.5 * entry * (1.0 if i == j else _ROOT)
    for i in range(D):
        target[i] *= count
    target[D + size], target[D + size + 1] = -0.5 * count, -0.5 * (degrees + D + 2)
