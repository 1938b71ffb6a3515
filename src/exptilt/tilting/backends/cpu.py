"""From torch tensors to the compiled sweeps and back: the frame, tiles, parts, threads.

The functions at the end are the backend's whole surface (``dispatch.py`` calls them): each takes the
canonical tensors of ``problem.py`` and returns fresh tensors. Memory beyond those: a few tiles for each
thread.

All that follows from shapes, strides and options alone (tiles, parts, tables of where each head begins) is
worked out once and kept (``layout.py``). A call copies that frame and fills in addresses.
``csrc/attention/attention.hpp`` says what the fields of a frame mean.
"""

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.threads import run_region
from exptilt.tilting.backends.layout import (
    STATISTIC_LINES,
    SUM_LINES,
    Array,
    Layout,
    described,
    frame_type,
    layout_of,
    over,
    rounded,
    sweep_address,
    table_of,
    tuning,
    zeros,
)
from exptilt.tilting.problem import WIDE, Gradients, Inputs, InputTangents, Needs
from exptilt.tilting.score_rule import ScoreRule


def _vectors(x: Tensor) -> Tensor:
    """x, copied if its vectors (the last axis) are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _canonical(t: Inputs) -> Inputs:
    """The tensors as sweeps read them: contiguous vectors, bias and weights of the dtype of sums, no sink."""
    query, key, value, bias, weight, _, mask, _ = t
    wide = WIDE[query.dtype]
    if bias is not None and bias.dtype != wide:
        bias = bias.to(wide)
    if weight is not None:
        weight = (weight if weight.dtype == wide else weight.to(wide)).unsqueeze(-2)
    return Inputs(_vectors(query), _vectors(key), _vectors(value), bias, weight, None, mask)


def _layout(sweep: str, t: Inputs, rule: ScoreRule) -> Layout:
    return layout_of(sweep, *map(described, (*t[:5], t.mask)), rule, torch.get_num_threads(), tuning())


def _frame(layout: Layout, t: Inputs) -> Any:
    """A copy of the layout's frame with the addresses of the tensors, which must be kept alive."""
    f = frame_type().from_buffer_copy(layout.frame)
    f.query, f.key, f.value = t.query.data_ptr() or 1, t.key.data_ptr() or 1, t.value.data_ptr() or 1
    if t.bias is not None:
        f.bias = t.bias.data_ptr() or 1
    if t.log_weight is not None:
        f.weight = t.log_weight.data_ptr() or 1
    if t.mask is not None:
        f.mask = t.mask.data_ptr() or 1
    return f


def _begin(sweep: str, t: Inputs, rule: ScoreRule) -> tuple[Layout, Any, Inputs]:
    """The layout of a sweep, its frame, and the tensors whose addresses are in it."""
    t = _canonical(t)
    layout = _layout(sweep, t, rule)
    return layout, _frame(layout, t), t


def forward_layout(t: Inputs, rule: ScoreRule) -> Layout | None:
    """The layout of a forward sweep over these tensors; None if one of them has to be converted first."""
    read = _canonical(t)
    unchanged = all(x is y for x, y in zip(read[:4], t[:4], strict=True))
    same_weight = t.log_weight is None or t.log_weight.dtype == WIDE[t.query.dtype]
    return _layout("forward", read, rule) if unchanged and same_weight else None


def forward(
    t: Inputs, rule: ScoreRule, layout: Layout | None = None, skip: Tensor | None = None
) -> tuple[Any, ...]:
    """The forward sweep.

    Args:
        t: the tensors.
        rule: of the scores.
        layout: that of `forward_layout` for tensors of these shapes, strides and dtypes, or None. With it no
            derivatives are wanted, and the place of the maximum is not written.
        skip: (*lead, Hq, Q), a key that each query leaves out, −1 for none; the results of those with −1
            are not filled in.

    Returns:
        output (*lead, Hq, Q, Dv); lines (7, *lead, Hq, Q) of `problem.RowStatistics`; the place of the
        maximum (*lead, Hq, Q), or None; whether a query's sum of weights is NaN; whether a query that has
        keys to see has no score above −inf.
    """
    if layout is not None and layout.tuned is tuning():
        p, f, best = layout, _frame(layout, t), None
    else:
        p, f, t = _begin("forward", t, rule)
        best = torch.empty(p.shape, dtype=torch.int64)
        f.best = best.data_ptr()
        f.skip = 0 if skip is None else skip.data_ptr()
    parts, shape, dtype = f.key_parts, p.shape, p.dtype
    output = torch.empty(p.output_shape, dtype=dtype)
    lines = torch.empty(p.lines_shape, dtype=dtype)
    f.output, f.statistics = output.data_ptr(), lines.data_ptr()
    if parts == 1:
        p.run(f, "forward", p.units)
        return output, lines, best, f.bad, f.blind
    frames = (frame_type() * 2)(f, f)
    pieces = (
        torch.empty((parts, *p.output_shape), dtype=dtype),
        torch.empty((STATISTIC_LINES, parts, *shape), dtype=dtype),
        torch.empty((parts, *shape), dtype=torch.int64),
    )
    f = frames[0]
    f.output, f.statistics, f.best = (x.data_ptr() for x in pieces)
    p.run(f, "forward", p.units * parts)
    run_region(sweep_address("join", p.number), ctypes.addressof(frames), 1)
    return output, lines, best, f.bad, f.blind


class _Filling:
    """Sets further tensors of a frame, and holds on to them until the sweep has run."""

    def __init__(self, layout: Layout, frame: Any):
        self.layout, self.frame, self.kept = layout, frame, list[Any]()

    def operand(self, name: str, x: Tensor | None) -> None:
        """Set vectors of queries or of keys."""
        if x is not None:
            x = _vectors(x)
            self.kept += [x, *self.layout.operand(self.frame, name, (x.shape, x.stride(), x.dtype))]
            setattr(self.frame, name, x.data_ptr() or 1)

    def plane(self, name: str, x: Tensor | None) -> None:
        """Set numbers of pairs of a query and a key."""
        if x is not None:
            x = x if x.dtype == self.layout.dtype else x.to(self.layout.dtype)
            self.kept += [x, *self.layout.plane(self.frame, name, (x.shape, x.stride(), x.dtype))]
            setattr(self.frame, name, x.data_ptr() or 1)

    def dots(self, dots: InputTangents) -> None:
        """Set tangents of the inputs."""
        self.operand("query_dot", dots.query)
        self.operand("key_dot", dots.key)
        self.operand("value_dot", dots.value)
        self.plane("bias_dot", dots.bias)
        self.plane("weight_dot", None if dots.log_weight is None else dots.log_weight.unsqueeze(-2))

    def rows(self, rows: Tensor) -> None:
        """Set the numbers known of each query (lines, *lead, heads, Q)."""
        self.kept.append(rows := rows.contiguous())
        self.frame.rows = rows.data_ptr()


def tangent(
    t: Inputs, dots: InputTangents, rows: Tensor, rule: ScoreRule, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and sums (4, ...): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'; rows: shift, inverse, gap, r or NaN.

    With the output of the forward sweep r is Σ p ṡ, and fewer digits are lost.
    """
    p, f, _kept = _begin("tangent", t, rule)
    filling = _Filling(p, f)
    filling.operand("attended", output)
    filling.dots(dots)
    filling.rows(rows)
    pushed = torch.empty((*p.shape, p.Dv), dtype=p.dtype)
    sums = torch.empty((SUM_LINES, *p.shape), dtype=p.dtype)
    f.output, f.statistics = pushed.data_ptr(), sums.data_ptr()
    p.run(f, "tangent", p.units)
    return pushed, sums


@lru_cache(256)
def _owners(lead: torch.Size, key_heads: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Order of the blocks in runs that add to the same place of a bias's gradient, and where each run begins.

    `shape` has the bias's axes before the queries; if it is empty, every block is a run of its own.
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
    """The sum of copies (parts, ...), without the padding of their vectors beyond `dim` numbers."""
    x = x[0] if x.shape[0] == 1 else x.sum(0)
    x = x if dim is None or dim == x.shape[-1] else x[..., :dim].contiguous()
    return x if x.dtype == dtype else x.to(dtype)


def _mass(t: Inputs, rule: ScoreRule, rows: Tensor) -> Gradients:
    """`Gradients` with the column sums of the weights alone."""
    p, f, _kept = _begin("mass", t, rule)
    filling = _Filling(p, f)
    filling.rows(rows)
    columns = zeros((f.row_parts, *p.lead, p.heads, p.K), torch.float64)
    f.column_sum = columns.data_ptr() or 1
    p.run(f, "mass", p.blocks * f.key_parts * f.row_parts)
    none = torch.empty(0, dtype=p.dtype)
    return Gradients(none, none, none, _summed(columns, p.dtype), none, none)


def worth(
    t: Inputs, rule: ScoreRule, vectors: Tensor, rows: Tensor, norms: bool, skip: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What leaving out each key changes: Σ_i, max_i |·| of the output's change, and Σ_i log(1 − p_ij).

    Args:
        t: the tensors.
        rule: of the scores.
        vectors: (*lead, Hq, Q, Dv), the outputs, or with `norms` False a direction along which to measure.
        rows: (3, *lead, Hq, Q): shift, inverse, and |o|², or the output along the direction.
        norms: whether changes are norms.
        skip: (*lead, Hq, Q), a key that each query leaves out of the sums, −1 for none.
    """
    p, f, _kept = _begin("worth", t, rule)
    filling = _Filling(p, f)
    filling.operand("attended", vectors)
    filling.plane("weight_dot", t.value.square().sum(-1).unsqueeze(-2) if norms else None)
    filling.rows(rows)
    columns = zeros((3, f.row_parts, *p.lead, p.heads, p.K), torch.float64)
    f.column_sum, f.skip = columns.data_ptr() or 1, skip.data_ptr()
    p.run(f, "mass", p.blocks * f.key_parts * f.row_parts)
    total, largest, lost = columns
    return _summed(total, p.dtype), largest.amax(0).to(p.dtype), _summed(lost, p.dtype)


def heaviest(t: Inputs, rule: ScoreRule, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places and weights (*lead, Hq, Q, count) of the heaviest keys of each query, and the others' weight.

    Rows (2, *lead, Hq, Q) are shift and inverse. A place is −1 where a query sees fewer keys.
    """
    p, f, _kept = _begin("heaviest", t._replace(value=t.key[..., :0]), rule)
    filling = _Filling(p, f)
    filling.rows(rows)
    places = torch.empty((*p.shape, count), dtype=torch.int64)
    weight, rest = torch.empty((*p.shape, count), dtype=p.dtype), torch.empty(p.shape, dtype=p.dtype)
    f.best, f.output, f.statistics, f.top = places.data_ptr(), weight.data_ptr(), rest.data_ptr(), count
    p.run(f, "heaviest", p.units)
    return places, weight, rest


def gradient(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    rule: ScoreRule,
    needs: Needs,
    dots: InputTangents | None = None,
    output_dot: Tensor | None = None,
) -> Gradients:
    """Gradients from a cotangent of the output, or of its tangent `output_dot` if `dots` are given.

    rows (6, *lead, Hq, Q): shift, inverse, gap, a0, a1, a2; with `dots` then pushed, e0, e1.
    """
    if needs.mass:
        return _mass(t, rule, rows)
    p, f, _kept = _begin("gradient" if dots is None else "second", t, rule)
    filling = _Filling(p, f)
    f.need_query, f.need_key, f.need_value = needs.query, needs.key, needs.value
    bias_axes: tuple[int, ...] = tuple(t.bias.shape[:-2]) if needs.bias and t.bias is not None else ()
    order, bounds = _owners(p.lead, p.key_heads, bias_axes)
    f.order, f.bounds = order.ctypes.data, bounds.ctypes.data
    owners, key_tiles, row_tiles = len(bounds) - 1, p.key_tiles(f), p.row_tiles(f)
    p.divide(f, owners, needs.bias)
    # Where a block's packed keys do not fit on the shelves, each tile of them is packed once, and the rows
    # come to it.
    f.keys_outside = int(not f.thin and row_tiles > 1 and f.shelf_slots < over(key_tiles, f.key_parts))
    if f.keys_outside:
        f.shelf_slots = 1
    filling.operand("cotangent", cotangent)
    filling.operand("attended", output)
    filling.operand("attended_dot", output_dot)
    filling.rows(rows)
    if dots is not None:
        filling.dots(dots)
    none = torch.empty(0, dtype=p.dtype)

    def made(there: bool, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        if not there:
            return none
        x = zeros(shape, dtype)
        setattr(f, name, x.data_ptr() or 1)
        return x

    wide, wide_v = rounded(p.D, p.width), rounded(p.Dv, p.width)
    key = made(needs.key, "key_grad", p.dtype, f.row_parts, *p.lead, p.key_heads, p.K, wide)
    value = made(needs.value, "value_grad", p.dtype, f.row_parts, *p.lead, p.key_heads, p.K, wide_v)
    columns = made(needs.columns, "column_sum", torch.float64, f.row_parts, *p.lead, p.heads, p.K)
    row_sum = made(needs.rows, "row_sum", torch.float64, f.key_parts, *p.shape)
    bias = none
    if needs.bias and t.bias is not None:
        bias = zeros(tuple(t.bias.shape), p.dtype)
        table, address = table_of(p.lead, p.heads, bias.shape, bias.stride())
        filling.kept.append(table)
        f.bias_grad, f.bias_grad_at, f.bias_grad_row = bias.data_ptr() or 1, address, p.K
    f.row_tile_to = row_tiles
    query = made(needs.query and f.key_parts == 1, "query_grad", p.dtype, p.blocks, p.block_rows, p.D)
    if f.key_parts == 1 or not needs.query:
        p.run(f, "backward", owners * f.key_parts * f.row_parts)
    else:
        query = torch.empty((p.blocks, p.block_rows, p.D), dtype=p.dtype)
        copies = f.key_parts * p.blocks * f.tile_rows * p.D * p.size
        turn = max(2, p.crew * p.tuned.copies_bytes // max(1, copies))
        for f.row_tile_from in range(0, row_tiles, turn):
            f.row_tile_to = min(f.row_tile_from + turn, row_tiles)
            start, stop = f.row_tile_from * f.tile_rows, min(f.row_tile_to * f.tile_rows, p.block_rows)
            parts = zeros((f.key_parts, p.blocks, stop - start, p.D), p.dtype)
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
