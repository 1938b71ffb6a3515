r"""x log(x/m) − x + m, and what is made of it, without cancellation where m is close to x.

    D(x, m) = x log(x/m) − x + m ≥ 0

is the KL divergence of Poisson counts, and a part of that of Gamma, Beta, Dirichlet, Wishart and Gaussian
members: the difference of large numbers when the two differ little. With d = (m − x)/x and v = d/(2 + d),
log(1 + d) = 2 artanh v, hence (Loader 2000, as in R's dpois)

    D = x (d − log(1 + d)) = x v (d − 2v² (1/3 + v²/5 + v⁴/7 + ⋯)).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from exptilt._support.transforms import is_concrete
from exptilt.families.numerics.gamma_functions import horner, remainder, remainder_slope, trigamma_gap

_NEAR = 0.2  # |d| up to which the series is used: nine terms are right to 1e-17; beyond it four bits are lost
_LEAST_CHANGE = 0.99  # 1 − ρ up to which ρ − 1 is used: beyond it ρ = e^{log ρ} has more digits
_SERIES = tuple(2 / (2 * k + 3) for k in range(9))
_NODES = [((1 + t) / 2, w / 2) for t, w in zip(*np.polynomial.legendre.leggauss(6), strict=True)]


def deviance(x: Tensor, gap: Tensor, log_ratio: Tensor) -> Tensor:
    """D(x, m) entry by entry, from x ≥ 0, m − x and log(m/x), to the digits that these have.

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
    """D(p, p') + D(1 − p, 1 − p') of coins with these log-odds and p' − p, entry by entry."""
    ones = deviance(torch.sigmoid(logit), gap, softplus(-logit) - softplus(-other))
    return ones + deviance(torch.sigmoid(-logit), -gap, softplus(logit) - softplus(other))


def log_excess(a: Tensor, b: Tensor) -> Tensor:
    """r − 1 − log r of r = a/b, entry by entry."""
    gap = (a - b) / b
    return deviance(torch.ones_like(gap), gap, a.log() - b.log())


def gamma_kl(a: Tensor, b: Tensor, change: Tensor, log_rate: Tensor) -> Tensor:
    r"""KL(Gamma(a, 1) ‖ Gamma(b, ρ)) from ρ − 1 and log ρ: of the means, and of the shapes at equal means.

    D(b, aρ) + [log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a)]
    """
    a, b, change, log_rate = torch.broadcast_tensors(a, b, change, log_rate)
    gap, log_ratio = b - a, b.log() - a.log()
    away = torch.where(change < -_LEAST_CHANGE, a * log_rate.clamp_max(0).exp() - b, a * change - gap)
    return deviance(b, away, log_rate - log_ratio) + _shapes(a, b, gap, log_ratio)


def _shapes(a: Tensor, b: Tensor, gap: Tensor, log_ratio: Tensor) -> Tensor:
    r"""log Γ(b) − log Γ(a) − (b − a) ψ(a) − D(b, a) with gap = b − a.

    Where b is near a, by Taylor's rest (b − a)² ∫₀¹ (1 − t) [ψ'(x) − 1/x] dt at x = a + t (b − a).
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
    """The value, or 0 where rounding made it negative; with its derivatives, also the second at 0."""
    return value - value.detach().clamp_max(0)
