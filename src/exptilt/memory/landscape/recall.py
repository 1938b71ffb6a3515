r"""How many of its patterns a memory recalls.

The rule, which every number of this kind depends on: pattern i is *recalled* if retrieval from x_i (plus
noise, where asked for) ends within a stated distance of x_i, and no other pattern is nearer to the end.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.intervals import share_interval
from exptilt._support.progress import track
from exptilt.memory.landscape.margins import one_memory, places, warn_of_duplicates
from exptilt.memory.patterns import Block, Keys
from exptilt.memory.retrieval import settle
from exptilt.memory.separation import Maximum
from exptilt.memory.similarity import SIMILARITIES

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_BLOCK = 1024  # patterns recalled at once, and between two moves of the progress bar


@dataclass(frozen=True)
class Recall:
    """Which patterns were recalled, and how closely.

    Args:
        recalled: ``(trials, N)`` booleans; ``(1, N)`` without noise, where all trials would be equal.
        error: of the same shape, distance of the end from the pattern, in units of M.
    """

    recalled: Tensor
    error: Tensor

    @property
    def count(self) -> int:
        """How many patterns were recalled in every trial."""
        return int(self.recalled.all(0).sum())

    @property
    def fraction(self) -> float:
        """Share of retrievals that succeeded."""
        return float(self.recalled.double().mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval (Clopper and Pearson) of `fraction`, retrievals taken as independent."""
        return share_interval(int(self.recalled.sum()), self.recalled.numel())[1:]


def capacity(
    self: "Hopfield",
    *,
    noise: float = 0.0,
    within: float = 0.1,
    trials: int = 1,
    max_steps: int = 1000,
    generator: torch.Generator | None = None,
) -> Recall:
    """Which of the stored patterns are recalled. For random patterns see `storage_capacity`.

    Args:
        noise: length of the random vector added to each start, in units of M.
        within: a pattern is recalled if retrieval ends within this distance of it, in units of M, and no
            other pattern is nearer.
        trials: starts for each pattern; one without noise, where all would be equal.
        max_steps: of each retrieval.
        generator: draws the noise.
    """
    one_memory(self, "capacity")
    whole("capacity", "trials", trials)
    whole("capacity", "max_steps", max_steps)
    number("capacity", "noise", noise, least=0)
    number("capacity", "within", within, above=0)
    warn_of_duplicates(self, "capacity")
    return recall(self, noise, within, trials if noise > 0 else 1, max_steps, generator)


@torch.no_grad()
def recall(
    memory: "Hopfield",
    noise: float,
    within: float,
    rounds: int,
    max_steps: int,
    generator: torch.Generator | None,
    show: bool | None = None,
) -> Recall:
    """See `capacity`."""
    keys = memory.keys.chosen(places(memory, None, "capacity")[None])[0][0]
    M = float(memory.size)
    near = Keys((Block(keys, keys.square().sum(-1)),), SIMILARITIES["euclidean"])
    recalled, errors = [], []
    for part in track(keys.split(_BLOCK) * rounds, "recall", show=show):
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
