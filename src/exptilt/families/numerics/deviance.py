r"""x log(x/m) − x + m, and what is made of it, without cancellation where m is close to x.

    D(x, m) = x log(x/m) − x + m ≥ 0

is the KL divergence of Poisson counts, and a part of that of Gamma, Beta, Dirichlet, Wishart and Gaussian members: the difference of large
numbers when the two differ little. With d = (m − x)/x and v = d/(2 + d), log(1 + d) = 2 artanh v, hence (Loader 2000, as in R's dpois)

    D = x (d − log(1 + d)) = x v (d − 2v² (1/3 + v²/5 + v⁴/7 + ⋯)).
"""

import torch
from numba import njit
from torch import Tensor

from exptilt._support.elementary import STRICT
from exptilt._support.kernels import kernel
from exptilt.families.numerics.gamma_functions import (
    Array,
    both_remainders,
    log_of_ratio,
    remainder,
    remainders,
    run,
    suits,
)

_NEAR = 0.2  # |d| up to which the series is used: nine terms are right to 1e-17; beyond it the difference loses four bits
_SERIES = tuple(2 / (2 * k + 3) for k in range(9))


@njit(fastmath=STRICT, error_model="numpy")
def _deviance(x: float, gap: float, log_ratio: float) -> float:
    v = gap / (2.0 * x + gap)
    q = v * v
    series = _SERIES[8]
    for k in range(7, -1, -1):
        series = series * q + _SERIES[k]
    near = v * (gap - x * q * series)
    return near if abs(gap) < _NEAR * x else gap - x * log_ratio


@kernel("the kernels of divergences", fastmath=STRICT)
def _sweep(x: Array, gap: Array, log_ratio: Array, result: Array) -> None:
    for i in range(x.size):
        result[i] = _deviance(x[i], gap[i], log_ratio[i])


@kernel("the kernels of divergences", fastmath=STRICT)
def _sweep_pairs(x: Array, m: Array, result: Array) -> None:
    for i in range(x.size):
        result[i] = _deviance(x[i], m[i] - x[i], log_of_ratio(m[i], x[i]))


@kernel("the kernels of divergences", fastmath=STRICT)
def _sweep_gammas(a: Array, b: Array, change: Array, log_rate: Array, result: Array) -> None:
    for i in range(a.size):
        gap = b[i] - a[i]
        log_ratio = log_of_ratio(b[i], a[i])
        means = _deviance(b[i], a[i] * change[i] - gap, log_rate[i] - log_ratio)
        first, slope = both_remainders(a[i])
        other, _ = both_remainders(b[i])
        shapes = 0.5 * _deviance(1.0, gap / a[i], log_ratio) + (other - first) + gap * slope
        result[i] = means + (shapes if shapes > 0.0 else 0.0)


def deviance(x: Tensor, gap: Tensor, log_ratio: Tensor) -> Tensor:
    """D(x, m) entry by entry, from x ≥ 0, m − x and log(m/x): each as exact as it is known, so that nothing is lost here.

    Example:
        >>> deviance(torch.tensor(1e8), torch.tensor(8.0), torch.tensor(8e-8))  # 8² / (2 · 10⁸)
        tensor(3.2000e-07)
    """
    if suits(x, gap, log_ratio):
        return run(_sweep, 1, x, gap, log_ratio)[0]
    near = gap.abs() < _NEAR * x
    small = torch.where(near, gap, 0.0)
    v = small / torch.where(near, 2 * x + gap, 1.0)
    q = v * v
    series = q * _SERIES[-1]
    for coefficient in _SERIES[-2:0:-1]:
        series = (series + coefficient) * q
    return torch.where(near, v * (small - x * q * (series + _SERIES[0])), gap - x * log_ratio)


def deviance_of(x: Tensor, m: Tensor) -> Tensor:
    """D(x, m) of positive x and m, entry by entry."""
    return run(_sweep_pairs, 1, x, m)[0] if suits(x, m) else deviance(x, m - x, m.log() - x.log())


def log_excess(a: Tensor, b: Tensor) -> Tensor:
    """R − 1 − log r of r = a/b, entry by entry."""
    gap = (a - b) / b
    return deviance(torch.ones_like(gap), gap, a.log() - b.log())


def gamma_kl(a: Tensor, b: Tensor, change: Tensor, log_rate: Tensor) -> Tensor:
    r"""KL(Gamma(a, 1) ‖ Gamma(b, ρ)), entry by entry, from ρ − 1 and log ρ: of the means, and of the shapes at equal means.

    D(b, aρ) + [log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a)]
    """
    if suits(a, b, change, log_rate):
        return run(_sweep_gammas, 1, a, b, change, log_rate)[0]
    gap, log_ratio = b - a, b.log() - a.log()
    first, slope = remainders(a)
    shapes = deviance(torch.ones_like(gap), gap / a, log_ratio) / 2 + (remainder(b) - first) + gap * slope
    return deviance(b, a * change - gap, log_rate - log_ratio) + not_negative(shapes)


def not_negative(value: Tensor) -> Tensor:
    """The value, or 0 where rounding made it negative; derivatives as they were, so that a second one at the minimum 0 is right."""
    return value - value.detach().clamp_max(0)
