"""The patterns of a memory, and how a sweep sees them.

Nothing of size states × patterns is ever made; temporaries are of the size of one part. Patterns that a
kernel can read where they are (float32 or float64, memory-mapped files too) are handed over whole, since
the kernel itself goes tile by tile.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.distributed.group import Members
from exptilt.memory.similarity import Similarity

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PART_NUMBERS = 1 << 23  # numbers in a converted copy of a part of the patterns: 32 MiB of float32
_TILE_CELLS = 1 << 20  # scores held at once; temporaries of this size stand beside them


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_tensor(name: str, given: Any) -> Tensor:
    """A tensor as it is, or a numpy array as a tensor: shared if the array is read-only, else copied.

    A writable array is copied because writes to it, unlike those to a tensor, go unnoticed.
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


def measured(patterns: Tensor, similarity: Similarity) -> Tensor:
    """``(..., N)``: `Similarity.measure` of the patterns, part by part; an error if one cannot be stored."""
    length = max(1, _TILE_CELLS // max(1, patterns[..., :1, :].numel()))
    parts = [patterns] if not is_concrete(patterns) else patterns.split(length, -2)
    measure = torch.cat([similarity.measure(part.to(wide(part.dtype))) for part in parts], -1)
    if is_concrete(measure):
        no_direction = "is 0 and has no direction. Leave it out, or pass similarity 'dot' or 'euclidean'."
        for bad, words in (
            (~measure.isfinite(), "holds NaN or infinity, or its norm overflows."),
            ((measure == 0) & similarity.sphere, no_direction),
        ):
            if bool(bad.any()):
                place = ", ".join(map(str, bad.nonzero()[0].tolist()))
                raise ArgumentError(f"Hopfield: patterns[{place}] {words}")
    return measure


@dataclass(frozen=True)
class Keys:
    """Patterns ``(..., H, N, D)`` as a sweep sees them, with an axis of heads.

    Args:
        patterns: ``(..., H, N, D)``.
        measure: ``(..., H, N)``, their squared norms; for cosine the norms.
        similarity: turns patterns into keys.
        values: ``(..., H, N, Dv)``, the rows to average; None averages the keys.
        members: the processes that have the other patterns; None if all are here.
    """

    patterns: Tensor
    measure: Tensor
    similarity: Similarity
    values: Tensor | None = None
    members: Members | None = None

    def _made(
        self, x: Tensor, measure: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, rows to average, and offsets or None, in the dtype of sums."""
        key = self.similarity.keys(x.to(measure.dtype), measure)
        return key, key if values is None else values.to(measure.dtype), self.similarity.offset(measure)

    def _pieces(self, length: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
        """Keys, rows to average, offsets, and the place of the first, at most `length` patterns at a time."""
        for start in range(0, self.patterns.shape[-2], length):
            at = slice(start, start + length)
            values = None if self.values is None else self.values[..., at, :]
            yield *self._made(self.patterns[..., at, :], self.measure[..., at], values), start

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Keys ``(..., H, n, D)``, rows to average ``(..., H, n, Dv)``, and offsets ``(..., H, n)`` or None.

        All patterns are one part where no copy has to be made.
        """
        held = [x for x in (self.patterns, self.values) if x is not None]
        if not self.similarity.sphere and all(x.dtype == self.measure.dtype for x in held):
            yield self._made(self.patterns, self.measure, self.values)
            return
        for key, value, offset, _ in self._pieces(
            max(1, _PART_NUMBERS // max(1, self.patterns[..., :1, :].numel()))
        ):
            yield key, value, offset

    def tiles(self, query: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Rows to average ``(..., H, n, Dv)``, scores ``(..., H, Q, n)``, and the place of the first.

        The scores are those of the query ``(..., H, Q, D)``.
        """
        for key, value, offset, start in self._pieces(max(16, _TILE_CELLS // max(1, query[..., 0].numel()))):
            score = query @ key.mT
            yield value, score if offset is None else score + offset[..., None, :], start

    def chosen(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys ``(..., H, Q, D)``, rows to average, and offsets or None, at places ``(..., H, Q)``."""
        held = [self.patterns, self.measure[..., None]] + ([] if self.values is None else [self.values])
        rows = [
            torch.take_along_dim(x.expand(*index.shape[:-1], *x.shape[-2:]), index[..., None], -2)
            for x in held
        ]
        return self._made(rows[0], rows[1][..., 0], None if self.values is None else rows[2])


def check_state(memory: "Hopfield", state: Any, name: str = "state") -> None:
    """Raise unless a state ``(..., D)`` is finite, of the patterns' dtype, device and leading axes."""
    if not isinstance(state, Tensor):
        kind = type(state).__name__
        raise ArgumentError(f"Hopfield: {name} is a {kind}. Pass a torch tensor: torch.as_tensor({name}).")
    x, lead, D, shape = memory.patterns, memory.lead, memory.dimension, tuple(state.shape)
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


def laid_out(memory: "Hopfield", state: Tensor) -> Tensor:
    """States ``(..., heads, Q, D)`` for a sweep, in the dtype that sums are taken in."""
    state = state.to(memory.dtype)
    return state if memory.lead else state.reshape(1, -1, memory.dimension)
