"""Scores of a tile: the one routine that all Triton kernels share, so that all see the same numbers."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh x and its slope, neither from a difference of numbers that are nearly equal.

    Below 0.625 by Cephes' rational form (Triton has no tanh that its interpreter knows) and 1 − tanh²; above,
    the slope is 4e/(1 + e)².
    """
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    e = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + e)
    large = (1.0 - e) * inverse
    small = x + x * z * (p / q)
    t = tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))
    return t, tl.where(tl.abs(x) < 0.625, 1.0 - small * small, 4.0 * e * inverse * inverse)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b.

    Two tensors of half precision are multiplied on tensor cores. Weights and cotangents are of float32:
    against bfloat16 they go as a sum of three bfloat16 numbers, against float16, whose range is small, as a
    sum of two TF32 numbers (which hold every float16). Of float16 no bit is lost, and of float32 hardly the
    last.
    """
    if b.dtype == tl.float32 or b.dtype == tl.float64 or a.dtype == b.dtype:
        total = tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION)
    elif b.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            high = a.to(tl.bfloat16)
            total = tl.dot(high, b, total)
            a = a - high.to(tl.float32)
    elif PRECISION == "ieee":  # AMD's matrix cores multiply float32 as it is
        total = tl.dot(a, b.to(tl.float32), total, input_precision="ieee")
    else:
        high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(high, b.to(tl.float32), total, input_precision="tf32")
        total = tl.dot(a - high, b.to(tl.float32), total, input_precision="tf32")
    return total


@triton.jit
def joined(a, b, total, PRECISION: tl.constexpr):
    """total + a b, where a tile of exact float32 products is summed by itself first.

    So a sum over many tiles is one of sums, whose errors do not grow with its length as fast. Scores are not
    added up like this: their sum must not depend on how many columns a sweep takes at a time.
    """
    if PRECISION == "ieee" and (b.dtype == tl.float32 or b.dtype == tl.float64):
        # no tile of the table has more than 32 terms; with 0 Triton would begin the tile's sum at `total`
        part = tl.dot(
            a.to(b.dtype), b, tl.zeros_like(total), input_precision=PRECISION, max_num_imprecise_acc=32
        )
        total += part
    else:
        total = product(a, b, total, PRECISION)
    return total


@triton.jit
def vectors(x, n, h, i, there, c, C):
    """(len(i), len(c)): columns c of the vectors i of x, of one head or of a head each; 0 if not there."""
    start = x.at + n * x.steps[0] + h * x.steps[1] + i.to(tl.int64) * x.steps[2]
    at = start[:, None] + c.to(tl.int64)[None, :] * x.steps[3]
    return tl.load(at, mask=there[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def plane(x, n, h, i, j, there):
    """(rows, keys): the numbers of x for pairs of a row and a key."""
    start = x.at + n * x.steps[0] + h * x.steps[1] + i.to(tl.int64) * x.steps[2]
    return tl.load(start[:, None] + j.to(tl.int64)[None, :] * x.steps[3], mask=there, other=0)


@triton.jit
def weights_of(x, n, h, j, there):
    """(rows, keys): a log-weight of each key, for the rows' heads h."""
    at = x.at + n * x.steps[0] + h[:, None] * x.steps[1] + j.to(tl.int64)[None, :] * x.steps[2]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def inner(
    x, y, n, h, g, i, real, j, inside, C, number: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr
):
    """(rows, keys): ⟨x_i, y_j⟩, vectors of rows and of keys with C columns, KIND.step of them at a time."""
    total = tl.zeros([KIND.rows, KIND.keys], number)
    if WHOLE:  # no loop, so that vectors that do not change are loaded once
        c = tl.arange(0, KIND.step)
        a, b = vectors(x, n, h, i, real, c, C), vectors(y, n, g, j, inside, c, C)
        total = product(a, tl.trans(b), total, KIND.precision)
    else:
        for c0 in range(0, C, KIND.step):
            c = c0 + tl.arange(0, KIND.step)
            a, b = vectors(x, n, h, i, real, c, C), vectors(y, n, g, j, inside, c, C)
            total = product(a, tl.trans(b), total, KIND.precision)
    return total


@triton.jit
def mix(x):
    """``plan.mix``, of unsigned numbers of 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(f, n, h, i, j):
    """(rows, keys): whether a weight is kept, as in ``plan.kept``."""
    at = f.random.at + n * f.random.steps[0]
    seed, cut = tl.load(at).to(tl.uint32), tl.load(at + f.random.steps[1]).to(tl.uint32)
    row = mix(mix(seed ^ mix((n * f.heads + h).to(tl.uint32))) + i.to(tl.uint32))
    return mix(row[:, None] ^ mix((j + 1).to(tl.uint32))[None, :]) >= cut


@triton.jit
def span(x, n, i, there):
    """The first key that each query i of a plan sees, and the one after the last; or the same for keys i."""
    at = x.at + n * x.steps[0] + i * x.steps[2]
    return tl.load(at, mask=there, other=0), tl.load(at + x.steps[1], mask=there, other=0)


@triton.jit
def span_of_all(x, n, i, there, last):
    """The first key that any of the queries i sees, and the one after the last; or the same for keys i."""
    a, b = span(x, n, i, there)
    return tl.min(tl.where(a < b, a, last)), tl.max(b)


@triton.jit
def scores(f, scale, cap, n, g, h, i, real, j, number: tl.constexpr, KIND: tl.constexpr):
    """Scores, −inf where hidden, and slope and bend of the softcap, each (rows, keys).

    They are those of queries i of heads h against keys j of key head g.
    """
    inside = j < f.K
    s = inner(f.query, f.key, n, h, g, i, real, j, inside, f.D, number, KIND.whole_d, KIND)
    s = s * tl.full([1, 1], scale, number)
    slope, bend = s, s
    if KIND.cap:
        c = tl.full([1, 1], cap, number)
        t, slope = tanh(s / c)
        bend = -2.0 * t * slope / c
        s = c * t
    seen = real[:, None] & inside[None, :]
    if f.bias.at is not None:
        s += plane(f.bias, n, h, i, j, seen)
    if f.weight.at is not None:
        s += weights_of(f.weight, n, h // f.weight_group, j, seen)
    own = i + (f.K - f.Q)  # the key that stands at the query's own place: both sequences end together
    if KIND.causal:
        seen = seen & (j[None, :] <= own[:, None])
    if KIND.window:
        seen = seen & (own[:, None] - j[None, :] < f.window)
        if not KIND.causal:
            seen = seen & (j[None, :] - own[:, None] < f.window)
    if f.mask.at is not None:
        seen = seen & (plane(f.mask, n, h, i, j, seen) != 0)
    if f.seen.at is not None:
        first, last = span(f.seen, n, i, real)
        seen = seen & (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
    if f.random.at is not None:
        seen = seen & kept(f, n, h, i, j)
    return tl.where(seen, s, float("-inf")), slope, bend


@triton.jit
def rows_of(f, r0, g, KIND: tl.constexpr):
    """Rows r0 … of key head g: their heads, their queries, whether there are such rows."""
    r = r0 + tl.arange(0, KIND.rows)
    return (g * f.group + r % f.group).to(tl.int64), r // f.group, r < f.group * f.Q


@triton.jit
def keys_seen(f, n, i, real, KIND: tl.constexpr):
    """The first key that some of these queries may see, and the one after the last."""
    first, last = 0, f.K
    if f.seen.at is not None:
        first, last = span_of_all(f.seen, n, i, real, f.K)
    else:
        least = tl.min(tl.where(real, i, f.Q)) + (f.K - f.Q)
        most = tl.max(tl.where(real, i, 0)) + (f.K - f.Q)
        if KIND.causal:
            last = tl.minimum(last, most + 1)
        if KIND.window:
            first = tl.maximum(first, least - f.window + 1)
            if not KIND.causal:
                last = tl.minimum(last, most + f.window)
    return first, last
