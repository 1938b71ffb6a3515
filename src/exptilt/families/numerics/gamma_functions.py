r"""log Γ and its derivative ψ less their large parts: what is left of both in one pass.

    R(a) = log Γ(a) − [(a − ½) log a − a + ½ log 2π],     r(a) = −R'(a) = log a − 1/(2a) − ψ(a)

Entropies and divergences of the Gamma family and its kin are differences of log Γ. At large a the brackets cancel on paper, not in floats;
R(a) ≈ 1/(12a) is what remains. With

    log Γ(a) = log Γ(z) − log p,     ψ(a) = ψ(z) − p'/p,     z = a + 8,   p = a (a + 1) ⋯ (a + 7)        for a < 8, else z = a

and at z ≥ 8 Stirling's series

    R(z) = Σ_k B_2k / (2k(2k−1) z^{2k−1}),     r(z) = Σ_k B_2k / (2k z^{2k}),

of which ten terms are right to the last bit of float64. The two share the product, the series' powers and the logarithms, and a loop over
them with no branches and no library calls becomes vector code: a fraction of the time that torch takes for log Γ and ψ. Largest error,
relative to 1 + |value|: 1e-14 for R (the logarithms cancel below 8), 4e-15 for r.

Inverting the digamma function and its relatives.

Three equations stand between expected logarithms and the parameters of the Gamma, Wishart and Dirichlet families:

    log a − ψ(a) = s                        Gamma, with s = log E[x] − E[log x]
    D log(ν/2) − ψ_D(ν/2) = s               Wishart and its kin
    ψ(α_k) − ψ(Σ_j α_j) = m_k               Dirichlet, Beta

Each is solved by Newton's method on a scale where the left side is almost a straight line at both ends (in the logarithm of the
parameter, the logarithm of the left side), so a fixed small number of steps reaches full precision from anywhere: no loop that depends on
data, hence nothing in the way of `vmap`, `torch.compile` or automatic differentiation. Derivatives flow through the last Newton steps,
where they are exact.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from exptilt._support.elementary import STRICT, bits_of_float64, float64_from_bits
from exptilt._support.kernels import kernel, run_chunks
from exptilt._support.linalg import multivariate_digamma
from exptilt._support.transforms import has_tangent, is_concrete

Array = np.ndarray[Any, Any]
_MANY = 16384  # entries from which the kernel is used: a millisecond of torch's time
_UNIT = 8192  # entries that one thread takes at least

_BERNOULLI = (
    1 / 6,
    -1 / 30,
    1 / 42,
    -1 / 30,
    5 / 66,
    -691 / 2730,
    7 / 6,
    -3617 / 510,
    43867 / 798,
    -174611 / 330,
)
_STIRLING = tuple(b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1))
_SLOPE = tuple(b / (2 * k) for k, b in enumerate(_BERNOULLI, 1))
HALF_LOG_2PI = math.log(2 * math.pi) / 2
# √½ as bits: a float less this, and more 1, has the exponent of its power of two and the fraction of a number in [√½, √2).
_ROOT_HALF, _ONE, _FRACTION, _EXPONENT = (
    0x3FE6A09E667F3BCD,
    0x3FF0000000000000,
    0x000FFFFFFFFFFFFF,
    0x7FF0000000000000,
)
_TWO_52 = 0x4330000000000000  # 2^52 as bits: an integer in the low bits of it is added to it
_LOG2_HIGH, _LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10


@njit(fastmath=STRICT, error_model="numpy")
def _log(x: float) -> float:
    """Log x of a positive normal number, within one unit in the last place: the method and coefficients of fdlibm's e_log.c."""
    bits = bits_of_float64(x) + (_ONE - _ROOT_HALF)  # type: ignore[call-arg]
    n = float64_from_bits(((bits & _EXPONENT) >> 52) | _TWO_52) - (2.0**52 + 1023.0)
    f = float64_from_bits((bits & _FRACTION) + _ROOT_HALF) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01))
    )
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    half = 0.5 * f * f
    return n * _LOG2_HIGH - ((half - (s * (half + (odd + even)) + n * _LOG2_LOW)) - f)


@njit(fastmath=STRICT, error_model="numpy")
def log_of_ratio(x: float, y: float) -> float:
    """Log x/y of positive normal numbers, exponents apart from fractions: no quotient is too large or too small."""
    one: int = bits_of_float64(x)  # type: ignore[call-arg]
    two: int = bits_of_float64(y)
    n = float64_from_bits(((one & _EXPONENT) >> 52) | _TWO_52) - float64_from_bits(
        ((two & _EXPONENT) >> 52) | _TWO_52
    )
    quotient = float64_from_bits((one & _FRACTION) | _ONE) / float64_from_bits((two & _FRACTION) | _ONE)
    return n * _LOG2_HIGH + (n * _LOG2_LOW + _log(quotient))


@njit(
    inline="always", fastmath=STRICT, error_model="numpy"
)  # as text: a call that gives back two numbers would not become vector code
def both_remainders(x: float) -> tuple[float, float]:
    """R and r of one number."""
    p, slope = 1.0, 0.0  # without the factor a, which may be tiny
    for k in range(1, 8):
        slope = slope * (x + k) + p
        p = p * (x + k)
    small = x < 8.0
    z = x + 8.0 if small else x
    r = 1.0 / z
    q = r * r
    first, second = _STIRLING[9], _SLOPE[9]
    for k in range(8, -1, -1):
        first = first * q + _STIRLING[k]
        second = second * q + _SLOPE[k]
    safe = x if small else 1.0
    log_z, log_x = _log(z), _log(safe)
    more = ((x - 0.5) * (log_z - log_x) - log_x) - (8.0 + _log(p * q * q * q * q if small else 1.0))
    steeper = (log_x - log_z) + (0.5 * r + 0.5 / safe) + slope / p
    return first * r + (more if small else 0.0), second * q + (steeper if small else 0.0)


@kernel("the kernels of log-gamma", fastmath=STRICT)
def _sweep(a: Array, remainder: Array, slope_remainder: Array) -> None:
    for i in range(a.size):
        remainder[i], slope_remainder[i] = both_remainders(a[i])


def remainders(a: Tensor) -> tuple[Tensor, Tensor]:
    """(R(a), r(a)) at positive, finite a, entry by entry.

    Example:
        >>> remainders(torch.tensor(1.0))  # 1 − ½ log 2π, 0.5772 − ½
        (tensor(0.0811), tensor(0.0772))
    """
    if suits(a):
        first, second = run(_sweep, 2, a)
        return first, second
    q, small = a.clamp_min(8.0) ** -2, a.clamp_max(8.0)
    return remainder(a), torch.where(
        a < 8, small.log() - 0.5 / small - torch.digamma(small), q * _horner(_SLOPE, q)
    )


def remainder(a: Tensor) -> Tensor:
    """R(a) at positive, finite a, entry by entry."""
    if suits(a):
        return run(_sweep, 2, a)[0]
    r, small = 1 / a.clamp_min(8.0), a.clamp_max(8.0)
    direct = torch.lgamma(small) - ((small - 0.5) * small.log() - small + HALF_LOG_2PI)
    return torch.where(a < 8, direct, r * _horner(_STIRLING, r * r))


def gamma_entropy(a: Tensor) -> Tensor:
    """Entropy of Gamma(a, 1), a + log Γ(a) + (1 − a) ψ(a), entry by entry, without its cancellation at large a."""
    first, second = remainders(a)
    return a.log() / 2 + HALF_LOG_2PI + first + (a - 1) * (0.5 / a + second)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value = (value + coefficient) * x
    return value + coefficients[0]


def suits(*tensors: Tensor) -> bool:
    """Whether a kernel is used: many entries, in main memory, and nobody wants derivatives. Else torch, which has them."""
    if max(tensor.numel() for tensor in tensors) < _MANY or not is_concrete(*tensors):
        return False
    if any(tensor.device.type != "cpu" or has_tangent(tensor) for tensor in tensors):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def run(sweep: Callable[..., None], outputs: int, *inputs: Tensor) -> Tensor:
    """``sweep(*inputs, *outputs)`` entry by entry on all threads: ``(outputs, ...)`` in the dtype of the inputs, which broadcast."""
    wide = inputs if all(x.shape == inputs[0].shape for x in inputs) else torch.broadcast_tensors(*inputs)
    flat = [tensor.detach().double().reshape(-1).numpy() for tensor in wide]
    values = np.empty((outputs, flat[0].size))

    def work(start: int, stop: int) -> None:
        piece = slice(start * _UNIT, stop * _UNIT)
        sweep(*(array[piece] for array in flat), *values[:, piece])

    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, -(-flat[0].size // _UNIT))
    return torch.from_numpy(values).to(wide[0].dtype).reshape(outputs, *wide[0].shape)


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
