r"""How far a pattern stands out from the others, and which patterns are equal.

    Δ_i = min_{j≠i} (s_ii − s_ij)          <x_i,x_i> − <x_i,x_j> for dot, 1 − cos for cosine, ½‖x_i − x_j‖² for euclidean

This is what decides whether a pattern can be retrieved (``theory.py``). The N×N matrix of scores is never there: blocks of patterns meet
tiles of patterns, and each row keeps its largest score.
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


def places(memory: "Hopfield", index: "int | Sequence[int] | Tensor | None", what: str) -> Tensor:
    """Places of patterns ``(P,)``, checked, at least one; None is all."""
    every = torch.arange(memory.count, device=memory.patterns.device)
    if index is None:
        return every
    try:
        given = torch.as_tensor(index, device=every.device)
    except (TypeError, ValueError, RuntimeError):
        given = torch.full((1,), torch.nan)
    if given.numel() and (
        given.is_floating_point()
        or given.is_complex()
        or (given.dtype == torch.bool and given.shape != every.shape)
    ):
        raise ArgumentError(
            f"{what}: index is {index!r}. Pass integers, the places of patterns, or {memory.count} booleans."
        )
    try:
        at = every[given if given.numel() else given.long()].reshape(-1)
    except IndexError:
        raise ArgumentError(f"{what}: index is {index}, and there are {memory.count} patterns.") from None
    if not at.numel():
        raise ArgumentError(f"{what}: index is {index}, which names no pattern. Pass at least one place.")
    return at


def warn_of_duplicates(memory: "Hopfield", what: str) -> None:
    """Say which patterns are equal, where a number would otherwise surprise."""
    groups = duplicates(memory.patterns)
    if groups:
        more = f" and {len(groups) - 1} more groups (see `duplicates`)" if len(groups) > 1 else ""
        text = f"{what}: patterns {groups[0]}{more} are equal. Equal patterns have separation 0 and are recalled together."
        warnings.warn(text, ExptiltWarning, stacklevel=4)


def separation(memory: "Hopfield", index: Sequence[int] | None = None) -> Tensor:
    """Δ ``(..., P)``, streamed; see `Hopfield.separation`."""
    warn_of_duplicates(memory, "separation")
    chosen, keys = places(memory, index, "separation"), memory.keys
    found = []
    for begin in track(range(0, chosen.numel(), _BLOCK), "separation"):
        at = chosen[begin : begin + _BLOCK]
        rows = at.expand(*keys.measure.shape[:-1], -1)
        query, offset = keys.chosen(rows)
        own = (query * query).sum(-1) + (0.0 if offset is None else offset)
        top = torch.full_like(own, -torch.inf)
        for key, score, start in keys.tiles(query):
            others = torch.arange(start, start + key.shape[-2], device=at.device)
            top = torch.maximum(top, score.masked_fill(at[:, None] == others, -torch.inf).amax(-1))
        found.append(own - top)
    gap = torch.cat(found, -1)
    return gap if memory.patterns.ndim > 2 else gap[0]


def duplicates(patterns: Tensor) -> list[list[int]]:
    """Groups of equal patterns of ``(..., N, D)``, each in order of place; found by a hash of their bits, then compared."""
    N = patterns.shape[-2]
    rows = patterns.detach().movedim(-2, 0).reshape(N, -1)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[rows.element_size()]
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator).to(rows.device) * 2 + 1
    hashed = torch.cat(
        [((part + 0.0).view(bits).long() * odd).sum(-1) for part in rows.split(1 << 14)]
    )  # + 0.0: −0 is 0
    order = torch.argsort(hashed, stable=True)
    same = hashed[order[1:]] == hashed[order[:-1]]
    groups: list[list[int]] = []
    last = -2
    for k in same.nonzero()[:, 0].tolist():
        i, j = int(order[k]), int(order[k + 1])
        if not torch.equal(rows[i], rows[j]):
            continue
        if k == last + 1 and groups and groups[-1][-1] == i:
            groups[-1].append(j)
        else:
            groups.append([i, j])
        last = k
    return sorted(groups)
