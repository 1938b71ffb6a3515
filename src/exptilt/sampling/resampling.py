r"""Resampling: N equally spaced pointers into the cumulative weights, moved by one uniform number.

    pointer_i = (i + U) / N,     ancestor_i = the least k with W_1 + … + W_k > pointer_i

Particle k is taken ⌊N W_k⌋ or ⌈N W_k⌉ times, N W_k on average. The loop is in ``csrc/resampling.hpp``, shared
with the Rao–Blackwellised filter of `switching`.
"""

import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.checks import entries, floating, whole
from exptilt._support.checks import generator as check_generator


def systematic(
    log_weight: Tensor, count: int | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices of the particles that survive, drawn systematically, in ascending order.

    Args:
        log_weight: ``(..., N)``, up to a constant; −inf for a dead particle.
        count: number of draws; N if not given.
        generator: the source of randomness; torch's own if not given.

    Returns:
        ``(..., count)``.

    Example:
        >>> systematic(torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0]), 4)
        tensor([0, 2, 3, 4])
    """
    floating("systematic", "log_weight", log_weight, axes=1, shape="(..., N)")
    check_generator("systematic", generator, log_weight.device)
    number = log_weight.shape[-1] if count is None else whole("systematic", "count", count)
    alive = (log_weight > -torch.inf).any(-1) & (log_weight < torch.inf).all(-1)  # False for NaN
    entries("systematic", "log_weight", log_weight, alive, "finite or −inf, and not −inf throughout")
    batch, device = log_weight.shape[:-1], log_weight.device
    weight = torch.softmax(log_weight.detach().cpu().double(), -1).contiguous()
    weight = weight.reshape(-1, weight.shape[-1])
    start = torch.rand((*batch, 1), dtype=torch.float64, device=device, generator=generator).cpu()
    ancestor = torch.empty((len(weight), number), dtype=torch.int64)
    places = [x.data_ptr() for x in (weight, start, ancestor)]
    native.call("resample", native.frame("Resampling")(*weight.shape, number, *places))
    return ancestor.reshape(*batch, number).to(device)


def effective_size(log_weight: Tensor) -> Tensor:
    """Effective sample size (Σ w)² / Σ w²: the equivalent number of equally weighted particles.

    Args:
        log_weight: ``(..., N)``, up to a constant.

    Returns:
        ``(...)``, between 1 and N; 0 where all are dead.

    Example:
        >>> effective_size(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor(2.)
    """
    floating("effective_size", "log_weight", log_weight, axes=1, shape="(..., N)")
    return torch.softmax(log_weight, -1).square().sum(-1).reciprocal().nan_to_num(0.0)
