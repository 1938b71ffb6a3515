"""What may be asked of `fixed_point`, checked as soon as it is said."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete

# Which of the options each solver takes.
TAKES = {
    "anderson": ("damping", "window", "regularization"),
    "picard": ("damping",),
    "broyden": ("window",),
    "newton-krylov": ("window",),
}


@dataclass(frozen=True)
class Options:
    """All that does not depend on the problem.

    Args:
        caller: whom an error message names.
        solver: as in `fixed_point`, like all that follow.
        tolerance: a number.
        max_steps: an integer.
        event_dims: an integer.
        damping: a number.
        window: an integer.
        regularization: a number.
        order: an integer.
        scale: a number or a tensor that broadcasts to ``(...)``.
        throw: whether to raise.
        strict: whether to raise for derivatives.
    """

    caller: str
    solver: str
    tolerance: float | None
    max_steps: int
    event_dims: int
    damping: float | None
    window: int | None
    regularization: float | None
    order: int
    scale: float | Tensor | None
    throw: bool
    strict: bool | None

    def __post_init__(self) -> None:
        if not isinstance(self.solver, str) or self.solver not in TAKES:
            raise ArgumentError(
                f"{self.caller}: no solver is called {self.solver!r}. Pass one of {', '.join(TAKES)}."
            )
        for name in ("damping", "window", "regularization"):
            if getattr(self, name) is not None and name not in TAKES[self.solver]:
                known = ", ".join(TAKES[self.solver])
                raise ArgumentError(
                    f"{self.caller}: {name} means nothing to the solver {self.solver!r}, which takes {known}. Leave it out."
                )
        if self.tolerance is not None:
            number(self.caller, "tolerance", self.tolerance, above=0)
        integer(self.caller, "max_steps", self.max_steps, 1)
        integer(self.caller, "event_dims", self.event_dims, 0)
        integer(self.caller, "order", self.order, 1)
        if self.damping is not None:
            number(self.caller, "damping", self.damping, above=0, most=1)
        if self.window is not None:
            integer(self.caller, "window", self.window, 1)
        if self.regularization is not None:
            number(self.caller, "regularization", self.regularization, least=0)
        if isinstance(self.scale, Tensor):
            if is_concrete(self.scale) and not bool(((self.scale >= 0) & self.scale.isfinite()).all()):
                raise ArgumentError(f"{self.caller}: scale is {self.scale}. Pass finite numbers ≥ 0.")
        elif self.scale is not None:
            number(
                self.caller, "scale", self.scale, least=0, otherwise=", or a tensor of one number a sample"
            )


def integer(caller: str, name: str, value: object, least: int) -> None:
    """Refuse what is no integer of at least this."""
    if isinstance(value, bool) or not isinstance(value, int | Integral) or value < least:
        raise ArgumentError(f"{caller}: {name} is {value!r}. Pass an integer ≥ {least}.")


def number(
    caller: str,
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    otherwise: str = "",
) -> None:
    """Refuse what is no finite number within these bounds."""
    sound = (
        not isinstance(value, bool)
        and isinstance(value, float | Real)
        and math.isfinite(float(value))
        and above < float(value)
        and least <= float(value) <= most
    )
    if not sound:
        bounds = (f"> {above:g}" if above > -math.inf else f"≥ {least:g}") + (
            f" and ≤ {most:g}" if most < math.inf else ""
        )
        raise ArgumentError(f"{caller}: {name} is {value!r}. Pass a finite number {bounds}{otherwise}.")
