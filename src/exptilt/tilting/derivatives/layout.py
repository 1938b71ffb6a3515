"""Flat arguments of functions: named groups of tensors as torch's autograd functions take them, or some."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def of_some(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Any], some: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function of the arguments numbered `some` alone, the others fixed."""

    def partial(*x: Tensor) -> tuple[Tensor, ...]:
        full = list(arguments)
        for i, value in zip(some, x, strict=True):
            full[i] = value
        return function(*full)

    return partial


class Layout:
    """The order of an autograd function's flat arguments: named groups, then one `Settings`.

    A group is a NamedTuple of tensors or None.

    Example:
        >>> from typing import NamedTuple
        >>> class Pair(NamedTuple):
        ...     a: int
        ...     b: int
        >>> layout = Layout(left=Pair, right=Pair)
        >>> layout.read(layout.flat("settings", left=Pair(1, 2), right=Pair(3, 4)))["right"]
        Pair(a=3, b=4)
    """

    def __init__(self, **groups: Any):
        self.groups: dict[str, Any] = groups
        self.slices: dict[str, slice] = {}
        start = 0
        for name, group in groups.items():
            self.slices[name] = slice(start, start + len(group._fields))
            start += len(group._fields)
        self.count = start

    def flat(self, settings: Any, **groups: Any) -> tuple[Any, ...]:
        """The flat arguments: the members of all groups, then the settings."""
        return (*(x for name in self.groups for x in groups[name]), settings)

    def read(self, arguments: Any) -> dict[str, Any]:
        """The groups, from arguments or saved tensors, by name."""
        return {name: self.groups[name](*arguments[part]) for name, part in self.slices.items()}

    def part(self, name: str, arguments: Any) -> Any:
        """One group's members, from anything laid out like the arguments."""
        return tuple(arguments[self.slices[name]])

    def gradients(self, **groups: Any) -> tuple[Tensor | None, ...]:
        """Return value of a backward rule: the given groups' gradients, None for all other arguments."""
        result: list[Tensor | None] = [None] * (self.count + 1)
        for name, values in groups.items():
            start = self.slices[name].start
            for i, x in enumerate(values):
                result[start + i] = x
        return tuple(result)
