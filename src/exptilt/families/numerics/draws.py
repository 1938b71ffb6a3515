r"""Normal, gamma and Poisson draws of torch that stay in their support.

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
_LARGE = 2.0**50  # above this rate a count is drawn as a rounded normal, almost the same law in float64


def standard_normal(like: Tensor, size: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Normal draws of this size, in the dtype and on the device of `like`."""
    return torch.randn(tuple(size), dtype=like.dtype, device=like.device, generator=generator)


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws, differentiable in the shape, no smaller than the least normal number."""
    return transforms.standard_gamma(shape, generator).clamp_min(torch.finfo(shape.dtype).tiny)


def log_standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Logarithms of Gamma(shape, 1) draws, differentiable in the shape.

    For a small shape a the draws themselves underflow, but their logarithms do not:

        log x = log y + (log u) / a     with y ~ Gamma(a + 1, 1) and u uniform.
    """
    if _safe(shape):
        return standard_gamma(shape, generator).log()
    uniform = torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return standard_gamma(shape + 1, generator).log() + torch.log1p(-uniform) / shape


def _safe(shape: Tensor) -> bool:
    """Whether no Gamma draw of these shapes underflows."""
    if not is_concrete(shape) or not shape.numel():
        return False
    return float(shape.detach().amin()) >= _SAFE.get(shape.dtype, math.inf)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Poisson counts, entry by entry."""
    drawn = torch.poisson(rate.clamp_max(_LARGE), generator=generator)
    if is_concrete(rate) and not bool((rate > _LARGE).any()):
        return drawn
    normal = torch.randn(rate.shape, dtype=rate.dtype, device=rate.device, generator=generator)
    return torch.where(rate > _LARGE, (rate + rate.sqrt() * normal).round(), drawn)


def categories(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Categories ``(..., 1)`` with ``log_weight (..., K)``, drawn by inverting ``uniform (..., 1)``."""
    cumulative = torch.softmax(log_weight.detach().double(), -1).cumsum(-1)
    index = (uniform * cumulative[..., -1:] >= cumulative).sum(-1, keepdim=True)
    return index.clamp_max(log_weight.shape[-1] - 1)
