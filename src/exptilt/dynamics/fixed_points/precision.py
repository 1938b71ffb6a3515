r"""The precision that f works in, and the one that a solver works in.

f is given the dtype that the caller chose, with the caller's autocast. What a solver does with the results, differences, Gram matrices and
linear solves, would drown in the rounding of half precision: that is done in float32 at least and with autocast off. So the rounding
of f is the only one that counts, and it sets how small a residual may be asked for: a few eps of what f works in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)
DTYPES = (*_HALF, torch.float32, torch.float64)


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext()


class Precision(NamedTuple):
    """Of one problem.

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
        """As it is here and now, for this state."""
        given, device = start.dtype, start.device
        cast = given is not torch.float64 and _autocasts(device)
        return cls(
            given,
            torch.float32 if given in _HALF else given,
            device,
            torch.get_autocast_dtype(device.type) if cast else None,
        )

    @property
    def eps(self) -> float:
        """Of what f works in."""
        eps = torch.finfo(self.given).eps
        return eps if self.autocast is None else max(eps, torch.finfo(self.autocast).eps)

    @property
    def tolerance(self) -> float:
        """The default: 256 eps, but 4 of half precision, where 256 would be everything."""
        return (4 if self.eps > 256 * torch.finfo(torch.float32).eps else 256) * self.eps

    def lift(self, function: Function) -> Function:
        """The function as the solver sees it: in and out in its own dtype, but computed as the caller wanted."""
        if self.autocast is None:
            if self.given is self.own:
                return function
            return lambda x: function(x.to(self.given)).to(self.own)
        kind, dtype, cached = self.device.type, self.autocast, torch.is_autocast_cache_enabled()

        def lifted(x: Tensor) -> Tensor:
            with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
                return function(x.to(self.given)).to(self.own)

        return lifted
