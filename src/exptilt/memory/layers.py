r"""Modules that own parameters and call `associate`: a memory as a layer of a network.

`HopfieldLayer` looks things up: in what it is given, or in patterns of its own that it learns. `HopfieldPooling` has learnt states that
summarise a set of any length. β is a parameter with one entry a head, kept as its logarithm so that learning cannot make it negative.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.memory.association import associate, check_steps

Beta = float | Sequence[float] | Tensor


def _split(x: Tensor, heads: int) -> Tensor:
    """(..., L, H·d) → (..., H, L, d): the features of head h are h·d … (h+1)·d."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _sizes(name: str, dimension: int, heads: int) -> None:
    if heads < 1 or dimension < 1 or dimension % heads:
        raise ArgumentError(f"{name}: dimension {dimension} must be a positive multiple of heads {heads}.")


def _log_beta(beta: Beta | None, dimension: int, heads: int, name: str) -> Tensor:
    """``(heads,)``."""
    wanted = f"Pass a finite number > 0, {heads} of them (one a head), or None for 1/sqrt(head dimension)."
    try:
        given = (
            torch.as_tensor(math.sqrt(heads / dimension) if beta is None else beta, dtype=torch.float64)
            .detach()
            .cpu()
        )
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name}: beta is {beta!r}. {wanted}") from None
    if (
        given.shape not in ((), (heads,))
        or isinstance(beta, bool)
        or not bool(((given > 0) & given.isfinite()).all())
    ):
        raise ArgumentError(f"{name}: beta is {beta!r}. {wanted}")
    return given.log().float().expand(heads).clone()


class HopfieldLayer(nn.Module):
    """Look up states in a memory: one that is given, or patterns that the layer learns.

    Args:
        dimension: features of states, memory and output.
        heads: memories side by side; divides dimension.
        stored: how many patterns the layer itself holds and learns; None: the memory is an argument of the call.
        steps: updates in all; None goes to the fixed point, with implicit gradients. A fixed point does not depend on where one came from,
            so with None neither `to_query` nor the states before it are trained.
        beta: where each head's inverse temperature begins, one number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether it is learnt.
        throw: with steps=None, raise where the fixed point is not reached.

    Example:
        >>> layer = HopfieldLayer(16, heads=4, steps=3)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, dimension: int, *, heads: int = 1, stored: int | None = None, steps: int | None = 1, beta: Beta | None = None,
        learn_beta: bool = True, throw: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        _sizes("HopfieldLayer", dimension, heads)
        check_steps("HopfieldLayer", steps)
        if stored is not None and (isinstance(stored, bool) or not isinstance(stored, int) or stored < 1):
            raise ArgumentError(
                f"HopfieldLayer: stored is {stored!r}. Pass how many patterns to learn, 1 or more, or None."
            )
        self.dimension, self.heads, self.steps, self.throw = dimension, heads, steps, throw
        self.log_beta = nn.Parameter(
            _log_beta(beta, dimension, heads, "HopfieldLayer"), requires_grad=learn_beta
        )
        self.to_query, self.to_key, self.to_value, self.to_output = (
            nn.Linear(dimension, dimension) for _ in range(4)
        )
        self.stored = None if stored is None else nn.Parameter(torch.randn(stored, dimension))

    @property
    def beta(self) -> Tensor:
        """``(heads,)``."""
        return self.log_beta.exp()

    def forward(self, state: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        """Associate states with the memory.

        Args:
            state: ``(..., Q, dimension)``.
            memory: ``(..., N, dimension)``; None for a layer with patterns of its own.
            mask: ``(..., N)`` booleans, False where a pattern is padding.

        Returns:
            ``(..., Q, dimension)``.
        """
        if (memory is None) == (self.stored is None):
            which = (
                "holds patterns of its own: pass memory=None"
                if self.stored is not None
                else "holds no patterns: pass a memory"
            )
            raise ArgumentError(f"HopfieldLayer: this layer {which}.")
        kept = self.stored if memory is None else memory
        assert kept is not None
        seen = None if mask is None else mask[..., None, None, :]
        key, value = _split(self.to_key(kept), self.heads), _split(self.to_value(kept), self.heads)
        found = associate(
            _split(self.to_query(state), self.heads),
            key,
            value,
            self.beta,
            steps=self.steps,
            mask=seen,
            throw=self.throw,
        )
        return self.to_output(found.transpose(-2, -3).flatten(-2))


class HopfieldPooling(nn.Module):
    """Summarise a set by states that the layer learns.

    Args:
        dimension: features of the set's members and of the output.
        queries: how many states, and so outputs.
        heads: memories side by side; divides dimension.
        steps: updates in all. Not None: what pooling learns are its states, and none of them would matter to a fixed point.
        beta: where each head's inverse temperature begins, one number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether it is learnt.

    Example:
        >>> HopfieldPooling(16, queries=2, heads=4)(torch.randn(3, 9, 16)).shape
        torch.Size([3, 2, 16])
    """

    def __init__(
        self,
        dimension: int,
        *,
        queries: int = 1,
        heads: int = 1,
        steps: int = 1,
        beta: Beta | None = None,
        learn_beta: bool = True,
    ) -> None:
        super().__init__()
        _sizes("HopfieldPooling", dimension, heads)
        if queries < 1:
            raise ArgumentError(f"HopfieldPooling: queries is {queries}. Pass 1 or more.")
        if steps is None:
            raise ArgumentError(
                "HopfieldPooling: steps is None. A fixed point does not depend on its start, so the states would never learn. "
                "Pass an integer >= 1."
            )
        check_steps("HopfieldPooling", steps)
        self.query = nn.Parameter(torch.randn(queries, dimension) / math.sqrt(dimension))
        self.lookup = HopfieldLayer(dimension, heads=heads, steps=steps, beta=beta, learn_beta=learn_beta)

    def forward(self, members: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool each set.

        Args:
            members: ``(..., N, dimension)``.
            mask: ``(..., N)`` booleans, False where a member is padding.

        Returns:
            ``(..., queries, dimension)``.
        """
        return self.lookup(self.query.expand(*members.shape[:-2], *self.query.shape), members, mask=mask)
