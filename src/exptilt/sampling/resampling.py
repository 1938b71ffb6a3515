r"""Resampling: N equally spaced pointers into the cumulative weights, moved by one uniform number.

    pointer_i = (i + U) / N,     ancestor_i = the least k with W_1 + … + W_k > pointer_i

Particle k is taken ⌊N W_k⌋ or ⌈N W_k⌉ times, N W_k on average. `point` is the only such loop: the
Rao–Blackwellised filter of `switching` calls it from its own compiled one.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import entries, floating, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.kernels import helper, kernel


@helper()
def point(weight: Any, start: float, ancestor: Any) -> None:
    """Write the ancestors of pointers (i + start)/N into weights of any sum; those of weight 0 have none."""
    total, last = 0.0, 0
    for k in range(weight.size):
        total += weight[k]
        if weight[k] > 0.0:
            last = k
    source, cumulative = 0, weight[0]
    for i in range(ancestor.size):
        pointer = (i + start) / ancestor.size * total
        while cumulative <= pointer and source < last:  # rounding may end beyond the last one alive
            source += 1
            cumulative += weight[source]
        ancestor[i] = source


@kernel("the kernel of resampling")
def _point_rows(weights: Any, starts: Any, ancestors: Any) -> None:
    for row in range(len(weights)):
        point(weights[row], starts[row], ancestors[row])


def systematic(
    log_weight: Tensor, count: int | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices of the particles that go on, drawn systematically and in ascending order.

    Args:
        log_weight: ``(..., N)``, up to a constant; −inf for a particle that is dead.
        count: how many are drawn; N if not given.
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
    alive = (log_weight > -torch.inf).any(-1) & (log_weight < torch.inf).all(-1)  # NaN is neither
    entries("systematic", "log_weight", log_weight, alive, "finite or −inf, and not −inf throughout")
    batch, device = log_weight.shape[:-1], log_weight.device
    weight = torch.softmax(log_weight.detach().double(), -1).reshape(-1, log_weight.shape[-1]).cpu().numpy()
    start = torch.rand((*batch, 1), dtype=torch.float64, device=device, generator=generator)
    ancestor = np.empty((len(weight), number), np.int64)
    _point_rows(weight, start.reshape(-1).cpu().numpy(), ancestor)
    return torch.from_numpy(ancestor).reshape(*batch, number).to(device)


def effective_size(log_weight: Tensor) -> Tensor:
    """(Σ w)² / Σ w², how many particles of equal weight these are worth.

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
