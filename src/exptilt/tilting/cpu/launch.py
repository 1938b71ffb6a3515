"""From torch tensors to compiled sweeps and back: blocks, buffers, tiles, threads.

The four functions at the end are the backend's whole surface (``operators.py`` calls them): each takes the canonical tensors of ``problem.py`` and
returns fresh tensors. Memory beyond those: one workspace of a few tiles per thread.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exptilt._support.announce import announce_if_slow
from exptilt._support.threads import run_chunks
from exptilt.tilting.problem import Gradients, Needs, Options, Tensors, has_full_bias

Array = np.ndarray[Any, Any]
# The tiles a sweep holds at once should stay in a core's second-level cache (512 KiB and up) beside the keys and values they meet.
_CACHE_BYTES = 384 * 1024
_ready: set[tuple[str, type]] = set()


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
        self.arrays[4] = self.arrays[4].reshape(self.arrays[4].shape[0], -1)
        self.arrays[5] = self.arrays[5].astype(bool, copy=False).view(np.uint8)
        window = -1 if options.window is None else options.window
        self.numbers = (self.number(options.scale), options.causal, window, self.number(options.softcap or 0.0))

    def blocks(self, x: Tensor | None) -> tuple[Array, Array]:
        """x (N or 1, query or key heads or 1, length, dim) as distinct blocks, and the block of each (batch, query head)."""
        if x is None:
            return np.empty((1, 1, 0), self.number), np.zeros(self.count, np.int64)
        for axis in (0, 1):
            if x.shape[axis] > 1 and x.stride(axis) == 0:
                x = x.narrow(axis, 0, 1)
        n, h = x.shape[:2]
        batch = np.arange(self.N) if n > 1 else np.zeros(self.N, np.int64)
        head = np.arange(self.heads) * h // max(self.heads, 1)
        return x.detach().contiguous().numpy().reshape(n * h, *x.shape[2:]), (batch[:, None] * h + head).ravel()

    def plain(self, x: Tensor | None, absent: tuple[int, ...]) -> Array:
        """x (N, heads, ...) as (N·heads, ...); an array of the given shape (with a 0 in it) if None."""
        if x is None:
            return np.empty(absent, self.number)
        return x.detach().contiguous().numpy().reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def tiles(self, buffers: int) -> tuple[int, int]:
        """Rows and columns of a tile when a sweep holds `buffers` of them at once."""
        cells = _CACHE_BYTES // buffers // np.dtype(self.number).itemsize
        tile_q = min(256 if buffers <= 2 else 128, max(self.Q, 1))
        tile_k = min(max(64, cells // tile_q // 64 * 64), 1024, max(self.K, 1))
        return tile_q, tile_k

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def run(self, name: str, sweep: Callable[..., None], arguments: tuple[Any, ...], units: int, cells: int, lines: tuple[int, int]) -> None:
        """Run `sweep(start, stop, *arguments)` over all units on torch's number of threads, each thread with its own work and lines."""

        def scratch() -> tuple[Array, Array]:
            return np.empty(cells, self.number), np.empty(lines, self.number)

        def work(start: int, stop: int, own: tuple[Array, Array]) -> None:
            sweep(start, stop, *(own[0] if a is _WORK else own[1] if a is _LINES else a for a in arguments))

        if (name, self.number) not in _ready:
            message = f"exptilt: compiling the {name} kernel for {np.dtype(self.number).name} (kept on disk for next time) ..."
            with announce_if_slow(message):
                work(0, 0, scratch())
            _ready.add((name, self.number))
        run_chunks(work, units, scratch)


_WORK, _LINES = object(), object()  # stand for a thread's own buffers in an argument list


def _array(x: Tensor, *shape: int) -> Array:
    return x.numpy().reshape(shape)


def forward(t: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """output (N, Hq, Q, Dv); statistics (5, N, Hq, Q): G, entropy, mean, variance, maximum; where the maximum is (N, Hq, Q)."""
    from exptilt.tilting.cpu.forward import forward_sweep  # noqa: PLC0415

    b = Blocks(t, options)
    tile_q, tile_k = b.tiles(1)
    output, statistics = b.new(b.N, b.heads, b.Q, b.Dv), b.new(5, b.N, b.heads, b.Q)
    best = torch.empty(b.N, b.heads, b.Q, dtype=torch.int64)
    results = _array(output, b.count, b.Q, b.Dv), _array(statistics, 5, b.count, b.Q), _array(best, b.count, b.Q)
    arguments = (tile_q, tile_k, *b.numbers, *b.arrays, *b.indices, _WORK, _LINES, *results)
    cells = tile_q * (tile_k + b.D + b.Dv)
    b.run("forward", forward_sweep, arguments, b.count * -(-b.Q // tile_q), cells, (7, max(tile_q, tile_k)))
    return output, statistics, best


class Joined(NamedTuple):
    """Tangents as the sweeps want them: (q̇,q)·scale against (k,k̇) give ż in one product."""

    query: Array
    key: Array
    value: Array
    bias: Array
    bias_at: Array
    log_weight: Array
    weight_at: Array


def _join(b: Blocks, t: Tensors, tangents: Tensors, scale: float) -> Joined:
    left = ([] if tangents.query is None else [tangents.query * scale]) + ([] if tangents.key is None else [t.query * scale])
    right = ([] if tangents.query is None else [t.key]) + ([] if tangents.key is None else [tangents.key])
    q = torch.cat(left, -1) if left else t.query[..., :0]
    k = torch.cat(right, -1) if right else t.key[..., :0]
    bias, bias_at = b.blocks(tangents.bias)
    weight, weight_at = b.blocks(None if tangents.log_weight is None else tangents.log_weight.unsqueeze(2))
    value = b.plain(tangents.value, (1, 1, 0))
    return Joined(b.plain(q, ()), b.plain(k, ()), value, bias, bias_at, weight.reshape(weight.shape[0], -1), weight_at)


def tangent(t: Tensors, tangents: Tensors, rows: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (N, Hq, Q, Dv) and sums (4, N, Hq, Q): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'; rows (2, N, Hq, Q): G, mean."""
    from exptilt.tilting.cpu.tangent import tangent_sweep  # noqa: PLC0415

    b = Blocks(t, options)
    tile_q, tile_k = b.tiles(2)
    j = _join(b, t, tangents, options.scale)
    output, sums = b.new(b.N, b.heads, b.Q, b.Dv), b.new(4, b.N, b.heads, b.Q)
    results = _array(output, b.count, b.Q, b.Dv), _array(sums, 4, b.count, b.Q)
    arguments = (tile_q, tile_k, *b.numbers, *b.arrays, *b.indices, *j, _array(rows.contiguous(), 2, b.count, b.Q), _WORK, _LINES, *results)
    cells = 2 * tile_q * tile_k + tile_q * (b.D + b.Dv)
    b.run("tangent", tangent_sweep, arguments, b.count * -(-b.Q // tile_q), cells, (4, max(tile_q, tile_k)))
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
        zeros = (lambda *shape: torch.zeros(shape, dtype=b.dtype))
        self.query = b.new(b.N, b.heads, b.Q, b.D) if needs.query else b.new(1, 1, 0)
        self.key = zeros(self.splits, b.N, b.key_heads, b.K, b.D) if needs.key else b.new(1, 1, 1, 0)
        self.value = zeros(self.splits, b.N, b.key_heads, b.K, b.Dv) if needs.value else b.new(1, 1, 1, 0)
        self.columns = zeros(self.splits, b.N, b.heads, b.K) if needs.log_weight else b.new(1, 1, 0)
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

    def arrays(self) -> tuple[Any, ...]:
        b, s = self.b, self.splits
        return (
            _array(self.query, b.count, b.Q, b.D) if self.needs.query else self.query.numpy(),
            _array(self.key, s, b.key_count, b.K, b.D) if self.needs.key else self.key.numpy(),
            _array(self.value, s, b.key_count, b.K, b.Dv) if self.needs.value else self.value.numpy(),
            _array(self.columns, s, b.count, b.K) if self.needs.log_weight else self.columns.numpy(),
            _array(self.rows, b.count, b.Q),
            self.bias.numpy().reshape(-1, *self.bias.shape[-2:]) if self.bias.numel() else self.bias.numpy(),
            self.bias_at,
        )  # fmt: skip

    def collect(self) -> Gradients:
        def joined(x: Tensor) -> Tensor:
            return x[0] if self.splits == 1 else x.sum(0)

        return Gradients(self.query, joined(self.key), joined(self.value), joined(self.columns), self.rows, self.bias)


def _backward(name: str, t: Tensors, options: Options, cotangent: Tensor, rows: Tensor, needs: Needs, tangents: Tensors | None) -> Gradients:
    from exptilt.tilting.cpu.gradient import gradient_sweep  # noqa: PLC0415
    from exptilt.tilting.cpu.second import second_sweep  # noqa: PLC0415

    b = Blocks(t, options)
    buffers = 2 if tangents is None else 4
    tile_q, tile_k = b.tiles(buffers)
    results = _Results(b, t, needs, tile_q)
    head = (results.units, results.bounds, results.splits, b.group, tile_q, tile_k, *b.numbers, needs.query, needs.key, needs.value)
    inputs = (*b.arrays, *b.indices, *b.blocks(cotangent), _array(rows.contiguous(), rows.shape[0], b.count, b.Q))
    if tangents is not None:
        alone = b.plain(None if tangents.query is None else tangents.query * options.scale, (1, 1, 0)), b.plain(tangents.key, (1, 1, 0))
        inputs = (*inputs, *alone, *_join(b, t, tangents, options.scale))
    arguments = (*head, *inputs, _WORK, _LINES, *results.arrays())
    cells = buffers * tile_q * tile_k + 2 * tile_q * b.D + max(tile_q, tile_k) * max(b.D, b.Dv)
    sweep = gradient_sweep if tangents is None else second_sweep
    b.run(name, sweep, arguments, results.bounds.size - 1, cells, (2, max(tile_q, tile_k)))
    return results.collect()


def gradient(t: Tensors, cotangent: Tensor, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """Cotangent (N, Hq, Q, Dv) of the output and rows (5, N, Hq, Q): G, mean, a0, a1, a2, carried back to the inputs."""
    return _backward("gradient", t, options, cotangent, rows, needs, None)


def second(t: Tensors, cotangent: Tensor, tangents: Tensors, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """The gradient of a forward derivative; rows (10, N, Hq, Q): G, mean, a0, a1, a2, Ġ, b1, b2, e0, e1."""
    return _backward("second", t, options, cotangent, rows, needs, tangents)
