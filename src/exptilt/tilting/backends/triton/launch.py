"""From torch tensors to Triton kernels and back: the four functions that ``dispatch.py`` calls.

What is verified: every number, in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), against the n×n
reference; and that the kernels compile to machine code for several generations of GPUs, within their shared
memory, most of them without spilled registers (`make gpu-audit`). What is not: they have never run on a GPU,
and no time was taken on one.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import MissingExtraError
from exptilt.tilting.backends.triton import frame
from exptilt.tilting.problem import Dots, Gradients, Inputs, Lines, Needs, has_full_bias, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

try:
    from exptilt.tilting.backends.triton import derivatives
    from exptilt.tilting.backends.triton.forward import forward_kernel
except ImportError as problem:
    raise MissingExtraError("triton", "gpu") from problem

STAGES = 2  # of a pipeline of loads
_TILES_OF_A_PART = 4  # tiles of keys at least, where few queries have their keys divided among programs
_PROCESSORS = 108  # multiprocessors, where there is no GPU to ask


def _run(kernel: Any, grid: tuple[int, ...], like: Tensor, warps: int, *given: Any, **constants: Any) -> None:
    """Launch a kernel on the GPU where `like` is; nothing changes for tensors on the CPU."""
    with torch.cuda.device_of(like):
        kernel[grid](*given, **constants, num_warps=warps, num_stages=STAGES)


def _over(x: int, y: int) -> int:
    return -(-x // y)


def _numbers(rule: ScoreRule) -> tuple[float, float]:
    return rule.scale, rule.softcap or 0.0


def key_parts(t: Inputs, units: int, keys: int) -> int:
    """Among how many programs the keys of a tile of rows are divided: 1, unless processors would idle."""
    device = t.query.device
    count = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _PROCESSORS
    )
    return max(1, min(2 * count // max(1, units), _over(t.key.shape[-2], keys) // _TILES_OF_A_PART))


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `problem.Lines` stacked, and where the maximum is."""
    shape, Dv = t.query.shape[:-1], t.value.shape[-1]
    t, wide = frame.flat(t), wide_dtype(t.query.dtype)
    (N, heads, Q, _), key_heads = t.query.shape, t.key.shape[1]
    kind, warps = frame.kind_of("forward", t, rule)
    units = N * key_heads * _over(heads // max(key_heads, 1) * Q, kind.rows)
    pieces = max(1, _over(Dv, kind.v))
    parts = key_parts(t, units * pieces, kind.keys)
    output = t.query.new_zeros((parts, *shape, Dv), dtype=wide)
    lines = t.query.new_empty((len(Lines._fields), parts, *shape), dtype=wide)
    best = t.query.new_empty((parts, *shape), dtype=torch.int64)
    if best.numel():
        results = output, lines, best, *_numbers(rule)
        _run(
            forward_kernel,
            (units, pieces, parts),
            t.query,
            warps,
            frame.frame_of(t, rule),
            *results,
            KIND=kind,
        )
    return (output[0], lines[:, 0], best[0]) if parts == 1 else _join(output, Lines(*lines), best)


def _join(output: Tensor, lines: Lines, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of parts of the keys, along the first axis, as those of all keys."""
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
    joined = Lines(G, entropy, mean, variance, top, weight, gap)
    whole = (share.unsqueeze(-1) * torch.where((share > 0).unsqueeze(-1), output, 0.0)).sum(0)
    return whole, torch.stack(joined), best.gather(0, first.unsqueeze(0))[0]


def tangent(t: Inputs, dots: Dots, rows: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and the sums r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ', stacked; rows: shift, inverse, gap."""
    shape, lead, Dv = t.query.shape[:-1], t.query.shape[:-3], t.value.shape[-1]
    t, wide = frame.flat(t), wide_dtype(t.query.dtype)
    (N, heads, Q, _), key_heads = t.query.shape, t.key.shape[1]
    kind, warps = frame.kind_of("tangent", t, rule)
    output, sums = t.query.new_zeros((*shape, Dv), dtype=wide), t.query.new_empty((4, *shape), dtype=wide)
    if sums.numel():
        grid = N * key_heads * _over(heads // key_heads * Q, kind.rows), max(1, _over(Dv, kind.v))
        given = (
            frame.frame_of(t, rule),
            frame.tangents_of(dots, lead),
            rows.contiguous(),
            output,
            sums,
            *_numbers(rule),
        )
        _run(derivatives.tangent_kernel, grid, t.query, warps, *given, KIND=kind)
    return output, sums


def _backward(
    t: Inputs, cotangent: Tensor, rows: Tensor, rule: ScoreRule, needs: Needs, dots: Dots | None = None
) -> Gradients:
    """rows are those of `pulled`, or shift, inverse and gap for the mass."""
    original, lead, shape = t.bias, t.query.shape[:-3], t.query.shape
    full_bias = needs.bias and has_full_bias(t)
    t, wide, second = frame.flat(t), wide_dtype(t.query.dtype), dots is not None
    (N, heads, Q, D), (key_heads, K), Dv = t.query.shape, t.key.shape[1:3], t.value.shape[-1]
    kind, warps = frame.kind_of("second" if second else "gradient", t, rule)
    bar = frame.operand(frame.one_batch_axis(cotangent, lead))
    none = t.query.new_empty(0, dtype=wide)

    def new(there: bool, *axes: int) -> Tensor:
        return t.query.new_zeros(axes, dtype=wide) if there else none.clone()

    def wanted(x: Tensor) -> Tensor | None:
        return x if x.numel() else None

    given = frame.frame_of(t, rule), frame.tangents_of(dots, lead), bar, rows.contiguous()

    def run(kernel: Any, grid: tuple[int, ...], *more: Any, **constants: Any) -> None:
        _run(
            kernel,
            grid,
            t.query,
            warps,
            *given,
            *more,
            *_numbers(rule),
            SECOND=second,
            KIND=kind,
            **constants,
        )

    query, row_sum = new(needs.query, *shape), new(needs.rows, *shape[:-1])
    key, value = new(needs.key, *lead, key_heads, K, D), new(needs.value, *lead, key_heads, K, Dv)
    column_sum, bias = new(needs.columns, *lead, heads, K), none.clone()
    size, pieces = N * heads * Q, max(1, _over(D, kind.d))
    if not (size and K):
        bias = new(full_bias, *original.shape) if original is not None else bias
        return Gradients(query, key, value, column_sum, row_sum, bias)
    if query.numel() or row_sum.numel():
        units = N * key_heads * _over(heads // key_heads * Q, kind.rows), pieces if query.numel() else 1
        run(derivatives.rows_kernel, units, wanted(query), wanted(row_sum))
    if key.numel() or value.numel() or column_sum.numel():
        units = N * key_heads * _over(K, kind.keys), max(pieces, _over(Dv, kind.v))
        sums = wanted(key), wanted(value), wanted(column_sum)
        run(derivatives.keys_kernel, units, size, *sums, MASS=needs.mass)
    if full_bias and t.bias is not None and original is not None:
        own = t.bias.shape[:2]
        bias = new(True, *t.bias.shape)
        grid = _over(Q, kind.rows), _over(K, kind.keys), own.numel()
        run(derivatives.bias_kernel, grid, size, bias, N, *own)
        whole = bias if own[0] == 1 else bias.unflatten(0, lead or (1,))
        bias = (
            whole.reshape(original.shape)
            if whole.numel() == original.numel()
            else whole.sum_to_size(original.shape)
        )
    return Gradients(query, key, value, column_sum, row_sum, bias)


def _met(cotangent: Tensor, output: Tensor) -> Tensor:
    return (cotangent * output).sum(-1)


def gradient(
    t: Inputs, cotangent: Tensor, output: Tensor, rows: Tensor, rule: ScoreRule, needs: Needs
) -> Gradients:
    """A cotangent (..., Hq, Q, Dv) of the output, and rows shift, inverse, gap, a0, a1, a2, carried back."""
    if not needs.mass:
        rows = torch.cat([rows, _met(cotangent, output)[None]])
    return _backward(t, cotangent, rows, rule, needs)


def second(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    output_dot: Tensor,
    dots: Dots,
    rows: Tensor,
    rule: ScoreRule,
    needs: Needs,
) -> Gradients:
    """The gradient of a forward derivative; rows are those of `gradient`, then pushed, e0, e1."""
    met, met_dot = _met(cotangent, output)[None], _met(cotangent, output_dot)[None]
    rows = torch.cat([rows[:6], met, rows[6:], met_dot])
    return _backward(t, cotangent, rows, rule, needs, dots)
