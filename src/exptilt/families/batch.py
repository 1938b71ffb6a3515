"""Batch axes of measures, which are indexed and reshaped like those of tensors; E[x] and Var[x] of a draw.

A measure is a dataclass of tensors ``batch + event`` whose batch axes broadcast together. Each operation is
done to every tensor alike and leaves the event axes alone. A tensor without batch axes is shared by the
whole batch and stays so where another tensor carries the batch.

E[x] and Var[x] are the mean and the diagonal of the covariance where t(x) is x. A family for which it is not
(Beta, Dirichlet, Wishart, ...) gives its closed forms in `_event_moments`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import pytree


class Batched(ABC):
    """What follows from `batch_shape` and `map` for the leading axes of a dataclass of tensors."""

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """Shape of the leading axes, fields broadcast together."""

    @abstractmethod
    def map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Apply a function to every tensor field and its number of event axes."""

    def __getitem__(self, index: Any) -> Self:
        items = index if isinstance(index, tuple) else (index,)
        used = sum(_consumed(item) for item in items)
        batch = tuple(self.batch_shape)
        name = f"{type(self).__name__} with batch {batch}"
        if used > len(batch) or sum(item is Ellipsis for item in items) > 1:
            raise BatchError(
                f"{name}: {_shown(items)} indexes {used} axes. Only batch axes can be indexed, "
                "those of an event cannot."
            )
        where = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        items = (*items[:where], *[slice(None)] * (len(batch) - used), *items[where + 1 :])
        try:
            return self._along_batch(lambda leaf, _: leaf[items])
        except (IndexError, TypeError) as error:
            raise BatchError(f"{name}: cannot be indexed by {_shown(items)}; {error}.") from None

    def __len__(self) -> int:
        if not self.batch_shape:
            raise BatchError(f"{type(self).__name__} has no batch axes, so no length.")
        return self.batch_shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """The same members with batch axes of another shape.

        Args:
            shape: sizes, or a sequence of them; one may be −1.
        """
        sizes = self._resized("reshape", shape)
        return self._along_batch(lambda leaf, event: leaf.reshape((*sizes, *leaf.shape[leaf.ndim - event :])))

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """The same members repeated along batch axes, without copies.

        Args:
            shape: sizes, or a sequence of them; −1 keeps the size of an axis.
        """
        sizes = self._resized("expand", shape)
        return self.map(lambda leaf, event: leaf.expand((*sizes, *leaf.shape[leaf.ndim - event :])))

    def _resized(self, method: str, shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
        """What `Tensor.reshape` or `Tensor.expand` would make of the batch's shape."""
        batch = torch.empty(self.batch_shape, device="meta")
        try:
            return tuple(getattr(batch, method)(_sizes(method, shape)).shape)
        except RuntimeError as error:
            raise ArgumentError(f"{type(self).__name__}.{method}: {error}.") from None

    def _along_batch(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Apply a function to every tensor with the whole batch; tensors that are shared stay as they are."""
        batch = self.batch_shape

        def apply(leaf: Tensor, event: int) -> Tensor:
            if batch and leaf.ndim == event:
                return leaf
            return function(leaf.expand((*batch, *leaf.shape[leaf.ndim - event :])), event)

        return self.map(apply)


class BatchError(ArgumentError, IndexError, TypeError):
    """A batch axis that is not there, or an index that is out of range."""


class EventMoments(ABC):
    """What follows from `mean` and `covariance` for x itself."""

    identity_coordinate: ClassVar[bool]

    @abstractmethod
    def mean(self, eta: Tensor | None = None) -> Tensor:
        """E[t] under the tilted measure."""

    @abstractmethod
    def covariance(self, eta: Tensor | None = None) -> Tensor:
        """Cov[t] under the tilted measure."""

    @property
    def event_mean(self) -> Any:
        """E[x], shaped like one draw: infinite where the integral is, NaN where there is no mean."""
        return self._event_moments()[0]

    @property
    def event_variance(self) -> Any:
        """Var[x], entry by entry, shaped like one draw: infinite or NaN as for `event_mean`."""
        return self._event_moments()[1]

    def _event_moments(self) -> tuple[Any, Any]:
        """E[x] and Var[x], each shaped like one draw."""
        if not self.identity_coordinate:
            raise ArgumentError(
                f"{type(self).__name__}: E[x] has no closed form here. Average `sample` instead."
            )
        return self.mean(), self.covariance().diagonal(dim1=-2, dim2=-1)


Some = TypeVar("Some", bound=Batched)


def stack(measures: Sequence[Some], dim: int = 0) -> Some:
    """One measure whose members are these: the opposite of iterating over it.

    Args:
        measures: of one class, dtype and event shape; their batch axes broadcast together.
        dim: where the new batch axis goes.

    Example:
        >>> from exptilt.families import Poisson
        >>> stack([Poisson(torch.tensor([1.0])), Poisson(torch.tensor([5.0]))]).mean()
        tensor([[1.],
                [5.]])
    """
    members = list(measures)
    kinds = {type(member).__name__ for member in members}
    if not members or not all(isinstance(member, Batched) for member in members) or len(kinds) > 1:
        got = ", ".join(sorted(kinds)) or "nothing"
        raise ArgumentError(f"stack: pass one or more measures of one class; got {got}.")
    try:
        batch = common_shape(*(member.batch_shape for member in members))
        wide = [member.expand(tuple(batch)) for member in members]
        axis = range(len(batch) + 1)[dim]
        specs = [pytree.tree_flatten(member) for member in wide]
        if any(spec != specs[0][1] for _, spec in specs):
            raise ArgumentError("stack: the measures differ in what is not a tensor (a density, a base).")
        if len({leaf.dtype for leaves, _ in specs for leaf in leaves}) > 1:
            raise ArgumentError("stack: the measures differ in dtype. Convert them with .to(dtype).")
        leaves = [torch.stack(parts, axis) for parts in zip(*(leaves for leaves, _ in specs), strict=True)]
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(member.batch_shape)) for member in members)
        raise ArgumentError(f"stack: {error}; got batches {shapes} and dim {dim}.") from None
    stacked: Some = pytree.tree_unflatten(leaves, specs[0][1])
    return stacked


def _consumed(item: Any) -> int:
    """How many axes an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1


def _shown(items: tuple[Any, ...]) -> str:
    return ", ".join("..." if item is Ellipsis else str(item) for item in items)


def _sizes(name: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not all(isinstance(size, int) for size in sizes):
        raise ArgumentError(f"{name}: pass sizes such as 3, 4 or (3, 4); got {shape!r}.")
    return sizes
