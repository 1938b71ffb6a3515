r"""One row of scores: what every sweep does before it goes its own way.

A sweep cuts the scores into tiles, BLAS fills a tile with z = scale <q_i, k_j>, and each row of the tile then passes here:

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
def to_scores(s, slope, bend, lo, hi, j0, i, cap, bias, log_weight, mask):  # type: ignore[no-untyped-def]
    """Turn s[lo:hi] from scale <q,k> into scores, in place; lo, hi count from the tile's first key j0.

    bias (Qb, Kb), log_weight (K,), mask (Qm, Km) with Qb, Kb, Qm, Km 1 or full; of size 0 when absent. slope and bend
    [lo:hi] are filled if cap > 0.
    """
    if cap > 0:
        one = cap / cap
        for j in range(lo, hi):
            t = hyperbolic_tangent(s[j] / cap)
            s[j] = cap * t
            d = one - t * t
            slope[j] = d
            bend[j] = -(t + t) * d / cap
    if bias.size > 0:
        row = bias[i if bias.shape[0] > 1 else 0]
        if row.size > 1:
            for j in range(lo, hi):
                s[j] += row[j0 + j]
        else:
            b = row[0]
            for j in range(lo, hi):
                s[j] += b
    if log_weight.size > 0:
        for j in range(lo, hi):
            s[j] += log_weight[j0 + j]
    if mask.size > 0:
        seen = mask[i if mask.shape[0] > 1 else 0]
        if seen.size > 1:
            for j in range(lo, hi):
                s[j] = s[j] if seen[j0 + j] else -np.inf
        elif not seen[0]:
            for j in range(lo, hi):
                s[j] = -np.inf


@njit(fastmath=FAST, error_model="numpy")
def largest(s, lo, hi):  # type: ignore[no-untyped-def]
    """Largest of s[lo:hi]; four running maxima hide the latency of one."""
    quarter = (hi - lo) // 4
    t0 = s.dtype.type(-np.inf)
    t1, t2, t3 = t0, t0, t0
    for j in range(lo, lo + quarter):
        x0, x1, x2, x3 = s[j], s[j + quarter], s[j + 2 * quarter], s[j + 3 * quarter]
        t0 = x0 if x0 > t0 else t0
        t1 = x1 if x1 > t1 else t1
        t2 = x2 if x2 > t2 else t2
        t3 = x3 if x3 > t3 else t3
    for j in range(lo + 4 * quarter, hi):
        t0 = s[j] if s[j] > t0 else t0
    return max(max(t0, t1), max(t2, t3))
