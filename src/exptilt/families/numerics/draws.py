r"""Normal, gamma and Poisson draws that stay in their support.

A gamma draw carries its pathwise derivative in the shape: for x with distribution function F(x; a),
dx/da = −∂_a F / ∂_x F.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exptilt._support import transforms
from exptilt._support.transforms import is_concrete

# Least shapes whose draws underflow with a probability below 1e-19.
_SAFE = {torch.float64: 0.1, torch.float32: 0.5}
_LARGE = 2.0**50  # beyond it a count is drawn as a rounded normal: float64 hardly tells the two laws apart


def standard_normal(like: Tensor, size: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Normal draws of this size, in the dtype and on the device of `like`."""
    return torch.randn(tuple(size), dtype=like.dtype, device=like.device, generator=generator)


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws, differentiable in the shape; at least the least normal number."""
    return transforms.standard_gamma(shape, generator).clamp_min(torch.finfo(shape.dtype).tiny)


def shares(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Dirichlet draws, Gamma(shape, 1) over their sum along the last axis, differentiable in the shape.

    Of a small shape a the draws themselves underflow; their logarithms do not:

        log x = log y + (log u) / a     with y ~ Gamma(a + 1, 1) and u uniform.
    """
    if (
        is_concrete(shape)
        and shape.numel()
        and float(shape.detach().amin()) >= _SAFE.get(shape.dtype, math.inf)
    ):
        x = standard_gamma(shape, generator)
        return x / x.sum(-1, keepdim=True)
    uniform = torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return torch.softmax(standard_gamma(shape + 1, generator).log() + torch.log1p(-uniform) / shape, -1)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Poisson counts, entry by entry."""
    drawn = torch.poisson(rate.clamp_max(_LARGE), generator=generator)
    if is_concrete(rate) and not bool((rate > _LARGE).any()):
        return drawn
    normal = torch.randn(rate.shape, dtype=rate.dtype, device=rate.device, generator=generator)
    return torch.where(rate > _LARGE, (rate + rate.sqrt() * normal).round(), drawn)


def categories(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """The place in ``log_weight (..., K)`` that each of ``uniform (..., 1)`` in [0, 1) stands for."""
    cumulative = torch.softmax(log_weight.detach().double(), -1).cumsum(-1)
    index = (uniform * cumulative[..., -1:] >= cumulative).sum(-1, keepdim=True)
    return index.clamp_max(log_weight.shape[-1] - 1)
