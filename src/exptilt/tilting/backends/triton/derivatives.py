r"""The sweeps of derivatives: forward (tangent), backward (gradient), and the gradient of a forward
derivative (second); formulas in ``csrc/attention/tangent.hpp`` and ``csrc/attention/backward.hpp``.

A backward sweep is several kernels, each with its own walk over the tiles, none of which adds to what another
program writes: sums are the same from run to run. Programs of `rows_kernel` own a tile of rows and find the
gradient by the query and the row sums; those of `keys_kernel` own a tile of keys and find the gradients by
key and value and the column sums; those of `bias_kernel` own a tile of pairs. Each finds the scores for
itself.
"""

import triton
import triton.language as tl

from exptilt.tilting.backends.triton.scores import (
    inner,
    joined,
    keys_seen,
    plane,
    rows_of,
    scores,
    span_of_all,
    vectors,
    weights_of,
)


@triton.jit
def line(rows, which, size, at, real):
    """(rows, 1): the number `which` known of each row."""
    return tl.load(rows + which * size + at, mask=real, other=0.0)[:, None]


@triton.jit
def weighed(s, rows, size, at, real):
    """p = e^{s − shift} times the inverse weight, and the centred score c = s − shift − gap."""
    away = s - line(rows, 0, size, at, real)
    p = tl.exp(away) * line(rows, 1, size, at, real)
    return p, tl.maximum(away - line(rows, 2, size, at, real), -1e15)


@triton.jit
def pushed_scores(f, dots, scale, slope, n, g, h, i, real, j, number: tl.constexpr, KIND: tl.constexpr):
    """ż and ṡ, the tangents of scale ⟨q,k⟩ and of the score."""
    inside = j < f.K
    z = tl.zeros([KIND.rows, KIND.keys], number)
    if dots.query.at is not None:
        z += inner(dots.query, f.key, n, h, g, i, real, j, inside, f.D, number, KIND.whole_d, KIND)
    if dots.key.at is not None:
        z += inner(f.query, dots.key, n, h, g, i, real, j, inside, f.D, number, KIND.whole_d, KIND)
    z = z * tl.full([1, 1], scale, number)
    s = z
    if KIND.cap:
        s = z * slope
    there = real[:, None] & inside[None, :]
    if dots.bias.at is not None:
        s += plane(dots.bias, n, h, i, j, there)
    if dots.weight.at is not None:
        s += weights_of(dots.weight, n, h // f.weight_group, j, there)
    return z, s


@triton.jit
def tangent_kernel(
    f,
    dots,
    rows,
    means,
    output,
    sums,
    scale: tl.float64,
    cap: tl.float64,
    CENTRED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program (tile of rows of a key head of a batch item, piece of the value's columns).

    rows: shift, inverse, gap, a first r or NaN. Writes output (batch, heads, Q, Dv): Σ p (ṡ' v + v̇), and
    sums (4, batch, heads, Q): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ' with ṡ' = ṡ − r. Without a first r it is the
    mean of ṡ in the first tile that has weight; where means, the outputs of the forward sweep, are given it
    is moved to Σ p ṡ in the end (``csrc/attention/tangent.hpp``), and values of float32 are taken about the
    mean of the tile's outputs: none of them is then far from 0.
    """
    number: tl.constexpr = output.dtype.element_ty
    tiles = tl.cdiv(f.group * f.Q, KIND.rows)
    unit, r0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * KIND.rows
    n, g = (unit // (f.heads // f.group)).to(tl.int64), (unit % (f.heads // f.group)).to(tl.int64)
    h, i, real = rows_of(f, r0, g, KIND)
    u = tl.program_id(1) * KIND.v + tl.arange(0, KIND.v)
    size = (tl.num_programs(0) // tiles).to(tl.int64) * f.group * f.Q
    at = (n * f.heads + h) * f.Q + i
    near = tl.load(rows + 3 * size + at, mask=real, other=0.0)
    r = tl.where(near == near, near, 0.0)
    settled = (near == near).to(tl.int32)
    x0, x1, x2 = tl.zeros([KIND.rows], number), tl.zeros([KIND.rows], number), tl.zeros([KIND.rows], number)
    m0, m1, m2 = tl.zeros([KIND.rows], number), tl.zeros([KIND.rows], number), tl.zeros([KIND.rows], number)
    o = tl.zeros([KIND.rows, KIND.v], number)
    there = real[:, None] & (u < f.Dv)[None, :]
    centre = tl.zeros([KIND.v], number)
    if CENTRED:
        centre += tl.sum(tl.load(means + at[:, None] * f.Dv + u[None, :], mask=there, other=0.0), 0)
        centre = centre / tl.sum(real.to(number))
    first, last = keys_seen(f, n, i, real, KIND)
    for j0 in range(first, last, KIND.keys):
        j = j0 + tl.arange(0, KIND.keys)
        s, slope, _ = scores(f, scale, cap, n, g, h, i, real, j, number, KIND)
        p, c = weighed(s, rows, size, at, real)
        _, moved = pushed_scores(f, dots, scale, slope, n, g, h, i, real, j, number, KIND)
        z = tl.sum(p, 1)
        here = tl.sum(tl.where(p != 0, p * moved, 0.0), 1) / tl.where(z > 0, z, 1.0)
        r = tl.where((settled == 0) & (z > 0), here, r)
        settled = tl.where(z > 0, 1, settled)
        x = tl.where(p != 0, p * (moved - r[:, None]), 0.0)
        x0 += tl.sum(x, 1)
        x1 += tl.sum(x * c, 1)
        x2 += tl.sum(x * c * c, 1)
        if means is not None:
            m0 += z
            m1 += tl.sum(p * c, 1)
            m2 += tl.sum(p * c * c, 1)
        if f.value.at is not None:
            v = vectors(f.value, n, g, j, j < f.K, u, f.Dv)
            if CENTRED:
                v = v - centre[None, :]
            o = joined(x, v, o, KIND.precision)
            if dots.value.at is not None:
                o = joined(p, vectors(dots.value, n, g, j, j < f.K, u, f.Dv), o, KIND.precision)
    if means is not None:
        end = x0 + r * m0
        by = end - r
        if f.value.at is not None:
            mean = tl.load(means + at[:, None] * f.Dv + u[None, :], mask=there, other=0.0)
            o += (x0 - by)[:, None] * centre[None, :] - by[:, None] * (mean - centre[None, :])
        r = end
        x0 -= by * m0
        x1 -= by * m1
        x2 -= by * m2
    if f.value.at is not None:
        tl.store(output + at[:, None] * f.Dv + u[None, :], o, mask=there)
    if tl.program_id(1) == 0:
        tl.store(sums + at, r, mask=real)
        tl.store(sums + size + at, x0, mask=real)
        tl.store(sums + 2 * size + at, x1, mask=real)
        tl.store(sums + 3 * size + at, x2, mask=real)


@triton.jit
def met_kernel(x, y, met, heads, Q, C, KIND: tl.constexpr):
    """Program (tile of queries, head of a batch item): met (batch, heads, Q), ⟨x_i, y_i⟩ of C columns.

    It is the diagonal of all products of a tile, so that they are summed as `inner` sums those of values:
    where a query sees one key only, ⟨ō, o⟩ and ⟨ō, v⟩ cancel to the last bit.
    """
    number: tl.constexpr = met.dtype.element_ty
    n, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    r = tl.arange(0, KIND.rows)
    i = tl.program_id(0) * KIND.rows + r
    real = i < Q
    pairs = inner(x, y, n, h, h, i, real, i, real, C, number, KIND.whole_v, KIND)
    own = tl.sum(tl.where(r[:, None] == r[None, :], pairs, 0.0), 1)
    tl.store(met + tl.program_id(1).to(tl.int64) * Q + i, own, mask=real)


@triton.jit
def pulled(
    f,
    dots,
    bar,
    rows,
    size,
    scale,
    cap,
    n,
    g,
    h,
    i,
    real,
    j,
    number: tl.constexpr,
    SECOND: tl.constexpr,
    KIND: tl.constexpr,
):
    """Weights that carry ō to the value, the derivative by the scores, M1 and M2, each (rows, keys).

    M1 multiplies k and q, M2 their tangents. rows: shift, inverse, gap, a0, a1, a2, ⟨ō, o⟩; then pushed, e0,
    e1, ⟨ō, ȯ⟩. Where a tile holds all keys the products ⟨ō, o⟩, ⟨ō, ȯ⟩ come from the very terms that they are
    subtracted from.
    """
    inside = j < f.K
    at = (n * f.heads + h) * f.Q + i
    s, slope, bend = scores(f, scale, cap, n, g, h, i, real, j, number, KIND)
    p, c = weighed(s, rows, size, at, real)
    a1, a2 = line(rows, 4, size, at, real), line(rows, 5, size, at, real)
    y = line(rows, 3, size, at, real) + c * (a1 + a2 * c)
    w = tl.zeros([KIND.rows, KIND.keys], number)
    if f.value.at is not None:
        w = inner(bar, f.value, n, h, g, i, real, j, inside, f.Dv, number, KIND.whole_v, KIND)
        met = line(rows, 6, size, at, real)
        if KIND.alone:
            met = tl.sum(tl.where(p != 0, p * w, 0.0), 1)[:, None]
        y += w - met
    if not SECOND:
        d = tl.where(p != 0, p * y, 0.0)
        m1 = d
        if KIND.cap:
            m1 = d * slope
        return p, d, m1, m1
    z, moved = pushed_scores(f, dots, scale, slope, n, g, h, i, real, j, number, KIND)
    x = moved - line(rows, 7, size, at, real)
    e = line(rows, 8, size, at, real) + c * line(rows, 9, size, at, real)
    if f.value.at is not None:
        t = tl.zeros([KIND.rows, KIND.keys], number)
        if dots.value.at is not None:
            t = inner(bar, dots.value, n, h, g, i, real, j, inside, f.Dv, number, KIND.whole_v, KIND)
        met = line(rows, 10, size, at, real)
        if KIND.alone:
            met = tl.sum(tl.where(p != 0, p * (x * w + t), 0.0), 1)[:, None]
        e += t - met
    d = tl.where(p != 0, p * ((y + a1 + 2.0 * a2 * c) * x + e), 0.0)
    m1, m2 = d, tl.where(p != 0, p * y, 0.0)
    if KIND.cap:
        m1 = d * slope + tl.where(p != 0, m2 * bend * z, 0.0)
        m2 = m2 * slope
    return tl.where(p != 0, p * x, 0.0), d, m1, m2


@triton.jit
def rows_kernel(
    f,
    dots,
    bar,
    rows,
    query_grad,
    row_sum,
    scale: tl.float64,
    cap: tl.float64,
    SECOND: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program (tile of rows of a key head of a batch item, piece of the query's columns).

    Writes query_grad (batch, heads, Q, D) and row_sum (batch, heads, Q), where wanted.
    """
    number: tl.constexpr = rows.dtype.element_ty
    tiles = tl.cdiv(f.group * f.Q, KIND.rows)
    unit, r0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * KIND.rows
    n, g = (unit // (f.heads // f.group)).to(tl.int64), (unit % (f.heads // f.group)).to(tl.int64)
    h, i, real = rows_of(f, r0, g, KIND)
    size = (tl.num_programs(0) // tiles).to(tl.int64) * f.group * f.Q
    u = tl.program_id(1) * KIND.d + tl.arange(0, KIND.d)
    total = tl.zeros([KIND.rows], number)
    q = tl.zeros([KIND.rows, KIND.d], number)
    first, last = keys_seen(f, n, i, real, KIND)
    for j0 in range(first, last, KIND.keys):
        j = j0 + tl.arange(0, KIND.keys)
        _, d, m1, m2 = pulled(f, dots, bar, rows, size, scale, cap, n, g, h, i, real, j, number, SECOND, KIND)
        total += tl.sum(d, 1)
        if query_grad is not None:
            k = vectors(f.key, n, g, j, j < f.K, u, f.D)
            k = tl.where(tl.abs(k.to(number)) < float("inf"), k, 0.0)  # unseen keys may hold anything
            q = joined(m1, k, q, KIND.precision)
            if SECOND:
                if dots.key.at is not None:
                    q = joined(m2, vectors(dots.key, n, g, j, j < f.K, u, f.D), q, KIND.precision)
    at = (n * f.heads + h) * f.Q + i
    if query_grad is not None:
        there = real[:, None] & (u < f.D)[None, :]
        tl.store(query_grad + at[:, None] * f.D + u[None, :], q * tl.full([1, 1], scale, number), mask=there)
    if row_sum is not None:
        if tl.program_id(1) == 0:
            tl.store(row_sum + at, total, mask=real)


@triton.jit
def keys_kernel(
    f,
    dots,
    bar,
    rows,
    size,
    key_grad,
    value_grad,
    column_sum,
    scale: tl.float64,
    cap: tl.float64,
    MASS: tl.constexpr,
    SECOND: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program (tile of keys of a key head of a batch item, piece of the columns).

    size: rows in all. Writes key_grad (batch, key heads, K, D), value_grad (batch, key heads, K, Dv) and
    column_sum (batch, heads, K), where wanted; with MASS the column sums are those of the weights.
    """
    number: tl.constexpr = rows.dtype.element_ty
    tiles = tl.cdiv(f.K, KIND.keys)
    unit, j0 = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * KIND.keys
    n, g = (unit // (f.heads // f.group)).to(tl.int64), (unit % (f.heads // f.group)).to(tl.int64)
    j = j0 + tl.arange(0, KIND.keys)
    inside = j < f.K
    u, w = tl.program_id(1) * KIND.d + tl.arange(0, KIND.d), tl.program_id(1) * KIND.v + tl.arange(0, KIND.v)
    k, v = tl.zeros([KIND.keys, KIND.d], number), tl.zeros([KIND.keys, KIND.v], number)
    first, last = 0, f.Q  # the queries that may see some of these keys
    if KIND.causal:
        first = tl.maximum(first, j0 - (f.K - f.Q))
    if KIND.window:
        last = tl.minimum(last, tl.minimum(j0 + KIND.keys, f.K) - 1 - (f.K - f.Q) + f.window)
        if not KIND.causal:
            first = tl.maximum(first, j0 - (f.K - f.Q) - f.window + 1)
    if f.seen_by.at is not None:
        first, last = span_of_all(f.seen_by, n, j, inside, f.Q)
    for b in range(f.group):
        columns = tl.zeros([KIND.keys], number)
        for i0 in range(first, last, KIND.rows):
            i = i0 + tl.arange(0, KIND.rows)
            real = i < f.Q
            h = (g * f.group + b) + tl.zeros([KIND.rows], tl.int64)
            if MASS:
                s, _, _ = scores(f, scale, cap, n, g, h, i, real, j, number, KIND)
                p, _ = weighed(s, rows, size, (n * f.heads + h) * f.Q + i, real)
                columns += tl.sum(p, 0)
            else:
                p, d, m1, m2 = pulled(
                    f, dots, bar, rows, size, scale, cap, n, g, h, i, real, j, number, SECOND, KIND
                )
                columns += tl.sum(d, 0)
                if key_grad is not None:
                    q = vectors(f.query, n, h, i, real, u, f.D)
                    k = joined(tl.trans(m1), q, k, KIND.precision)
                    if SECOND:
                        if dots.query.at is not None:
                            q = vectors(dots.query, n, h, i, real, u, f.D)
                            k = joined(tl.trans(m2), q, k, KIND.precision)
                if value_grad is not None:
                    o = vectors(bar, n, h, i, real, w, f.Dv)
                    v = joined(tl.trans(p), o, v, KIND.precision)
        if column_sum is not None:
            if tl.program_id(1) == 0:
                tl.store(column_sum + (n * f.heads + g * f.group + b) * f.K + j, columns, mask=inside)
    at = (unit.to(tl.int64) * f.K + j)[:, None]
    if key_grad is not None:
        there = inside[:, None] & (u < f.D)[None, :]
        tl.store(key_grad + at * f.D + u[None, :], k * tl.full([1, 1], scale, number), mask=there)
    if value_grad is not None:
        tl.store(value_grad + at * f.Dv + w[None, :], v, mask=inside[:, None] & (w < f.Dv)[None, :])


@triton.jit
def bias_kernel(
    f,
    dots,
    bar,
    rows,
    size,
    bias_grad,
    batch,
    own_batch,
    own_heads,
    scale: tl.float64,
    cap: tl.float64,
    SECOND: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program (tile of queries, tile of keys, batch item and head of the bias).

    Writes bias_grad (own_batch, own_heads, Q, K): the derivative by the scores, summed over the batch items
    and heads that share a bias.
    """
    number: tl.constexpr = rows.dtype.element_ty
    owner_n, owner_h = tl.program_id(2) // own_heads, tl.program_id(2) % own_heads
    i, j = (
        tl.program_id(0) * KIND.rows + tl.arange(0, KIND.rows),
        tl.program_id(1) * KIND.keys + tl.arange(0, KIND.keys),
    )
    real = i < f.Q
    total, zero = tl.zeros([KIND.rows, KIND.keys], number), tl.zeros([1], tl.int64)
    for n in range(tl.where(own_batch == 1, 0, owner_n), tl.where(own_batch == 1, batch, owner_n + 1)):
        for b in range(tl.where(own_heads == 1, 0, owner_h), tl.where(own_heads == 1, f.heads, owner_h + 1)):
            h, g = tl.zeros([KIND.rows], tl.int64) + b, zero + b // f.group
            _, d, _, _ = pulled(
                f, dots, bar, rows, size, scale, cap, zero + n, g, h, i, real, j, number, SECOND, KIND
            )
            total += d
    at = (tl.program_id(2).to(tl.int64) * f.Q + i.to(tl.int64))[:, None] * f.K + j[None, :]
    tl.store(bias_grad + at, total, mask=real[:, None] & (j < f.K)[None, :])
