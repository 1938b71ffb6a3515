"""Where flows start: named laws of independent coordinates, all with mean 0 and variance 1."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError

_DEGREES = 3


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _laplace(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    u = _uniform(shape, generator) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp_max(0.5 - 1e-12)) / math.sqrt(2)


def _student(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    squares = sum(
        (_normal(shape, generator).square() for _ in range(_DEGREES)), torch.zeros(shape, dtype=torch.float64)
    )
    return _normal(shape, generator) / (squares / _DEGREES).sqrt() / math.sqrt(_DEGREES / (_DEGREES - 2))


def _bimodal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # ±0.9 with noise of variance 1 − 0.9².
    side = torch.where(_uniform(shape, generator) < 0.5, -0.9, 0.9).double()
    return side + math.sqrt(1 - 0.9**2) * _normal(shape, generator)


STARTS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "gaussian": _normal,
    "laplace": _laplace,
    "student": _student,
    "uniform": lambda shape, generator: (2 * _uniform(shape, generator) - 1) * math.sqrt(3),
    "bimodal": _bimodal,
    "skewed": lambda shape, generator: -torch.log1p(-_uniform(shape, generator)) - 1,
}


def check_start(name: str) -> None:
    """Raise unless a start has this name."""
    if name not in STARTS:
        raise ArgumentError(f"start is {name!r}. Pass one of {', '.join(STARTS)}.")


def start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a start of a named law, ``(*shape)`` float64."""
    check_start(name)
    return STARTS[name](shape, generator)
