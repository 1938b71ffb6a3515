"""The options of `fixed_point` and `Equilibrium`, checked when they are passed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete

# The options that each solver takes.
TAKES = {"anderson": ("damping", "window"), "picard": ("damping",)}
# Bounds of the options that are real numbers.
_BOUNDS: dict[str, dict[str, Any]] = {"tolerance": {"above": 0}, "damping": {"above": 0, "most": 1}}
_LEAST = {"max_steps": 1, "event_dims": 0, "order": 1, "window": 1}


@dataclass(frozen=True)
class Options:
    """The settings of a solve; `caller` begins error messages, the others are explained in `fixed_point`."""

    caller: str
    solver: str = "anderson"
    tolerance: float | None = None
    max_steps: int = 500
    event_dims: int = 1
    damping: float | None = None
    window: int | None = None
    order: int = 2
    scale: float | Tensor | None = None
    throw: bool = True
    strict: bool | None = None

    def __post_init__(self) -> None:
        caller, given = self.caller, {name: x for name, x in vars(self).items() if x is not None}
        if not isinstance(self.solver, str) or self.solver not in TAKES:
            known = ", ".join(TAKES)
            raise ArgumentError(f"{caller}: no solver is called {self.solver!r}. Pass one of {known}.")
        takes = TAKES[self.solver]
        for name in TAKES["anderson"]:
            if name in given and name not in takes:
                raise ArgumentError(
                    f"{caller}: {name} is not an option of the solver {self.solver!r}, which takes "
                    f"{', '.join(takes)}. Leave it out."
                )
        for name in given.keys() & _BOUNDS.keys():
            number(caller, name, given[name], **_BOUNDS[name])
        for name, least in _LEAST.items():
            if name in given or name in ("max_steps", "event_dims", "order"):
                whole(caller, name, getattr(self, name), least=least)
        if isinstance(self.scale, Tensor):
            if is_concrete(self.scale) and not bool(((self.scale >= 0) & self.scale.isfinite()).all()):
                raise ArgumentError(f"{caller}: scale is {self.scale}. Pass finite numbers ≥ 0.")
        elif self.scale is not None:
            number(caller, "scale", self.scale, least=0, otherwise=", or a tensor of one number a sample")
