"""Where flows start: named laws of independent coordinates, all with mean 0 and variance 1."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _laplace(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    u = _uniform(shape, generator) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp_max(0.5 - 1e-12)) / math.sqrt(2)


def _bimodal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # ±0.9 with noise of variance 1 − 0.9².
    side = torch.where(_uniform(shape, generator) < 0.5, -0.9, 0.9).double()
    return side + math.sqrt(1 - 0.9**2) * _normal(shape, generator)


STARTS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "gaussian": _normal,
    "laplace": _laplace,
    "uniform": lambda shape, generator: (2 * _uniform(shape, generator) - 1) * math.sqrt(3),
    "bimodal": _bimodal,
}


def start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a start of a named law, ``(*shape)`` float64."""
    return STARTS[name](shape, generator)
