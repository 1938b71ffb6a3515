"""From torch tensors to compiled sweeps and back: blocks, buffers, tiles, threads.

The four functions at the end are the backend's whole surface (``operators.py`` calls them): each takes the canonical tensors of
``problem.py`` and returns fresh tensors. Memory beyond those: one workspace of a few tiles per thread.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.announce import announce_if_slow
from exptilt._support.threads import run_chunks
from exptilt.tilting.cpu.product import THIN, padded, width_of
from exptilt.tilting.problem import Gradients, Needs, Options, Tensors, has_full_bias

Array = np.ndarray[Any, Any]
# The tiles a sweep holds at once should stay in a core's second-level cache (512 KiB and up) beside the keys and values they meet.
_CACHE_BYTES = 384 * 1024
# Packed keys and values are kept for the next queries of the same head up to this size, per thread and kind;
# beyond it they are packed anew.
_SHELF_BYTES = 8 * 1024 * 1024
# Fewer products than this are not worth a second thread for one tile of queries: they take as long as it takes to wake one.
_SPLIT_PRODUCTS = 1 << 20
# Queries that a sweep takes at a time, at most; whole sixes, the rows that a product takes at a time.
_MOST_ROWS = 258
_ready: set[tuple[str, type]] = set()


_NOTHING = {number: np.empty((1, 1, 0), number) for number in (np.float32, np.float64)}
_block_of: dict[tuple[int, int, int, int], Array] = {}


def _blocks_used(N: int, heads: int, n: int, h: int) -> Array:
    """Which of n·h blocks each (batch, query head) uses, (N·heads,); kept, since a call asks six times."""
    if (N, heads, n, h) not in _block_of:
        if len(_block_of) > 1000:
            _block_of.clear()
        batch = np.arange(N) if n > 1 else np.zeros(N, np.int64)
        _block_of[N, heads, n, h] = (batch[:, None] * h + np.arange(heads) * h // max(heads, 1)).ravel()
    return _block_of[N, heads, n, h]


class Blocks:
    """The problem's tensors as (blocks, length, dim) arrays, with the block that each (batch, query head) uses.

    An axis that is broadcast (size 1, or stride 0 as left by ``expand``) is stored once and shared through the index.
    """

    def __init__(self, t: Tensors, options: Options):
        self.N, self.heads, self.Q, self.D = t.query.shape
        self.key_heads, self.K, self.Dv = t.key.shape[1], t.key.shape[2], t.value.shape[3]
        self.count, self.key_count = self.N * self.heads, self.N * self.key_heads
        self.group = self.heads // max(self.key_heads, 1)
        self.dtype = t.query.dtype
        self.number = np.float32 if self.dtype == torch.float32 else np.float64
        weight = None if t.log_weight is None else t.log_weight.unsqueeze(2)
        pairs = [self.blocks(x) for x in (t.query, t.key, t.value, t.bias, weight, t.mask)]
        self.arrays = [array for array, _ in pairs]
        self.indices = [index for _, index in pairs]
        self.arrays[4] = self.arrays[4][:, 0]
        self.arrays[5] = self.arrays[5].astype(bool, copy=False).view(np.uint8)
        window = -1 if options.window is None else options.window
        self.width = width_of(self.number)
        self.numbers = (self.width, self.number(options.scale), options.causal, window, self.number(options.softcap or 0.0))

    def blocks(self, x: Tensor | None) -> tuple[Array, Array]:
        """X (N or 1, query or key heads or 1, length, dim) as distinct blocks, and the block of each (batch, query head)."""
        if x is None:
            return _NOTHING[self.number], _blocks_used(self.N, self.heads, 1, 1)
        for axis in (0, 1):
            if x.shape[axis] > 1 and x.stride(axis) == 0:
                x = x.narrow(axis, 0, 1)
        n, h = x.shape[:2]
        return x.contiguous().numpy(force=True).reshape(n * h, *x.shape[2:]), _blocks_used(self.N, self.heads, n, h)

    def plain(self, x: Tensor | None, absent: tuple[int, ...]) -> Array:
        """X (N, heads, ...) as (N·heads, ...); an array of the given shape (with a 0 in it) if None."""
        if x is None:
            return np.empty(absent, self.number)
        return x.contiguous().numpy(force=True).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def tiles(self, buffers: int) -> tuple[int, int]:
        """Rows and columns of a tile when a sweep holds `buffers` of them at once; columns are whole pairs of panels."""
        pair = 2 * self.width
        cells = _CACHE_BYTES // buffers // np.dtype(self.number).itemsize
        limit = _MOST_ROWS if buffers <= 2 else 132
        parts = -(-self.Q // limit)
        even = -(-self.Q // max(parts, 1))
        tile_q = max(1, min(self.Q, -(-even // 6) * 6))
        return tile_q, min(max(2 * pair, cells // tile_q // pair * pair), 1024, -(-max(self.K, 1) // pair) * pair)

    def new(self, *shape: int) -> Tensor:
        """A tensor for results, not yet filled, in the problem's dtype."""
        return torch.empty(shape, dtype=self.dtype)

    def shelf(self, tile_k: int, inner: int, there: bool = True) -> Callable[[], tuple[Array, Array]]:
        """A shelf for packed tiles of vectors of length `inner`, and its tags."""
        size = tile_k * inner if there else 0
        slots = max(1, min(-(-self.K // tile_k), _SHELF_BYTES // max(1, size * np.dtype(self.number).itemsize)))
        return lambda: (np.empty((slots, size), self.number), np.full(slots, -1, np.int64))

    def run(
        self,
        name: str,
        sweep: Callable[..., None],
        before: tuple[Any, ...],
        own: list[Any],
        after: tuple[Any, ...],
        units: int,
    ) -> None:
        """Run `sweep(start, stop, *before, *own, *after)` over all units on torch's number of threads.

        own lists a thread's buffers: shapes, or functions that make several.
        """

        def scratch() -> list[Array]:
            made: list[Array] = []
            for x in own:
                made.extend([np.empty(x, self.number)] if isinstance(x, tuple) else x())
            return made

        def work(start: int, stop: int, buffers: list[Array]) -> None:
            sweep(start, stop, *before, *buffers, *after)

        if (name, self.number) not in _ready:
            message = f"exptilt: compiling the {name} kernel for {np.dtype(self.number).name} (kept on disk for next time) ..."
            with announce_if_slow(message):
                work(0, 0, scratch())
            _ready.add((name, self.number))
        run_chunks(work, units, scratch)


def _array(x: Tensor, *shape: int) -> Array:
    return x.numpy(force=True).reshape(shape)


def _parts(b: Blocks, tiles: int, tile_k: int) -> int:
    """In how many parts the keys are swept: one, unless there is much to do and too few tiles of queries to give each thread one."""
    threads = torch.get_num_threads()
    if tiles >= threads or b.count * b.Q * b.K * (b.D + b.Dv) < _SPLIT_PRODUCTS:
        return 1
    return min(-(-threads // max(tiles, 1)), -(-b.K // tile_k))


def forward(t: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (N, Hq, Q, Dv); statistics (5, N, Hq, Q): G, entropy, mean, variance, maximum; where the maximum is (N, Hq, Q)."""
    from exptilt.tilting.cpu.forward import forward_sweep, join

    b = Blocks(t, options)
    tile_q, tile_k = b.tiles(1)
    wide, packed = padded(b.Dv, b.number), tile_q > THIN
    tiles = b.count * -(-b.Q // tile_q)
    parts = _parts(b, tiles, tile_k)

    def results(parts: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Array, Array, Array]]:
        n = parts * b.N
        made = b.new(n, b.heads, b.Q, b.Dv), b.new(5, n, b.heads, b.Q), torch.empty(n, b.heads, b.Q, dtype=torch.int64)
        n *= b.heads
        return made, (_array(made[0], n, b.Q, b.Dv), _array(made[1], 5, n, b.Q), _array(made[2], n, b.Q))

    found, arrays = results(parts)
    own = [
        (tile_q, tile_k + b.width), (tile_q, b.D), (tile_q, wide), (7, max(tile_q, tile_k)),
        b.shelf(tile_k, b.D, packed), b.shelf(tile_k, wide, packed),
    ]  # fmt: skip
    before = (parts, tile_q, tile_k, *b.numbers, *b.arrays, *b.indices)
    b.run("forward", forward_sweep, before, own, arrays, parts * tiles)
    if parts == 1:
        return found
    whole, whole_arrays = results(1)
    join(parts, *arrays, *whole_arrays)
    return whole


def _tangents(b: Blocks, tangents: Tensors) -> tuple[Array, ...]:
    """Tangents as the sweeps take them, of size 0 if absent.

    query (B·Hq, Q, D), key and value (B·Hkv, K, ·), bias and log_weight with their indices.
    """
    query, key, value = (b.plain(x, (1, 1, 0)) for x in (tangents.query, tangents.key, tangents.value))
    weight, weight_at = b.blocks(None if tangents.log_weight is None else tangents.log_weight.unsqueeze(2))
    return query, key, value, *b.blocks(tangents.bias), weight[:, 0], weight_at


def tangent(t: Tensors, tangents: Tensors, rows: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (N, Hq, Q, Dv) and sums (4, N, Hq, Q): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'; rows (2, N, Hq, Q): G, mean."""
    from exptilt.tilting.cpu.tangent import tangent_sweep

    b = Blocks(t, options)
    tile_q, tile_k = b.tiles(2)
    wide = padded(b.Dv, b.number)
    output, sums = b.new(b.N, b.heads, b.Q, b.Dv), b.new(4, b.N, b.heads, b.Q)
    results = _array(output, b.count, b.Q, b.Dv), _array(sums, 4, b.count, b.Q)
    own = [
        (2, tile_q, tile_k + b.width), (tile_q, b.D), (tile_q, b.D), (tile_q, wide), (4, max(tile_q, tile_k)),
        b.shelf(tile_k, b.D), b.shelf(tile_k, b.D, tangents.key is not None),
        b.shelf(tile_k, wide), b.shelf(tile_k, wide, tangents.value is not None),
    ]  # fmt: skip
    before = (
        b.group,
        tile_q,
        tile_k,
        *b.numbers,
        *b.arrays,
        *b.indices,
        *_tangents(b, tangents),
        _array(rows.contiguous(), 2, b.count, b.Q),
    )
    b.run("tangent", tangent_sweep, before, own, results, b.count * -(-b.Q // tile_q))
    return output, sums


class _Results:
    """Buffers of a backward sweep, and the order of its units: those that write to one place are done by one thread, one after another."""

    def __init__(self, b: Blocks, t: Tensors, needs: Needs, tile_q: int):
        self.b, self.needs = b, needs
        full_bias = needs.bias and has_full_bias(t)
        turns = b.group * -(-b.Q // tile_q)
        threads = torch.get_num_threads()
        self.splits = 1
        if b.key_count < 2 * threads and not full_bias:
            self.splits = max(1, min(-(-2 * threads // max(b.key_count, 1)), turns))
        self.wide, self.wide_v = padded(b.D, b.number), padded(b.Dv, b.number)
        self.query = b.new(b.N, b.heads, b.Q, b.D) if needs.query else b.new(1, 1, 0)
        self.key = self.zeros(b.key_heads, b.K, self.wide) if needs.key else b.new(1, 1, 1, 0)
        self.value = self.zeros(b.key_heads, b.K, self.wide_v) if needs.value else b.new(1, 1, 1, 0)
        self.columns = self.zeros(b.heads, b.K) if needs.log_weight else b.new(1, 1, 0)
        self.rows = torch.zeros(b.N, b.heads, b.Q, dtype=b.dtype)
        self.units = np.arange(b.key_count * self.splits)
        self.bounds = np.arange(self.units.size + 1)
        self.bias = b.new(1, 1, 0)
        self.bias_at = np.zeros(b.count, np.int64)
        if full_bias:
            assert t.bias is not None
            self.bias = torch.zeros_like(t.bias, memory_format=torch.contiguous_format)
            n, h = t.bias.shape[:2]
            batch, head = np.divmod(np.arange(b.count), b.heads)
            self.bias_at = batch * (n > 1) * h + head * (h > 1)
            owner = (self.units // b.key_heads) * (n > 1) * b.key_heads + (self.units % b.key_heads) * (h > 1)
            self.units = np.argsort(owner, kind="stable")
            owner = owner[self.units]
            self.bounds = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1], True])

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros((self.splits, self.b.N, *shape), dtype=self.b.dtype)

    def arrays(self) -> tuple[Any, ...]:
        b, s = self.b, self.splits
        return (
            _array(self.query, b.count, b.Q, b.D) if self.needs.query else self.query.numpy(),
            _array(self.key, s, b.key_count, b.K, self.wide) if self.needs.key else self.key.numpy(),
            _array(self.value, s, b.key_count, b.K, self.wide_v) if self.needs.value else self.value.numpy(),
            _array(self.columns, s, b.count, b.K) if self.needs.log_weight else self.columns.numpy(),
            _array(self.rows, b.count, b.Q),
            self.bias.numpy().reshape(-1, *self.bias.shape[-2:]) if self.bias.numel() else self.bias.numpy(),
            self.bias_at,
        )  # fmt: skip

    def collect(self) -> Gradients:
        def joined(x: Tensor) -> Tensor:
            return x[0] if self.splits == 1 else x.sum(0)

        key, value = joined(self.key)[..., : self.b.D].contiguous(), joined(self.value)[..., : self.b.Dv].contiguous()
        return Gradients(self.query, key, value, joined(self.columns), self.rows, self.bias)


def _backward(
    name: str, t: Tensors, options: Options, cotangent: Tensor, rows: Tensor, needs: Needs, tangents: Tensors | None
) -> Gradients:
    from exptilt.tilting.cpu.gradient import gradient_sweep
    from exptilt.tilting.cpu.second import second_sweep

    b = Blocks(t, options)
    tile_q, tile_k = b.tiles(2 if tangents is None else 4)
    results = _Results(b, t, needs, tile_q)
    wide, wide_v = results.wide, results.wide_v
    head = (results.units, results.bounds, results.splits, b.group, tile_q, tile_k, *b.numbers, needs.query, needs.key, needs.value)
    inputs = (*b.arrays, *b.indices, *b.blocks(cotangent), _array(rows.contiguous(), rows.shape[0], b.count, b.Q))
    tiles = [(2 if tangents is None else 4, tile_q, tile_k + b.width), (tile_q, b.D), (tile_q, wide), (2, max(tile_q, tile_k))]
    packed: list[Any] = [(tile_q * wide,), (tile_q * wide_v,)]
    shelves: list[Any] = [b.shelf(tile_k, b.D), b.shelf(tile_k, wide), b.shelf(tile_k, b.Dv)]
    if tangents is None:
        b.run(name, gradient_sweep, (*head, *inputs), [*tiles, *packed, *shelves], results.arrays(), results.bounds.size - 1)
        return results.collect()
    tiles.insert(2, (tile_q, b.D))
    packed.append((tile_q * wide,))
    shelves += [
        b.shelf(tile_k, b.D, tangents.key is not None),
        b.shelf(tile_k, b.Dv, tangents.value is not None),
        b.shelf(tile_k, wide, tangents.key is not None),
    ]
    before = (*head, *inputs, *_tangents(b, tangents))
    b.run(name, second_sweep, before, [*tiles, *packed, *shelves], results.arrays(), results.bounds.size - 1)
    return results.collect()


def gradient(t: Tensors, cotangent: Tensor, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """Cotangent (N, Hq, Q, Dv) of the output and rows (5, N, Hq, Q): G, mean, a0, a1, a2, carried back to the inputs."""
    return _backward("gradient", t, options, cotangent, rows, needs, None)


def second(t: Tensors, cotangent: Tensor, tangents: Tensors, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """The gradient of a forward derivative; rows (10, N, Hq, Q): G, mean, a0, a1, a2, Ġ, b1, b2, e0, e1."""
    return _backward("second", t, options, cotangent, rows, needs, tangents)
