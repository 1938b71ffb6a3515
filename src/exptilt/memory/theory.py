r"""Theorems on a softmax memory with dot products (Ramsauer et al. 2021).

Patterns of norm at most M, N of them, with separations Δ_i:

    retrieval   one step from a state at distance r, or the fixed point itself:
                error ≤ 2(N−1)M e^{−β(Δ_i − 2 max(r, r*)M)}
    capacity    random patterns on a sphere of radius K√(d−1): with probability 1 − p at least √p c^{(d−1)/4}
                can be stored, where

    c = b / W₀(e^{a + log b}),   a = 2/(d−1) (1 + log(2βK²p(d−1))),   b = 2K²β/5,   if  c ≥ (2/√p)^{4/(d−1)},

with W₀ the upper branch of Lambert's function. For p = 0.001 this gives c = 3.1546 (β = 1, K = 3, d = 20) and
1.3718 (β = 1, K = 1, d = 75; 1.37188, which the paper cuts off). These are lower bounds: `storage_capacity`
measures how far below the truth they lie.
"""

import math
import sys
from dataclasses import dataclass

import torch
from scipy.special import wrightomega
from torch import Tensor

from exptilt._support.checks import number


@dataclass(frozen=True)
class StorageBound:
    """The theorem's numbers for one dimension.

    Args:
        base: c.
        needed: the least c for which the theorem holds.
        log_argument: a + log b, the logarithm of the argument of W₀.
        log_count: the logarithm of √p c^{(d−1)/4}, which is how many patterns can be stored.
    """

    base: float
    needed: float
    log_argument: float
    log_count: float

    @property
    def count(self) -> float:
        """√p c^{(d−1)/4}; inf beyond 10³⁰⁸, where `log_count` is still finite."""
        return _exp(self.log_count)

    @property
    def holds(self) -> bool:
        """Whether c is large enough for the theorem to hold."""
        return self.base >= self.needed


def storage_bound(
    dimension: int, *, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001
) -> StorageBound:
    """How many random patterns theory guarantees to be stored.

    Args:
        dimension: d >= 2.
        beta: inverse temperature.
        radius: K; patterns lie on a sphere of radius K√(d−1).
        failure: p, the probability that fewer can be stored.

    Example:
        >>> round(storage_bound(20, radius=3.0).base, 4)
        3.1546
    """
    number("storage_bound", "dimension", dimension, least=2)
    log_energy = math.log(number("storage_bound", "beta", beta, above=0))  # log(βK²)
    log_energy += 2 * math.log(number("storage_bound", "radius", radius, above=0))
    log_p, power = math.log(number("storage_bound", "failure", failure, above=0, most=1)), (dimension - 1) / 4
    a = (1 + math.log(2 * (dimension - 1)) + log_energy + log_p) / (2 * power)
    argument = a + math.log(2 / 5) + log_energy
    # ω(z) = W₀(e^z) and log W₀(e^z) = z − W₀(e^z): nothing overflows on the way
    log_c = float(wrightomega(argument)) - a
    needed = _exp((math.log(2) - log_p / 2) / power)
    return StorageBound(_exp(log_c), needed, argument, log_p / 2 + power * log_c)


def _exp(x: float) -> float:
    """e^x, or inf where that overflows."""
    return math.exp(x) if x < math.log(sys.float_info.max) else math.inf


def retrieval_error_bound(
    separation: Tensor, distance: Tensor, *, count: int, beta: float, size: float
) -> Tensor:
    """Upper bound on the distance from a pattern to its fixed point, or to a state after one step.

    Args:
        separation: ``(...)``, Δ.
        distance: ``(...)``, the larger of the distances of the state and of the fixed point from the pattern.
        count: N.
        beta: inverse temperature.
        size: M.

    Returns:
        ``(...)``.
    """
    number("retrieval_error_bound", "count", count, least=1)
    for name, value in (("beta", beta), ("size", size)):
        number("retrieval_error_bound", name, value, above=0)
    return 2 * (count - 1) * size * torch.exp(-beta * (separation - 2 * distance * size))
