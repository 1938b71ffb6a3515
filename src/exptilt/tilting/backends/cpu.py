"""From torch tensors to the compiled sweeps and back: the frame, tiles, parts, threads.

The functions at the end are the backend's whole surface (``dispatch.py`` calls them): each takes the
canonical tensors of ``problem.py`` and returns fresh tensors. Memory beyond those: a few tiles for each
thread.

All that follows from shapes, strides and options alone (tiles, parts, tables of where each head begins) is
worked out once and kept: `_layout`. A call copies that frame and fills in addresses. What the fields of a
frame mean is said in ``csrc/attention.hpp``.
"""

import ctypes
import math
import os
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.errors import ArgumentError
from exptilt._support.threads import run_region
from exptilt.tilting.problem import Dots, Gradients, Inputs, Needs, has_full_bias, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

Array = np.ndarray[Any, Any]
KINDS = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
NUMBERS = {torch.float32: "float32", torch.float64: "float64"}
THIN = 8  # queries of a block, or keys, up to which nothing is packed
FLUSH = 16  # tiles of keys whose scores a joint sweep keeps at most
# Packed tiles are kept for the next queries of the same head up to this size, per thread and shelf; beyond it
# they are packed anew.
_SHELF_BYTES = 4 << 20
_SUM_LINES = 4  # of the tangent sweep
_STATISTIC_LINES = 7  # of the forward sweep

# Shape, strides and dtype of a tensor.
Described = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Tuning(NamedTuple):
    """What decides how work is cut up, and no result beyond rounding.

    Attributes:
        cache_bytes: size of a core's second-level cache.
        tile_rows: rows of a tile at most, in sweeps that hold a strip of scores.
        backward_rows: the same in sweeps that hold a whole tile of scores.
        worth_a_thread: multiply-adds that are worth one more thread: they take several times as long as it
            takes to wake one. With few queries they wait for memory, and an eighth of them is worth it.
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
def _sweep(name: str, number: str) -> int:
    return native.address(f"{name}_{number}")


@cache
def _block_rows() -> int:
    """Rows of a product that are summed at once."""
    return int(native.load().exptilt_block_rows_float32())


@cache
def _frame() -> Any:
    return native.frame("Attention")


@lru_cache(4096)
def _table(lead: torch.Size, heads: int, shape: torch.Size, steps: tuple[int, ...]) -> tuple[Array, int]:
    """Where each of (items · heads) blocks of a tensor (..., heads or a divisor, ·, ·) begins."""
    places = np.zeros(1, np.int64)
    here = shape[-3]
    for size, mine, step in zip((*lead, here), shape[:-2], steps[:-2], strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * (0 if mine == 1 else step)).reshape(-1)
    table = np.repeat(places, heads // here)
    return table, table.ctypes.data


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system hands out, without torch's threads, which a forked child does not have."""
    return torch.from_numpy(np.zeros(shape, NUMBERS[dtype]))


def _over(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def _rounded(x: int, to: int) -> int:
    return _over(x, to) * to


def _described(x: Tensor | None) -> Described | None:
    return None if x is None else (x.shape, x.stride(), x.dtype)


class Layout:
    """All that follows from shapes, strides and options: sizes, and a frame without addresses of tensors."""

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
        self.dtype = wide_dtype(query[2])
        self.size = 4 if self.dtype == torch.float32 else 8
        self.number = NUMBERS[self.dtype]
        group = self.heads // max(self.key_heads, 1)
        self.items = math.prod(self.lead)
        self.blocks = self.items * self.key_heads
        self.shape = (*self.lead, self.heads, self.Q)
        self.rows = self.items * self.heads * self.Q
        self.block_rows = group * self.Q
        self.width = 2 * int(getattr(native.load(), f"exptilt_lanes_{self.number}")())
        self.kept: list[Any] = []
        f = self.frame = _frame()()
        f.blocks, f.group, f.Q, f.K, f.D, f.Dv = self.blocks, group, self.Q, self.K, self.D, self.Dv
        f.scale, f.cap, f.causal = rule.scale, rule.softcap or 0.0, rule.causal
        # a window of more than all hides nothing either
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
        """Set table, step and kind of vectors of queries or of keys; what it returns must be kept alive."""
        heads = self.key_heads if name.startswith(("key", "value")) else self.heads
        table, address = _table(self.lead, heads, x[0], x[1])
        setattr(f, name + "_table", address)
        setattr(f, name + "_step", x[1][-2])
        setattr(f, name + "_kind", KINDS[x[2]])
        return [table]

    def plane(self, f: Any, name: str, x: Described) -> list[Array]:
        """Set table and steps of numbers of pairs (..., heads, Q or 1, K or 1); keep the result alive."""
        table, address = _table(self.lead, self.heads, x[0], x[1])
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
            tiles = _over(self.block_rows, most_rows)
            f.tile_rows = _rounded(_over(self.block_rows, tiles), block)
        f.strip = min(f.tile_rows, 4 * block)
        held = vectors + cells * (f.strip if strips else f.tile_rows)
        # Keys are read in order: some may come from the next cache.
        columns = self.tuned.cache_bytes * 3 // 2 // self.size // max(held, 1)
        pair = 2 * self.width
        f.tile_keys = max(pair, min(columns // pair * pair, 1024, _rounded(self.K, pair)))
        fit = _SHELF_BYTES // max(1, f.tile_keys * vectors * self.size // 2)
        f.shelf_slots = max(1, min(self.key_tiles(f), fit))

    def row_tiles(self, f: Any) -> int:
        """Tiles of a block's rows."""
        return _over(self.block_rows, max(1, f.tile_rows))

    def key_tiles(self, f: Any) -> int:
        """Tiles of keys."""
        return _over(self.K, f.tile_keys)

    @property
    def units(self) -> int:
        """Tiles of rows of all blocks."""
        return self.blocks * self.row_tiles(self.frame)

    def divide(self, f: Any, owners: int, by_keys: bool) -> None:
        """Cut keys or rows of a backward sweep into parts, where owners are fewer than threads need."""
        crew = self.crew
        if crew < 2 or not 0 < owners < 4 * crew:
            return
        wanted, key_tiles, row_tiles = _over(4 * crew, owners), self.key_tiles(f), self.row_tiles(f)
        # Parts of the rows have copies of all gradients of keys: only where keys are few. And rows of
        # different heads may add to one place of a bias's gradient, keys do not.
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
        run_region(_sweep(sweep, self.number), ctypes.addressof(f), threads)
        if f.failed:
            raise MemoryError("exptilt: no memory is left for the tiles of a sweep of attention")


@lru_cache(1024)
def _layout(sweep: str, *described: Any) -> Layout:
    """The layout of a sweep: "forward", "tangent", "mass", "gradient" or "second"."""
    p = Layout(*described)
    f = p.frame
    if sweep == "forward":
        p.tiles(f, p.D + p.Dv, p.tuned.tile_rows, True, 2)
        units = p.blocks * p.row_tiles(f)
        if 0 < units < 2 * p.crew:
            f.key_parts = max(1, min(_over(2 * p.crew, units), p.key_tiles(f)))
    elif sweep == "tangent":
        p.tiles(f, 2 * (p.D + p.Dv), p.tuned.tile_rows, True, 2)
    elif sweep == "mass":
        p.tiles(f, p.D, p.tuned.tile_rows, True, 1)
        f.shelf_slots = 1  # every tile of keys is packed once, and the rows come to it
        p.divide(f, p.blocks, False)
    else:
        f.second = sweep == "second"
        p.tiles(f, 2 * p.D + p.Dv, p.tuned.backward_rows, False, 4 if f.second else 2)
    return p


def _vectors(x: Tensor) -> Tensor:
    """x with vectors whose numbers lie one after the other."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _begin(sweep: str, t: Inputs, rule: ScoreRule) -> tuple[Layout, Any, Inputs]:
    """The layout of a sweep, its frame, and the tensors whose addresses are in it."""
    query, key, value, bias, weight, _, mask = t
    query, key, value = _vectors(query), _vectors(key), _vectors(value)
    wide = wide_dtype(query.dtype)
    if bias is not None and bias.dtype != wide:
        bias = bias.to(wide)
    if weight is not None:
        weight = (weight if weight.dtype == wide else weight.to(wide)).unsqueeze(-2)
    layout = _layout(
        sweep,
        (query.shape, query.stride(), query.dtype),
        (key.shape, key.stride(), key.dtype),
        (value.shape, value.stride(), value.dtype),
        _described(bias),
        _described(weight),
        _described(mask),
        rule,
        torch.get_num_threads(),
        tuning(),
    )
    f = _frame().from_buffer_copy(layout.frame)
    f.query, f.key, f.value = query.data_ptr() or 1, key.data_ptr() or 1, value.data_ptr() or 1
    if bias is not None:
        f.bias = bias.data_ptr() or 1
    if weight is not None:
        f.weight = weight.data_ptr() or 1
    if mask is not None:
        f.mask = mask.data_ptr() or 1
    return layout, f, Inputs(query, key, value, bias, weight, None, mask)


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
    """The forward sweep.

    Returns:
        output (*lead, Hq, Q, Dv); lines (7, *lead, Hq, Q) of `problem.LINES`; where the maximum is (*lead,
        Hq, Q); whether a query's sum of weights is NaN; whether a query that has keys to see has no score
        above −inf.
    """
    p, f, _kept = _begin("forward", t, rule)
    parts, shape, dtype = f.key_parts, p.shape, p.dtype
    output, lines = (
        torch.empty((*shape, p.Dv), dtype=dtype),
        torch.empty((_STATISTIC_LINES, *shape), dtype=dtype),
    )
    best = torch.empty(shape, dtype=torch.int64)
    f.output, f.statistics, f.best = output.data_ptr(), lines.data_ptr(), best.data_ptr()
    if parts == 1:
        p.run(f, "forward", p.units)
        return output, lines, best, bool(f.bad), bool(f.blind)
    frames = (_frame() * 2)(f, f)
    pieces = (
        torch.empty((parts, *shape, p.Dv), dtype=dtype),
        torch.empty((_STATISTIC_LINES, parts, *shape), dtype=dtype),
        torch.empty((parts, *shape), dtype=torch.int64),
    )
    f = frames[0]
    f.output, f.statistics, f.best = (x.data_ptr() for x in pieces)
    p.run(f, "forward", p.units * parts)
    run_region(_sweep("join", p.number), ctypes.addressof(frames), 1)
    return output, lines, best, bool(f.bad), bool(f.blind)


class _Filling:
    """Sets further tensors of a frame, and holds on to them until the sweep has run."""

    def __init__(self, layout: Layout, frame: Any):
        self.layout, self.frame, self.kept = layout, frame, list[Any]()

    def operand(self, name: str, x: Tensor | None) -> None:
        """Vectors of queries or of keys."""
        if x is not None:
            x = _vectors(x)
            self.kept += [x, *self.layout.operand(self.frame, name, (x.shape, x.stride(), x.dtype))]
            setattr(self.frame, name, x.data_ptr() or 1)

    def plane(self, name: str, x: Tensor | None) -> None:
        """Numbers of pairs of a query and a key."""
        if x is not None:
            x = x if x.dtype == self.layout.dtype else x.to(self.layout.dtype)
            self.kept += [x, *self.layout.plane(self.frame, name, (x.shape, x.stride(), x.dtype))]
            setattr(self.frame, name, x.data_ptr() or 1)

    def dots(self, dots: Dots) -> None:
        """Tangents of the inputs."""
        self.operand("query_dot", dots.query)
        self.operand("key_dot", dots.key)
        self.operand("value_dot", dots.value)
        self.plane("bias_dot", dots.bias)
        self.plane("weight_dot", None if dots.log_weight is None else dots.log_weight.unsqueeze(-2))

    def rows(self, rows: Tensor) -> None:
        """Lines of what is known of each query (lines, *lead, heads, Q)."""
        self.kept.append(rows := rows.contiguous())
        self.frame.rows = rows.data_ptr()


def tangent(
    t: Inputs, dots: Dots, rows: Tensor, rule: ScoreRule, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and sums (4, ...): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'; rows: shift, inverse, gap.

    With the output of the forward sweep r is Σ p ṡ, and fewer digits are lost.
    """
    p, f, _kept = _begin("tangent", t, rule)
    filling = _Filling(p, f)
    filling.operand("attended", output)
    filling.dots(dots)
    filling.rows(rows)
    pushed = torch.empty((*p.shape, p.Dv), dtype=p.dtype)
    sums = torch.empty((_SUM_LINES, *p.shape), dtype=p.dtype)
    f.output, f.statistics = pushed.data_ptr(), sums.data_ptr()
    p.run(f, "tangent", p.units)
    return pushed, sums


@lru_cache(256)
def _owners(lead: torch.Size, key_heads: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Blocks in an order in which those that add to the same place of a bias's gradient follow each other,
    and where each such run begins.

    shape is that of the bias's axes before the queries; without any, every block is a run of its own.
    """
    blocks = math.prod(lead) * key_heads
    if not shape:
        return np.arange(blocks), np.arange(blocks + 1)
    place = np.zeros((*lead, key_heads), np.int64)
    for axis, size in enumerate((1,) * (len(lead) + 1 - len(shape)) + shape):
        if size > 1:
            here = place.shape[axis]
            index = np.arange(here).reshape([-1 if a == axis else 1 for a in range(place.ndim)])
            place = place * here + index
    flat = place.reshape(-1)
    order = np.argsort(flat, kind="stable")
    changes = np.flatnonzero(np.diff(flat[order])) + 1
    return order, np.concatenate([[0], changes, [blocks]])


def _summed(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Copies (parts, ...) added up, without what fills their vectors beyond `dim` numbers."""
    x = x[0] if x.shape[0] == 1 else x.sum(0)
    x = x if dim is None or dim == x.shape[-1] else x[..., :dim].contiguous()
    return x if x.dtype == dtype else x.to(dtype)


def _mass(t: Inputs, rule: ScoreRule, rows: Tensor) -> Gradients:
    """The column sums of the weights."""
    p, f, _kept = _begin("mass", t, rule)
    filling = _Filling(p, f)
    filling.rows(rows)
    columns = _zeros((f.row_parts, *p.lead, p.heads, p.K), torch.float64)
    f.column_sum = columns.data_ptr() or 1
    p.run(f, "mass", p.blocks * f.key_parts * f.row_parts)
    none = torch.empty(0, dtype=p.dtype)
    return Gradients(none, none, none, _summed(columns, p.dtype), none, none)


def _backward(
    t: Inputs,
    rule: ScoreRule,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    needs: Needs,
    dots: Dots | None = None,
    output_dot: Tensor | None = None,
    lines: Tensor | None = None,
    whole: bool = True,
) -> Gradients | None:
    """The backward sweep; with `lines`, where tangents go together with `output_dot`, the joint one.

    That one is None where keys are too many to keep the scores of a tile's rows with all of them, or scores
    cannot be kept.
    """
    p, f, _kept = _begin("gradient" if dots is None else "second", t, rule)
    filling = _Filling(p, f)
    full_bias = needs.bias and has_full_bias(t)
    f.whole_output = int(whole)
    f.need_query, f.need_key, f.need_value = needs.query, needs.key, needs.value
    bias_axes: tuple[int, ...] = tuple(t.bias.shape[:-2]) if full_bias and t.bias is not None else ()
    order, bounds = _owners(p.lead, p.key_heads, bias_axes)
    f.order, f.bounds = order.ctypes.data, bounds.ctypes.data
    owners, key_tiles, row_tiles = len(bounds) - 1, p.key_tiles(f), p.row_tiles(f)
    p.divide(f, owners, full_bias)
    # Where a block's packed keys do not fit on the shelves, each tile of them is packed once, and the rows
    # come to it.
    f.keys_outside = int(not f.thin and row_tiles > 1 and f.shelf_slots < _over(key_tiles, f.key_parts))
    if f.keys_outside:
        f.shelf_slots = 1
    if lines is not None and output_dot is not None:
        if f.thin or f.cap > 0 or f.key_parts > 1 or f.keys_outside or key_tiles > FLUSH:
            return None
        f.joint, f.output, f.statistics = key_tiles, output_dot.data_ptr() or 1, lines.data_ptr()
    filling.operand("cotangent", cotangent)
    filling.operand("attended", output)
    filling.operand("attended_dot", output_dot)
    filling.rows(rows)
    if dots is not None:
        filling.dots(dots)
    none = torch.empty(0, dtype=p.dtype)

    def zeros(there: bool, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        if not there:
            return none
        made = _zeros(shape, dtype)
        setattr(f, name, made.data_ptr() or 1)
        return made

    wide, wide_v = _rounded(p.D, p.width), _rounded(p.Dv, p.width)
    key = zeros(needs.key, "key_grad", p.dtype, f.row_parts, *p.lead, p.key_heads, p.K, wide)
    value = zeros(needs.value, "value_grad", p.dtype, f.row_parts, *p.lead, p.key_heads, p.K, wide_v)
    columns = zeros(needs.columns, "column_sum", torch.float64, f.row_parts, *p.lead, p.heads, p.K)
    row_sum = zeros(needs.rows, "row_sum", torch.float64, f.key_parts, *p.shape)
    bias = none
    if full_bias and t.bias is not None:
        bias = _zeros(tuple(t.bias.shape), p.dtype)
        table, address = _table(p.lead, p.heads, bias.shape, bias.stride())
        filling.kept.append(table)
        f.bias_grad, f.bias_grad_at, f.bias_grad_row = bias.data_ptr() or 1, address, p.K
    f.row_tile_to = row_tiles
    query = zeros(needs.query and f.key_parts == 1, "query_grad", p.dtype, p.blocks, p.block_rows, p.D)
    if f.key_parts == 1 or not needs.query:
        p.run(f, "backward", owners * f.key_parts * f.row_parts)
    else:
        query = torch.empty((p.blocks, p.block_rows, p.D), dtype=p.dtype)
        copies = f.key_parts * p.blocks * f.tile_rows * p.D * p.size
        turn = max(2, p.crew * p.tuned.copies_bytes // max(1, copies))
        for f.row_tile_from in range(0, row_tiles, turn):
            f.row_tile_to = min(f.row_tile_from + turn, row_tiles)
            start, stop = f.row_tile_from * f.tile_rows, min(f.row_tile_to * f.tile_rows, p.block_rows)
            parts = _zeros((f.key_parts, p.blocks, stop - start, p.D), p.dtype)
            f.query_grad = parts.data_ptr() or 1
            p.run(f, "backward", owners * f.key_parts)
            torch.sum(parts, 0, out=query[:, start:stop])
    return Gradients(
        query.view(*p.shape, p.D) if needs.query else none,
        _summed(key, p.dtype, p.D) if needs.key else none,
        _summed(value, p.dtype, p.Dv) if needs.value else none,
        _summed(columns, p.dtype) if needs.columns else none,
        _summed(row_sum, p.dtype) if needs.rows else none,
        bias,
    )


def gradient(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    rule: ScoreRule,
    needs: Needs,
    whole: bool = True,
) -> Gradients:
    """A cotangent of the output carried back; rows (6, *lead, Hq, Q): shift, inverse, gap, a0, a1, a2.

    With `whole` False these are some of the keys that output and rows belong to.
    """
    if needs.mass:
        return _mass(t, rule, rows)
    return _backward(t, rule, cotangent, output, rows, needs, whole=whole)  # type: ignore[return-value]


def second(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    output_dot: Tensor,
    dots: Dots,
    rows: Tensor,
    rule: ScoreRule,
    needs: Needs,
    whole: bool = True,
) -> Gradients:
    """The gradient of a forward derivative; rows (9, *lead, Hq, Q): as in `gradient`, then pushed, e0, e1."""
    found: Any = _backward(t, rule, cotangent, output, rows, needs, dots, output_dot, whole=whole)
    return found  # type: ignore[no-any-return]


def joint(
    t: Inputs, cotangent: Tensor, output: Tensor, dots: Dots, rows: Tensor, rule: ScoreRule, needs: Needs
) -> tuple[Tensor, Tensor, Gradients] | None:
    """`second` that finds the tangents by itself: output's, then those of log-normalizer, gap and variance.

    rows (7, *lead, Hq, Q): as in `gradient`, then the variance.
    """
    dtype = wide_dtype(t.query.dtype)
    moved, lines = _zeros(tuple(output.shape), dtype), _zeros((3, *output.shape[:-1]), dtype)
    found = _backward(t, rule, cotangent, output, rows, needs, dots, moved, lines)
    return None if found is None else (moved, lines, found)
