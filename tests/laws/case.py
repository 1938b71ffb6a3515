"""What a measure under law has to say of itself, and how the members in `registry.py` are drawn."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exptilt import families as f

F64 = torch.float64
Generator = torch.Generator


def rand(g: Generator, *size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(size, dtype=F64, generator=g)


def randn(g: Generator, *size: int) -> Tensor:
    return torch.randn(size, dtype=F64, generator=g)


def spd(g: Generator, *batch: int, size: int, low: float = 0.3) -> Tensor:
    root = randn(g, *batch, size, size) / size**0.5
    return root @ root.mT + low * torch.eye(size, dtype=F64)


@dataclass
class Case:
    """One measure under law.

    make: a random member with the given batch. tilt: a valid η for a member. extreme: members at the edge of
    what floats hold. boundary: means of t on the boundary of the hull, where it has one. known: what
    `from_natural` has to be told beside the parameter. whole: fields that hold whole numbers, which nobody
    differentiates by.
    """

    cls: type
    make: Callable[..., f.Measure]
    tilt: Callable[[Any, Generator], Tensor] = lambda h, g: randn(g, *h.batch_shape, h.dimension) * 0.5
    extreme: Callable[[], list[f.Measure]] = list
    boundary: Callable[[Any], Tensor] | None = None
    integral: Callable[[], float] | None = None
    scipy: Callable[[Any], Any] | None = None
    scipy_x: Callable[[Tensor], Any] = lambda x: x.numpy()
    scipy_offset: float = 0.0
    tolerance: float = 1e-9
    known: Callable[[Any], dict[str, Tensor]] = lambda h: {}
    whole: tuple[str, ...] = ()
    name: str = field(default="")

    def __post_init__(self) -> None:
        self.name = self.name or self.cls.__name__


def toward_another(case_make: Callable[..., Any]) -> Callable[[Any, Generator], Tensor]:
    """η that leads part of the way to another random member: the natural domain is convex, so it is valid."""

    def tilt(h: Any, g: Generator) -> Tensor:
        other = case_make(g, tuple(h.batch_shape))
        difference: Tensor = (other.natural_parameter - h.natural_parameter)[..., : h.dimension]
        return difference * 0.5

    return tilt


def quadrature(
    h: f.Measure, lower: list[float], upper: list[float], wrap: Callable[[Tensor], Any] = lambda x: x
) -> float:
    rule = f.FromDensity.quadrature(lambda x: h.log_prob(wrap(x)), lower=lower, upper=upper)
    return float(rule.log_normalizer(torch.zeros(len(lower), dtype=F64)).exp())


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)
