r"""How alike a state and a pattern are: every similarity here is linear in the state, s_i = ⟨k_i, q⟩ + b_i.

    dot         k = x         q = ξ         b = 0
    cosine      k = x/‖x‖     q = ξ/‖ξ‖     b = 0            patterns and states live on the unit sphere
    euclidean   k = x         q = ξ         b = −‖x‖²/2      −½‖x − ξ‖², but for −½‖ξ‖², the same for all

The last line is THEORY A8: distance is a dot product with a log-weight on the keys. So one sweep over the
patterns serves all three, and with a convex separation Ψ (``separation.py``) each has an energy that no step
raises:

    E(ξ) = −Ψ(s) + ½⟨q,q⟩ + ½M² + const      M² = max ‖x‖², 1, 0.

On the sphere a step ends with a division by the norm: the maximum over the ball of the linear bound on Ψ is
attained at ∇Ψ/‖∇Ψ‖.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError


@dataclass(frozen=True)
class Similarity:
    """One of the three similarities in the table above.

    Args:
        name: dot, cosine or euclidean.
    """

    name: str

    @property
    def sphere(self) -> bool:
        """Whether patterns and states are scaled to unit norm."""
        return self.name == "cosine"

    def measure(self, patterns: Tensor) -> Tensor:
        """Squared norm of each pattern ``(..., N)``; for cosine the norm, because the square may overflow."""
        return length(patterns) if self.sphere else patterns.square().sum(-1)

    def offset(self, measure: Tensor) -> Tensor | None:
        """b ``(..., N)`` from `measure` ``(..., N)``; None stands for 0."""
        return -measure / 2 if self.name == "euclidean" else None

    def reach(self, measure: Tensor) -> Tensor:
        """M² ``(...)`` from `measure` ``(..., N)``."""
        largest = measure.amax(-1)
        return largest if self.name == "dot" else torch.full_like(largest, float(self.sphere))

    def keys(self, patterns: Tensor, measure: Tensor) -> Tensor:
        """k ``(..., N, D)`` from patterns ``(..., N, D)`` and their measure ``(..., N)``."""
        return patterns / measure[..., None] if self.sphere else patterns

    def query(self, state: Tensor) -> Tensor:
        """q ``(..., D)`` from states ``(..., D)``."""
        return unit(state) if self.sphere else state

    def settle(self, average: Tensor, query: Tensor) -> Tensor:
        """The state after a step, from Σ y_i k_i ``(..., D)``; on the sphere it stays where that sum is 0."""
        if not self.sphere:
            return average
        pulled = (average.detach() != 0).any(-1, keepdim=True)
        return torch.where(pulled, unit(torch.where(pulled, average, 1.0)), query)


def _largest(x: Tensor) -> Tensor:
    """The largest modulus of a coordinate ``(..., 1)``, 1 for 0: a divisor that keeps squares in range."""
    top = x.detach().abs().amax(-1, keepdim=True)
    return torch.where(top > 0, top, 1.0)


def unit(x: Tensor) -> Tensor:
    """``(..., D)`` scaled to a norm of 1; 0 stays 0."""
    return torch.nn.functional.normalize(x / _largest(x), dim=-1, eps=torch.finfo(x.dtype).tiny)


def length(x: Tensor) -> Tensor:
    """Norms ``(...)`` of ``(..., D)``; only a norm beyond the dtype overflows, and only 0 has norm 0."""
    top = _largest(x)
    norm: Tensor = torch.linalg.vector_norm(x / top, dim=-1)
    return norm * top[..., 0]


SIMILARITIES = {name: Similarity(name) for name in ("dot", "cosine", "euclidean")}


def similarity(name: str) -> Similarity:
    """The similarity of that name, or an error that lists them."""
    if name not in SIMILARITIES:
        raise ArgumentError(f"Hopfield: similarity is {name!r}. Pass one of {', '.join(SIMILARITIES)}.")
    return SIMILARITIES[name]
