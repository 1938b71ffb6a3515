"""Arguments checked before anything is computed; a message says what was got and what to pass.

Each function returns the argument it checks, or raises an `ArgumentError` that begins with the caller's name:

    max_steps = whole("fixed_point", "max_steps", max_steps)

`caller` begins the message; `name` and `value` are those of the argument; `otherwise` says what else may be
passed, such as ", or None for all". Values of tensors are read only where that is possible: not inside
`torch.compile` nor under `torch.func`.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete

Word = TypeVar("Word")


def whole(caller: str, name: str, value: object, *, least: int = 1, otherwise: str = "") -> int:
    """`value` as an `int`, if it is a whole number ≥ `least`; raises for True and 2.0.

    Example:
        >>> whole("retrieve", "steps", 0)
        Traceback (most recent call last):
        exptilt._support.errors.ArgumentError: retrieve: steps is 0. Pass an integer ≥ 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{caller}: {name} is {value!r}. Pass an integer ≥ {least}{otherwise}.")
    return int(value)


def number(
    caller: str,
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    otherwise: str = "",
) -> float:
    """`value` as a `float`, if it is finite and within bounds (`least`, `most` included); tensors raise.

    Example:
        >>> number("Flow", "step", 0, above=0)
        Traceback (most recent call last):
        exptilt._support.errors.ArgumentError: Flow: step is 0. Pass a finite number > 0.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        found = float(value)
        if math.isfinite(found) and above < found < below and least <= found <= most:
            return found
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in (("≥", least), (">", above), ("≤", most), ("<", below))
        if math.isfinite(bound)
    ]
    wanted = " ".join(["a finite number", " and ".join(bounds)]).strip()
    raise ArgumentError(f"{caller}: {name} is {value!r}. Pass {wanted}{otherwise}.")


def choice(caller: str, name: str, value: Word, among: Iterable[Word], *, otherwise: str = "") -> Word:
    """`value`, if it is one of the words in `among`.

    Example:
        >>> choice("filter", "store", "some", ("all", "last"))
        Traceback (most recent call last):
        exptilt._support.errors.ArgumentError: filter: store is 'some'. Pass one of 'all', 'last'.
    """
    known = list(among)
    if not any(value is word or (type(value) is type(word) and value == word) for word in known):
        words = ", ".join(map(repr, known))
        raise ArgumentError(f"{caller}: {name} is {value!r}. Pass one of {words}{otherwise}.")
    return value


def floating(
    caller: str,
    name: str,
    value: object,
    *,
    axes: int = 0,
    shape: str = "",
    dtypes: tuple[torch.dtype, ...] = (),
) -> Tensor:
    """`value`, if it is a floating-point tensor with at least `axes` axes, the last of which are not empty.

    `dtypes` are those allowed, () for any; `shape` names the axes in the message, such as "(..., N, D)".
    """
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise ArgumentError(
            f"{caller}: {name} must be a floating-point tensor; got {got}. Pass torch.as_tensor({name})."
        )
    if not value.is_floating_point() or (dtypes and value.dtype not in dtypes):
        words = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"a tensor of {words}" if dtypes else "a floating-point tensor"
        raise ArgumentError(
            f"{caller}: {name} must be {wanted}; got {value.dtype}. Convert it: {name}.float()."
        )
    if value.ndim < axes or (axes and 0 in value.shape[-axes:]):
        wanted = f"{shape or f'at least {axes} axes, leading ones are batch'}, none of the last {axes} empty"
        raise ArgumentError(f"{caller}: {name} has shape {tuple(value.shape)}. Pass {wanted}.")
    return value


def alike(caller: str, **tensors: Tensor | None) -> None:
    """Raise unless all tensors have the dtype and the device of the first; None is left out."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in present[1:]:
        first, y = present[0]
        if x.dtype != y.dtype or x.device != y.device:
            raise ArgumentError(
                f"{caller}: {first} is {y.dtype} on {y.device}, {name} is {x.dtype} on {x.device}. "
                f"Pass the same dtype and device: {name}.to({first})."
            )


def generator(caller: str, value: object, device: torch.device | None = None) -> torch.Generator | None:
    """`value`, if it is None or a torch generator for draws on `device` (None allows any device)."""
    if value is None:
        return None
    if not isinstance(value, torch.Generator):
        raise ArgumentError(
            f"{caller}: generator is {value!r}. Pass a torch.Generator, or None for torch's own."
        )
    if device is not None and value.device.type != device.type:
        raise ArgumentError(
            f"{caller}: generator is on {value.device}, the draws are made on {device}. "
            f"Pass torch.Generator({str(device)!r})."
        )
    return value


def entries(caller: str, name: str, tensor: Tensor, valid: Tensor, wanted: str) -> None:
    """Raise at the first leading index of tensor ``(..., *event)`` where `valid` ``(...)`` is false.

    `wanted` says in words what an entry must be.
    """
    if not is_concrete(tensor, valid) or bool(valid.all()):
        return
    index = tuple((~valid).nonzero()[0].tolist())
    where = f"{name}[{', '.join(map(str, index))}]" if index else name
    raise ArgumentError(f"{caller}: {where} must be {wanted}; got {tensor[index].tolist()}.")


def finite(caller: str, **tensors: Tensor) -> None:
    """Raise unless every entry is finite."""
    for name, tensor in tensors.items():
        if is_concrete(tensor) and not _between(tensor, -math.inf):
            entries(caller, name, tensor, tensor.isfinite(), "finite")


def positive(caller: str, **tensors: Tensor) -> None:
    """Raise unless every entry is finite and greater than 0."""
    for name, tensor in tensors.items():
        if is_concrete(tensor) and not _between(tensor, 0.0):
            entries(caller, name, tensor, (tensor > 0) & tensor.isfinite(), "positive and finite")


def _between(tensor: Tensor, lower: float) -> bool:
    """Whether lower < x < ∞ for every entry, in one pass: aminmax returns NaN if any entry is NaN."""
    if tensor.numel() == 0:
        return True
    least, largest = tensor.detach().aminmax()
    return bool((least > lower) & (largest < math.inf))
