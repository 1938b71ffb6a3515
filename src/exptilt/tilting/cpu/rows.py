r"""One row of scores: what every sweep does before it goes its own way.

A sweep cuts the scores into tiles, fills a tile with z = scale <q_i, k_j> (``product.py``), and each row of the tile then passes here:

    visible   causality and the window leave one run of keys lo..hi to each query
    to_scores z → s = softcap(z) + bias + log_weight, −inf where masked, in place; slope ds/dz = 1 − tanh² and
              bend d²s/dz² = −2 tanh (1 − tanh²)/cap are kept for the derivatives
"""

import numpy as np
from numba import njit

from exptilt.tilting.cpu.elementary import hyperbolic_tangent

# Sums may be reordered (so that they vectorise) and products fused; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
# A masked score is −inf; its distance to the mean is taken as this, so that weight 0 times its square is 0 and not NaN. No score with
# a weight above 0 is farther than about 100 (float32) or 800 (float64) from the maximum.
FAR = -1e15
# e to this is 0 in float32 and float64 alike.
LOW = -800.0


@njit(fastmath=FAST, error_model="numpy")
def visible(i, length_q, length_k, causal, window):  # type: ignore[no-untyped-def]
    """First and last-plus-one key that query i sees; query and key sequences end together (bottom-right)."""
    own = i + length_k - length_q
    lo, hi = 0, length_k
    if causal:
        hi = min(hi, own + 1)
    if window >= 0:
        lo = max(lo, own - window + 1)
        if not causal:
            hi = min(hi, own + window)
    return lo, max(hi, lo)


@njit(fastmath=FAST, error_model="numpy")
def tile_range(i0, i1, length_q, length_k, causal, window):  # type: ignore[no-untyped-def]
    """Keys that some query of i0..i1 sees."""
    lo, _ = visible(i0, length_q, length_k, causal, window)
    _, hi = visible(i1 - 1, length_q, length_k, causal, window)
    return min(lo, length_k), min(max(hi, 0), length_k)


@njit(fastmath=FAST, error_model="numpy")
def tile_part(t, tile_k, first, last, width):  # type: ignore[no-untyped-def]
    """Of tile t, the part that meets keys first..last, begun at a whole panel: its first key, how many of the tile's keys it skips, its length."""
    skip = max(first - t * tile_k, 0) // width * width
    j0 = t * tile_k + skip
    return j0, skip, min((t + 1) * tile_k, last) - j0


@njit(fastmath=FAST, error_model="numpy")
def part_of(x, i, start, stop):  # type: ignore[no-untyped-def]
    """Columns start..stop of row i of x (Q or 1, K or 1): a row of numbers, a single one for all keys, or none if x is absent."""
    row = x[i if x.shape[0] > 1 else 0]
    return row[start:stop] if row.size > 1 else row


@njit(fastmath=FAST, error_model="numpy")
def to_scores(s, slope, bend, cap, bias, log_weight, mask):  # type: ignore[no-untyped-def]
    """Turn s from scale <q,k> into scores, in place. All are rows over the same visible keys (loops that start at 0 vectorise).

    bias and mask may have one entry for all keys; bias, log_weight, mask are empty when absent. slope and bend are filled if cap > 0.
    """
    if cap > 0:
        one = cap / cap
        for j in range(s.size):
            t = hyperbolic_tangent(s[j] / cap)
            s[j] = cap * t
            d = one - t * t
            slope[j] = d
            bend[j] = -(t + t) * d / cap
    add_row(s, bias)
    add_row(s, log_weight)
    if mask.size == s.size:
        for j in range(s.size):
            s[j] = s[j] if mask[j] else -np.inf
    elif mask.size == 1 and not mask[0]:
        for j in range(s.size):
            s[j] = -np.inf


@njit(fastmath=FAST, error_model="numpy")
def add_row(s, row):  # type: ignore[no-untyped-def]
    """S += row, which may be empty or have one entry for all keys."""
    if row.size == s.size:
        for j in range(s.size):
            s[j] += row[j]
    elif row.size == 1:
        b = row[0]
        for j in range(s.size):
            s[j] += b


@njit(fastmath=FAST, error_model="numpy")
def largest(s):  # type: ignore[no-untyped-def]
    """Largest of s; four running maxima hide the latency of one."""
    quarter = s.size // 4
    a, b, c, d = s[:quarter], s[quarter : 2 * quarter], s[2 * quarter : 3 * quarter], s[3 * quarter :]
    t0 = s.dtype.type(-np.inf)
    t1, t2, t3 = t0, t0, t0
    for j in range(quarter):
        t0 = a[j] if a[j] > t0 else t0
        t1 = b[j] if b[j] > t1 else t1
        t2 = c[j] if c[j] > t2 else t2
        t3 = d[j] if d[j] > t3 else t3
    for j in range(quarter, d.size):
        t0 = d[j] if d[j] > t0 else t0
    return max(max(t0, t1), max(t2, t3))


@njit(fastmath=FAST, error_model="numpy")
def clear_outside(row, lo, hi):  # type: ignore[no-untyped-def]
    """Zero a tile's row outside the visible keys lo..hi, for the matrix products that follow."""
    row[:lo] = 0
    row[hi:] = 0
