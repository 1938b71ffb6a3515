"""Checks of the tensors that make up a measure or an event, with messages that say what is wrong."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from exptilt._support.checks import alike, entries, floating
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import is_concrete


def with_axes(fields: Mapping[str, tuple[Any, int]]) -> dict[str, Any]:
    """The fields given as numbers or 0-d tensors, expanded to their number of event axes.

    A vector gets as many equal entries as the other vectors have, or one. Numbers take the dtype and the
    device of the first tensor among the fields.
    """
    tensors = [(value, event) for value, event in fields.values() if isinstance(value, Tensor)]
    like = tensors[0][0] if tensors else torch.empty(())
    length = max([1, *(x.shape[-1] for x, event in tensors if event == 1 and x.ndim)])
    made = {}
    for name, (value, event) in fields.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if number or (event and isinstance(value, Tensor) and value.ndim == 0):
            x = torch.as_tensor(value, dtype=like.dtype, device=like.device) if number else value
            made[name] = x.expand((length,) if event == 1 else (1,) * event)
    return made


def one_coordinate(x: Any, like: Tensor) -> Any:
    """A number (in the dtype of `like`) or 0-d tensor as a vector of one entry; any other x unchanged."""
    if isinstance(x, Real) and not isinstance(x, bool):
        return torch.tensor([x], dtype=like.dtype, device=like.device)
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.ndim == 0 else x


def sizes(caller: str, shape: Any) -> tuple[int, ...]:
    """The shape of draws as a tuple, from a number of draws or a sequence of sizes."""
    given = (shape,) if isinstance(shape, int) and not isinstance(shape, bool) else shape
    if not isinstance(given, Sequence) or any(not isinstance(size, int) or size < 0 for size in given):
        wanted = "a number of draws such as 100, or a sequence of sizes such as (100,)"
        raise ArgumentError(f"{caller}.sample: shape must be {wanted}; got {shape!r}.")
    return tuple(given)


def check_tensors(caller: str, fields: Mapping[str, tuple[Tensor, int]]) -> None:
    """Raise unless the fields, each with its number of event axes, can make up one measure."""
    for name, (tensor, event) in fields.items():
        floating(caller, name, tensor, axes=event, dtypes=(torch.float32, torch.float64))
    alike(caller, **{name: tensor for name, (tensor, _) in fields.items()})
    try:
        common_shape(*[tensor.shape[: tensor.ndim - event] for tensor, event in fields.values()])
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in fields.items())
        wanted = "the batch axes of its fields do not broadcast together"
        raise ArgumentError(f"{caller}: {wanted}; got {shapes}.") from None


def check_log_weight(caller: str, log_weight: Tensor) -> None:
    """Raise unless along the last axis there is no NaN, no +inf and at least one weight above −inf."""
    if not is_concrete(log_weight):
        return
    valid = ~log_weight.isnan() & (log_weight < torch.inf)
    entries(caller, "log_weight", log_weight, valid, "a number below +inf")
    alive = (log_weight > -torch.inf).any(-1)
    if not bool(alive.all()):
        index = tuple((~alive).nonzero()[0].tolist())
        where = f"log_weight[{', '.join(map(str, index))}]" if index else "log_weight"
        wanted = "Give at least one entry a finite log-weight."
        raise ArgumentError(f"{caller}: {where} is all −inf, a measure of mass 0. {wanted}")


def unlike_an_event(
    caller: str, wanted: Sequence[Sequence[object]], leaves: Sequence[object]
) -> ArgumentError:
    """The error that x does not have the shapes of an event."""
    shapes = " and ".join(f"(..., {', '.join(map(str, shape))})" for shape in wanted)
    got = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    return ArgumentError(f"{caller}: x must be {shapes}; got {got}.")
