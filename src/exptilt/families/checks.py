"""Checks of the tensors that make up a measure or an event, with messages that say what is wrong."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from exptilt._support.checks import alike, entries, floating
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import is_concrete


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
    """The error that x is not of the shapes that an event has."""
    shapes = " and ".join(f"(..., {', '.join(map(str, shape))})" for shape in wanted)
    got = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    return ArgumentError(f"{caller}: x must be {shapes}; got {got}.")
