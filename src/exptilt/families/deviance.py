r"""x log(x/m) − x + m, and what is made of it, without cancellation where m is close to x.

    D(x, m) = x log(x/m) − x + m ≥ 0

is the KL divergence of Poisson counts, and a part of that of Gamma, Beta, Dirichlet, Wishart and Gaussian members: the difference of large
numbers when the two differ little. With d = (m − x)/x and v = d/(2 + d), log(1 + d) = 2 artanh v, hence (Loader 2000, as in R's dpois)

    D = x (d − log(1 + d)) = x v (d − 2v² (1/3 + v²/5 + v⁴/7 + ⋯)).
"""

import torch
from numba import njit
from torch import Tensor

from exptilt.families.log_gamma import Array, remainder, remainders, run, suits
from exptilt.tilting.cpu.elementary import STRICT

_NEAR = 0.2  # |d| up to which the series is used: nine terms are right to 1e-17; beyond it the difference loses four bits
_SERIES = tuple(2 / (2 * k + 3) for k in range(9))


@njit(nogil=True, cache=True, fastmath=STRICT, error_model="numpy")
def _sweep(x: Array, gap: Array, log_ratio: Array, result: Array) -> None:
    for i in range(x.size):
        v = gap[i] / (2.0 * x[i] + gap[i])
        q = v * v
        series = _SERIES[8]
        for k in range(7, -1, -1):
            series = series * q + _SERIES[k]
        near = v * (gap[i] - x[i] * q * series)
        result[i] = near if abs(gap[i]) < _NEAR * x[i] else gap[i] - x[i] * log_ratio[i]


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


def log_excess(a: Tensor, b: Tensor) -> Tensor:
    """R − 1 − log r of r = a/b, entry by entry."""
    gap = (a - b) / b
    return deviance(torch.ones_like(gap), gap, a.log() - b.log())


def shape_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(Gamma(a, a) ‖ Gamma(b, b)), two of the same mean, entry by entry: log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a)."""
    first, slope = remainders(a)
    return not_negative(log_excess(b, a) / 2 + (remainder(b) - first) + (b - a) * slope)


def not_negative(value: Tensor) -> Tensor:
    """The value, or 0 where rounding made it negative; derivatives as they were, so that a second one at the minimum 0 is right."""
    return value - value.detach().clamp_max(0)
