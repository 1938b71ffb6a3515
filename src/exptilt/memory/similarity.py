r"""How alike a state and a pattern are: every similarity here is linear in the state, s_i = <k_i, q> + b_i.

    dot         k = x            q = ξ          b = 0
    cosine      k = x/‖x‖        q = ξ/‖ξ‖      b = 0               patterns and states live on the unit sphere
    euclidean   k = x            q = ξ          b = −‖x‖²/2         −½‖x − ξ‖² but for −½‖ξ‖², which is the same for all patterns

The last line is THEORY A8: distance is a dot product with a log-weight on the keys. So one sweep over the patterns serves all three,
and with a convex separation Ψ (``separation.py``) all three have an energy that a step never raises:

    E(ξ) = −Ψ(s) + ½<q,q> + ½M² + const      M² = max ‖x‖², 1, 0.

On the sphere a step ends with a division by the norm: the maximum over the ball of the linear bound on Ψ is attained at ∇Ψ/‖∇Ψ‖.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError


@dataclass(frozen=True)
class Similarity:
    """One line of the table above.

    Args:
        name: dot, cosine or euclidean.
        sphere: whether patterns and states are scaled to unit norm.
        offset: b from the squared norms of the patterns ``(..., N)``; None stands for 0.
        reach: M² from the largest squared norm ``(...)``.
    """

    name: str
    sphere: bool
    offset: Callable[[Tensor], Tensor] | None
    reach: Callable[[Tensor], Tensor]

    def keys(self, patterns: Tensor, square: Tensor) -> Tensor:
        """K ``(..., N, D)`` from patterns ``(..., N, D)`` and their squared norms ``(..., N)``."""
        return patterns / square.sqrt()[..., None] if self.sphere else patterns

    def query(self, state: Tensor) -> Tensor:
        """Q ``(..., D)`` from states ``(..., D)``."""
        return torch.nn.functional.normalize(state, dim=-1, eps=torch.finfo(state.dtype).tiny) if self.sphere else state

    def settle(self, average: Tensor, query: Tensor) -> Tensor:
        """Where a step ends, from Σ y_i k_i ``(..., D)``; on the sphere, a state on which nothing pulls stays."""
        if not self.sphere:
            return average
        size = average.detach().norm(dim=-1, keepdim=True)
        pulled = size > 0
        return torch.where(pulled, torch.nn.functional.normalize(torch.where(pulled, average, 1.0), dim=-1, eps=1e-300), query)


SIMILARITIES = {
    "dot": Similarity("dot", False, None, lambda largest: largest),
    "cosine": Similarity("cosine", True, None, torch.ones_like),
    "euclidean": Similarity("euclidean", False, lambda square: -square / 2, torch.zeros_like),
}


def similarity(name: str) -> Similarity:
    """The similarity of that name, or an error that lists them."""
    if name not in SIMILARITIES:
        raise ArgumentError(f"Hopfield: similarity is {name!r}. Pass one of {', '.join(SIMILARITIES)}.")
    return SIMILARITIES[name]
