r"""The precision that f works in, and the one that a solver works in.

f works in the dtype that the caller chose, under the caller's autocast. The solver's own arithmetic
(differences, Gram matrices, linear solves) would drown in the rounding of half precision, so it is done in
float32 at least and with autocast off. Only the rounding of f is left, and it sets the smallest residual
that can be asked for: a few eps of the precision that f works in.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import autocasts

Function = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALF, torch.float32, torch.float64)


class Precision(NamedTuple):
    """The dtypes of one problem.

    Args:
        given: dtype of the state as f sees it.
        own: dtype of the state as the solver keeps it.
        device: of both.
        autocast: dtype that f is cast to, None without autocast. float64 is never cast.
    """

    given: torch.dtype
    own: torch.dtype
    device: torch.device
    autocast: torch.dtype | None

    @classmethod
    def of(cls, start: Tensor) -> "Precision":
        """The dtypes and autocast setting in force for `start`."""
        given, device = start.dtype, start.device
        cast = given is not torch.float64 and autocasts(device)
        own = torch.float32 if given in _HALF else given
        return cls(given, own, device, torch.get_autocast_dtype(device.type) if cast else None)

    @property
    def eps(self) -> float:
        """The eps of the precision that f works in."""
        eps = torch.finfo(self.given).eps
        return eps if self.autocast is None else max(eps, torch.finfo(self.autocast).eps)

    @property
    def tolerance(self) -> float:
        """The default tolerance: 256 eps; in half precision, where that would be too coarse, 4 eps."""
        return (4 if self.eps > 256 * torch.finfo(torch.float32).eps else 256) * self.eps

    def lift(self, function: Function) -> Function:
        """The function with the solver's dtype in and out, computed in the caller's dtype and autocast."""
        if self.autocast is None:
            if self.given is self.own:
                return function
            return lambda x: function(x.to(self.given)).to(self.own)
        kind, dtype, cached = self.device.type, self.autocast, torch.is_autocast_cache_enabled()

        def lifted(x: Tensor) -> Tensor:
            with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
                return function(x.to(self.given)).to(self.own)

        return lifted


def lifted(
    caller: str, name: str, function: Function, state: Tensor, event_dims: int
) -> tuple[Function, Tensor, Tensor, Precision]:
    """Function, state, image and precision as a solver sees them; an error if state or image do not fit."""
    if not isinstance(state, Tensor):
        kind = type(state).__name__
        raise ArgumentError(f"{caller}: {name} is a {kind}. Pass a tensor: torch.as_tensor({name}).")
    if state.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ArgumentError(
            f"{caller}: {name} has dtype {state.dtype}, which is not supported. Pass floating point: {known}."
        )
    if event_dims > state.ndim:
        raise ArgumentError(
            f"{caller}: event_dims is {event_dims}, {name} has shape {tuple(state.shape)}. "
            f"Pass 0 to {state.ndim}."
        )
    precision, state = Precision.of(state), state.detach()
    image = function(state)
    if not isinstance(image, Tensor):
        kind = type(image).__name__
        raise ArgumentError(f"{caller}: function returned {kind}; it must return a tensor like its argument.")
    alike = image.dtype == state.dtype or (precision.autocast is not None and image.is_floating_point())
    if image.shape != state.shape or not alike or image.device != state.device:
        raise ArgumentError(
            f"{caller}: function turned {tuple(state.shape)}, {state.dtype}, {state.device} into "
            f"{tuple(image.shape)}, {image.dtype}, {image.device}. "
            "It must return the shape, dtype and device that it was given."
        )
    return precision.lift(function), state.to(precision.own), image.to(precision.own), precision
