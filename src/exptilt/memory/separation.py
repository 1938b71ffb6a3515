r"""How scores become weights: the separation, as the gradient of a convex function Ψ.

Each separation has a convex Ω whose conjugate gives potential and weights (Hopfield–Fenchel–Young, Santos et
al. 2024):

    Ψ(s) = β⁻¹ Ω*(βs) = max_y ⟨y,s⟩ − β⁻¹ Ω(y),      y(s) = ∇Ψ(s),      a step is  ξ ← Σ_i y_i k_i = ∇_ξ Ψ.

    softmax      Ω = Σ y log y on the simplex             Ψ = β⁻¹ log Σ e^{βs}      (THEORY C1)
    entmax(α)    Ω = (Σ y^α − 1)/(α(α−1)) on the simplex   sparse; α = 2 is sparsemax, α → 1 softmax
    max          Ω = 0 on the simplex                     Ψ = max s, all weight at the first; β plays no part
    polynomial   Ω = 0 on {y ≥ 0, Σ y^{n/(n−1)} ≤ 1}       Ψ = (Σ max(s,0)^n)^{1/n}; β plays no part

Since Ψ is convex, E = −Ψ + ½⟨ξ,ξ⟩ lies under its tangent bound at ξ, and a step minimises that bound: no step
raises E.

The polynomial one orders states of one norm as Krotov and Hopfield's energy −Σ F(s), F(s) = max(s,0)^n, does,
and its weights are their F' up to a factor. Weights s^n/Σ s^n, as some write, have a Jacobian that is not
symmetric: they are the gradient of nothing, there is no energy, and they are not offered. With euclidean
similarity no score is positive, so `polynomial` is refused there.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.distributed.collectives import share
from exptilt.distributed.parts import join
from exptilt.memory.entmax import entmax_sweep
from exptilt.memory.patterns import Keys
from exptilt.tilting import AttentionResult, attend, merge


class Read(NamedTuple):
    """The result of one sweep: Σ y_i k_i ``(..., H, Q, D)`` (or Σ y_i v_i) and Ψ ``(..., H, Q)``."""

    average: Tensor
    potential: Tensor


class Separation(ABC):
    """Base of the separations in the table above."""

    def read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        """The average of the keys (or values) under their weights, and the potential.

        Args:
            keys: the patterns.
            query: ``(..., H, Q, D)``.
            beta: ``(..., H)``.
        """
        return self._read(keys, query, beta)

    @abstractmethod
    def _read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read: ...

    def uniform(self, count: int) -> float:
        """Ω of equal weights.

        Args:
            count: number of weights.
        """
        if isinstance(self, Softmax):
            return -math.log(count)
        if isinstance(self, Entmax):
            return (math.pow(count, 1 - self.alpha) - 1) / (self.alpha * (self.alpha - 1))
        return 0.0


@dataclass(frozen=True)
class Softmax(Separation):
    """Weights e^{βs}/Σ e^{βs}, streamed by `attend`."""

    def _read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        together = keys.members
        if together is not None:
            query, own = share(query, together), share(beta, together)
            tilted = join(self._over(keys, query, own), together)
        else:
            tilted = self._over(keys, query, beta)
        return Read(tilted.output, tilted.log_normalizer / beta[..., None])

    def _over(self, keys: Keys, query: Tensor, beta: Tensor) -> AttentionResult:
        """The attention result over the patterns on this process."""
        sharp = query * beta[..., None, None]
        found = []
        for key, value, offset in keys.parts():
            weight = None if offset is None else beta[..., None] * offset
            found.append(attend(sharp, key, value, scale=1.0, log_weight=weight, check=False))
        return found[0] if len(found) == 1 else merge(found)


@dataclass(frozen=True)
class Entmax(Separation):
    """Sparse weights [(α−1)βs − τ]_+^{1/(α−1)}, with the τ for which they sum to one.

    Args:
        alpha: in (1, 2]; 2 is sparsemax. (Above 2 the weights leave 0 with infinite slope.)
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not 1.0 < self.alpha <= 2.0:
            wanted = "Pass 1 < alpha <= 2; 2 is sparsemax, and for 1 there is 'softmax'."
            raise ArgumentError(f"Entmax: alpha is {self.alpha}. {wanted}")

    def _read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        return Read(*entmax_sweep(keys, query, beta, self.alpha))


@dataclass(frozen=True)
class Maximum(Separation):
    """All weight on the first of the largest scores: nearest-pattern search.

    The index is not differentiable; the pattern and score there are.
    """

    def _read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        with torch.no_grad():
            top = query.new_full(query.shape[:-1], -torch.inf)
            best = torch.zeros(query.shape[:-1], dtype=torch.int64, device=query.device)
            for _, score, start in keys.tiles(query.detach()):
                high, at = score.max(-1)
                best = torch.where(high > top, at + start, best)
                top = torch.maximum(high, top)
        key, value, offset = keys.chosen(best)
        score = (key * query).sum(-1)
        score = score if offset is None else score + offset
        known = top.isfinite()  # if scores overflow, the largest is unknown
        return Read(torch.where(known[..., None], value, torch.nan), torch.where(known, score, torch.nan))


@dataclass(frozen=True)
class Polynomial(Separation):
    """Weights proportional to max(s,0)^{n−1}.

    A step sums patterns under the weights ∇Ψ, whose sum is at least 1; values are averaged under weights that
    sum to 1. A state without a positive score has no weights: it reads 0.

    Args:
        degree: n >= 2; the larger, the sharper.
    """

    degree: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 2:
            raise ArgumentError(f"Polynomial: degree is {self.degree!r}. Pass an integer >= 2.")

    def _read(self, keys: Keys, query: Tensor, beta: Tensor) -> Read:
        n = self.degree
        top = query.new_zeros(query.shape[:-1])  # sums are relative to the largest score so far
        total, weight, average = (
            torch.zeros_like(top),
            torch.zeros_like(top),
            torch.zeros_like(top)[..., None],
        )
        for value, score, _ in keys.tiles(query):
            m = torch.maximum(top, score.detach().amax(-1))
            safe = torch.where(m > 0, m, 1.0)
            rebase = top / safe
            r = score.clamp_min(0) / safe[..., None]
            total = total * rebase**n + (r**n).sum(-1)
            slope, rebase = r ** (n - 1), rebase ** (n - 1)
            weight = weight * rebase + slope.sum(-1)
            average = average * rebase[..., None] + slope @ value
            top = m
        alive = total != 0  # NaN (scores overflow) stays NaN
        norm = torch.where(alive, total, 1.0) ** (1 / n)
        share = torch.where(alive, weight, 1.0) if keys.values is not None else norm ** (n - 1)
        average = average / share[..., None]
        return Read(torch.where(alive[..., None], average, 0.0), torch.where(alive, top * norm, 0.0))


SEPARATIONS: dict[str, Separation] = {
    "softmax": Softmax(),
    "sparsemax": Entmax(2.0),
    "entmax": Entmax(),
    "max": Maximum(),
    "polynomial": Polynomial(),
}


def separation(which: "str | Separation") -> Separation:
    """The separation of that name, or the one that was passed."""
    if isinstance(which, Separation):
        return which
    if which not in SEPARATIONS:
        known = ", ".join(SEPARATIONS)
        wanted = f"Pass one of {known}, or Entmax(alpha), Polynomial(degree)."
        raise ArgumentError(f"Hopfield: separation is {which!r}. {wanted}")
    return SEPARATIONS[which]
