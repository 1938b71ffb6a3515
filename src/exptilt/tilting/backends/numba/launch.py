"""From torch tensors to compiled sweeps and back: the frame, tiles, parts, threads.

The four functions at the end are the backend's whole surface (``dispatch.py`` calls them): each takes the
canonical tensors of ``problem.py`` and returns fresh tensors. Memory beyond those: a few tiles per thread.
"""

import ctypes
import math
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from exptilt._support.kernels import region, run_region
from exptilt.tilting.backends.numba.frame import FRAME, Frame, Operand, Plane
from exptilt.tilting.backends.numba.machine import machine
from exptilt.tilting.backends.numba.packing import KINDS
from exptilt.tilting.backends.numba.product import THIN
from exptilt.tilting.backends.numba.workspace import FLUSH
from exptilt.tilting.problem import Dots, Gradients, Inputs, Needs, has_full_bias, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

Array = np.ndarray[Any, Any]
# Packed tiles are kept for the next queries of the same head up to this size, per thread and shelf; beyond it
# they are packed anew.
_SHELF_BYTES = 4 << 20
# Multiply-adds that are worth one more thread: they take several times as long as it takes to wake one. With
# few queries they wait for memory, and take longer.
_WORTH_A_THREAD = 1 << 21
_FEWER_IF_THIN = 8
# Rows of a tile at most, in sweeps that hold a strip of scores, and in those that hold a whole tile of them.
TILE_ROWS, BACKWARD_ROWS = 252, 132
# Where keys are divided among threads, each part has a query gradient of its own. Rows are swept in turns
# that keep these copies to so many bytes for each thread.
_COPIES_BYTES = 4 << 20
_SUM_LINES = 4  # of the tangent sweep
_STATISTIC_LINES = 7  # of the forward sweep


@cache
def _compiled(sweep: str, number: str) -> int:
    """The address of a sweep ("forward", "tangent", "backward") as a C function; compiled when needed."""
    function = getattr(import_module(f"{__package__}.{sweep}"), f"{sweep}_{number}")
    variant = f"{machine().vector_bits}-{machine().block_rows}"
    title = f"the {sweep} kernel of attention for {number}"
    return region(title, types.void(types.CPointer(FRAME)), variant)(function)


@lru_cache(4096)
def _table(lead: torch.Size, heads: int, shape: torch.Size, steps: tuple[int, ...]) -> tuple[Array, int]:
    """Where each of (items · heads) blocks of a tensor (..., heads or a divisor, ·, ·) begins."""
    places = np.zeros(1, np.int64)
    here = shape[-3]
    for size, mine, step in zip((*lead, here), shape[:-2], steps[:-2], strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * (0 if mine == 1 else step)).reshape(-1)
    table = np.repeat(places, heads // here)
    return table, table.ctypes.data


def _zeros(shape: tuple[int, ...], number: str) -> Tensor:
    """Zeros that the system hands out, without torch's threads, which a forked child does not have."""
    return torch.from_numpy(np.zeros(shape, number))


def _over(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def _rounded(x: int, to: int) -> int:
    return _over(x, to) * to


class Launch:
    """A problem as the sweeps take it: its sizes, its frame, and what must stay alive until they have run."""

    def __init__(self, t: Inputs, rule: ScoreRule):
        self.lead = t.query.shape[:-3]
        self.heads, self.Q, self.D = t.query.shape[-3:]
        self.key_heads, self.K = t.key.shape[-3:-1]
        self.Dv = t.value.shape[-1]
        self.dtype = wide_dtype(t.query.dtype)
        self.size = 4 if self.dtype == torch.float32 else 8
        self.number = "float32" if self.size == 4 else "float64"
        self.group = self.heads // max(self.key_heads, 1)
        self.items = math.prod(self.lead)
        self.blocks = self.items * self.key_heads
        self.rows = self.items * self.heads * self.Q
        self.block_rows = self.group * self.Q
        self.width = 2 * machine().lanes(self.size)
        self.threads = torch.get_num_threads()
        self.kept: list[Any] = []
        f = self.frame = Frame()
        f.blocks, f.group, f.Q, f.K, f.D, f.Dv = self.blocks, self.group, self.Q, self.K, self.D, self.Dv
        f.scale, f.cap, f.causal = rule.scale, rule.softcap or 0.0, rule.causal
        f.window = (
            -1 if rule.window is None else min(rule.window, self.Q + self.K)
        )  # more hides nothing either
        f.thin = self.block_rows <= THIN
        f.key_parts = f.row_parts = 1
        self.operand("query", t.query)
        self.operand("key", t.key)
        self.operand("value", t.value)
        self.plane("bias", t.bias)
        self.plane("weight", None if t.log_weight is None else t.log_weight.unsqueeze(-2))
        self.plane("mask", None if t.mask is None else t.mask.view(torch.uint8))

    def keep(self, x: Any) -> Any:
        """Hold on to x until the sweep has run."""
        self.kept.append(x)
        return x

    def table(self, x: Tensor, heads: int) -> int:
        """Address of the table of where each of (items · heads) blocks of x begins."""
        table, address = _table(self.lead, heads, x.shape, x.stride())
        self.kept.append(table)
        return address

    def operand(self, name: str, x: Tensor | None) -> None:
        """Vectors of queries (query, cotangent and their like) or of keys."""
        if x is None:
            return
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        heads = self.key_heads if name.startswith(("key", "value")) else self.heads
        operand = Operand(self.keep(x).data_ptr() or 1, self.table(x, heads), x.stride(-2), KINDS[x.dtype])
        setattr(self.frame, name, operand)

    def plane(self, name: str, x: Tensor | None) -> None:
        """Numbers of pairs of a query and a key (..., heads, Q or 1, K or 1)."""
        if x is None:
            return
        if x.dtype not in (self.dtype, torch.uint8):
            x = x.to(self.dtype)
        row, column = (0 if x.shape[axis] == 1 else x.stride(axis) for axis in (-2, -1))
        setattr(self.frame, name, Plane(self.keep(x).data_ptr() or 1, self.table(x, self.heads), row, column))

    def new(self, *shape: int) -> Tensor:
        """A tensor for results, not yet filled, in the dtype that sums are taken in."""
        return torch.empty(shape, dtype=self.dtype)

    def tiles(self, vectors: int, most_rows: int, strips: bool, cells: int) -> None:
        """Choose tiles for a sweep.

        Args:
            vectors: numbers of keys and values that a product holds for each key.
            most_rows: rows of a tile, at most.
            strips: whether rows go from scores to sums in strips, or a tile at a time.
            cells: numbers held for each pair of a row and a key.
        """
        f, block = self.frame, machine().block_rows
        f.tile_rows = self.block_rows
        if not f.thin:
            tiles = -(-self.block_rows // most_rows)
            f.tile_rows = _rounded(-(-self.block_rows // tiles), block)
        f.strip = min(f.tile_rows, 4 * block)
        held = vectors + cells * (f.strip if strips else f.tile_rows)
        # Keys are read in order: some may come from the next cache.
        columns = machine().cache_bytes * 3 // 2 // self.size // held
        pair = 2 * self.width
        f.tile_keys = max(pair, min(columns // pair * pair, 1024, _rounded(self.K, pair)))
        fit = _SHELF_BYTES // max(1, f.tile_keys * vectors * self.size // 2)
        f.shelf_slots = max(1, min(self.key_tiles, fit))

    @property
    def row_tiles(self) -> int:
        """Tiles of a block's rows."""
        return _over(self.block_rows, max(1, self.frame.tile_rows))

    @property
    def key_tiles(self) -> int:
        """Tiles of keys."""
        return _over(self.K, self.frame.tile_keys)

    def crew(self) -> int:
        """How many threads the work is worth."""
        work = self.rows * self.K * (self.D + self.Dv) * (_FEWER_IF_THIN if self.frame.thin else 1)
        return max(1, min(self.threads, work // _WORTH_A_THREAD))

    def run(self, sweep: str, units: int) -> None:
        """Run a sweep over its units."""
        if units == 0:
            return
        f, threads = self.frame, min(self.crew(), units)
        f.next, f.units = 0, units
        f.chunk = max(1, units // (8 * threads))
        run_region(_compiled(sweep, self.number), ctypes.addressof(f), threads)

    def rows_tensor(self, rows: Tensor) -> None:
        """Lines of what is known of each query (lines, *lead, heads, Q)."""
        self.frame.rows = self.keep(rows.contiguous()).data_ptr()


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
    """The forward sweep.

    Returns:
        output (*lead, Hq, Q, Dv); lines (7, *lead, Hq, Q) of `problem.LINES`; where the maximum is (*lead,
        Hq, Q); whether a query's sum of weights is NaN; whether a query that has keys to see has no score
        above −inf.
    """
    p = Launch(t, rule)
    f = p.frame
    p.tiles(p.D + p.Dv, TILE_ROWS, True, 2)
    units = p.blocks * p.row_tiles
    crew = p.crew()
    if 0 < units < 2 * crew:
        f.key_parts = max(1, min(-(-2 * crew // units), p.key_tiles))
    parts = f.key_parts
    shape = (*p.lead, p.heads, p.Q)
    pieces = (parts, *shape) if parts > 1 else shape
    output, lines = p.new(*pieces, p.Dv), p.new(_STATISTIC_LINES, *pieces)
    best = torch.empty(pieces, dtype=torch.int64)
    f.output, f.statistics, f.best = output.data_ptr(), lines.data_ptr(), best.data_ptr()
    p.run("forward", units * parts)
    if parts > 1:
        from exptilt.tilting.backends.numba.forward import join

        whole = p.new(*shape, p.Dv), p.new(_STATISTIC_LINES, *shape), torch.empty(shape, dtype=torch.int64)
        shapes = (p.rows, p.Dv), (_STATISTIC_LINES, p.rows), (p.rows,)
        given = (
            output.view(parts, *shapes[0]),
            lines.view(_STATISTIC_LINES, parts, p.rows),
            best.view(parts, p.rows),
        )
        target = (x.view(shape).numpy() for x, shape in zip(whole, shapes, strict=True))
        join(parts, *(x.numpy() for x in given), *target)
        return *whole, bool(f.bad), bool(f.blind)
    return output, lines, best, bool(f.bad), bool(f.blind)


def _dots(p: Launch, dots: Dots) -> None:
    p.operand("query_dot", dots.query)
    p.operand("key_dot", dots.key)
    p.operand("value_dot", dots.value)
    p.plane("bias_dot", dots.bias)
    p.plane("weight_dot", None if dots.log_weight is None else dots.log_weight.unsqueeze(-2))


def tangent(
    t: Inputs, dots: Dots, rows: Tensor, rule: ScoreRule, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and sums (4, ...): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'; rows: shift, inverse, gap.

    With the output of the forward sweep r is Σ p ṡ, and fewer digits are lost.
    """
    p = Launch(t, rule)
    p.operand("attended", output)
    _dots(p, dots)
    p.rows_tensor(rows)
    p.tiles(2 * (p.D + p.Dv), TILE_ROWS, True, 2)
    shape = (*p.lead, p.heads, p.Q)
    output, sums = p.new(*shape, p.Dv), p.new(_SUM_LINES, *shape)
    p.frame.output, p.frame.statistics = output.data_ptr(), sums.data_ptr()
    p.run("tangent", p.blocks * p.row_tiles)
    return output, sums


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
    p = Launch(t, rule)
    f = p.frame
    p.operand("cotangent", cotangent)
    p.operand("attended", output)
    p.operand("attended_dot", output_dot)
    p.rows_tensor(rows)
    if dots is not None:
        _dots(p, dots)
        f.second = 1
    full_bias = needs.bias and has_full_bias(t)
    f.only_mass, f.whole = int(needs.mass), int(whole)
    f.need_query, f.need_key, f.need_value = needs.query, needs.key, needs.value
    vectors = 2 * p.D + p.Dv
    if f.only_mass:
        p.tiles(p.D, TILE_ROWS, True, 1)
    else:
        p.tiles(vectors, BACKWARD_ROWS, False, 2 if dots is None else 4)
    crew = p.crew()
    bias_axes: tuple[int, ...] = tuple(t.bias.shape[:-2]) if full_bias and t.bias is not None else ()
    order, bounds = _owners(p.lead, p.key_heads, bias_axes)
    f.order, f.bounds = p.keep(order).ctypes.data, p.keep(bounds).ctypes.data
    owners = len(bounds) - 1
    if 0 < owners < 4 * crew and crew > 1:
        wanted = -(-4 * crew // owners)
        # Parts of the rows have copies of all gradients of keys: only where keys are few. And rows of
        # different heads may add to one place of a bias's gradient, keys do not.
        if full_bias or p.key_tiles >= min(wanted, p.row_tiles):
            f.key_parts = min(wanted, p.key_tiles)
        else:
            f.row_parts = min(wanted, p.row_tiles)
    # Where a block's packed keys do not fit on the shelves, each tile of them is packed once, and the rows
    # come to it.
    f.keys_outside = int(not f.thin and p.row_tiles > 1 and f.shelf_slots < -(-p.key_tiles // f.key_parts))
    if f.keys_outside:
        f.shelf_slots = 1
    if lines is not None and output_dot is not None:
        if f.thin or f.cap > 0 or f.key_parts > 1 or f.keys_outside or p.key_tiles > FLUSH:
            return None
        f.joint, f.output, f.statistics = p.key_tiles, output_dot.data_ptr() or 1, lines.data_ptr()
    wide, wide_v = _rounded(p.D, p.width), _rounded(p.Dv, p.width)

    def zeros(there: bool, name: str, *shape: int) -> Tensor:
        made = _zeros(shape if there else (0,), p.number)
        if there:
            setattr(f, name, p.keep(made).data_ptr() or 1)
        return made

    key = zeros(needs.key, "key_grad", f.row_parts, *p.lead, p.key_heads, p.K, wide)
    value = zeros(needs.value, "value_grad", f.row_parts, *p.lead, p.key_heads, p.K, wide_v)
    columns = zeros(needs.columns, "column_sum", f.row_parts, *p.lead, p.heads, p.K)
    row_sum = zeros(needs.rows, "row_sum", f.key_parts, *p.lead, p.heads, p.Q)
    bias = _zeros((0,), p.number)
    if full_bias and t.bias is not None:
        bias = _zeros(tuple(t.bias.shape), p.number)
        f.bias_grad, f.bias_grad_at, f.bias_grad_row = bias.data_ptr() or 1, p.table(bias, p.heads), p.K
    f.row_tile_to = p.row_tiles
    query = zeros(needs.query and f.key_parts == 1, "query_grad", p.blocks, p.block_rows, p.D)
    if f.key_parts == 1 or not needs.query:
        p.run("backward", owners * f.key_parts * f.row_parts)
    else:
        query = p.new(p.blocks, p.block_rows, p.D)
        copies = f.key_parts * p.blocks * f.tile_rows * p.D * p.size
        turn = max(2, crew * _COPIES_BYTES // max(1, copies))
        for f.row_tile_from in range(0, p.row_tiles, turn):
            f.row_tile_to = min(f.row_tile_from + turn, p.row_tiles)
            start, stop = f.row_tile_from * f.tile_rows, min(f.row_tile_to * f.tile_rows, p.block_rows)
            parts = _zeros((f.key_parts, p.blocks, stop - start, p.D), p.number)
            f.query_grad = parts.data_ptr() or 1
            p.run("backward", owners * f.key_parts)
            torch.sum(parts, 0, out=query[:, start:stop])
    query = query.view(*p.lead, p.heads, p.Q, p.D) if needs.query else query

    def joined(x: Tensor, there: bool, dim: int | None = None) -> Tensor:
        if not there:
            return x
        x = x[0] if x.shape[0] == 1 else x.sum(0)
        return x if dim is None or dim == x.shape[-1] else x[..., :dim].contiguous()

    keys = joined(key, needs.key, p.D), joined(value, needs.value, p.Dv), joined(columns, needs.columns)
    return Gradients(query, *keys, joined(row_sum, needs.rows), bias)


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
    number = "float32" if wide_dtype(t.query.dtype) == torch.float32 else "float64"
    moved, lines = _zeros(tuple(output.shape), number), _zeros((3, *output.shape[:-1]), number)
    found = _backward(t, rule, cotangent, output, rows, needs, dots, moved, lines)
    return None if found is None else (moved, lines, found)
