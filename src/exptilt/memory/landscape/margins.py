r"""How far a pattern stands out from the others, and which patterns are equal.

    Δ_i = min_{j≠i} (s_ii − s_ij):    dot ⟨x_i,x_i⟩ − ⟨x_i,x_j⟩,    cosine 1 − cos,    euclidean ½‖x_i − x_j‖²

Δ_i decides whether a pattern can be retrieved (``theory.py``). The N×N matrix of scores is never
made: blocks of patterns meet tiles of patterns, and each row keeps its largest score.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.progress import track

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_BLOCK = 1024  # patterns compared with all others at once


def one_memory(memory: "Hopfield", what: str) -> None:
    """Raise if the patterns have leading axes."""
    if memory.lead:
        raise ArgumentError(
            f"{what}: the patterns have leading axes {memory.lead}. Measure one memory at a time: "
            "Hopfield(patterns[h], beta[h])."
        )


def places(memory: "Hopfield", index: "int | Sequence[int] | Tensor | None", what: str) -> Tensor:
    """Places of patterns ``(P,)``, checked, at least one; None is all."""
    every = torch.arange(memory.count, device=memory.beta.device)
    if index is None:
        return every
    try:
        given = torch.as_tensor(index, device=every.device)
    except (TypeError, ValueError, RuntimeError):
        given = torch.full((1,), torch.nan)
    wrong = given.is_floating_point() or given.is_complex()
    if given.numel() and (wrong or (given.dtype == torch.bool and given.shape != every.shape)):
        wanted = f"Pass integers, the places of patterns, or {memory.count} booleans."
        raise ArgumentError(f"{what}: index is {index!r}. {wanted}")
    try:
        at = every[given if given.numel() else given.long()].reshape(-1)
    except IndexError:
        raise ArgumentError(f"{what}: index is {index}, and there are {memory.count} patterns.") from None
    if not at.numel():
        raise ArgumentError(f"{what}: index is {index}, which names no pattern. Pass at least one place.")
    return at


def warn_of_duplicates(memory: "Hopfield", what: str) -> None:
    """Warn which patterns are equal, if any are."""
    groups = memory.duplicates()
    if groups:
        more = f" and {len(groups) - 1} more groups (see `duplicates`)" if len(groups) > 1 else ""
        text = "Equal patterns have separation 0 and are recalled together."
        warnings.warn(f"{what}: patterns {groups[0]}{more} are equal. {text}", ExptiltWarning, stacklevel=3)


def separation(self: "Hopfield", *, index: Sequence[int] | None = None) -> Tensor:
    """How far each pattern stands out: Δ_i = min_{j≠i} (s_ii − s_ij), in scores of this memory's similarity.

    Warns where patterns are equal: their separation is 0.

    Args:
        index: the patterns to measure; None is all, at a cost of N² products in O(N) memory.

    Returns:
        ``(..., N)`` or ``(..., len(index))``; inf where there is one pattern only.
    """
    warn_of_duplicates(self, "separation")
    keys, found = self.keys, []
    for at in track(places(self, index, "separation").split(_BLOCK), "separation"):
        query, _, offset = keys.chosen(at.expand(*(self.lead or (1,)), -1))
        own = (query * query).sum(-1) + (0.0 if offset is None else offset)
        top = torch.full_like(own, -torch.inf)
        for _, score, start in keys.tiles(query):
            others = torch.arange(start, start + score.shape[-1], device=at.device)
            top = torch.maximum(top, score.masked_fill(at[:, None] == others, -torch.inf).amax(-1))
        found.append(own - top)
    gap = torch.cat(found, -1)
    return gap if self.lead else gap[0]


def duplicates(self: "Hopfield") -> list[list[int]]:
    """Groups of patterns that are equal in every leading index. They are allowed, and count together."""
    # Found by a hash of their bits, then compared.
    generator = torch.Generator().manual_seed(0)
    numbers = self.dimension * torch.Size(self.lead).numel()
    odd = torch.randint(-(2**62), 2**62, (numbers,), generator=generator).to(self.beta.device) * 2 + 1
    hashes = []
    for block in self.blocks:
        rows = block.patterns.detach().movedim(-2, 0).reshape(block.count, -1)
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[rows.element_size()]
        # + 0.0 turns −0 into 0
        hashes += [((part + 0.0).view(bits).long() * odd).sum(-1) for part in rows.split(1 << 14)]
    hashed = torch.cat(hashes)
    order = torch.argsort(hashed, stable=True)
    same = hashed[order[1:]] == hashed[order[:-1]]
    groups: list[list[int]] = []
    for k in same.nonzero()[:, 0].tolist():
        pair = order[k : k + 2]
        both = self.keys.picked(pair.expand(*(self.lead or (1,)), 2))[0]
        i, j = pair.tolist()
        if not torch.equal(both[..., 0, :], both[..., 1, :]):
            continue
        if groups and groups[-1][-1] == i:
            groups[-1].append(j)
        else:
            groups.append([i, j])
    return sorted(groups)
