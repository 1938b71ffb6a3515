r"""Inverting the digamma function and its relatives.

Three equations stand between expected logarithms and the parameters of the Gamma, Wishart and Dirichlet families:

    log a − ψ(a) = s                        Gamma, with s = log E[x] − E[log x]
    D log(ν/2) − ψ_D(ν/2) = s               Wishart and its kin
    ψ(α_k) − ψ(Σ_j α_j) = m_k               Dirichlet, Beta

Each is solved by Newton's method on a scale where the left side is almost a straight line at both ends (in the logarithm of the
parameter, the logarithm of the left side), so a fixed small number of steps reaches full precision from anywhere: no loop that depends on
data, hence nothing in the way of `vmap`, `torch.compile` or automatic differentiation. Derivatives flow through the last Newton steps,
where they are exact.
"""

import torch
from torch import Tensor

from exptilt._support.linalg import multivariate_digamma
from exptilt._support.transforms import is_concrete


def _trigamma(a: Tensor) -> Tensor:
    return torch.polygamma(1, a)


def digamma_gap(a: Tensor) -> Tensor:
    """Log a − ψ(a) > 0, without the cancellation at large a (asymptotic series, error below 1e-17 from a = 16 on)."""
    large = a.clamp_min(16.0)
    r = 1 / large**2
    # B_{2k} / (2k): 1/12, −1/120, 1/252, −1/240, 1/132, −691/32760
    series = 1 / (2 * large) + r * (
        1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * (691 / 32760)))))
    )
    small = a.clamp_max(16.0)
    return torch.where(a > 16, series, small.log() - torch.digamma(small))


def _trigamma_gap(a: Tensor) -> Tensor:
    """A ψ'(a) − 1 > 0, minus the logarithmic derivative of `digamma_gap`, by the same division of cases."""
    large = a.clamp_min(16.0)
    r = 1 / large**2
    series = 1 / (2 * large) + r * (
        1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * (5 / 66 - r * (691 / 2730)))))
    )
    small = a.clamp_max(16.0)
    return torch.where(a > 16, series, small * _trigamma(small) - 1)


def invert_digamma_gap(s: Tensor) -> Tensor:
    """The a > 0 with log a − ψ(a) = s, for s > 0, entry by entry.

    Example:
        >>> invert_digamma_gap(digamma_gap(torch.tensor(3.0)))
        tensor(3.0000)
    """
    a = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)  # Minka (2002), within 1.5 %
    for _ in range(4):
        gap = digamma_gap(a)
        a = a * torch.exp(gap * (gap / s).log() / _trigamma_gap(a))
    return a


def multivariate_gap(degrees: Tensor, dimension: int) -> Tensor:
    """D log(ν/2) − ψ_D(ν/2) > 0 for ν > D − 1."""
    half = degrees / 2
    return dimension * digamma_gap(half) + (
        dimension * torch.digamma(half) - multivariate_digamma(half, dimension)
    )


def invert_multivariate_gap(s: Tensor, dimension: int) -> Tensor:
    """The ν > D − 1 with D log(ν/2) − ψ_D(ν/2) = s, for s > 0, entry by entry."""
    d = dimension
    halves = torch.arange(d, dtype=s.dtype, device=s.device) / 2
    free = d * (d + 1) / (2 * s) + 2 / s  # ν − D + 1: from the two ends, D(D+1)/(2ν) and 2/(ν − D + 1)
    for _ in range(8):
        half = (free + d - 1) / 2
        gap = multivariate_gap(2 * half, d)
        slope = d / half / 2 - _trigamma(half.unsqueeze(-1) - halves).sum(-1) / 2
        free = free * torch.exp(((s / gap).log() * gap / (slope * free)).clamp(-8, 8))
    return free + d - 1


def inverse_digamma(y: Tensor, rounds: int = 4) -> Tensor:
    """The a > 0 with ψ(a) = y, entry by entry (Minka 2000, appendix C); two rounds give four digits or more, four all of them."""
    a = torch.where(
        y >= -2.22, y.clamp_min(-2.22).exp() + 0.5, 1 / (-0.5772156649015329 - y).clamp_min(1e-300)
    )
    for _ in range(rounds):
        a = a - (torch.digamma(a) - y) / _trigamma(a)
    return a


def invert_dirichlet(mean: Tensor) -> Tensor:
    """The α with ψ(α_k) − ψ(Σα) = m_k along the last axis, for Σ e^{m_k} < 1 and at least two entries.

    First for the total τ alone. With α_k = ψ⁻¹(m_k + ψ(τ)), R = Σα/τ falls from K to S = Σ e^{m} as τ grows,
    and log (R − S)/(K − R) is nearly −log τ + const at both ends: Newton's steps on that, kept between the
    totals known to be too small and too large. Then Newton on all entries, whose Hessian is a diagonal minus
    a rank-one matrix; and once more on each entry with Σα held, since where entries differ by many orders of
    magnitude the rank-one part is a difference of nearly equal numbers. Lower precisions are solved in
    float64: near the boundary S = 1 they have no digits to spare.
    """
    given, mean = mean.dtype, mean.double()
    count = mean.shape[-1]
    s = mean.exp().sum(-1)
    left = -torch.expm1(torch.logsumexp(mean, -1))  # 1 − S, to all digits
    target = (left / (count - 1)).log()
    total = (count - s) / (2 * left)
    low, high = torch.full_like(total, 1e-30), torch.full_like(total, 1e30)
    settled = torch.zeros_like(total, dtype=torch.bool)
    for _ in range(60 if is_concrete(total) else 12):
        alpha = inverse_digamma(mean + torch.digamma(total).unsqueeze(-1), 3)
        ratio = alpha.sum(-1) / total
        slope = (_trigamma(total).unsqueeze(-1) / _trigamma(alpha)).sum(-1) - ratio
        offset = target - ((ratio - s).clamp_min(1e-300) / (count - ratio).clamp_min(1e-300)).log()
        change = offset / (slope / (ratio - s) + slope / (count - ratio))
        low, high = torch.where(ratio > 1, total, low), torch.where(ratio > 1, high, total)
        new = total * change.clamp(-16, 16).exp()
        new = torch.where((new > low) & (new < high), new, low.sqrt() * high.sqrt())
        # A total that has settled stays: at the root rounding chooses the side, and the next step may leave
        # the bracket.
        new = torch.where(settled, total, new)
        settled = settled | ((new - total).abs() < 1e-3 * total)
        total = new
        if is_concrete(settled) and bool(settled.all()):
            break  # close enough for the steps below; where values cannot be looked at, all rounds are taken
    alpha = inverse_digamma(mean + torch.digamma(total).unsqueeze(-1))
    for _ in range(3):
        alpha = _dirichlet_step(alpha, mean)
    wanted = mean + torch.digamma(alpha.sum(-1, keepdim=True))
    return (alpha - (torch.digamma(alpha) - wanted) / _trigamma(alpha)).to(given)


def _dirichlet_step(alpha: Tensor, mean: Tensor) -> Tensor:
    total = alpha.sum(-1, keepdim=True)
    slope = torch.digamma(alpha) - torch.digamma(total) - mean
    q = _trigamma(alpha)
    shared = (slope / q).sum(-1, keepdim=True) / ((1 / q).sum(-1, keepdim=True) - 1 / _trigamma(total))
    new = torch.maximum(alpha - (slope - shared) / q, alpha / 4)
    return torch.where(new.isfinite(), new, alpha)
