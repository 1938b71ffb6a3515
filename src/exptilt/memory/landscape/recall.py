r"""How many of its patterns a memory gives back.

The rule, which every number of this kind depends on: pattern i is *recalled* if retrieval from x_i (plus noise, where asked for) ends
within a stated distance of x_i, and no other pattern is nearer to the end.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.intervals import share_interval
from exptilt._support.progress import track
from exptilt.memory.checks import check_count
from exptilt.memory.landscape.basins import one_memory
from exptilt.memory.landscape.margins import warn_of_duplicates
from exptilt.memory.patterns import Keys
from exptilt.memory.retrieval import settle
from exptilt.memory.separation import Maximum
from exptilt.memory.similarity import SIMILARITIES

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_BLOCK = 1024  # patterns recalled at once, and so how often the bar moves


@dataclass(frozen=True)
class Recall:
    """Which patterns came back.

    Args:
        recalled: ``(trials, N)`` booleans; ``(1, N)`` without noise, where all trials would be equal.
        error: of the same shape, distance of the end from the pattern, in units of M.
    """

    recalled: Tensor
    error: Tensor

    @property
    def count(self) -> int:
        """How many patterns came back in every trial."""
        return int(self.recalled.all(0).sum())

    @property
    def fraction(self) -> float:
        """Share of retrievals that succeeded."""
        return float(self.recalled.double().mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval (Clopper and Pearson) of that share, retrievals taken as independent."""
        return share_interval(int(self.recalled.sum()), self.recalled.numel())[1:]


@torch.no_grad()
def measure(
    memory: "Hopfield",
    *,
    noise: float,
    within: float,
    trials: int,
    max_steps: int,
    generator: torch.Generator | None,
    quiet: bool = False,
) -> Recall:
    """See `Hopfield.capacity`; `quiet` neither warns nor shows a bar."""
    one_memory(memory, "capacity")
    check_count("capacity", "trials", trials)
    check_count("capacity", "max_steps", max_steps)
    if not (0 <= noise < math.inf and 0 < within < math.inf):
        raise ArgumentError(
            f"capacity: noise is {noise}, within {within}. Pass finite numbers, noise >= 0 and within > 0."
        )
    if not quiet:
        warn_of_duplicates(memory, "capacity")
    keys = memory.keys.part(0, memory.count)[0][0]
    M = float(memory.size)
    rounds = trials if noise > 0 else 1
    near = Keys(keys[None], keys.square().sum(-1)[None], SIMILARITIES["euclidean"])
    recalled, errors = [], []
    for part in track(keys.split(_BLOCK) * rounds, "recall", show=False if quiet else None):
        start = part
        if noise > 0:
            kick = torch.randn(part.shape, dtype=part.dtype, device=part.device, generator=generator)
            start = part + noise * M * kick / kick.norm(dim=-1, keepdim=True)
        end = settle(memory, start, 1e-6, max_steps, show=False).value
        error = (end - part).norm(dim=-1)
        nearest = (end - Maximum().read(near, end[None], memory.head_beta).average[0]).norm(dim=-1)
        recalled.append((error <= within * M) & (error <= nearest * (1 + 1e-6)))
        errors.append(error / M)
    return Recall(torch.cat(recalled).reshape(rounds, -1), torch.cat(errors).reshape(rounds, -1))
