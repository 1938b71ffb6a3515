"""The patterns as a sweep sees them: keys and offsets, a part at a time, whatever the patterns lie in.

Nothing of size states × patterns is ever made; temporaries are of the size of one part. Patterns that a kernel can read where they are
(float32 or float64, memory-mapped files too) are handed over whole, since the kernel itself goes tile by tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.transforms import is_concrete
from exptilt.memory.similarity import Similarity

_PART_NUMBERS = 1 << 23  # numbers of a converted copy of some patterns: 32 MiB of float32
_TILE_CELLS = (
    1 << 20
)  # scores held at once; a few temporaries of this size stand beside them: 4 MiB each in float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def measures(patterns: Tensor, similarity: Similarity) -> Tensor:
    """``(..., N)``: what the similarity keeps of each pattern, taken in part after part."""
    N, D = patterns.shape[-2:]
    length = max(1, _TILE_CELLS // max(1, D * patterns.shape[:-2].numel()))
    if length >= N or not is_concrete(patterns):
        return similarity.measure(patterns.to(wide(patterns.dtype)))
    return torch.cat(
        [measures(patterns[..., j : j + length, :], similarity) for j in range(0, N, length)], -1
    )


@dataclass(frozen=True)
class Keys:
    """Patterns ``(..., H, N, D)``, the similarity that makes keys of them, and what it keeps of each ``(..., H, N)``."""

    patterns: Tensor
    measure: Tensor
    similarity: Similarity

    @property
    def count(self) -> int:
        """N."""
        return self.patterns.shape[-2]

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Keys ``(..., H, n, D)`` and offsets ``(..., H, n)`` or None of the patterns start..stop."""
        measure = self.measure[..., start:stop]
        key = self.similarity.keys(self.patterns[..., start:stop, :].to(self.measure.dtype), measure)
        return key, None if self.similarity.offset is None else self.similarity.offset(measure)

    def parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """All keys, in one part where no copy of them has to be made."""
        as_they_are = not self.similarity.sphere and self.patterns.dtype == self.measure.dtype
        numbers = max(1, self.patterns[..., :1, :].numel())
        length = self.count if as_they_are else max(1, _PART_NUMBERS // numbers)
        for start in range(0, self.count, length):
            yield self.part(start, min(self.count, start + length))

    def tiles(self, query: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Keys ``(..., H, n, D)``, their scores ``(..., H, Q, n)`` with the query ``(..., H, Q, D)``, and the number of the first."""
        length = max(16, _TILE_CELLS // max(1, query[..., 0].numel()))
        for start in range(0, self.count, length):
            key, offset = self.part(start, min(self.count, start + length))
            score = query @ key.mT
            yield key, score if offset is None else score + offset[..., None, :], start

    def chosen(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys ``(..., H, Q, D)`` and offsets ``(..., H, Q)`` of the patterns of that index ``(..., H, Q)``."""
        shape = index.shape[:-1]
        measure = torch.take_along_dim(self.measure.expand(*shape, -1), index, -1)
        patterns = self.patterns.expand(*shape, *self.patterns.shape[-2:])
        key = self.similarity.keys(
            torch.take_along_dim(patterns, index[..., None], -2).to(measure.dtype), measure
        )
        return key, None if self.similarity.offset is None else self.similarity.offset(measure)
