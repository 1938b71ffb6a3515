r"""The user's function as a solver sees it: plain numbers, outside of `torch.func` transforms.

Inside ``vmap``, ``grad`` or ``jvp`` a tensor is wrapped once per transform, and a loop that ends once a
number is small cannot read it there. `plain` takes the transforms off while a solver works, a `Problem`
puts them back for each call of the user's function:

    outside      a stack of transforms, tensors of shape (batch..., event...) wrapped in them
    a solver     no transform, plain tensors (v_1, ..., v_k, batch..., event...), v an axis per ``vmap``

What a solver returns is a constant for every transform: derivatives are attached afterwards
(``implicit.py``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import (
    has_tangent,
    inside_transforms,
    is_wrapped,
    outside_transforms,
    unwrapped,
    vmap_axis,
    with_vmap_axis,
)
from exptilt.dynamics.fixed_points.precision import Function

plain = outside_transforms
"""Takes all transforms off, and yields them for `Problem.stack`."""


def bare(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """The innermost tensor, with an axis per ``vmap`` in front, and the levels of those axes.

    The graph that the tensor has below all transforms is kept.
    """
    if not is_wrapped(tensor):
        return tensor, []
    raw, levels = bare(unwrapped(tensor))
    if (found := vmap_axis(tensor)) is not None:
        axis, level = found
        raw = raw.movedim(axis + len(levels), len(levels))
        levels = [*levels, level]
    return raw, levels


def differentiated(tensor: Tensor) -> bool:
    """Whether any transform, or autograd in either direction, follows this tensor."""
    if vmap_axis(tensor) is not None:
        return differentiated(unwrapped(tensor))
    if is_wrapped(tensor):
        return True
    with plain():
        return tensor.requires_grad or has_tangent(tensor)


@dataclass(frozen=True)
class Problem:
    """A function, the shape of its states, and the transforms that were taken off.

    Args:
        function: the user's, on tensors of `shape`.
        shape: of the state as the user sees it.
        event_dims: how many of its last axes make up one sample.
        levels: of the ``vmap`` axes in front.
        sizes: of these axes.
        stack: the transforms that were taken off.
    """

    function: Function
    shape: torch.Size
    event_dims: int
    levels: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    stack: Any = None

    @property
    def samples(self) -> tuple[int, ...]:
        """Sizes of all axes over which samples are laid out, those of ``vmap`` first."""
        return self.sizes + tuple(self.shape[: len(self.shape) - self.event_dims])

    @property
    def event(self) -> int:
        """How many numbers one sample has."""
        return math.prod(self.shape[len(self.shape) - self.event_dims :])

    @property
    def full(self) -> tuple[int, ...]:
        """Shape of a plain state."""
        return self.sizes + tuple(self.shape)

    def wrap(self, raw: Tensor) -> Tensor:
        """The plain tensor `raw`, with the axes of `levels` in front, wrapped in the transforms."""
        for level in self.levels:
            raw = with_vmap_axis(raw, level)
        return raw

    def unwrap(self, tensor: Tensor) -> Tensor:
        """The plain tensor ``(*sizes, ...)`` inside one that is wrapped in the transforms."""
        return self.spread(*bare(tensor))

    def spread(self, raw: Tensor, levels: list[int]) -> Tensor:
        """The tensor, whose leading axes are `levels`, expanded to an axis for each level of the problem."""
        for place, (level, size) in enumerate(zip(self.levels, self.sizes, strict=True)):
            if level not in levels:
                raw = raw.unsqueeze(place).expand(*raw.shape[:place], size, *raw.shape[place:])
        return raw

    def inside(self, call: Callable[..., Tensor], *raws: Tensor) -> Tensor:
        """Re-enter the torch.func transforms, call `call`, return the wrapped tensor."""
        if not self.stack:
            return call(*raws)
        with inside_transforms(self.stack):
            return call(*(self.wrap(raw) for raw in raws))

    def __call__(self, state: Tensor) -> Tensor:
        """f(x) for flat plain states ``(S, n)``, detached."""
        return self.unwrap(self.inside(self.function, state.reshape(self.full))).detach().reshape(state.shape)
