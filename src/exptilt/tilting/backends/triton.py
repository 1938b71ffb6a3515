r"""The forward sweep as one Triton kernel: output, log-normalizer, entropy, score mean, variance and maximum,
in one pass over the keys.

A program owns a tile of queries of one (batch, head) and walks over the tiles of keys that at least one of
them sees. A row holds

    m  the largest score so far                        z  Σ e^{s_j − m}
    c  the mean score under the weights, less m    M  Σ e^{s_j − m} (s_j − m − c)²    o  Σ e^{s_j − m} v_j

and joins the same five numbers of each new tile, rebased to the larger m, by the parallel formula, as in
``numba/forward.py``:

    z = z₁ + z₂,   c = c₁ + (c₂ − c₁) z₂/z,   M = M₁ + M₂ + (c₂ − c₁)² z₁ z₂/z.

Nothing is copied: query heads find the key head they share by index, a broadcast axis of bias or mask has
stride 0. Products are taken in full float32 (``ieee``; Triton's default on recent GPUs is TF32, three
digits). A long query or key vector is taken in pieces of ``_WIDEST`` columns; a long value vector is divided
among programs, each of which finds the weights for itself: neither has a limit.

Only the forward sweep is here; ``dispatch.py`` sends the derivatives of a call with ``backend="gpu"`` to
``tiled``, and says so.

What is verified: every number, in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), against the n×n
reference; and that the kernel compiles to machine code for compute capabilities 8.0 and 9.0, within their
shared memory. What is not: it has never run on a GPU, and no time was taken on one. The tiles follow what the
assembler says of registers; they are not tuned.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import MissingExtraError
from exptilt.tilting.problem import Inputs, Lines
from exptilt.tilting.score_rule import ScoreRule

try:
    import triton
    import triton.language as tl
except ImportError as problem:
    raise MissingExtraError("triton", "gpu") from problem

_WIDEST = 128  # columns of query, key or value in one tile
_NARROWEST = 16  # Triton's smallest matrix product
# With these and the tiles of `_tiles` the assembler spills no register for compute capability 8.0, whether
# all options are on or none. For 9.0 it spills none with none on, and up to 172 bytes with all.
_COMPILED = {"num_warps": 8, "num_stages": 2}


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh x, by Cephes' rational form below 0.625: Triton has none that its interpreter knows."""
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * z * (p / q), tl.where(x < 0, -large, large))


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    bias,
    log_weight,
    mask,
    output,
    statistics,
    best,
    query_steps,
    key_steps,
    value_steps,
    bias_steps,
    weight_steps,
    mask_steps,
    heads,
    group,
    weight_group,
    Q,
    K,
    D,
    Dv,
    window,
    scale: tl.float64,
    cap: tl.float64,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """One tile of queries of one (batch, head), against all its keys; see `forward`.

    Tensors as in ``problem.py``, None if absent (value: if Dv = 0), each with its strides; mask as bytes.
    Those written to are contiguous. Places are 64-bit: Q·K passes 2³¹ at length 46341. WHOLE: a query's D
    columns fit into one tile.
    """
    number = query.dtype.element_ty
    tiles = tl.cdiv(Q, TILE_Q)
    unit = tl.program_id(0) // tiles
    i0 = (tl.program_id(0) % tiles) * TILE_Q
    part = tl.program_id(1)
    n, h = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    rows = i0 + tl.arange(0, TILE_Q)
    real = rows < Q
    own = rows + (K - Q)  # the key that stands at the query's own place: both sequences end together
    i, d = rows.to(tl.int64), tl.arange(0, TILE_D).to(tl.int64)
    u = (part * TILE_V + tl.arange(0, TILE_V)).to(tl.int64)
    query_at = query + n * query_steps[0] + h * query_steps[1] + i[:, None] * query_steps[2]
    key_at = key + n * key_steps[0] + (h // group) * key_steps[1]
    if WHOLE:
        q = tl.load(query_at + d[None, :] * query_steps[3], mask=real[:, None] & (d < D)[None, :], other=0.0)

    first, last = 0, K  # the keys that some query of the tile sees
    if CAUSAL:
        last = tl.minimum(last, tl.minimum(i0 + TILE_Q, Q) + (K - Q))
    if WINDOW:
        first = tl.maximum(first, i0 + (K - Q) - window + 1)
        if not CAUSAL:
            last = tl.minimum(last, tl.minimum(i0 + TILE_Q, Q) - 1 + (K - Q) + window)

    top = tl.full([TILE_Q], float("-inf"), number)
    weight = tl.zeros([TILE_Q], number)
    mean = tl.zeros([TILE_Q], number)
    square = tl.zeros([TILE_Q], number)
    found = tl.zeros([TILE_Q], tl.int32)
    o = tl.zeros([TILE_Q, TILE_V], number)
    for j0 in range(first, last, TILE_K):
        columns = j0 + tl.arange(0, TILE_K)
        j = columns.to(tl.int64)
        inside = columns < K

        # scores
        if WHOLE:
            k = tl.load(
                key_at + d[:, None] * key_steps[3] + j[None, :] * key_steps[2],
                mask=(d < D)[:, None] & inside[None, :],
                other=0.0,
            )
            s = tl.dot(q, k, input_precision="ieee")
        else:
            s = tl.zeros([TILE_Q, TILE_K], number)
            for d0 in range(0, D, TILE_D):
                b = d0 + d
                q = tl.load(
                    query_at + b[None, :] * query_steps[3], mask=real[:, None] & (b < D)[None, :], other=0.0
                )
                k = tl.load(
                    key_at + b[:, None] * key_steps[3] + j[None, :] * key_steps[2],
                    mask=(b < D)[:, None] & inside[None, :],
                    other=0.0,
                )
                s = tl.dot(q, k, s, input_precision="ieee")
        s = s * tl.full([1, 1], scale, number)
        if CAP:
            c = tl.full([1, 1], cap, number)
            s = c * _tanh(s / c)
        if bias is not None:
            at = (
                bias
                + n * bias_steps[0]
                + h * bias_steps[1]
                + i[:, None] * bias_steps[2]
                + j[None, :] * bias_steps[3]
            )
            s += tl.load(at, mask=real[:, None] & inside[None, :], other=0.0)
        if log_weight is not None:
            at = (
                log_weight + n * weight_steps[0] + (h // weight_group) * weight_steps[1] + j * weight_steps[2]
            )
            s += tl.load(at, mask=inside, other=0.0)[None, :]
        seen = real[:, None] & inside[None, :]
        if CAUSAL:
            seen = seen & (columns[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (own[:, None] - columns[None, :] < window)
            if not CAUSAL:
                seen = seen & (columns[None, :] - own[:, None] < window)
        if mask is not None:
            at = (
                mask
                + n * mask_steps[0]
                + h * mask_steps[1]
                + i[:, None] * mask_steps[2]
                + j[None, :] * mask_steps[3]
            )
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        s = tl.where(seen, s, float("-inf"))

        # the tile's own five numbers, relative to the larger maximum
        high = tl.max(s, 1)
        found = tl.where(high > top, tl.min(tl.where(s == high[:, None], columns[None, :], K), 1), found)
        m = tl.maximum(high, top)
        shift = tl.where(m == float("-inf"), 0.0, m)
        s = s - shift[:, None]
        e = tl.exp(s)
        s = tl.maximum(s, -1e15)  # FAR of numba/workspace.py: weight 0 times its square is 0
        z = tl.sum(e, 1)
        c1 = tl.sum(e * s, 1) / tl.where(z > 0, z, 1.0)
        gone = s - c1[:, None]

        # joined
        rebase = tl.exp(top - shift)
        old = weight * rebase
        mean = tl.where(old > 0, mean + (top - shift), 0.0)
        weight = old + z
        share = z / tl.where(weight > 0, weight, 1.0)
        gap = tl.where(z > 0, c1 - mean, 0.0)
        square = square * rebase + tl.sum(e * gone * gone, 1) + gap * gap * old * share
        mean += gap * share
        top = m
        if value is not None:
            at = (
                value
                + n * value_steps[0]
                + (h // group) * value_steps[1]
                + j[:, None] * value_steps[2]
                + u[None, :] * value_steps[3]
            )
            v = tl.load(at, mask=inside[:, None] & (u < Dv)[None, :], other=0.0)
            o = tl.dot(e, v, o * rebase[:, None], input_precision="ieee")

    alive = weight > 0
    z = tl.where(alive, weight, 1.0)
    at = unit.to(tl.int64) * Q + i
    if value is not None:
        tl.store(
            output + at[:, None] * Dv + u[None, :], o / z[:, None], mask=real[:, None] & (u < Dv)[None, :]
        )
    if part == 0:
        log_z = tl.log(z)
        size = (tl.num_programs(0) // tiles).to(tl.int64) * Q
        tl.store(statistics + at, tl.where(alive, top + log_z, float("-inf")), mask=real)
        tl.store(statistics + size + at, tl.where(alive, log_z - mean, 0.0), mask=real)
        tl.store(statistics + 2 * size + at, tl.where(alive, top + mean, 0.0), mask=real)
        tl.store(statistics + 3 * size + at, square / z, mask=real)
        tl.store(statistics + 4 * size + at, top, mask=real)
        tl.store(statistics + 5 * size + at, weight, mask=real)
        tl.store(statistics + 6 * size + at, mean, mask=real)
        tl.store(best + at, found.to(tl.int64), mask=real)


def _width(columns: int) -> int:
    return min(_WIDEST, max(_NARROWEST, int(triton.next_power_of_2(columns))))


def _tiles(Q: int, D: int, Dv: int, number: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of scores, columns of a tile of query and key, of value."""
    tile_d, tile_v = _width(D), _width(Dv)
    large, small = ((64, 32), (32, 16)) if number == torch.float32 else ((32, 16), (16, 16))
    tile_q, tile_k = large if max(tile_d, tile_v) <= 64 else small
    return (tile_q if Q > 16 else 16), tile_k, tile_d, tile_v


def _steps(x: Tensor | None, axes: int) -> tuple[int, ...]:
    """The strides of x; 0 along an axis of size 1, which is shared by all who read it."""
    return (
        (0,) * axes
        if x is None
        else tuple(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))
    )


def launch(
    t: Inputs, rule: ScoreRule, output: Tensor, statistics: Tensor, best: Tensor
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the arguments of the kernel, by name."""
    (N, heads, Q, D), (key_heads, K), Dv = t.query.shape, t.key.shape[1:3], t.value.shape[3]
    tile_q, tile_k, tile_d, tile_v = _tiles(Q, D, Dv, t.query.dtype)
    value = t.value if Dv else None
    mask = None if t.mask is None else t.mask.view(torch.uint8)
    arguments = {
        "query": t.query,
        "key": t.key,
        "value": value,
        "bias": t.bias,
        "log_weight": t.log_weight,
        "mask": mask,
        "output": output,
        "statistics": statistics,
        "best": best,
        "query_steps": _steps(t.query, 4),
        "key_steps": _steps(t.key, 4),
        "value_steps": _steps(value, 4),
        "bias_steps": _steps(t.bias, 4),
        "weight_steps": _steps(t.log_weight, 3),
        "mask_steps": _steps(mask, 4),
        "heads": heads,
        "group": heads // key_heads,
        "weight_group": 1 if t.log_weight is None else heads // t.log_weight.shape[1],
        "Q": Q,
        "K": K,
        "D": D,
        "Dv": Dv,
        "scale": rule.scale,
        "cap": rule.softcap or 0.0,
        "window": 0 if rule.window is None else min(rule.window, Q + K),  # more hides nothing either
        "CAUSAL": rule.causal,
        "WINDOW": rule.window is not None,
        "CAP": rule.softcap is not None,
        "WHOLE": tile_d >= D,
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "TILE_D": tile_d,
        "TILE_V": tile_v,
    }
    return (N * heads * triton.cdiv(Q, tile_q), max(1, triton.cdiv(Dv, tile_v))), arguments


def _one_batch_axis(x: Tensor | None, lead: torch.Size) -> Tensor | None:
    """A tensor with all its batch axes as one, which stays of size 1 if all of them are."""
    if x is None or len(lead) == 1:
        return x
    mine = x.shape[: len(lead)]
    return (
        x.reshape(1, *x.shape[len(lead) :])
        if mine.numel() == 1
        else x.expand(*lead, *x.shape[len(lead) :]).flatten(0, len(lead) - 1)
    )


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `problem.Lines` stacked, and where the maximum is."""
    rows, lead = t.query.shape[:-1], t.query.shape[:-3]
    given: Any = (_one_batch_axis(x, lead) if lead else None if x is None else x.unsqueeze(0) for x in t)
    t = Inputs(*given)
    output, lines = (
        t.query.new_empty((*rows, t.value.shape[-1])),
        t.query.new_empty((len(Lines._fields), *rows)),
    )
    best = t.query.new_empty(rows, dtype=torch.int64)
    if best.numel():
        grid, arguments = launch(t, rule, output, lines, best)
        with torch.cuda.device_of(
            t.query
        ):  # Triton launches on the current GPU; nothing changes for tensors on the CPU
            _forward[grid](**arguments, **_COMPILED)
    return output, lines, best
