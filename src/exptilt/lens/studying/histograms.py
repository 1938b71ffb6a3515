r"""Histograms that can be merged: their bins have the same edges, whatever was seen first.

Bin widths are powers of two and edges are multiples of the width, so the histogram of two texts is the sum of
their histograms at the coarser width. The range of a statistic need not be known beforehand, and an
interrupted study goes on where it stopped.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from exptilt.lens.studying.results import Histogram

FINEST = -6  # bins of 1/64: finer than any figure shows
MOST = 256  # bins kept while counting

Counts = tuple[int, int, NDArray[np.float64]]
"""Exponent e of the width 2^e, index of the first bin, counts: bin i spans [i 2^e, (i+1) 2^e)."""


def count(values: NDArray[np.float64]) -> Counts:
    """Counts of the finite values, in the finest bins of which at most `MOST` are needed."""
    values = values[np.isfinite(values)]
    if values.size == 0:
        return FINEST, 0, np.zeros(0)
    exponent = FINEST
    low, high = float(values.min()), float(values.max())
    while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) >= MOST:
        exponent += 1
    index = np.floor(values / 2.0**exponent).astype(np.int64)
    first = int(index.min())
    return exponent, first, np.bincount(index - first).astype(np.float64)


def _coarser(counts: Counts, exponent: int) -> Counts:
    """The same counts in bins of width 2^exponent; there is at least one bin."""
    old, first, numbers = counts
    index = (first + np.arange(numbers.size)) >> (exponent - old)
    return exponent, int(index[0]), np.bincount(index - index[0], weights=numbers).astype(np.float64)


def merge(parts: Iterable[Counts], *, bins: int) -> Histogram:
    """Sum of all parts in at most `bins` bins; one empty bin if nothing was counted."""
    parts = [part for part in parts if part[2].size]
    if not parts:
        return Histogram(np.array([0.0, 1.0]), np.zeros(1))
    exponent = max(part[0] for part in parts)
    while True:
        aligned = [_coarser(part, exponent) for part in parts]
        first = min(part[1] for part in aligned)
        last = max(part[1] + part[2].size for part in aligned)
        if last - first <= bins:
            break
        exponent += 1
    total = np.zeros(last - first)
    for _, start, numbers in aligned:
        total[start - first : start - first + numbers.size] += numbers
    return Histogram((np.arange(first, last + 1) * 2.0**exponent).astype(np.float64), total)
