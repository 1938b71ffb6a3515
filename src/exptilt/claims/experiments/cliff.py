r"""The classical cliff: recall of random patterns by a Hebbian network as the load P/N grows.

Started at a stored pattern, the network settles close to it while the load is low; beyond α_c ≈ 0.138 (Amit,
Gutfreund, Sompolinsky 1985, N → ∞) it drifts away for good. The rule: a pattern x is *recalled* if its
overlap m = ⟨σ, x⟩/N with the state σ reached at the end exceeds a threshold. At α_c theory has m ≈ 0.967
just before the jump to about 0.35, so anything between tells the two apart; here it is 0.9. In a finite
network the jump is smeared out: some patterns are recalled above α_c, some lost below it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.progress import track
from exptilt.memory.binary.classical import ClassicalHopfield

RECALLED = 0.9  # the overlap above which a pattern counts as recalled


class Cliff(NamedTuple):
    """Share of the patterns recalled and mean overlap, ``(loads, seeds)`` each."""

    loads: tuple[float, ...]
    fraction: Tensor
    overlap: Tensor

    @property
    def mean(self) -> Tensor:
        """``(loads,)``: the share recalled, mean over seeds."""
        return self.fraction.mean(-1)


def classical_cliff(
    loads: Sequence[float] = (0.10, 0.13, 0.14, 0.15, 0.16, 0.18),
    *,
    units: int = 1000,
    seeds: int = 3,
    seed: int = 0,
) -> Cliff:
    """Share of random ±1 patterns that Hebbian networks recall when started at them, by load P/N."""
    fraction = torch.zeros(len(loads), seeds, dtype=torch.float64)
    overlap = torch.zeros_like(fraction)
    for i, j in track([(i, j) for i in range(len(loads)) for j in range(seeds)], "cliff"):
        generator = torch.Generator().manual_seed(seed + 1000 * i + j)
        shape = (max(1, round(loads[i] * units)), units)
        x = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
        end = ClassicalHopfield.hebbian(x).retrieve(x, throw=False, generator=generator).value
        m = (end * x).mean(-1)
        fraction[i, j], overlap[i, j] = (m > RECALLED).double().mean(), m.mean()
    return Cliff(tuple(loads), fraction, overlap)
