"""Fixed-point problems with known answers, and the obvious way to solve them: iterate for long."""

from collections.abc import Callable

import torch
from torch import Tensor

F64 = torch.float64
SOLVERS = ("anderson", "picard")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def contraction(n: int, radius: float, seed: int) -> Tensor:
    """A matrix of this spectral norm."""
    a = torch.randn(n, n, dtype=F64, generator=generator(seed))
    return radius * a / torch.linalg.matrix_norm(a, 2)


def attention(patterns: Tensor, injection: Tensor, beta: float) -> Callable[[Tensor], Tensor]:
    """ξ ↦ softmax(β X ξ) X + injection."""
    return lambda state: torch.softmax(beta * state @ patterns.mT, -1) @ patterns + injection


def unrolled(function: Callable[[Tensor], Tensor], start: Tensor, steps: int = 120) -> Tensor:
    for _ in range(steps):
        start = function(start)
    return start


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
