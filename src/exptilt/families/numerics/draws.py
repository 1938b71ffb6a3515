r"""Normal, gamma and Poisson draws: NumPy's samplers, on all threads, from a torch generator.

One number is taken from the torch generator and becomes the seed of a family of streams, one for each block of entries:

    seed ~ generator,     block i of 8192 entries ~ SFC64(seed, i)

Which thread draws which block makes no difference, so the result depends on the generator alone, not on the number of threads. NumPy's
ziggurat normals and gammas take half the time of torch's float64 ones, and torch draws all of these on one thread.

Where values cannot be looked at (`torch.compile`, `torch.func`) or are not on the CPU, torch's own samplers are used; the choice is made in
`_on_cpu`, for all three alike. A gamma draw carries its pathwise derivative in the shape either way: for x with distribution function
F(x; a), dx/da = −∂_a F / ∂_x F.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support import transforms
from exptilt._support.kernels import run_chunks
from exptilt._support.transforms import has_tangent, in_transform, is_concrete

Array = np.ndarray[Any, Any]
_BLOCK = 8192  # a quarter of a millisecond of gammas; a new stream costs a twentieth of that
_SAFE = {
    torch.float64: 0.1,
    torch.float32: 0.5,
}  # least shape whose draws underflow with a probability below 1e-19
_LARGE = 2.0**53  # beyond it float64 cannot tell neighbouring counts apart, nor their law from a normal one


def standard_normal(like: Tensor, size: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Normal draws of this size, in the dtype and on the device of `like`."""
    if not _on_cpu(like):
        return torch.randn(tuple(size), dtype=like.dtype, device=like.device, generator=generator)
    result = torch.empty(tuple(size), dtype=like.dtype)
    single = like.dtype == torch.float32
    _fill(
        result,
        generator,
        lambda rng, start, stop: rng.standard_normal(stop - start, np.float32 if single else np.float64),
    )
    return result


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws, entry by entry, differentiable in the shape; never 0 but the least normal number instead."""
    tiny = torch.finfo(shape.dtype).tiny
    if not _on_cpu(shape):
        return transforms.standard_gamma(shape, generator).clamp_min(tiny)
    flat = shape.detach().reshape(-1).double().numpy()
    result = torch.empty(shape.shape, dtype=shape.dtype)
    _fill(result, generator, lambda rng, start, stop: np.maximum(rng.standard_gamma(flat[start:stop]), tiny))
    if torch.is_grad_enabled() and shape.requires_grad:
        pathwise: Tensor = _Pathwise.apply(shape, result)
        return pathwise
    return result


def shares(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws over their sum along the last axis: a Dirichlet draw, differentiable in the shape.

    Of a small shape a the draws themselves underflow; their logarithms do not:

        log x = log y + (log u) / a     with y ~ Gamma(a + 1, 1) and u uniform.
    """
    if _on_cpu(shape) and shape.numel() and float(shape.detach().amin()) >= _SAFE.get(shape.dtype, math.inf):
        x = standard_gamma(shape, generator)
        return x / x.sum(-1, keepdim=True)
    uniform = torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return torch.softmax(standard_gamma(shape + 1, generator).log() + torch.log1p(-uniform) / shape, -1)


def poisson(rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Poisson counts, entry by entry."""
    if not _on_cpu(rate):
        return torch.poisson(rate, generator=generator)
    flat = rate.detach().reshape(-1).double().numpy()
    result = torch.empty(rate.shape, dtype=rate.dtype)
    _fill(result, generator, lambda rng, start, stop: _counts(rng, flat[start:stop]))
    return result


def _counts(rng: np.random.Generator, rate: Array) -> Array:
    large = rate > _LARGE
    if not large.any():
        return rng.poisson(rate)
    drawn: Array = rng.poisson(np.minimum(rate, _LARGE)).astype(np.float64)
    drawn[large] = np.rint(rate[large] + np.sqrt(rate[large]) * rng.standard_normal(int(large.sum())))
    return drawn


def functorch_active() -> bool:
    """Whether a `torch.func` transform is under way: under `vmap` what is drawn belongs to a batch, even if the parameters do not."""
    return not torch.compiler.is_compiling() and in_transform()


def _on_cpu(tensor: Tensor) -> bool:
    """Whether NumPy may draw: values can be looked at, are in main memory, and no derivative by `torch.func` is being taken."""
    if not is_concrete(tensor) or functorch_active() or tensor.device.type != "cpu":
        return False
    return not has_tangent(tensor)


def _fill(
    result: Tensor, generator: torch.Generator | None, draw: Callable[[np.random.Generator, int, int], Array]
) -> None:
    """Write ``draw(stream, start, stop)`` to the entries start..stop of a contiguous tensor, block by block."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    flat = result.view(-1).numpy()

    def work(first: int, last: int) -> None:
        for block in range(first, last):
            start, stop = block * _BLOCK, min((block + 1) * _BLOCK, flat.size)
            stream = np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(block,)))
            flat[start:stop] = draw(np.random.Generator(stream), start, stop)

    run_chunks(work, -(-flat.size // _BLOCK))


class _Pathwise(torch.autograd.Function):
    """Gives a gamma draw its derivative in the shape."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(shape, drawn)
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        shape, drawn = ctx.saved_tensors
        return bar * transforms.standard_gamma_slope(shape, drawn), None
