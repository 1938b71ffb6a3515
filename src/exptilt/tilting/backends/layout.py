"""How a sweep is cut into tiles and parts, which follows from shapes, strides and options alone.

A `Layout` is worked out once for calls of one kind and kept; ``cpu.py`` copies its frame and fills in
addresses. ``csrc/attention/attention.hpp`` says what the fields of a frame mean.
"""

import ctypes
import math
import os
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.errors import ArgumentError
from exptilt._support.threads import run_region
from exptilt.tilting.problem import WIDE
from exptilt.tilting.score_rule import ScoreRule

Array = np.ndarray[Any, Any]
KINDS = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
NUMBERS = {torch.float32: "float32", torch.float64: "float64"}
THIN = 8  # with at most so many queries in a block, or keys, nothing is packed
# Packed tiles are kept for the next queries of the same head up to this size, per thread and shelf; beyond it
# they are packed anew.
_SHELF_BYTES = 4 << 20
SUM_LINES = 4  # of the tangent sweep
STATISTIC_LINES = 7  # of the forward sweep

# Shape, strides and dtype of a tensor.
Described = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Tuning(NamedTuple):
    """Numbers that decide how work is cut up; results differ by rounding only.

    Attributes:
        cache_bytes: size of a core's second-level cache.
        tile_rows: rows of a tile at most, in sweeps that hold a strip of scores.
        backward_rows: the same in sweeps that hold a whole tile of scores.
        worth_a_thread: multiply-adds that are worth one more thread: they take several times as long as
            waking it. With few queries they wait for memory, and an eighth as many are worth a thread.
        copies_bytes: where keys are divided among threads, each part has a query gradient of its own. Rows
            are swept in turns that keep these copies to so many bytes for each thread.
    """

    cache_bytes: int
    tile_rows: int = 252
    backward_rows: int = 132
    worth_a_thread: int = 1 << 21
    copies_bytes: int = 4 << 20


@cache
def tuning() -> Tuning:
    """The tuning for this machine; ``EXPTILT_CACHE_KIB`` says how large the cache is, if it is set."""
    asked = os.environ.get("EXPTILT_CACHE_KIB")
    if asked is not None:
        if not asked.isdigit() or int(asked) == 0:
            raise ArgumentError(f"EXPTILT_CACHE_KIB is {asked!r}. Set it to a positive whole number.")
        return Tuning(int(asked) * 1024)
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    return Tuning(size if size > 0 else 512 * 1024)


@cache
def sweep_address(name: str, number: str) -> int:
    """Address of the C function of a sweep for "float32" or "float64"."""
    return native.address(f"{name}_{number}")


@cache
def sweep_function(name: str, number: str) -> Any:
    """The C function of a sweep, to be called on this thread."""
    return native.function(f"{name}_{number}")


@cache
def _block_rows() -> int:
    """Rows of a product that are summed at once."""
    return int(native.load().exptilt_block_rows_float32())


@cache
def frame_type() -> Any:
    """The ctypes struct that all sweeps take as their argument."""
    return native.frame("Attention")


@lru_cache(4096)
def table_of(lead: torch.Size, heads: int, shape: torch.Size, steps: tuple[int, ...]) -> tuple[Array, int]:
    """Offsets of (items · heads) blocks of a tensor (..., heads or a divisor, ·, ·), and their address."""
    places = np.zeros(1, np.int64)
    here = shape[-3]
    for size, mine, step in zip((*lead, here), shape[:-2], steps[:-2], strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * (0 if mine == 1 else step)).reshape(-1)
    table = np.repeat(places, heads // here)
    return table, table.ctypes.data


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros by numpy: torch would use its threads, which a forked child does not have."""
    return torch.from_numpy(np.zeros(shape, NUMBERS[dtype]))


def over(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def rounded(x: int, to: int) -> int:
    """x rounded up to a multiple of `to`."""
    return over(x, to) * to


def described(x: Tensor | None) -> Described | None:
    """Shape, strides and dtype of a tensor, or None."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


class Layout:
    """Sizes of a sweep, and a frame without addresses of tensors, from shapes, strides and options."""

    def __init__(
        self,
        query: Described,
        key: Described,
        value: Described,
        bias: Described | None,
        weight: Described | None,
        mask: Described | None,
        rule: ScoreRule,
        threads: int,
        tuned: Tuning,
    ):
        self.tuned = tuned
        self.lead = query[0][:-3]
        self.heads, self.Q, self.D = query[0][-3:]
        self.key_heads, self.K = key[0][-3:-1]
        self.Dv = value[0][-1]
        self.dtype = WIDE[query[2]]
        self.size = 4 if self.dtype == torch.float32 else 8
        self.number = NUMBERS[self.dtype]
        group = self.heads // max(self.key_heads, 1)
        self.items = math.prod(self.lead)
        self.blocks = self.items * self.key_heads
        self.shape = (*self.lead, self.heads, self.Q)
        self.output_shape, self.lines_shape = (*self.shape, self.Dv), (STATISTIC_LINES, *self.shape)
        self.rows = self.items * self.heads * self.Q
        self.block_rows = group * self.Q
        self.width = 2 * int(getattr(native.load(), f"exptilt_lanes_{self.number}")())
        self.kept: list[Any] = []
        f = self.frame = frame_type()()
        f.blocks, f.group, f.Q, f.K, f.D, f.Dv = self.blocks, group, self.Q, self.K, self.D, self.Dv
        f.scale, f.cap, f.causal = rule.scale, rule.softcap or 0.0, rule.causal
        # a window wider than all positions hides nothing
        f.window = -1 if rule.window is None else min(rule.window, self.Q + self.K)
        f.thin = self.block_rows <= THIN or self.K <= THIN
        f.key_parts = f.row_parts = 1
        for name, x in (("query", query), ("key", key), ("value", value)):
            self.kept += self.operand(f, name, x)
        for name, plane in (("bias", bias), ("weight", weight), ("mask", mask)):
            if plane is not None:
                self.kept += self.plane(f, name, plane)
        work = self.rows * self.K * (self.D + self.Dv) * (8 if f.thin else 1)
        self.crew = max(1, min(threads, work // tuned.worth_a_thread))

    def operand(self, f: Any, name: str, x: Described) -> list[Array]:
        """Set table, step and kind of vectors of queries or of keys; keep the result alive."""
        heads = self.key_heads if name.startswith(("key", "value")) else self.heads
        table, address = table_of(self.lead, heads, x[0], x[1])
        setattr(f, name + "_table", address)
        setattr(f, name + "_step", x[1][-2])
        setattr(f, name + "_kind", KINDS[x[2]])
        return [table]

    def plane(self, f: Any, name: str, x: Described) -> list[Array]:
        """Set table and steps of numbers of pairs (..., heads, Q or 1, K or 1); keep the result alive."""
        table, address = table_of(self.lead, self.heads, x[0], x[1])
        setattr(f, name + "_table", address)
        setattr(f, name + "_row", 0 if x[0][-2] == 1 else x[1][-2])
        setattr(f, name + "_column", 0 if x[0][-1] == 1 else x[1][-1])
        return [table]

    def tiles(self, f: Any, vectors: int, most_rows: int, strips: bool, cells: int) -> None:
        """Choose tiles for a sweep.

        Args:
            f: the frame.
            vectors: numbers of keys and values that a product holds for each key.
            most_rows: rows of a tile, at most.
            strips: whether rows go from scores to sums in strips, or a tile at a time.
            cells: numbers held for each pair of a row and a key.
        """
        block = _block_rows()
        f.tile_rows = max(1, self.block_rows)
        if self.block_rows > THIN:
            tiles = over(self.block_rows, most_rows)
            f.tile_rows = rounded(over(self.block_rows, tiles), block)
        f.strip = min(f.tile_rows, 4 * block)
        held = vectors + cells * (f.strip if strips else f.tile_rows)
        # Keys are read in order: some may come from the next cache.
        columns = self.tuned.cache_bytes * 3 // 2 // self.size // max(held, 1)
        pair = 2 * self.width
        f.tile_keys = max(pair, min(columns // pair * pair, 1024, rounded(self.K, pair)))
        fit = _SHELF_BYTES // max(1, f.tile_keys * vectors * self.size // 2)
        f.shelf_slots = max(1, min(self.key_tiles(f), fit))

    def row_tiles(self, f: Any) -> int:
        """Number of tiles of a block's rows."""
        return over(self.block_rows, max(1, f.tile_rows))

    def key_tiles(self, f: Any) -> int:
        """Number of tiles of keys."""
        return over(self.K, f.tile_keys)

    @cached_property
    def units(self) -> int:
        """Number of tiles of rows of all blocks."""
        return self.blocks * self.row_tiles(self.frame)

    def divide(self, f: Any, owners: int, by_keys: bool) -> None:
        """Cut keys or rows of a backward sweep into parts, if there are too few owners for the threads."""
        crew = self.crew
        if crew < 2 or not 0 < owners < 4 * crew:
            return
        wanted, key_tiles, row_tiles = over(4 * crew, owners), self.key_tiles(f), self.row_tiles(f)
        # Each part of the rows has a copy of all gradients of keys, so rows are cut only where keys are few.
        # And rows of different heads may add to one place of a bias's gradient; keys do not.
        if by_keys or key_tiles >= min(wanted, row_tiles):
            f.key_parts = min(wanted, key_tiles)
        else:
            f.row_parts = min(wanted, row_tiles)

    def run(self, f: Any, sweep: str, units: int) -> None:
        """Run a sweep over its units."""
        if units == 0:
            return
        threads = min(self.crew, units)
        f.next, f.units, f.chunk = 0, units, max(1, units // (8 * threads))
        if threads > 1:
            run_region(sweep_address(sweep, self.number), ctypes.addressof(f), threads)
        else:
            sweep_function(sweep, self.number)(ctypes.addressof(f))
        if f.failed:
            raise MemoryError("exptilt: no memory is left for the tiles of a sweep of attention")


@lru_cache(1024)
def layout_of(sweep: str, *given: Any) -> Layout:
    """The layout of a sweep: "forward", "tangent", "mass", "worth", "heaviest", "gradient" or "second"."""
    p = Layout(*given)
    f = p.frame
    if sweep == "forward":
        p.tiles(f, p.D + p.Dv, p.tuned.tile_rows, True, 2)
        units = p.blocks * p.row_tiles(f)
        if 0 < units < 2 * p.crew:
            f.key_parts = max(1, min(over(2 * p.crew, units), p.key_tiles(f)))
    elif sweep == "tangent":
        p.tiles(f, 2 * (p.D + p.Dv), p.tuned.tile_rows, True, 2)
    elif sweep == "heaviest":
        p.tiles(f, p.D, p.tuned.tile_rows, True, 1)
    elif sweep in ("mass", "worth"):
        held = (p.D, 1) if sweep == "mass" else (p.D + p.Dv, 2)
        p.tiles(f, held[0], p.tuned.tile_rows, True, held[1])
        f.shelf_slots = 1  # every tile of keys is packed once, and the rows come to it
        p.divide(f, p.blocks, False)
    else:
        f.second = sweep == "second"
        p.tiles(f, 2 * p.D + p.Dv, p.tuned.backward_rows, False, 4 if f.second else 2)
    return p
