"""Indexing and reshaping of the batch axes of measures; what a law says of x itself.

A measure is a dataclass of tensors ``batch + event`` whose batch axes broadcast together. Each operation
applies to every tensor alike and leaves the event axes alone. A tensor without batch axes is shared by the
whole batch and stays shared if another tensor carries the batch.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import pytree
from exptilt.families.checks import one_coordinate, unlike_an_event

Some = TypeVar("Some", bound="Fields")


STATIC = {"static": True}
"""Metadata of a dataclass field that is not a tensor: `.to`, `vmap` and the like leave it unchanged."""


def make(cls: type[Some], **fields: Any) -> Some:
    """An instance made from valid fields without the constructor's checks."""
    instance = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


class Fields(ABC):
    """Base of the frozen dataclasses of tensors ``batch + event``: shapes, indexing, conversions."""

    event_dims: ClassVar[Mapping[str, int]]
    """For each tensor field, its number of event axes (trailing axes that are not batch)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name = f"{cls.__module__}.{cls.__qualname__}".replace(".families.members.", ".families.")
        pytree.register_pytree_node(cls, _flatten, _unflattener(cls), serialized_type_name=name)

    @property
    @abstractmethod
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that makes up one x."""

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the leading axes, fields broadcast together."""
        return common_shape(*[leaf.shape[: leaf.ndim - event] for leaf, event in self._leaves()])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the fields."""
        return self._leaves()[0][0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the fields."""
        return self._leaves()[0][0].device

    def to(
        self, *arguments: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """A copy of this measure on another device or in another dtype.

        Args:
            arguments: a device, a dtype or both, as for `torch.Tensor.to`.
            device: the device, by keyword.
            dtype: the dtype, by keyword.
        """
        given = {"device": device, "dtype": dtype}
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return self.map(lambda leaf, _: leaf.to(*arguments, **named))

    def map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Apply a function to every tensor field, nested ones too.

        Args:
            function: takes a tensor ``(..., event)`` and its number of event axes.
        """
        _, spec = pytree.tree_flatten(self)
        changed: Self = pytree.tree_unflatten([function(leaf, event) for leaf, event in self._leaves()], spec)
        return changed

    def __getitem__(self, index: Any) -> Self:
        batch = self.batch_shape
        try:
            places = torch.arange(batch.numel(), device=self.device).reshape(batch)[index]
        except (IndexError, TypeError, ValueError) as error:
            name = f"{type(self).__name__} with batch {tuple(batch)}"
            raise BatchError(f"{name}: cannot be indexed by {index}, only batch axes can; {error}.") from None

        def chosen(leaf: Tensor, event: int) -> Tensor:
            return leaf.reshape(batch.numel(), *leaf.shape[leaf.ndim - event :])[places]

        return self._along_batch(chosen)

    def __len__(self) -> int:
        if not self.batch_shape:
            raise BatchError(f"{type(self).__name__} has no batch axes, so len() is not defined.")
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

    @classmethod
    def stack(cls, measures: "Sequence[Self]", dim: int = 0) -> Self:
        """One measure with the given measures as members: the opposite of iterating over a measure.

        Args:
            measures: one or more of this class, alike but for their tensors; their batch axes broadcast.
            dim: where the new batch axis goes.

        Example:
            >>> from exptilt.families import Poisson
            >>> Poisson.stack([Poisson(torch.tensor([1.0])), Poisson(torch.tensor([5.0]))]).mean()
            tensor([[1.],
                    [5.]])
        """
        members = list(measures)
        kinds = {(type(member), getattr(member, "dtype", None)) for member in members}
        if len(kinds) != 1 or next(iter(kinds))[0] is not cls:
            got = ", ".join(sorted(f"{kind.__name__} {dtype}" for kind, dtype in kinds)) or "nothing"
            wanted = f"measures must be one or more of {cls.__name__}, in one dtype"
            raise ArgumentError(f"{cls.__name__}.stack: {wanted}; got {got}.")
        try:
            batch = common_shape(*(member.batch_shape for member in members))
            wide = [member.expand(tuple(batch)) for member in members]
            axis = range(len(batch) + 1)[dim]
            stacked: Self = pytree.tree_map(lambda *leaves: torch.stack(leaves, axis), *wide)
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(str(tuple(member.batch_shape)) for member in members)
            raise ArgumentError(
                f"{cls.__name__}.stack: measures have batches {shapes}, dim is {dim}: {error}."
            ) from None
        return stacked

    def _resized(self, method: str, shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
        """The batch's shape after `Tensor.reshape` or `Tensor.expand`, as `method` says."""
        batch = torch.empty(self.batch_shape, device="meta")
        try:
            return tuple(getattr(batch, method)(_sizes(method, shape)).shape)
        except RuntimeError as error:
            raise ArgumentError(f"{type(self).__name__}.{method}: {error}.") from None

    def _along_batch(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Apply a function to every tensor, expanded to the whole batch; shared tensors stay unchanged."""
        batch = self.batch_shape

        def apply(leaf: Tensor, event: int) -> Tensor:
            if batch and leaf.ndim == event:
                return leaf
            return function(leaf.expand((*batch, *leaf.shape[leaf.ndim - event :])), event)

        return self.map(apply)

    def _leaves(self) -> list[tuple[Tensor, int]]:
        """Every tensor with its number of event axes, in the order of the pytree."""
        return [(getattr(self, name), event) for name, event in self.event_dims.items()]

    def _event(self, x: Any) -> Any:
        """The event x in the measure's dtype; an error unless its tensors end in the event shapes."""
        wanted = self.event_shapes
        x = one_coordinate(x, self._leaves()[0][0]) if wanted == ((1,),) else x
        leaves = pytree.tree_leaves(x)
        good = len(leaves) == len(wanted) and all(isinstance(leaf, Tensor) for leaf in leaves)
        if not good or any(
            leaf.shape[leaf.ndim - len(shape) :] != shape for leaf, shape in zip(leaves, wanted, strict=True)
        ):
            raise unlike_an_event(type(self).__name__, wanted, leaves)
        return pytree.tree_map(lambda leaf: leaf.to(self.dtype), x)

    # What a law says of x itself.

    @abstractmethod
    def _event_moments(self) -> tuple[Any, Any]:
        """E[x] and Var[x], each shaped like one draw."""

    def _mode(self) -> Any:
        raise ArgumentError(f"{type(self).__name__}: the mode has no closed form here.")

    def _cdf(self, x: Tensor) -> Tensor:
        raise ArgumentError(f"{type(self).__name__}: the distribution function has no closed form here.")

    def _icdf(self, q: Tensor) -> Tensor:
        raise ArgumentError(f"{type(self).__name__}: quantiles have no closed form here.")

    @property
    def event_mean(self) -> Any:
        """E[x], shaped like one draw: infinite where the integral is infinite, NaN where no mean exists."""
        return self._event_moments()[0]

    @property
    def event_variance(self) -> Any:
        """Var[x], entry by entry, shaped like one draw: infinite or NaN as for `event_mean`."""
        return self._event_moments()[1]

    @property
    def stddev(self) -> Any:
        """Standard deviation of x: the square root of `event_variance`."""
        return pytree.tree_map(torch.sqrt, self.event_variance)

    @property
    def mode(self) -> Any:
        """An x of largest density, possibly at the edge of the support; NaN where there is none."""
        return self._mode()

    def cdf(self, x: Tensor) -> Tensor:
        """P(x_d ≤ x), entry by entry.

        Args:
            x: ``(..., D)``.

        Returns:
            ``(..., D)``. Computed by SciPy if torch has no such function; then it is not differentiable, and
            a tensor that requires a gradient is refused.
        """
        return self._cdf(self._event(x))

    def icdf(self, q: Tensor) -> Tensor:
        """The least x with P(x_d ≤ x) ≥ q, entry by entry: the quantiles.

        Args:
            q: ``(..., D)``, from 0 to 1.

        Returns:
            ``(..., D)``, as for `cdf`; NaN where q is not a probability.
        """
        q = self._event(q)
        return self._icdf(torch.where((q >= 0) & (q <= 1), q, torch.nan))


def _flatten(held: Fields) -> tuple[list[Any], tuple[Any, ...]]:
    fields = dataclasses.fields(held)  # type: ignore[arg-type]
    children = [getattr(held, field.name) for field in fields if not field.metadata.get("static")]
    return children, tuple(getattr(held, field.name) for field in fields if field.metadata.get("static"))


def _unflattener(cls: type[Fields]) -> Callable[[Any, Any], Fields]:
    def unflatten(children: Any, context: tuple[Any, ...]) -> Fields:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        tensors, others = iter(children), iter(context)
        made = {field.name: next(others if field.metadata.get("static") else tensors) for field in fields}
        return make(cls, **made)

    return unflatten


class BatchError(ArgumentError, IndexError, TypeError):
    """A batch axis does not exist, or an index is out of range."""


def _sizes(name: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not all(isinstance(size, int) for size in sizes):
        raise ArgumentError(f"{name}: pass sizes such as 3, 4 or (3, 4); got {shape!r}.")
    return sizes
