r"""log Γ and ψ minus their large parts, differences of ψ, and the inverses that the families need.

    R(a) = log Γ(a) − [(a − ½) log a − a + ½ log 2π],     r(a) = −R'(a) = log a − 1/(2a) − ψ(a)

Entropies and divergences of the Gamma family and its kin are differences of log Γ. At large a the brackets
cancel on paper, not in floats; R(a) ≈ 1/(12a) remains. Below 8, R and r are differences of torch's functions;
from 8 on they are Stirling's series

    R(a) = Σ_k B_2k / (2k(2k−1) a^{2k−1}),     r(a) = Σ_k B_2k / (2k a^{2k}).

Three equations link expected logarithms to the parameters of Gamma, Wishart and Dirichlet laws:

    log a − ψ(a) = s                        Gamma, with s = log E[x] − E[log x]
    D log(ν/2) − ψ_D(ν/2) = s               Wishart and its kin
    ψ(Σ_j α_j) − ψ(α_k) = s_k               Dirichlet, Beta

Each is solved by Newton's method on a scale where the left side is almost a straight line at both ends (in
the logarithm of the parameter, the logarithm of the left side). If values cannot be read, the number of steps
is fixed. Derivatives flow through the last Newton steps, where they are exact.
"""

import math

import torch
from torch import Tensor

from exptilt._support.linalg import multivariate_digamma
from exptilt._support.transforms import is_concrete

HALF_LOG_2PI = math.log(2 * math.pi) / 2
_NUMERATORS = (1, -1, 1, -1, 5, -691, 7, -3617, 43867, -174611)
_DENOMINATORS = (6, 30, 42, 30, 66, 2730, 6, 510, 798, 330)
BERNOULLI = tuple(n / d for n, d in zip(_NUMERATORS, _DENOMINATORS, strict=True))
STIRLING = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(BERNOULLI, 1))
SLOPE = tuple(b / (2 * k) for k, b in enumerate(BERNOULLI, 1))


def horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Σ_k c_k x^k."""
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value = (value + coefficient) * x
    return value + coefficients[0]


def remainder(a: Tensor) -> Tensor:
    """R(a) at positive, finite a, entry by entry."""
    r, small = 1 / a.clamp_min(8.0), a.clamp_max(8.0)
    direct = torch.lgamma(small) - ((small - 0.5) * small.log() - small + HALF_LOG_2PI)
    return torch.where(a < 8, direct, r * horner(STIRLING, r * r))


def remainder_slope(a: Tensor) -> Tensor:
    """r(a) at positive, finite a, entry by entry."""
    q, small = a.clamp_min(8.0) ** -2, a.clamp_max(8.0)
    return torch.where(a < 8, small.log() - 0.5 / small - torch.digamma(small), q * horner(SLOPE, q))


def gamma_entropy(a: Tensor) -> Tensor:
    """Entropy of Gamma(a, 1), a + log Γ(a) + (1 − a) ψ(a), entry by entry; no cancellation at large a."""
    return a.log() / 2 + HALF_LOG_2PI + remainder(a) + (a - 1) * (0.5 / a + remainder_slope(a))


def trigamma(a: Tensor) -> Tensor:
    """ψ'(a), to full precision (torch's polygamma has nine digits)."""
    total = 1 / (a * a)
    for i in range(1, 8):
        total = total + (a + i) ** -2
    u = 1 / (a + 8)
    return total + u * (1 + u / 2 + u * u * horner(BERNOULLI, u * u))


def digamma_gap(a: Tensor) -> Tensor:
    """log a − ψ(a) > 0, without cancellation at large a."""
    return 0.5 / a + remainder_slope(a)


def trigamma_gap(a: Tensor) -> Tensor:
    """a ψ'(a) − 1 > 0, minus the logarithmic derivative of `digamma_gap`; no cancellation at large a."""
    large, small = a.clamp_min(8.0), a.clamp_max(8.0)
    q = large**-2
    return torch.where(
        a < 8, (1 - small) / small + small * trigamma(small + 1), 0.5 / large + q * horner(BERNOULLI, q)
    )


def digamma_rise(a: Tensor, b: Tensor) -> Tensor:
    r"""ψ(a + b) − ψ(a) for positive a and b, accurate even for tiny b; infinite if a(a+b) underflows.

    With c = a + b, u = 1/(a + 8), v = 1/(c + 8), and Stirling's series from there on; each term has the
    factor b:

        Σ_{i<8} b / ((a+i)(c+i)) + log(1 + bu) + buv/2 + Σ_k B_2k/(2k) (u^{2k} − v^{2k})

    Example:
        >>> digamma_rise(torch.tensor(1.0), torch.tensor(1e-20))  # b π²/6
        tensor(1.6449e-20)
    """
    c = a + b
    total = 1 / (a * c)
    for i in range(1, 8):
        total = total + 1 / ((a + i) * (c + i))
    u, v = 1 / (a + 8), 1 / (c + 8)
    q, p = u * u, v * v
    shared, power, series = torch.ones_like(q), p, torch.full_like(q, SLOPE[0])
    for coefficient in SLOPE[1:]:  # q^k − p^k = (q − p) (q^{k−1} + q^{k−2} p + ⋯)
        shared = shared * q + power
        power = power * p
        series = series + coefficient * shared
    return b * (total + u * v * (0.5 + (u + v) * series)) + torch.log1p(b * u)


def trigamma_fall(a: Tensor, b: Tensor) -> Tensor:
    """ψ'(a) − ψ'(a + b) for positive a and b, accurate even for tiny b."""
    c = a + b
    total = torch.zeros_like(c)
    for i in range(8):
        product = (a + i) * (c + i)
        total = total + (a + c + 2 * i) / product / product
    u, v = 1 / (a + 8), 1 / (c + 8)
    q, p = u * u, v * v
    shared, power, series = torch.zeros_like(q), torch.ones_like(p), 1 + 0.5 * (u + v)
    for coefficient in BERNOULLI:
        shared = shared * q + power
        power = power * p
        series = series + coefficient * ((u + v) * u * shared + power)
    return b * (total + u * v * series)


def invert_digamma_gap(s: Tensor) -> Tensor:
    """The a > 0 with log a − ψ(a) = s, for s > 0, entry by entry.

    Example:
        >>> invert_digamma_gap(digamma_gap(torch.tensor(3.0)))
        tensor(3.0000)
    """
    a = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)  # Minka (2002), within 1.5 %
    for _ in range(4):
        gap = digamma_gap(a)
        a = a * torch.exp(gap * (gap / s).log() / trigamma_gap(a))
    return a


def multivariate_gap(degrees: Tensor, dimension: int) -> Tensor:
    """D log(ν/2) − ψ_D(ν/2) > 0 for ν > D − 1."""
    half = degrees / 2
    rest = dimension * torch.digamma(half) - multivariate_digamma(half, dimension)
    return dimension * digamma_gap(half) + rest


def invert_multivariate_gap(s: Tensor, dimension: int) -> Tensor:
    """The ν > D − 1 with D log(ν/2) − ψ_D(ν/2) = s, for s > 0, entry by entry."""
    d = dimension
    halves = torch.arange(d, dtype=s.dtype, device=s.device) / 2
    free = d * (d + 1) / (2 * s) + 2 / s  # ν − D + 1: from the two ends, D(D+1)/(2ν) and 2/(ν − D + 1)
    for _ in range(8):
        half = (free + d - 1) / 2
        gap = multivariate_gap(2 * half, d)
        slope = d / half / 2 - trigamma(half.unsqueeze(-1) - halves).sum(-1) / 2
        free = free * torch.exp(((s / gap).log() * gap / (slope * free)).clamp(-8, 8))
    return free + d - 1


def inverse_digamma(y: Tensor, rounds: int = 4) -> Tensor:
    """The a > 0 with ψ(a) = y, entry by entry (Minka 2000, appendix C)."""
    above, below = y.clamp_min(-2.22).exp() + 0.5, 1 / (-0.5772156649015329 - y).clamp_min(1e-300)
    a = torch.where(y >= -2.22, above, below)
    for _ in range(rounds):
        a = a - (torch.digamma(a) - y) / trigamma(a)
    return a


def rest_of_sum(x: Tensor) -> Tensor:
    """For each entry the sum of all others along the last axis, without subtracting from the total."""
    if x.shape[-1] == 2:
        return x.flip(-1)
    before = torch.nn.functional.pad(x, (1, 0))[..., :-1].cumsum(-1)
    after = torch.nn.functional.pad(x, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return before + after


def dirichlet_mean(alpha: Tensor) -> Tensor:
    """ψ(α_k) − ψ(Σα) along the last axis, accurate even if one entry is nearly the whole sum."""
    return -digamma_rise(alpha, rest_of_sum(alpha))


def log_sum_exp(mean: Tensor) -> Tensor:
    """log Σ e^{m_k} along the last axis, accurate even where it is close to 0."""
    top, index = mean.max(-1, keepdim=True)
    largest = torch.zeros_like(mean, dtype=torch.bool).scatter(-1, index, True)
    rest = torch.expm1(top.squeeze(-1)) + torch.where(largest, -torch.inf, mean).exp().sum(-1)
    return torch.where(rest > -0.5, torch.log1p(rest.clamp_min(-0.5)), torch.logsumexp(mean, -1))


def invert_dirichlet(mean: Tensor) -> Tensor:
    r"""The α with ψ(α_k) − ψ(Σα) = m_k along the last axis, for Σ e^{m_k} < 1 and at least two entries.

    Let * be the entry with the largest m, and R the sum of the other entries, which may be a tiny part of
    τ = Σα. At a given τ the other entries are ψ⁻¹(ψ(τ) + m_k), while the equation of * wants the rest R* with
    ψ(τ) − ψ(τ − R*) = −m_*. As τ grows, R/R* falls from ∞ to Q = (S − e^{m_*}) / (1 − e^{m_*}) < 1 with
    S = Σ e^{m_k}, and log(R/R* − Q) is nearly −log τ + const at both ends. Newton's method on this function
    finds τ with R = R*, kept between totals known to be too small and too large. Then Newton's method on all
    entries, whose Hessian is a diagonal minus a rank-one matrix. No step subtracts nearly equal numbers, so α
    is as accurate as m allows. Float32 is solved in float64.
    """
    given, mean = mean.dtype, mean.double()
    largest = torch.zeros_like(mean, dtype=torch.bool).scatter(-1, mean.argmax(-1, keepdim=True), True)
    alpha = _dirichlet_start(mean.detach(), largest)
    for _ in range(3):
        alpha = _dirichlet_step(alpha, mean, largest)
    return alpha.to(given)


def _dirichlet_start(mean: Tensor, largest: Tensor) -> Tensor:
    """α to at least three digits, by solving for its total."""
    s = -torch.where(largest, mean, 0.0).sum(-1)
    share = -torch.expm1(-s)
    left = -torch.expm1(log_sum_exp(mean))  # 1 − S
    limit, target = torch.where(largest, 0.0, mean.exp()).sum(-1) / share, (left / share).log()
    total = mean.shape[-1] / (2 * left)
    low, high = torch.full_like(total, 1e-300), torch.full_like(total, 1e300)
    settled = torch.zeros_like(total, dtype=torch.bool)
    for _ in range(60 if is_concrete(total) else 12):
        alpha, slopes = _others(mean, total)
        rest = torch.where(largest, 0.0, alpha).sum(-1)
        wanted, _, wanted_slope = _rest_for(total, s)
        ratio = rest / wanted
        low = torch.where(ratio > 1, total / 2, low)  # factor 2: near the root, rounding may decide the side
        high = torch.where(ratio > 1, high, 2 * total)
        steep = torch.where(largest, 0.0, slopes).sum(-1) / rest - wanted_slope / wanted
        change = (target - (ratio - limit).log()) * (ratio - limit) / (total * ratio * steep)
        new = total * change.clamp(-16, 16).exp()
        new = torch.where((new >= low) & (new <= high), new, low.sqrt() * high.sqrt())  # also where it is NaN
        new = torch.where(settled, total, new)
        settled = settled | ((new - total).abs() < 1e-3 * total)
        total = new
        if is_concrete(settled) and bool(settled.all()):
            break
    return torch.where(largest, _rest_for(total, s)[1].unsqueeze(-1), _others(mean, total)[0])


def _others(mean: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The α with ψ(α_k) = ψ(τ) + m_k, and their derivatives in τ."""
    alpha = inverse_digamma(mean + torch.digamma(total).unsqueeze(-1))
    return alpha, trigamma(total).unsqueeze(-1) / trigamma(alpha)


def _rest_for(total: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The r with ψ(τ) − ψ(τ − r) = s, then τ − r, and the derivative of r in τ; entry by entry.

    By Newton's method on a convex function, from the better of two bounds on the root: log(τ/x) and 1/x − 1/τ
    are at most ψ(τ) − ψ(x).
    """
    r = torch.minimum(-total * torch.expm1(-s), total * (s * total / (1 + s * total)))
    x = torch.maximum(total * torch.exp(-s), total / (1 + s * total))
    for _ in range(3):
        step = (digamma_rise(x, r) - s) / trigamma(x)
        x, r = x + step, r - step
    return r, x, trigamma_fall(x, r) / trigamma(x)


def _dirichlet_step(alpha: Tensor, mean: Tensor, largest: Tensor) -> Tensor:
    """One step of Newton's method for all entries."""
    rest = rest_of_sum(alpha)
    error = -digamma_rise(alpha, rest) - mean
    q, whole = trigamma(alpha), trigamma(alpha.sum(-1, keepdim=True))
    # Σ_k 1/q_k − 1/ψ'(τ), where 1/q_* − 1/ψ'(τ) is computed as one term
    spare = torch.where(largest, -trigamma_fall(alpha, rest) / (q * whole), 1 / q).sum(-1, keepdim=True)
    shared = (error / q).sum(-1, keepdim=True) / spare
    new = torch.maximum(alpha - (error - shared) / q, alpha / 4)
    return torch.where(new.isfinite(), new, alpha)
