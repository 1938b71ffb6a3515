r"""Modified Bessel functions of any order and argument, in logarithms, smooth at zero.

With s = κ² and F_ν(s) = log(I_ν(κ) κ^{−ν}), an entire function of s,

    ρ_ν := I_{ν+1}(κ) / (κ I_ν(κ)) = 2 F_ν'(s),   ρ_{ν−1} = 1 / (2ν + s ρ_ν),   F_{ν−1} = F_ν − log ρ_{ν−1}.

The recurrence is stable downwards. It is started at an order of at least 32, where Debye's uniform expansion
(DLMF 10.41.3)

    F_ν = ν (w − log(ν(1 + w))) − ½ log(2πν) − ½ log w + log Σ_k u_k(1/w) ν^{−k},     w = √(1 + s/ν²)

is right to the last bit of float64 for every s ≥ 0. The code never branches on data, so it batches, compiles
and differentiates to any order.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

_START = 32  # lowest order at which Debye's expansion is used
_TERMS = 12  # terms of Debye's expansion: the first omitted one is below 1e-17 at order 32


def _debye_polynomials() -> list[list[float]]:
    """Coefficients of u_0, u_1, ... by power, from u_{k+1} = ½p²(1−p²)u_k' + ⅛∫(1−5t²)u_k, exactly."""
    polynomials = [[Fraction(1)]]
    for _ in range(_TERMS):
        last = polynomials[-1]
        following = [Fraction(0)] * (len(last) + 3)
        for power, coefficient in enumerate(last):
            if power:
                following[power + 1] += coefficient * power / 2
                following[power + 3] -= coefficient * power / 2
            following[power + 1] += coefficient / (8 * (power + 1))
            following[power + 3] -= 5 * coefficient / (8 * (power + 3))
        polynomials.append(following)
    return [[float(coefficient) for coefficient in polynomial] for polynomial in polynomials]


_DEBYE = _debye_polynomials()


def _debye_coefficients(order: float) -> tuple[list[float], list[float]]:
    """Coefficients of Σ_k u_k(p) ν^{−k} as a polynomial in p, and of its derivative."""
    total = [0.0] * (3 * _TERMS + 1)
    for k, polynomial in enumerate(_DEBYE):
        for power in range(k, 3 * k + 1, 2):
            total[power] += polynomial[power] * order**-k
    return total, [c * power for power, c in enumerate(total)][1:]


def _horner(coefficients: list[float], p: Tensor) -> Tensor:
    value = torch.full_like(p, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * p + coefficient
    return value


class Bessel(NamedTuple):
    """ρ_ν, ρ_{ν+1}, root = √(s + n²) with a fixed n, c = root − n, F − c and c − sρ, in this order."""

    ratio: Tensor
    above: Tensor
    root: Tensor
    large: Tensor
    value: Tensor
    product: Tensor


def log_bessel(order: float, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F_ν(s), ρ_ν(s) and ρ_{ν+1}(s) at s = κ² ≥ 0, entry by entry, for order ν > −1.

    Computed in float64 whatever the dtype of `s`.

    Example:
        >>> value, ratio, _ = log_bessel(
        ...     0.5, torch.tensor(4.0, dtype=torch.float64)
        ... )  # I_½(κ) = √(2/πκ) sinh κ
        >>> abs(float(value) - math.log(math.sinh(2) / math.sqrt(2 * math.pi))) < 1e-13
        True
    """
    found = bessel(order, s.double(), product=False)
    return (found.value + found.large).to(s.dtype), found.ratio.to(s.dtype), found.above.to(s.dtype)


def bessel(order: float, s: Tensor, *, product: bool) -> Bessel:
    """`Bessel` at s = κ² ≥ 0 in float64, entry by entry, for order ν > −1; c − sρ only if asked for."""
    up = max(1, math.ceil(_START - order))
    v = order + up
    w = (1 + s / v**2).sqrt()
    p = 1 / w
    coefficients, slopes = _debye_coefficients(v)
    series = _horner(coefficients, p)
    root = v * w
    # ρ = 2 dF/ds with dw/ds = p/(2v²), dp/ds = −p³/(2v²)
    bend = _horner(slopes, p) / series
    ratio = 1 / (v * (1 + w)) - p**2 / (2 * v**2) - p**3 / v**2 * bend
    above, scaled = ratio, series
    rest = v + (1 - p**2) / 2 + (p - p**3) * bend  # vw − sρ, by s = v²(w² − 1)
    for step in range(up):
        twice = 2 * (v - step)
        above, ratio = ratio, 1 / (twice + s * ratio)
        scaled = scaled / (ratio * root)  # one logarithm for all factors, which are near 1 at large s
        if product:
            rest = (root * (twice - rest) + v**2) / (
                twice + root - rest
            )  # vw − s/(2ν + vw − rest), by (vw)² − s = v²
    # Joins −v log(v(1 + w)) of Debye's expansion with log(root) of each factor; order = v − up.
    value = (
        v
        - order * (v * (1 + w)).log()
        - up * (1 + p).log()
        - (math.log(2 * math.pi * v) + w.log()) / 2
        + scaled.log()
    )
    return Bessel(ratio, above, root, s / (v * (1 + w)), value, rest - v)
