"""Hidden states along the depth of a model, gathered block by block (THEORY F6).

Kept are a sample of hidden states, their norms, and the factor by which each part of a block multiplies a
norm. The first token of a text is left out of samples and means. In many trained transformers it serves as a
place to attend to when there is nothing else, grows to a hundred times the norm of the others, and would
drown them. Its norm is given by itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt.lens.questions.blocks import Passage

GROWTH = ("attention_expansion", "mlp_expansion", "norm_contraction")


def growth(before: Tensor, after: Tensor) -> float:
    """Geometric mean over tokens of ‖after‖ / ‖before‖, both ``(token, width)``."""
    ratio = after.double().norm(dim=-1).log() - before.double().norm(dim=-1).log()
    return float(ratio[ratio.isfinite()].mean().exp()) if bool(ratio.isfinite().any()) else np.nan


def grown(passage: Passage, *, partial: bool) -> dict[str, float]:
    """Factors by which attention, MLP and norms multiply the norm of a token: geometric means, or NaN.

    `partial` says that the block is attention alone, its MLP elsewhere.
    """
    found = dict.fromkeys(GROWTH, float("nan"))
    middle, output, norms = passage.middle(), passage.output, passage.norms

    def ratio(before: Tensor, after: Tensor) -> float:
        tokens = slice(1, None) if before.shape[1] > 1 else slice(None)
        return growth(before[0, tokens], after[0, tokens])

    if middle is not None and len(passage.calls) == 1:
        found["attention_expansion"] = ratio(passage.hidden, middle)
        if output is not None and not partial:
            last = norms[-1] if norms else None
            if last is None or not torch.equal(last.after, output):
                found["mlp_expansion"] = ratio(middle, output)
            else:  # normalised after each sum: attention, norm, MLP, norm
                normed = next((e.after for e in norms if torch.equal(e.before, middle)), None)
                if normed is not None and last.late:
                    found["mlp_expansion"] = ratio(normed, last.before)
    factors = [ratio(event.before, event.after) for event in norms]
    if factors:
        found["norm_contraction"] = float(np.exp(np.mean(np.log(factors))))
    return found


@dataclass(frozen=True)
class Place:
    """One place along the depth."""

    label: str
    sample: Tensor  # (token, width)
    norm: float  # mean of all tokens but the first
    first_norm: float


class Depth:
    """Gathers places and factors as blocks run; blocks over another number of tokens are not sampled."""

    def __init__(self, model: nn.Module, tokens: int, sample: int, seed: int):
        self._modules, self._tokens = dict(model.named_modules()), tokens
        rest = np.arange(min(1, tokens - 1), tokens)
        chosen = np.random.default_rng([seed, tokens]).choice(rest, min(sample, rest.size), replace=False)
        self._kept = torch.from_numpy(np.sort(chosen))
        self._places: list[tuple[str, Place]] = []
        self._ends: dict[str, tuple[int, Place]] = {}
        self._last: dict[str, int] = {}
        self._blocks: list[tuple[str, int, dict[str, float]]] = []

    def _split(self, block: str) -> tuple[str, int, bool]:
        """Outermost ModuleList around a block, its index there, and whether it is only a part of a layer."""
        parts = block.split(".")
        for length in range(1, len(parts) + 1):
            if isinstance(self._modules.get(".".join(parts[: length - 1])), nn.ModuleList):
                return ".".join(parts[: length - 1]), int(parts[length - 1]), length < len(parts)
        return "", 0, False

    def add(self, name: str, passage: Passage) -> None:
        """Add the passage of a block that has run."""
        stack, number, partial = self._split(name)
        before = self._last.get(stack)
        label = "embedding" if before is None else f"after layer {before}"
        label = f"inside layer {number}" if before == number else label
        self._last[stack] = number
        self._places.append((stack, self._place(label, passage.hidden)))
        self._ends.pop(stack, None)
        if passage.output is not None and not partial:
            self._ends[stack] = (len(self._places), self._place(f"after layer {number}", passage.output))
        self._blocks.append((stack, number, grown(passage, partial=partial)))

    def _place(self, label: str, hidden: Tensor) -> Place:
        states = hidden[0].detach()
        size = states.double().norm(dim=-1)
        kept = states[self._kept.to(states.device)] if states.shape[0] == self._tokens else states[:0]
        norm = float(size[1:].mean()) if len(size) > 1 else float("nan")
        return Place(label, kept.float().cpu(), norm, float(size[0]))

    def result(self) -> dict[str, NDArray[Any]]:
        """Arrays by name: numbers of each ``place:`` and ``block:``, hidden states of each ``sample:``."""
        places = list(self._places)
        for stack, (index, place) in sorted(self._ends.items(), key=lambda item: -item[1][0]):
            places.insert(index, (stack, place))

        def label(stack: str, text: str) -> str:
            return f"{stack}: {text}" if len(self._last) > 1 else text

        blocks = [label(stack, f"layer {number}") for stack, number, _ in self._blocks]
        found: dict[str, NDArray[Any]] = {
            "place_labels": np.array([label(stack, place.label) for stack, place in places], dtype=np.str_),
            "place:hidden_norm": np.array([place.norm for _, place in places]),
            "place:first_norm": np.array([place.first_norm for _, place in places]),
            "block_labels": np.array(blocks, dtype=np.str_),
        }
        found |= {f"block:{name}": np.array([x[name] for _, _, x in self._blocks]) for name in GROWTH}
        return found | {f"sample:{i}": place.sample.numpy() for i, (_, place) in enumerate(places)}
