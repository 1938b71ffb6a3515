r"""Which mean constraints contradict each other.

A law ν on the points x_n with mean m exists unless some d has <d, x_n − m> < 0 for every n (Farkas). The constraints that such a d uses,
d_j ≠ 0, cannot all be met: the d with the least Σ|d_j| is found by a linear program,

    min Σ_j |d_j|     such that     <d, x_n − m> ≤ −1 for every n,

and uses few. Then half of them are left out, the other half, quarters, and so on down to each by itself: where the rest still contradict
each other, they were not needed. What remains is a set of which none can be left out.

Of many points few matter. Each program is solved over some of them, and those that its answer violates most are added until it violates
none. If already the few cannot be separated from m, all of them cannot.

A contradiction of size ε needs d of size 1/ε, which the program does not find much below ε = 1e-9. Then the distance of m from the hull
decides instead, which is known to rounding.
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from exptilt.families.hull import distance_from_origin

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_START, _ADDED = 256, 64  # points to begin with, and added at a time


def conflicting(points: Array, mean: Array) -> list[int]:
    """Numbers of constraints (columns of ``points (N, k)``) that contradict each other; none if ``mean (k)`` is attainable.

    Those that no outcome meets by itself are all named; only where there are none, a set of which none can be left out.

    Example:
        >>> square = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> conflicting(square, np.array([0.5, 3.0]))
        [1]
    """
    offset = points - mean
    scale = np.maximum(np.abs(offset).max(0), np.finfo(float).tiny)
    offset = offset / scale
    alone = np.flatnonzero((offset > 0).all(0) | (offset < 0).all(0))
    if alone.size:
        return [int(j) for j in alone]
    few = set(range(0, len(offset), max(1, len(offset) // _START)))
    noise = 32 * np.finfo(float).eps * (offset.shape[1] + float(np.abs(mean / scale).max()))
    every = list(range(offset.shape[1]))
    return _least(every, lambda columns: _separating(offset, columns, few)) or _least(
        every, lambda columns: columns if distance_from_origin(offset[:, columns]) > noise else []
    )


def _least(columns: list[int], contradictory: Callable[[list[int]], list[int]]) -> list[int]:
    """A part of the columns of which none can be left out: `contradictory` gives those it needs among some, or none."""
    kept = contradictory(columns)
    block = len(kept)
    while block > 1:
        block = (block + 1) // 2
        for start in reversed(range(0, len(kept), block)):
            rest = kept[:start] + kept[start + block :]
            kept = (contradictory(rest) if 0 < len(rest) < len(kept) else []) or kept
    return kept


def _separating(offset: Array, columns: list[int], few: set[int]) -> list[int]:
    """Columns that the shortest separating d uses among these, or none if there is no d; adds the points that mattered to `few`."""
    while True:
        rows = offset[np.ix_(sorted(few), columns)]
        program = linprog(
            np.ones(2 * len(columns)), A_ub=np.hstack([rows, -rows]), b_ub=-np.ones(len(rows)), method="highs"
        )
        if program.x is None:
            return []
        d = program.x[: len(columns)] - program.x[len(columns) :]
        height = offset[:, columns] @ d
        worst = np.argsort(height)[-_ADDED:]
        violated = worst[height[worst] > -1 + 1e-6]
        if set(violated.tolist()) <= few:
            return [j for j, size in zip(columns, np.abs(d), strict=True) if size > 1e-7 * np.abs(d).max()]
        few.update(violated.tolist())
