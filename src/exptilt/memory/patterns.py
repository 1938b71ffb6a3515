"""The patterns of a memory: where they lie, how they grow, and how a sweep sees them.

Patterns lie in blocks, one after another: first the patterns that the caller passed, then those appended.
Appending does not copy the present patterns, which may be in a file. Nothing of size states × patterns is
ever made; temporaries are of the size of one part. Patterns that a kernel can read where they are (float32
or float64, memory-mapped files too) are handed over a block at a time, since the kernel itself goes tile by
tile.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete, version
from exptilt.distributed.group import Members
from exptilt.memory.similarity import Similarity

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEAST_BLOCK = 256  # appended patterns up to this number are copied with every addition
_PART_NUMBERS = 1 << 23  # numbers in a converted copy of a part of the patterns: 32 MiB of float32
_TILE_CELLS = 1 << 20  # scores held at once; temporaries of this size stand beside them


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_tensor(name: str, given: Any) -> Tensor:
    """A tensor as it is, or a numpy array as a tensor: shared if the array is read-only, else copied.

    A writable array is copied because writes to it, unlike those to a tensor, go unnoticed (`Block.changed`).
    """
    if isinstance(given, np.ndarray):
        with warnings.catch_warnings():  # nobody here writes to a read-only array
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            try:
                return torch.from_numpy(given.copy() if given.flags.writeable else given)
            except (TypeError, ValueError) as problem:
                got = f"{name} is an array that torch cannot share ({problem})"
                raise ArgumentError(f"Hopfield: {got}. Pass a copy.") from None
    if not isinstance(given, Tensor):
        wanted = "Pass a tensor or numpy array (..., N, D)."
        raise ArgumentError(f"Hopfield: {name} is a {type(given).__name__}. {wanted}")
    return given


def as_patterns(given: Any) -> Tensor:
    """Patterns as a tensor ``(..., N, D)``."""
    patterns = as_tensor("patterns", given)
    if patterns.dtype not in _DTYPES:
        wanted = "Pass float64, float32, bfloat16 or float16: patterns.float()."
        raise ArgumentError(f"Hopfield: patterns has dtype {patterns.dtype}. {wanted}")
    if patterns.ndim < 2 or not all(patterns.shape[-2:]):
        which = "Pass (..., N, D): N patterns of dimension D."
        which = which if patterns.ndim < 2 else "So nothing is stored. Pass at least one pattern."
        raise ArgumentError(f"Hopfield: patterns has shape {tuple(patterns.shape)}. {which}")
    return patterns


def _measure(patterns: Tensor, similarity: Similarity) -> Tensor:
    """``(..., N)``: `Similarity.measure` of the patterns, part by part."""
    N, D = patterns.shape[-2:]
    length = max(1, _TILE_CELLS // max(1, D * patterns.shape[:-2].numel()))
    if length >= N or not is_concrete(patterns):
        return similarity.measure(patterns.to(wide(patterns.dtype)))
    return torch.cat([_measure(part, similarity) for part in patterns.split(length, -2)], -1)


@dataclass(frozen=True, eq=False)
class Block:
    """Some patterns of a memory.

    Args:
        patterns: ``(..., n, D)``.
        measure: ``(..., n)``, their squared norms; for cosine the norms.
        values: ``(..., n, Dv)``, their values, or None.
    """

    patterns: Tensor
    measure: Tensor
    values: Tensor | None = None
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self._versions())

    @classmethod
    def of(cls, patterns: Tensor, similarity: Similarity, values: Tensor | None = None) -> "Block":
        """A block of patterns ``(..., n, D)`` and values ``(..., n, Dv)``, measured and checked."""
        measure = _measure(patterns, similarity)
        if is_concrete(measure):
            no_direction = "is 0 and has no direction. Leave it out, or pass similarity 'dot' or 'euclidean'."
            for bad, words in (
                (~measure.isfinite(), "holds NaN or infinity, or its norm overflows."),
                ((measure == 0) & similarity.sphere, no_direction),
            ):
                if bool(bad.any()):
                    place = ", ".join(map(str, bad.nonzero()[0].tolist()))
                    raise ArgumentError(f"Hopfield: patterns[{place}] {words}")
        return cls(patterns, measure, values)

    @property
    def count(self) -> int:
        """n, how many patterns the block has."""
        return self.patterns.shape[-2]

    @property
    def kind(self) -> str:
        """Shapes without N, dtypes and device as text: the same for all blocks of one memory."""
        held = [("patterns", self.patterns), *([] if self.values is None else [("values", self.values)])]
        shapes = [", ".join(map(str, (*x.shape[:-2], "N", x.shape[-1]))) for _, x in held]
        named = zip(held, shapes, strict=True)
        return " and ".join(f"{name} ({shape}) {x.dtype} on {x.device}" for (name, x), shape in named)

    def _versions(self) -> tuple[int, ...]:
        held = [x for x in (self.patterns, self.values) if x is not None]
        return tuple(map(version, held)) if is_concrete(*held) else ()

    @property
    def changed(self) -> bool:
        """Whether the patterns or values were written to since the block was made."""
        now = self._versions()
        return bool(self.versions and now) and now != self.versions


def extended(blocks: tuple[Block, ...], new: Block) -> tuple[Block, ...]:
    """The blocks, followed by the new patterns; the first block is never copied.

    Later blocks that are small, or no larger than the new one, are joined with it: few blocks are made.
    """
    while len(blocks) > 1 and blocks[-1].count <= max(_LEAST_BLOCK, new.count):
        last, blocks = blocks[-1], blocks[:-1]
        values = None if last.values is None or new.values is None else (last.values, new.values)
        new = Block(
            torch.cat([last.patterns, new.patterns], -2),
            torch.cat([last.measure, new.measure], -1),
            None if values is None else torch.cat(values, -2),
        )
    return (*blocks, new)


@dataclass(frozen=True)
class Keys:
    """Keys ``(..., H, N, D)`` of a sweep, with an axis of heads, and the rows to average: keys or values.

    Args:
        blocks: the patterns.
        similarity: turns patterns into keys.
        values: average the values, not the keys.
        members: the processes that have the other patterns; None if all are here.
    """

    blocks: tuple[Block, ...]
    similarity: Similarity
    values: bool = False
    members: Members | None = None

    def _rows(self, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
        """Patterns, measures, and values or None, with an axis of heads."""
        x, measure, values = block.patterns, block.measure, block.values if self.values else None
        if x.ndim > 2:
            return x, measure, values
        return x[None], measure[None], None if values is None else values[None]

    def _made(
        self, x: Tensor, measure: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, rows to average, and offsets or None, from rows of a block, in the dtype of sums."""
        key = self.similarity.keys(x.to(measure.dtype), measure)
        return key, key if values is None else values.to(measure.dtype), self.similarity.offset(measure)

    def _pieces(self, length: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
        """Keys, rows to average, offsets, place of the first: a block at a time, or at most `length` rows."""
        begin = 0
        for block in self.blocks:
            x, measure, values = self._rows(block)
            step = length or block.count
            for start in range(0, block.count, step):
                at = slice(start, start + step)
                part = None if values is None else values[..., at, :]
                yield *self._made(x[..., at, :], measure[..., at], part), begin + start
            begin += block.count

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Keys ``(..., H, n, D)``, rows to average ``(..., H, n, Dv)``, and offsets ``(..., H, n)`` or None.

        A part is a whole block where no copy has to be made.
        """
        first = self.blocks[0]
        held = [first.patterns, *([first.values] if self.values and first.values is not None else [])]
        as_they_are = not self.similarity.sphere and all(x.dtype == first.measure.dtype for x in held)
        length = max(1, _PART_NUMBERS // max(1, first.patterns[..., :1, :].numel()))
        for key, value, offset, _ in self._pieces(None if as_they_are else length):
            yield key, value, offset

    def tiles(self, query: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Rows to average ``(..., H, n, Dv)``, scores ``(..., H, Q, n)``, and the place of the first.

        The scores are those of the query ``(..., H, Q, D)``.
        """
        length = max(16, _TILE_CELLS // max(1, query[..., 0].numel()))
        for key, value, offset, start in self._pieces(length):
            score = query @ key.mT
            yield value, score if offset is None else score + offset[..., None, :], start

    def picked(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Patterns ``(..., H, Q, D)``, measures ``(..., H, Q)``, values or None at places ``(..., H, Q)``."""
        found: list[Tensor] = []
        start = 0
        for block in self.blocks:
            x, measure, values = self._rows(block)
            at = (index - start).clamp(0, block.count - 1)
            rows = [x, measure[..., None], *([] if values is None else [values])]
            rows = [row.expand(*at.shape[:-1], *row.shape[-2:]) for row in rows]
            here = [torch.take_along_dim(row, at[..., None], -2) for row in rows]
            later = (index >= start)[..., None]
            found = [torch.where(later, a, b) for a, b in zip(here, found, strict=True)] if found else here
            start += block.count
        return found[0], found[1][..., 0], found[2] if self.values else None

    def chosen(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys ``(..., H, Q, D)``, rows to average, and offsets or None, at places ``(..., H, Q)``."""
        return self._made(*self.picked(index))


def check_state(memory: "Hopfield", state: Any, name: str = "state") -> None:
    """Raise unless a state ``(..., D)`` is finite, of the patterns' dtype, device and leading axes."""
    if not isinstance(state, Tensor):
        kind = type(state).__name__
        raise ArgumentError(f"Hopfield: {name} is a {kind}. Pass a torch tensor: torch.as_tensor({name}).")
    x, lead, D, shape = memory.blocks[0].patterns, memory.lead, memory.dimension, tuple(state.shape)
    if state.dtype not in (x.dtype, memory.dtype) or state.device != x.device:
        got = f"{state.dtype} on {state.device}, patterns are {x.dtype} on {x.device}"
        raise ArgumentError(f"Hopfield: {name} is {got}. Convert it: {name}.to(patterns).")
    if shape[-1:] != (D,):
        got = f"{name} has shape {shape}, patterns have dimension {D}"
        raise ArgumentError(f"Hopfield: {got}. Pass states (..., {D}).")
    if lead and (len(shape) < len(lead) + 2 or shape[-2 - len(lead) : -2] != lead):
        raise ArgumentError(
            f"Hopfield: {name} has shape {shape}, patterns have leading axes {lead}. Pass states (..., "
            f"{', '.join(map(str, lead))}, Q, {D}): Q for each memory; state.expand puts the same before all."
        )
    if not is_concrete(state):
        return
    # The sum is a quick check; if it is not finite it may have overflowed, so every number is checked.
    if not math.isfinite(state.detach().sum().item()) and not bool(state.isfinite().all()):
        index = (~state.isfinite().all(-1)).nonzero()[0].tolist()
        raise ArgumentError(f"Hopfield: {name}{index or ''} holds NaN or infinity. Pass finite states.")
    if memory.similarity.sphere and not bool((state != 0).any(-1).all()):
        wanted = "The similarity is cosine: pass states that are not 0."
        raise ArgumentError(f"Hopfield: a {name.removesuffix('s')} is 0 and has no direction. {wanted}")
