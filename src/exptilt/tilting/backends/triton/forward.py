r"""The forward sweep: output, log-normalizer, entropy, score mean, variance and maximum, in one pass over the
keys.

A program owns a tile of rows (queries of the heads that share a key head) and walks over the tiles of keys
that at least one of them sees, or over its part of them. A row holds

    m  the largest score so far                        z  Σ e^{s_j − m}
    c  the mean score under the weights, less m    M  Σ e^{s_j − m} (s_j − m − c)²    o  Σ e^{s_j − m} v_j

and joins the same five numbers of each new tile, rebased to the larger m, by the parallel formula, as in
``csrc/attention/forward.hpp``:

    z = z₁ + z₂,   c = c₁ + (c₂ − c₁) z₂/z,   M = M₁ + M₂ + (c₂ − c₁)² z₁ z₂/z.
"""

import triton
import triton.language as tl

from exptilt.tilting.backends.triton.scores import joined, keys_seen, rows_of, scores, vectors


@triton.jit
def forward_kernel(f, output, lines, best, scale: tl.float64, cap: tl.float64, KIND: tl.constexpr):
    """Program (tile of rows of a key head of a batch item, piece of the value's columns, part of the keys).

    Writes output (parts, batch, heads, Q, Dv), lines (7, parts, batch, heads, Q) of
    `problem.RowStatistics` and best (parts, batch, heads, Q), contiguous. Places are 64-bit:
    Q·K passes 2³¹ at length 46341.
    """
    number: tl.constexpr = output.dtype.element_ty
    tiles = tl.cdiv(f.group * f.Q, KIND.rows)
    unit, r0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * KIND.rows
    n, g = (unit // (f.heads // f.group)).to(tl.int64), (unit % (f.heads // f.group)).to(tl.int64)
    h, i, real = rows_of(f, r0, g, KIND)
    u = tl.program_id(1) * KIND.v + tl.arange(0, KIND.v)
    first, last = keys_seen(f, n, i, real, KIND)
    each = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), KIND.keys), tl.num_programs(2)) * KIND.keys
    start = first + tl.program_id(2) * each

    top = tl.full([KIND.rows], float("-inf"), number)
    weight = tl.zeros([KIND.rows], number)
    mean = tl.zeros([KIND.rows], number)
    square = tl.zeros([KIND.rows], number)
    found = tl.zeros([KIND.rows], tl.int32)
    o = tl.zeros([KIND.rows, KIND.v], number)
    for j0 in range(start, tl.minimum(start + each, last), KIND.keys):
        j = j0 + tl.arange(0, KIND.keys)
        s, _, _ = scores(f, scale, cap, n, g, h, i, real, j, number, KIND)

        # the tile's own five numbers, relative to the larger maximum
        high = tl.max(s, 1)
        at_high = tl.min(tl.where(s == high[:, None], j[None, :], j0 + KIND.keys), 1)
        found = tl.where(high > top, at_high, found)
        m = tl.maximum(high, top)
        shift = tl.where(m == float("-inf"), 0.0, m)
        s = s - shift[:, None]
        e = tl.exp(s)
        s = tl.maximum(s, -1e15)  # FAR of csrc/attention/attention.hpp: weight 0 times its square is 0
        z = tl.sum(e, 1)
        c = tl.sum(e * s, 1) / tl.where(z > 0, z, 1.0)
        away = s - c[:, None]

        # joined
        rebase = tl.exp(top - shift)
        old = weight * rebase
        mean = tl.where(old > 0, mean + (top - shift), 0.0)
        weight = old + z
        inverse = 1.0 / tl.where(weight > 0, weight, 1.0)
        gap = tl.where(z > 0, c - mean, 0.0)
        square = square * rebase + tl.sum(e * away * away, 1) + gap * gap * old * (z * inverse)
        # from the side that weighs more, so that a share near 0 costs no digits
        mean = tl.where(z > old, c - gap * (old * inverse), mean + gap * (z * inverse))
        top = m
        if f.value.at is not None:
            v = vectors(f.value, n, g, j, j < f.K, u, f.Dv)
            o = joined(e, v, o * rebase[:, None], KIND.precision)

    alive = weight > 0
    z = tl.where(alive, weight, 1.0)
    size = (tl.num_programs(0) // tiles).to(tl.int64) * f.group * f.Q
    at = tl.program_id(2) * size + (n * f.heads + h) * f.Q + i
    if f.value.at is not None:
        there = real[:, None] & (u < f.Dv)[None, :]
        tl.store(output + at[:, None] * f.Dv + u[None, :], o / z[:, None], mask=there)
    if tl.program_id(1) == 0:
        size *= tl.num_programs(2)
        log_z = tl.log(z)
        tl.store(lines + at, tl.where(alive, top + log_z, float("-inf")), mask=real)
        tl.store(lines + size + at, tl.where(alive, log_z - mean, 0.0), mask=real)
        tl.store(lines + 2 * size + at, tl.where(alive, top + mean, 0.0), mask=real)
        tl.store(lines + 3 * size + at, square / z, mask=real)
        tl.store(lines + 4 * size + at, top, mask=real)
        tl.store(lines + 5 * size + at, weight, mask=real)
        tl.store(lines + 6 * size + at, mean, mask=real)
        tl.store(best + at, found.to(tl.int64), mask=real)
