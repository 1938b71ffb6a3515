"""From torch tensors to Triton kernels and back: the three functions that ``dispatch.py`` calls.

Verified: every number, in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), against the n×n
reference; and that the kernels compile to machine code for several generations of GPUs, within their shared
memory and without spilled registers (`make gpu-audit`). Not verified: the kernels have never run on a GPU,
and were never timed on one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import MissingExtraError
from exptilt.tilting.backends.triton import frame
from exptilt.tilting.backends.triton.config import NARROWEST, Kind, kind_of
from exptilt.tilting.problem import Gradients, Inputs, InputTangents, Needs, RowStatistics, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

try:
    from exptilt.tilting.backends.triton import derivatives
    from exptilt.tilting.backends.triton.forward import forward_kernel
except ImportError as problem:
    raise MissingExtraError("triton", "gpu") from problem

_TILES_OF_A_PART = 4  # least tiles of keys for a program, where programs share the keys of few queries
_PROCESSORS = 108  # multiprocessors assumed where there is no GPU


def _run(sweep: str, t: Inputs, rule: ScoreRule, launch: Callable[[Kind, dict[str, Any]], Any]) -> Any:
    """Launch a sweep's kernel with its tile, on the GPU where the inputs are and on its current stream.

    `launch` gets the kind to compile for and the launch options, among them the constants of every kernel.
    """
    kind, options = kind_of(sweep, t, rule)
    with torch.cuda.device_of(t.query):
        return launch(kind, {"scale": rule.scale, "cap": rule.softcap or 0.0, "KIND": kind} | options)


def _over(x: int, y: int) -> int:
    return -(-x // y)


def key_parts(t: Inputs, units: int, keys: int) -> int:
    """Number of programs that share the keys of a tile of rows: 1, unless processors would idle."""
    device = t.query.device
    count = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _PROCESSORS
    )
    return max(1, min(2 * count // max(1, units), _over(t.key.shape[-2], keys) // _TILES_OF_A_PART))


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `problem.RowStatistics` stacked, and where the maximum is."""
    shape, Dv = t.query.shape[:-1], t.value.shape[-1]
    t, wide = frame.flat(t), wide_dtype(t.query.dtype)
    (N, heads, Q, _), key_heads = t.query.shape, t.key.shape[1]

    def launch(kind: Kind, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        units = N * key_heads * _over(heads // max(key_heads, 1) * Q, kind.rows)
        pieces = max(1, _over(Dv, kind.v))
        parts = key_parts(t, units * pieces, kind.keys)
        output = t.query.new_zeros((parts, *shape, Dv), dtype=wide)
        lines = t.query.new_empty((len(RowStatistics._fields), parts, *shape), dtype=wide)
        best = t.query.new_empty((parts, *shape), dtype=torch.int64)
        if best.numel():
            given = frame.frame_of(t, rule), output, lines, best
            forward_kernel[units, pieces, parts](*given, **options)
        return (output[0], lines[:, 0], best[0]) if parts == 1 else _join(output, RowStatistics(*lines), best)

    found: tuple[Tensor, Tensor, Tensor] = _run("forward", t, rule, launch)
    return found


def _join(output: Tensor, lines: RowStatistics, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results over all keys, from those over parts of the keys, which lie along the first axis."""
    top, first = lines.maximum.max(0)
    shift = torch.where(top == -torch.inf, 0.0, top)
    weights = lines.weight * torch.exp(lines.maximum - shift)
    weight = weights.sum(0)
    alive = weight > 0
    z = torch.where(alive, weight, 1.0)
    share = weights / z
    gaps = torch.where(weights > 0, lines.gap + (lines.maximum - shift), 0.0)
    gap = (share * gaps).sum(0)
    variance = (share * (lines.variance + (gaps - gap).square())).sum(0)
    G = torch.where(alive, shift + z.log(), -torch.inf)
    entropy, mean = (torch.where(alive, x, 0.0) for x in (z.log() - gap, shift + gap))
    joined = RowStatistics(G, entropy, mean, variance, top, weight, gap)
    whole = (share.unsqueeze(-1) * torch.where((share > 0).unsqueeze(-1), output, 0.0)).sum(0)
    return whole, torch.stack(joined), best.gather(0, first.unsqueeze(0))[0]


def tangent(
    t: Inputs, dots: InputTangents, rows: Tensor, rule: ScoreRule, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and the sums r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ', stacked; rows: shift, inverse, gap, r.

    With the output of the forward sweep r is Σ p ṡ, and fewer digits are lost
    (``csrc/attention/tangent.hpp``).
    """
    shape, lead, Dv = t.query.shape[:-1], t.query.shape[:-3], t.value.shape[-1]
    t, wide = frame.flat(t), wide_dtype(t.query.dtype)
    (N, heads, Q, _), key_heads = t.query.shape, t.key.shape[1]
    means = None if output is None else output.contiguous()
    centred = means is not None and t.query.dtype == wide and Dv > 0
    output, sums = t.query.new_zeros((*shape, Dv), dtype=wide), t.query.new_empty((4, *shape), dtype=wide)
    given = frame.frame_of(t, rule), frame.tangents_of(dots, lead), rows.contiguous(), means, output, sums

    def launch(kind: Kind, options: dict[str, Any]) -> None:
        grid = N * key_heads * _over(heads // key_heads * Q, kind.rows), max(1, _over(Dv, kind.v))
        derivatives.tangent_kernel[grid](*given, CENTRED=centred, **options)

    if sums.numel():
        _run("tangent", t, rule, launch)
    return output, sums


def _met(t: Inputs, rule: ScoreRule, x: Tensor, y: Tensor) -> Tensor:
    """(..., Hq, Q): ⟨x, y⟩ of vectors (..., Hq, Q, Dv)."""
    lead, (heads, Q, Dv) = x.shape[:-3], x.shape[-3:]
    met = y.new_zeros(x.shape[:-1])
    vectors = [frame.operand(frame.one_batch_axis(z, lead)) for z in (x, y)]

    def launch(kind: Kind, options: dict[str, Any]) -> None:
        kind = kind._replace(rows=NARROWEST, keys=NARROWEST)
        grid = _over(Q, kind.rows), met.numel() // Q
        options = {name: n for name, n in options.items() if name.startswith("num_")}
        derivatives.met_kernel[grid](*vectors, met, heads, Q, Dv, KIND=kind, **options)

    if met.numel() and Dv:
        _run("met", t, rule, launch)
    return met


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
    """Gradients from a cotangent (..., Hq, Q, Dv) of the output, or of its tangent if `dots` are given.

    rows: shift, inverse, gap, a0, a1, a2; with `dots` then pushed, e0, e1.
    """
    if not needs.mass:
        met = [_met(t, rule, cotangent, x)[None] for x in (output, output_dot) if x is not None]
        rows = torch.cat([rows[:6], met[0], rows[6:], *met[1:]])
    original, lead, shape = t.bias, t.query.shape[:-3], t.query.shape
    t, wide, second = frame.flat(t), wide_dtype(t.query.dtype), output_dot is not None
    (N, heads, Q, D), (key_heads, K), Dv = t.query.shape, t.key.shape[1:3], t.value.shape[-1]
    bar = frame.operand(frame.one_batch_axis(cotangent, lead))
    given = frame.frame_of(t, rule), frame.tangents_of(dots, lead), bar, rows.contiguous()

    def new(there: bool, *axes: int) -> Tensor:
        return t.query.new_zeros(axes if there else 0, dtype=wide)

    def run(
        part: str, kernel: Any, grid: Callable[[Kind], tuple[int, ...]], *results: Any, **more: Any
    ) -> None:
        def launch(kind: Kind, options: dict[str, Any]) -> None:
            made = (x if not isinstance(x, Tensor) or x.numel() else None for x in results)
            options = options | {"KIND": kind._replace(alone=kind.keys >= K)}
            kernel[grid(kind)](*given, *made, SECOND=second, **more, **options)

        sweep = "key mass" if needs.mass else f"{'second' if second else 'gradient'} by {part}"
        _run(sweep, t, rule, launch)

    query, row_sum = new(needs.query, *shape), new(needs.rows, *shape[:-1])
    key, value = new(needs.key, *lead, key_heads, K, D), new(needs.value, *lead, key_heads, K, Dv)
    column_sum, bias, size = new(needs.columns, *lead, heads, K), new(False), N * heads * Q
    if original is not None and t.bias is not None and needs.bias:
        own = t.bias.shape[:2]
        bias = new(True, *t.bias.shape)
        if size and K:
            pairs = (size, bias, N, *own)
            run(
                "bias",
                derivatives.bias_kernel,
                lambda kind: (_over(Q, kind.rows), _over(K, kind.keys), own.numel()),
                *pairs,
            )
        spread = bias if own[0] == 1 else bias.unflatten(0, lead or (1,))
        same = spread.numel() == original.numel()
        bias = spread.reshape(original.shape) if same else spread.sum_to_size(original.shape)
    if size and K and (query.numel() or row_sum.numel()):
        units, columns = N * key_heads, D if query.numel() else 1
        run(
            "rows",
            derivatives.rows_kernel,
            lambda kind: (units * _over(heads // key_heads * Q, kind.rows), _over(columns, kind.d)),
            query,
            row_sum,
        )
    if size and K and (key.numel() or value.numel() or column_sum.numel()):
        units = N * key_heads
        run(
            "keys",
            derivatives.keys_kernel,
            lambda kind: (units * _over(K, kind.keys), max(_over(D, kind.d), _over(Dv, kind.v))),
            size,
            key,
            value,
            column_sum,
            MASS=needs.mass,
        )
    return Gradients(query, key, value, column_sum, row_sum, bias)
