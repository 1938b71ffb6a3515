r"""The basin of attraction of a pattern, measured.

Around each pattern, along random directions u, the largest r is sought from which retrieval of x + ru still ends where retrieval of x
itself ends. Each ray is bisected between 0 and 4M; all rays of all patterns move in one batch. A basin need not be star-shaped: on a ray
that leaves it and comes back, bisection finds one of the crossings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.intervals import mean_interval
from exptilt._support.progress import track
from exptilt.memory.checks import check_count
from exptilt.memory.landscape.margins import places
from exptilt.memory.retrieval import settle
from exptilt.memory.theory import guaranteed_radius

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_FARTHEST = 4.0  # in units of M: the hull of the patterns is at most 2M wide
_SAME = 1e-3  # two ends are the same fixed point when closer than this, in units of M


@dataclass(frozen=True)
class Basin:
    """Radii of attraction of P patterns along U directions each.

    Args:
        index: ``(P,)``, which patterns.
        low: ``(P, U)``, a radius from which retrieval came back.
        high: ``(P, U)``, one from which it did not; inf where it came back from 4M too.
        guaranteed: ``(P,)``, the radius theory vouches for, 0 where it does not (``theory.py``; dot and softmax only, else 0).
    """

    index: Tensor
    low: Tensor
    high: Tensor
    guaranteed: Tensor

    @property
    def radius(self) -> Tensor:
        """``(P,)``: the smallest over the directions tried; a larger ball is refuted."""
        return self.low.amin(-1)

    @property
    def mean(self) -> Tensor:
        """``(P,)``: the mean over directions."""
        return self.low.mean(-1)

    @property
    def interval(self) -> Tensor:
        """``(P, 2)``: 95 % confidence interval of the mean over directions; NaN for one direction."""
        _, low, high = mean_interval(self.low)
        return torch.stack([low, high], -1).to(self.low.dtype)


def one_memory(memory: "Hopfield", what: str) -> None:
    """Experiments are done on one memory at a time."""
    if memory.patterns.ndim > 2:
        raise ArgumentError(
            f"{what}: the patterns have leading axes {tuple(memory.patterns.shape[:-2])}. Measure one memory at a time: "
            "Hopfield(patterns[h], beta[h])."
        )


@torch.no_grad()
def measure(
    memory: "Hopfield",
    index: Sequence[int] | None,
    *,
    directions: int,
    precision: float,
    generator: torch.Generator | None,
) -> Basin:
    """See `Hopfield.basin`."""
    from exptilt.memory.separation import Softmax

    one_memory(memory, "basin")
    check_count("basin", "directions", directions)
    if not 0 < precision < _FARTHEST:
        raise ArgumentError(f"basin: precision is {precision}. Pass a number between 0 and {_FARTHEST}.")
    at = places(memory, index, "basin")
    x = memory.keys.chosen(at[None])[0][0]
    M = float(memory.size)
    home = _end(memory, x)
    u = torch.randn(
        at.numel(), directions, memory.dimension, dtype=x.dtype, device=x.device, generator=generator
    )
    u = u / u.norm(dim=-1, keepdim=True)

    def returns(r: Tensor) -> Tensor:
        end = _end(memory, x[:, None] + r[..., None] * u)
        return (end - home[:, None]).norm(dim=-1) <= _SAME * M

    low, high = x.new_zeros(at.numel(), directions), x.new_full((at.numel(), directions), _FARTHEST * M)
    all_the_way = returns(high)
    for _ in track(range(math.ceil(math.log2(_FARTHEST / precision))), "basins"):
        middle = (low + high) / 2
        back = returns(middle)
        low, high = torch.where(back, middle, low), torch.where(back, high, middle)
    low, high = torch.where(all_the_way, _FARTHEST * M, low), torch.where(all_the_way, torch.inf, high)
    guaranteed = torch.zeros_like(low[:, 0])
    if isinstance(memory.rule, Softmax) and memory.similarity.name == "dot":
        guaranteed = guaranteed_radius(
            memory.separation(index=at.tolist()), count=memory.count, beta=float(memory.beta), size=M
        )
    return Basin(at, low, high, guaranteed)


def _end(memory: "Hopfield", state: Tensor) -> Tensor:
    """Where retrieval ends; a ray on the border of two basins may take long, and then counts by where it stands."""
    return settle(memory, state, 1e-6, 1000, show=False).value
