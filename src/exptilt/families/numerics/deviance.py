r"""The deviance x log(x/m) − x + m and related functions, without cancellation where m is close to x.

    D(x, m) = x log(x/m) − x + m ≥ 0

is the KL divergence of Poisson counts, and a part of that of Gamma, Beta, Dirichlet, Wishart and Gaussian
members: a difference of large numbers if x and m are close. With d = (m − x)/x and v = d/(2 + d),
log(1 + d) = 2 artanh v, hence (Loader 2000, as in R's dpois)

    D = x (d − log(1 + d)) = x v (d − 2v² (1/3 + v²/5 + v⁴/7 + ⋯)).
"""

import numpy as np
import torch
from torch import Tensor

from exptilt._support.transforms import is_concrete
from exptilt.families.numerics.gamma_functions import (
    HALF_LOG_2PI,
    horner,
    remainder,
    remainder_slope,
    trigamma_gap,
)

_NEAR = 0.2  # largest |d| for the series, nine terms of which are right to 1e-17
_LEAST_CHANGE = 0.99  # largest 1 − ρ for which ρ − 1 is used; above it ρ = e^{log ρ} is more accurate
_SERIES = tuple(2 / (2 * k + 3) for k in range(9))
_NODES = [((1 + t) / 2, w / 2) for t, w in zip(*np.polynomial.legendre.leggauss(6), strict=True)]


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) in full precision; torch's own default returns x from 20 on, which is off by 2e-9."""
    return torch.nn.functional.softplus(x, threshold=40.0)


def deviance(x: Tensor, gap: Tensor, log_ratio: Tensor) -> Tensor:
    """D(x, m) entry by entry, from x ≥ 0, m − x and log(m/x), as accurate as these arguments.

    Example:
        >>> deviance(torch.tensor(1e8), torch.tensor(8.0), torch.tensor(8e-8))  # 8² / (2 · 10⁸)
        tensor(3.2000e-07)
    """
    near = gap.abs() < _NEAR * x
    small = torch.where(near, gap, 0.0)
    v = small / torch.where(near, 2 * x + gap, 1.0)
    q = v * v
    return torch.where(near, v * (small - x * q * horner(_SERIES, q)), gap - x * log_ratio)


def deviance_of(x: Tensor, m: Tensor) -> Tensor:
    """D(x, m) of positive x and m, entry by entry."""
    x, m = torch.broadcast_tensors(x, m)
    return deviance(x, m - x, m.log() - x.log())


def coin_kl(logit: Tensor, other: Tensor, gap: Tensor) -> Tensor:
    """KL D(p, p') + D(1 − p, 1 − p') of coins, entry by entry, from their log-odds and gap = p' − p."""
    ones = deviance(torch.sigmoid(logit), gap, softplus(-logit) - softplus(-other))
    return ones + deviance(torch.sigmoid(-logit), -gap, softplus(logit) - softplus(other))


def coin_gap(logit: Tensor, other: Tensor) -> Tensor:
    """p' − p = ±σ(high) σ(−low) (1 − e^{low − high}) of coins with these log-odds, entry by entry."""
    low, high = torch.minimum(logit, other), torch.maximum(logit, other)
    size = -torch.sigmoid(high) * torch.sigmoid(-low) * torch.expm1(low - high)
    return torch.where(other > logit, size, -size)


def coin_conjugate(logit: Tensor, mean: Tensor) -> Tensor:
    """KL(coin with this mean ‖ coin with these log-odds), entry by entry, also at means 0 and 1."""
    p = mean.clamp(0, 1)
    value: Tensor = softplus(logit) - logit * p - torch.special.entr(p) - torch.special.entr(1 - p)
    return value


def log_excess(a: Tensor, b: Tensor) -> Tensor:
    """r − 1 − log r for r = a/b, entry by entry."""
    gap = (a - b) / b
    return deviance(torch.ones_like(gap), gap, a.log() - b.log())


def gamma_log_density(a: Tensor, x: Tensor, log_x: Tensor) -> Tensor:
    """x times the density of Gamma(a, 1) at x, in logs: −D(a, x) + ½ log a/2π − R(a)."""
    log_a = a.log()
    return log_a / 2 - HALF_LOG_2PI - remainder(a) - deviance(a, x - a, log_x - log_a)


def gamma_kl(a: Tensor, b: Tensor, change: Tensor, log_rate: Tensor) -> Tensor:
    r"""KL(Gamma(a, 1) ‖ Gamma(b, ρ)), from change = ρ − 1 and log_rate = log ρ.

    The part from the means, plus the part from the shapes at equal means:

    D(b, aρ) + [log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a)]
    """
    a, b, change, log_rate = torch.broadcast_tensors(a, b, change, log_rate)
    gap, log_ratio = b - a, b.log() - a.log()
    away = torch.where(change < -_LEAST_CHANGE, a * log_rate.clamp_max(0).exp() - b, a * change - gap)
    return deviance(b, away, log_rate - log_ratio) + _shapes(a, b, gap, log_ratio)


def _shapes(a: Tensor, b: Tensor, gap: Tensor, log_ratio: Tensor) -> Tensor:
    r"""log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a) with gap = b − a.

    If b is near a, by Taylor's remainder (b − a)² ∫₀¹ (1 − t) [ψ'(x) − 1/x] dt with x = a + t (b − a).
    """
    near = gap.abs() < _NEAR * a
    first = remainder(b) - remainder(a) + gap * remainder_slope(a)
    far = deviance(torch.ones_like(gap), gap / a, log_ratio) / 2 + first
    if is_concrete(near):
        a, gap = a[near], gap[near]
        return far.masked_scatter(near, _taylor_rest(a, gap)) if a.numel() else far
    return torch.where(near, _taylor_rest(a, torch.where(near, gap, 0.0)), far)


def _taylor_rest(a: Tensor, gap: Tensor) -> Tensor:
    total = torch.zeros_like(a)
    for t, weight in _NODES:
        x = a + t * gap
        total = total + weight * (1 - t) * x * trigamma_gap(x) * (gap / x) ** 2
    return total


def not_negative(value: Tensor) -> Tensor:
    """The value, or 0 where rounding made it negative; the derivatives are kept in either case."""
    return value - value.detach().clamp_max(0)
