r"""Exponential capacity, measured, beside the bound of theory.

Random patterns lie on a sphere of radius K√(d−1). For each dimension d and seed, the search is for the
largest number N of patterns that are all recalled (`recalled`): N is doubled until one is lost, then
bisected; a smaller N takes the first of the same patterns. Means and intervals are of log N over seeds,
beside the bound √p c^{(d−1)/4} of ``theory.py``.

Theory is a lower bound, proved with a union bound over pairs and for a radius of attraction as well, so
measured numbers lie above it: the gap, as a factor and in the rate of growth per dimension, is part of the
result. The growth to expect for recall alone: another pattern weighs e^{−β(M² − ⟨x_i,x_j⟩)}, and the
mean of that over random x_j is about e^{−βM²(1 − βM²/2d)} for βM² < d, so N may grow like e^{βK²d(1 − βK²/2)}
(K²β < 1): for β = K = 1 about e^{d/2}.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.intervals import mean_interval
from exptilt._support.progress import track
from exptilt.memory.hopfield import Hopfield
from exptilt.memory.retrieval import settle
from exptilt.memory.theory import StorageBound, storage_bound


@dataclass(frozen=True)
class Capacity:
    """How many random patterns were all recalled, by dimension and seed, beside the bounds of theory."""

    dimensions: tuple[int, ...]
    count: Tensor  # (d, seeds), the largest N found
    bounds: tuple[StorageBound, ...]
    limited: Tensor  # (d, seeds), where the search ended at `most` and the true number is larger

    @property
    def mean(self) -> Tensor:
        """``(d,)``: geometric mean of the count over seeds."""
        return self.count.double().log().mean(-1).exp()

    @property
    def interval(self) -> Tensor:
        """``(d, 2)``: 95 % interval of `mean`; NaN for one seed."""
        return torch.stack(mean_interval(self.count.double().log())[1:], -1).exp()

    @property
    def exponent(self) -> tuple[float, float, float]:
        """Growth of log N per dimension over all draws, and the ends of its 95 % interval."""
        d, y = self._draws()
        return _slope(d, y)[:3]

    @property
    def against_polynomial(self) -> float:
        """Residual squares of log N = a + m log d over those of a + r d: above 1 if growth is exponential."""
        d, y = self._draws()
        return _slope(d.log(), y)[3] / max(_slope(d, y)[3], 1e-300)

    def _draws(self) -> tuple[Tensor, Tensor]:
        d = torch.tensor(self.dimensions, dtype=torch.float64)[:, None].expand_as(self.count)
        return d[~self.limited], self.count.double().log()[~self.limited]


def _slope(x: Tensor, y: Tensor) -> tuple[float, float, float, float]:
    """Slope of a straight line, the ends of its 95 % interval, and the sum of squares that it leaves."""
    from scipy.stats import t

    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = float((y - slope * x).square().sum())
    wide = float(t.ppf(0.975, len(x) - 2)) * math.sqrt(left / (len(x) - 2) / float((x * x).sum()))
    return slope, slope - wide, slope + wide, left


def sphere(count: int, dimension: int, radius: float, generator: torch.Generator) -> Tensor:
    """``(count, dimension)`` float64 points drawn evenly from a sphere."""
    x = torch.randn(count, dimension, dtype=torch.float64, generator=generator)
    return radius * torch.nn.functional.normalize(x, dim=-1)


@torch.no_grad()
def recalled(memory: Hopfield, noise: float, generator: torch.Generator) -> bool:
    """Whether retrieval from each pattern, plus noise, ends within 0.1 M of it and nearer to no other."""
    x, M = memory.patterns, float(memory.size)
    for part in x.split(1024):
        start = part
        if noise > 0:
            kick = torch.randn(part.shape, dtype=part.dtype, generator=generator)
            start = part + noise * M * kick / kick.norm(dim=-1, keepdim=True)
        end = settle(memory, start, 1e-6, 200, show=False).value
        error = (end - part).norm(dim=-1)
        nearest = torch.cdist(end, x, compute_mode="donot_use_mm_for_euclid_dist").amin(-1)
        if not bool(((error <= 0.1 * M) & (error <= nearest * (1 + 1e-6))).all()):
            return False
    return True


def storage_capacity(
    dimensions: Sequence[int],
    *,
    beta: float = 1.0,
    radius: float = 1.0,
    noise: float = 0.0,
    seeds: int = 5,
    most: int = 4096,
    seed: int = 0,
) -> Capacity:
    """Measure how many random patterns can be stored, dimension by dimension.

    Patterns lie on a sphere of radius K√(d−1), K = `radius`; each cue is a pattern plus a random vector of
    length `noise`, in units of M; at most `most` patterns are tried.

    Example:
        >>> found = storage_capacity([4, 10], seeds=2)
        >>> bool(found.mean[1] > found.mean[0])
        True
    """
    counts = torch.zeros(len(dimensions), seeds, dtype=torch.int64)
    for i, j in track([(i, j) for i in range(len(dimensions)) for j in range(seeds)], "capacity"):
        d = dimensions[i]
        generator = torch.Generator().manual_seed(seed + 1000 * j + d)
        patterns = sphere(most, d, radius * math.sqrt(d - 1), generator)

        def all_recalled(N: int, patterns: Tensor = patterns) -> bool:
            return recalled(Hopfield(patterns[:N], beta), noise, torch.Generator().manual_seed(seed + N))

        low, high = 1, 2
        while high < most and all_recalled(high):
            low, high = high, min(2 * high, most)
        if high == most and all_recalled(most):
            low = high = most
        while high - low > max(1, low // 16):  # to 6 %: seeds differ by more
            middle = (low + high) // 2
            low, high = (middle, high) if all_recalled(middle) else (low, middle)
        counts[i, j] = low
    bounds = tuple(storage_bound(d, beta=beta, radius=radius) for d in dimensions)
    return Capacity(tuple(dimensions), counts, bounds, counts == most)
