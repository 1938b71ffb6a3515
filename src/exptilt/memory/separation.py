r"""How scores become weights: the separation, as the gradient of a convex function Ψ.

Each separation below has a convex Ω whose conjugate gives potential and weights (Hopfield–Fenchel–Young networks, Santos et al. 2024):

    Ψ(s) = β⁻¹ Ω*(βs) = max_y <y,s> − β⁻¹ Ω(y),        y(s) = ∇Ψ(s),        a step is  ξ ← Σ_i y_i k_i = ∇_ξ Ψ.

    softmax      Ω = Σ y log y on the simplex               Ψ = β⁻¹ log Σ e^{βs}        (THEORY C1)
    entmax(α)    Ω = (Σ y^α − 1)/(α(α−1)) on the simplex     sparse weights; α = 2 is sparsemax, α → 1 softmax   (``entmax.py``)
    max          Ω = 0 on the simplex                       Ψ = max s, weights 1 at the first largest score; β plays no part
    polynomial   Ω = 0 on {y ≥ 0, Σ y^{n/(n−1)} ≤ 1}         Ψ = (Σ max(s,0)^n)^{1/n};   β plays no part

Since Ψ is convex, E = −Ψ + ½<ξ,ξ> lies under its tangent bound at ξ, and a step minimises that bound: no step raises E, for any of them.

The polynomial one orders states of one norm as Krotov and Hopfield's energy −Σ F(s), F(s) = max(s,0)^n, does, and its weights are their
F' up to a factor. Weights s^n/Σ s^n, as some write, have a Jacobian that is not symmetric: they are the gradient of nothing, there is no
energy, and they are not offered. With euclidean similarity no score is positive, so `polynomial` is refused there.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.attention import attend
from exptilt.memory.entmax import entmax_sweep
from exptilt.memory.patterns import Keys
from exptilt.tilting import merge


class Read(NamedTuple):
    """What one sweep yields: Σ y_i k_i ``(..., H, Q, D)`` and Ψ ``(..., H, Q)``."""

    average: Tensor
    potential: Tensor


@dataclass(frozen=True)
class Softmax:
    """Weights e^{βs}/Σ e^{βs}, streamed by `attend`."""

    def read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        """One sweep.

        Args:
            keys: the patterns.
            query: ``(..., H, Q, D)``.
            beta: ``(..., H)``.
        """
        found = []
        for key, offset in keys.parts():
            weight = None if offset is None else beta[..., None] * offset
            found.append(
                attend(query * beta[..., None, None], key, key, scale=1.0, log_weight=weight, check=False)
            )
        tilted = found[0] if len(found) == 1 else merge(found)
        return Read(tilted.output, tilted.log_normalizer / beta[..., None])

    def uniform(self, count: int) -> float:
        """Ω of equal weights.

        Args:
            count: how many.
        """
        return -math.log(count)


@dataclass(frozen=True)
class Entmax:
    """Sparse weights [(α−1)βs − τ]_+^{1/(α−1)}, with the τ for which they sum to one.

    Args:
        alpha: in (1, 2]; 2 is sparsemax. (Above 2 the weights leave 0 with infinite slope.)
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not 1.0 < self.alpha <= 2.0:
            raise ArgumentError(
                f"Entmax: alpha is {self.alpha}. Pass 1 < alpha <= 2; 2 is sparsemax, and for 1 there is 'softmax'."
            )

    def read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        """A few sweeps to find τ, one more to average.

        Args:
            keys: the patterns.
            query: ``(..., H, Q, D)``.
            beta: ``(..., H)``.
        """
        return Read(*entmax_sweep(keys, query, beta, self.alpha))

    def uniform(self, count: int) -> float:
        """Ω of equal weights.

        Args:
            count: how many.
        """
        return (count ** (1 - self.alpha) - 1) / (self.alpha * (self.alpha - 1))


@dataclass(frozen=True)
class Maximum:
    """All weight on the first of the largest scores: nearest-pattern search."""

    def read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        """One sweep for the index, which is not differentiable; what stands there is.

        Args:
            keys: the patterns.
            query: ``(..., H, Q, D)``.
            beta: ``(..., H)``.
        """
        with torch.no_grad():
            top = query.new_full(query.shape[:-1], -torch.inf)
            best = torch.zeros(query.shape[:-1], dtype=torch.int64, device=query.device)
            for _, score, start in keys.tiles(query.detach()):
                high, at = score.max(-1)
                best = torch.where(high > top, at + start, best)
                top = torch.maximum(high, top)
        key, offset = keys.chosen(best)
        key = torch.where(
            top.isfinite()[..., None], key, torch.nan
        )  # of scores that overflow none is the largest
        score = (key * query).sum(-1)
        return Read(key, score if offset is None else score + offset)

    def uniform(self, count: int) -> float:
        """Ω of equal weights.

        Args:
            count: how many.
        """
        return 0.0


@dataclass(frozen=True)
class Polynomial:
    """Weights proportional to max(s,0)^{n−1}.

    Args:
        degree: n >= 2; the larger, the sharper.
    """

    degree: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 2:
            raise ArgumentError(f"Polynomial: degree is {self.degree!r}. Pass an integer >= 2.")

    def read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        """One sweep, with sums relative to the largest score so far.

        Args:
            keys: the patterns.
            query: ``(..., H, Q, D)``.
            beta: ``(..., H)``.
        """
        n = self.degree
        top = query.new_zeros(query.shape[:-1])
        total, average = torch.zeros_like(top), torch.zeros_like(query)
        for key, score, _ in keys.tiles(query):
            m = torch.maximum(top, score.detach().amax(-1))
            safe = torch.where(m > 0, m, 1.0)
            rebase = top / safe
            r = score.clamp_min(0) / safe[..., None]
            total = total * rebase**n + (r**n).sum(-1)
            average = average * (rebase ** (n - 1))[..., None] + r ** (n - 1) @ key
            top = m
        alive = total != 0  # NaN, of scores that overflow, stays NaN
        z = torch.where(alive, total, 1.0)
        norm = z ** (1 / n)
        return Read(
            torch.where(alive[..., None], average / (norm ** (n - 1))[..., None], 0.0),
            torch.where(alive, top * norm, 0.0),
        )

    def uniform(self, count: int) -> float:
        """Ω of equal weights.

        Args:
            count: how many.
        """
        return 0.0


Separation = Softmax | Entmax | Maximum | Polynomial

SEPARATIONS: dict[str, Separation] = {
    "softmax": Softmax(), "sparsemax": Entmax(2.0), "entmax": Entmax(), "max": Maximum(), "polynomial": Polynomial(),
}  # fmt: skip


def separation(which: "str | Separation") -> Separation:
    """The separation of that name, or the one that was passed."""
    if isinstance(which, Softmax | Entmax | Maximum | Polynomial):
        return which
    if which not in SEPARATIONS:
        known = ", ".join(SEPARATIONS)
        raise ArgumentError(
            f"Hopfield: separation is {which!r}. Pass one of {known}, or Entmax(alpha), Polynomial(degree)."
        )
    return SEPARATIONS[which]
