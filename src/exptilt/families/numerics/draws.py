r"""Normal, gamma and Poisson draws that stay in their support.

Many draws in main memory come from NumPy, on all threads, in half of torch's time. One number of the torch
generator seeds a stream for each block of entries,

    seed ~ generator,     block i of 8192 entries ~ SFC64(seed, i)

so that draws depend on the generator alone, not on the number of threads. Few draws, draws on another device
and draws within a transform of torch come from torch. Either way a gamma draw carries its pathwise derivative
in the shape: for x with distribution function F(x; a), dx/da = −∂_a F / ∂_x F.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support import transforms
from exptilt._support.threads import run_chunks
from exptilt._support.transforms import has_tangent, in_transform, is_concrete

Array = np.ndarray[Any, Any]
_BLOCK = 8192  # gamma draws take a quarter of a millisecond, a new stream a twentieth of that

LOG = ("log x", (1,))
"""The inner form of positive draws: their logarithm."""

# Least shapes whose draws underflow with a probability below 1e-19.
_SAFE = {torch.float64: 0.1, torch.float32: 0.5}
_LARGE = 2.0**50  # above this rate a count is drawn as a rounded normal, almost the same law in float64


def standard_normal(like: Tensor, size: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Normal draws of this size, in the dtype and on the device of `like`."""
    if not _many(like, math.prod(size)):
        return torch.randn(tuple(size), dtype=like.dtype, device=like.device, generator=generator)
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    result = torch.empty(tuple(size), dtype=like.dtype)
    return _filled(result, generator, lambda rng, start, stop: rng.standard_normal(stop - start, kind))


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws, differentiable in the shape, no smaller than the least normal number."""
    tiny = torch.finfo(shape.dtype).tiny
    if not _many(shape, shape.numel()):
        return transforms.standard_gamma(shape, generator).clamp_min(tiny)
    a, result = shape.detach().reshape(-1).double().numpy(), torch.empty(shape.shape, dtype=shape.dtype)
    _filled(result, generator, lambda rng, start, stop: np.maximum(rng.standard_gamma(a[start:stop]), tiny))
    return _pathwise(shape, result)


def log_standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Logarithms of Gamma(shape, 1) draws, differentiable in the shape.

    For a small shape a the draws themselves underflow, but their logarithms do not:

        log x = log y + (log u) / a     with y ~ Gamma(a + 1, 1) and u uniform.
    """
    if _safe(shape):
        return standard_gamma(shape, generator).log()
    uniform = torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return standard_gamma(shape + 1, generator).log() + torch.log1p(-uniform) / shape


def shares(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Dirichlet draws along the last axis, differentiable in the shape: Gamma(shape, 1) over their sum."""
    if _safe(shape):
        x = standard_gamma(shape, generator)
        return x / x.sum(-1, keepdim=True)
    return torch.softmax(log_standard_gamma(shape, generator), -1)


def _safe(shape: Tensor) -> bool:
    """Whether no Gamma draw of these shapes underflows."""
    if not is_concrete(shape) or not shape.numel():
        return False
    return float(shape.detach().amin()) >= _SAFE.get(shape.dtype, math.inf)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Poisson counts, entry by entry."""
    below = rate.clamp_max(_LARGE)
    if _many(rate, rate.numel()):
        flat, drawn = below.detach().reshape(-1).double().numpy(), torch.empty(rate.shape, dtype=rate.dtype)
        _filled(drawn, generator, lambda rng, start, stop: rng.poisson(flat[start:stop]))
    else:
        drawn = torch.poisson(below, generator=generator)
    if is_concrete(rate) and not bool((rate > _LARGE).any()):
        return drawn
    normal = torch.randn(rate.shape, dtype=rate.dtype, device=rate.device, generator=generator)
    return torch.where(rate > _LARGE, (rate + rate.sqrt() * normal).round(), drawn)


def categories(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Categories ``(..., 1)`` with ``log_weight (..., K)``, drawn by inverting ``uniform (..., 1)``."""
    cumulative = torch.softmax(log_weight.detach().double(), -1).cumsum(-1)
    index = (uniform * cumulative[..., -1:] >= cumulative).sum(-1, keepdim=True)
    return index.clamp_max(log_weight.shape[-1] - 1)


def _many(parameter: Tensor, count: int) -> bool:
    """Whether NumPy draws: at least a block, and parameters that can be read and lie in main memory."""
    if count < _BLOCK or not is_concrete(parameter) or in_transform():
        return False
    return parameter.device.type == "cpu" and not has_tangent(parameter)


def _filled(
    result: Tensor, generator: torch.Generator | None, draw: Callable[[np.random.Generator, int, int], Array]
) -> Tensor:
    """The contiguous `result` filled by blocks: entries start..stop from ``draw(stream, start, stop)``."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    flat = result.view(-1).numpy()

    def work(first: int, last: int) -> None:
        for block in range(first, last):
            start, stop = block * _BLOCK, min((block + 1) * _BLOCK, flat.size)
            stream = np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(block,)))
            flat[start:stop] = draw(np.random.Generator(stream), start, stop)

    run_chunks(work, -(-flat.size // _BLOCK))
    return result


class _Pathwise(Function):
    """A gamma draw with its derivative in the shape."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(shape, drawn)
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        return bar * transforms.standard_gamma_slope(*ctx.saved_tensors), None


_pathwise: Callable[[Tensor, Tensor], Tensor] = _Pathwise.apply
