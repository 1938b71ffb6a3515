"""95% confidence intervals of means and shares."""

from typing import NamedTuple

import torch
from torch import Tensor

_LEVEL = 0.95


class Interval(NamedTuple):
    """A mean or share with its 95% confidence interval.

    Attributes:
        mean: ``(...)``.
        low: ``(...)``.
        high: ``(...)``.
    """

    mean: Tensor
    low: Tensor
    high: Tensor


def mean_interval(values: Tensor) -> Interval:
    """Student's interval of the mean over the last axis, NaN left out; one value alone has the interval NaN.

    Args:
        values: ``(..., seeds)``.
    """
    from scipy import special  # not above: importing it takes longer than importing all of this package

    there = ~values.isnan()
    count = there.sum(-1)
    x = torch.where(there, values, 0.0).double()
    mean = x.sum(-1) / count
    variance = torch.where(there, (x - mean.unsqueeze(-1)).square(), 0.0).sum(-1) / (count - 1)
    factor = torch.as_tensor(special.stdtrit((count - 1).clamp_min(1).cpu().numpy(), (1 + _LEVEL) / 2)).to(
        x.device
    )
    half = factor * (variance / count).sqrt()
    return Interval(mean, mean - half, mean + half)


def share_interval(hits: int, count: int) -> tuple[float, float, float]:
    """Share of hits among trials, with Clopper and Pearson's exact interval.

    Args:
        hits: number of hits.
        count: number of trials, at least 1.

    Example:
        >>> [round(x, 3) for x in share_interval(8, 10)]
        [0.8, 0.444, 0.975]
    """
    from scipy import special

    tail = (1 - _LEVEL) / 2
    low = float(special.betaincinv(hits, count - hits + 1, tail)) if hits else 0.0
    high = float(special.betaincinv(hits + 1, count - hits, 1 - tail)) if hits < count else 1.0
    return hits / count, low, high
