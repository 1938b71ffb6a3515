r"""The basin of attraction of a pattern, measured.

Around each pattern, along random directions u, the largest r is sought from which retrieval of x + ru still
ends where retrieval of x itself ends. Each ray is bisected between 0 and 4M; all rays of all patterns move in
one batch. A basin need not be star-shaped: on a ray that leaves it and comes back, one crossing is found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.intervals import mean_interval
from exptilt._support.progress import track
from exptilt.memory.landscape.margins import one_memory, places
from exptilt.memory.retrieval import settle
from exptilt.memory.separation import Softmax
from exptilt.memory.theory import guaranteed_radius

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_FARTHEST = 4.0  # in units of M: the hull of the patterns is at most 2M wide
_SAME = 1e-3  # two ends are the same fixed point when closer than this, in units of M


@dataclass(frozen=True)
class Basin:
    """Radii of attraction of P patterns along U directions each.

    Args:
        index: ``(P,)``, places of the patterns.
        low: ``(P, U)``, a radius from which retrieval came back.
        high: ``(P, U)``, a radius from which it did not come back; inf where it came back from 4M too.
        guaranteed: ``(P,)``, the radius that theory guarantees (``theory.py``; dot and softmax only), else 0.
    """

    index: Tensor
    low: Tensor
    high: Tensor
    guaranteed: Tensor

    @property
    def radius(self) -> Tensor:
        """``(P,)``: the smallest radius over the directions tried; a larger ball is refuted."""
        return self.low.amin(-1)

    @property
    def mean(self) -> Tensor:
        """``(P,)``: the mean radius over directions."""
        return self.low.mean(-1)

    @property
    def interval(self) -> Tensor:
        """``(P, 2)``: 95 % confidence interval of the mean over directions; NaN for one direction."""
        return torch.stack(mean_interval(self.low)[1:], -1).to(self.low.dtype)


@torch.no_grad()
def basin(
    self: "Hopfield",
    *,
    index: Sequence[int] | None = None,
    directions: int = 16,
    precision: float = 1e-2,
    generator: torch.Generator | None = None,
) -> Basin:
    """Measured distances from each pattern up to which retrieval ends where it does from the pattern.

    Args:
        index: the patterns to measure; None is all.
        directions: how many random directions are tried around each pattern.
        precision: width of the bracket in which each radius is found, in units of M.
        generator: draws the directions.
    """
    one_memory(self, "basin")
    whole("basin", "directions", directions)
    number("basin", "precision", precision, above=0, below=_FARTHEST)
    at = places(self, index, "basin")
    x = self.keys.chosen(at[None])[0][0]
    M, shape = float(self.size), (at.numel(), directions)
    u = torch.randn(*shape, self.dimension, dtype=x.dtype, device=x.device, generator=generator)
    u = u / u.norm(dim=-1, keepdim=True)

    def end(state: Tensor) -> Tensor:
        """Where retrieval ends; the last state if the steps run out (a start on a border)."""
        return settle(self, state, 1e-6, 1000, show=False).value

    home = end(x)[:, None]

    def returns(r: Tensor) -> Tensor:
        near: Tensor = (end(x[:, None] + r[..., None] * u) - home).norm(dim=-1) <= _SAME * M
        return near

    low, high = x.new_zeros(shape), x.new_full(shape, _FARTHEST * M)
    all_the_way = returns(high)
    for _ in track(range(math.ceil(math.log2(_FARTHEST / precision))), "basins"):
        middle = (low + high) / 2
        back = returns(middle)
        low, high = torch.where(back, middle, low), torch.where(back, high, middle)
    low, high = torch.where(all_the_way, _FARTHEST * M, low), torch.where(all_the_way, torch.inf, high)
    guaranteed = torch.zeros_like(low[:, 0])
    if isinstance(self.rule, Softmax) and self.similarity.name == "dot":
        gap = self.separation(index=at.tolist())
        guaranteed = guaranteed_radius(gap, count=self.count, beta=float(self.beta), size=M)
    return Basin(at, low, high, guaranteed)
