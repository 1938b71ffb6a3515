"""What a constructor asks of its tensors, and how it says what is wrong.

Shapes and dtypes are always checked. Values are checked wherever they can be looked at: not inside `torch.compile` nor under `torch.func`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import is_concrete


def check_tensors(family: str, fields: Mapping[str, tuple[Tensor, int]]) -> None:
    """Every field is a floating tensor of the same dtype and device with at least its event axes, and batch axes broadcast."""
    first_name, first = next((name, tensor) for name, (tensor, _) in fields.items())
    for name, (tensor, event) in fields.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentError(f"{family}: {name} must be a floating-point tensor; got {got}.")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"{family}: {name} is {tensor.dtype}; measures compute in float32 or float64. Convert it with .float()."
            )
        if tensor.ndim < event:
            raise ArgumentError(
                f"{family}: {name} needs at least {event} axes, leading ones are batch; got shape {tuple(tensor.shape)}."
            )
        if event and tensor.shape[-1] == 0:
            got = f"{name} has shape {tuple(tensor.shape)}"
            raise ArgumentError(
                f"{family}: {got}, no entries. A measure needs at least one point, in at least one dimension."
            )
        if tensor.dtype != first.dtype or tensor.device != first.device:
            got = f"{first_name} {first.dtype} on {first.device}, {name} {tensor.dtype} on {tensor.device}"
            raise ArgumentError(f"{family}: fields must share dtype and device; got {got}.")
    try:
        common_shape(*[tensor.shape[: tensor.ndim - event] for tensor, event in fields.values()])
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in fields.items())
        raise ArgumentError(
            f"{family}: the batch axes of its fields do not broadcast together; got {shapes}."
        ) from None


def check_same_dimension(family: str, **vectors: Tensor) -> None:
    """The last axes are equally long."""
    if len({vector.shape[-1] for vector in vectors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(vector.shape)}" for name, vector in vectors.items())
        raise ArgumentError(f"{family}: last axes must be equally long; got {shapes}.")


def check_values(family: str, name: str, tensor: Tensor, valid: Tensor, wanted: str) -> None:
    """Raise at the first entry (or leading index) where ``valid`` is false."""
    if not is_concrete(tensor, valid) or bool(valid.all()):
        return
    index = tuple((~valid).nonzero()[0].tolist())
    where = f"{name}[{', '.join(map(str, index))}]" if index else name
    got = tensor[index].tolist() if index else tensor.tolist()
    raise ArgumentError(f"{family}: {where} must be {wanted}; got {got}.")


def check_positive(family: str, **tensors: Tensor) -> None:
    """Every entry is finite and greater than 0."""
    for name, tensor in tensors.items():
        if is_concrete(tensor) and not _between(tensor, 0.0):
            check_values(family, name, tensor, (tensor > 0) & tensor.isfinite(), "positive and finite")


def check_finite(family: str, **tensors: Tensor) -> None:
    """Every entry is finite."""
    for name, tensor in tensors.items():
        if is_concrete(tensor) and not _between(tensor, -torch.inf):
            check_values(family, name, tensor, tensor.isfinite(), "finite")


def _between(tensor: Tensor, lower: float) -> bool:
    """Whether lower < x < ∞ for every entry, in one pass: NaN is both the least and the largest."""
    if tensor.numel() == 0:
        return True
    least, largest = tensor.detach().aminmax()
    return bool((least > lower) & (largest < torch.inf))


def check_log_weight(family: str, log_weight: Tensor) -> None:
    """Along the last axis there is no NaN, no +inf and at least one weight above −inf."""
    if not is_concrete(log_weight):
        return
    if log_weight.shape[-1] == 0:
        raise ArgumentError(
            f"{family}: log_weight has no entries (shape {tuple(log_weight.shape)}). A measure needs at least one point."
        )
    check_values(
        family,
        "log_weight",
        log_weight,
        ~log_weight.isnan() & (log_weight < torch.inf),
        "a number below +inf",
    )
    alive = (log_weight > -torch.inf).any(-1)
    if not bool(alive.all()):
        index = tuple((~alive).nonzero()[0].tolist())
        where = f"log_weight[{', '.join(map(str, index))}]" if index else "log_weight"
        raise ArgumentError(
            f"{family}: {where} is all −inf, a measure of mass 0. Give at least one entry a finite log-weight."
        )
