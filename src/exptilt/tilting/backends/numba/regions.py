"""The sweeps as C functions of a frame, one for float32 and one for float64, compiled when first asked for."""

from functools import cache
from importlib import import_module

from numba import types

from exptilt._support.kernels import region
from exptilt.tilting.backends.numba.frame import FRAME
from exptilt.tilting.backends.numba.machine import machine

SWEEPS = ("forward", "tangent", "backward")


@cache
def compiled(sweep: str, number: str) -> int:
    """The address of a sweep.

    Args:
        sweep: one of `SWEEPS`.
        number: "float32" or "float64".
    """
    function = getattr(import_module(f"{__package__}.{sweep}"), f"{sweep}_{number}")
    title = f"the {sweep} kernel of attention for {number}"
    variant = f"{machine().vector_bits}-{machine().block_rows}"
    return region(title, types.void(types.CPointer(FRAME)), variant)(function)
