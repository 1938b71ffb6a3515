r"""Is the equilibrium Gaussian when the measure is that of the moving points? (THEORY B5a)

    η_i ← RN(η_i + Σ_j softmax_j(β⟨η_j,η_i⟩) η_j)

from N points of a named law, under a named renormaliser, over seeds.

The papers leave this open. `equilibrium_sweep` measures cluster counts and Gaussianity by step; all seeds of
a setting run as one batch.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch

from exptilt._support.progress import track
from exptilt.claims.experiments.starts import start
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.trajectory import Trajectory


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep: N points in D dimensions; its path has measurements of T steps and S seeds."""

    count: int
    dimension: int
    beta: float
    start: str
    renormalizer: str
    path: Trajectory

    @property
    def final(self) -> dict[int, int]:
        """How many seeds ended with each count of clusters."""
        return dict(sorted(Counter(self.path.clusters.count[-1].tolist()).items()))


def equilibrium_sweep(
    *,
    counts: tuple[int, ...] = (1000,),
    dimensions: tuple[int, ...] = (4,),
    betas: tuple[float, ...] = (1.0,),
    starts: tuple[str, ...] = ("gaussian", "laplace", "uniform"),
    renormalizers: tuple[str, ...] = ("sphere", "layer", "batch", "whiten"),
    seeds: int = 8,
    steps: int = 300,
    measure_every: int = 5,
    seed: int = 0,
) -> tuple[Setting, ...]:
    """Run flows of moving points over all combinations of settings; `starts` are names of `STARTS`.

    Example:
        >>> found = equilibrium_sweep(
        ...     counts=(60,), dimensions=(2,), starts=("laplace",), seeds=3, steps=150, measure_every=50
        ... )
        >>> {s.renormalizer: s.final for s in found}["whiten"]
        {3: 3}
    """
    settings = []
    every = list(itertools.product(counts, dimensions, betas, starts, renormalizers))
    for count, dimension, beta, law, kind in track(every, "sweep"):
        # The same draws for every β and renormaliser, so that these are compared on equal starts.
        number = seed + 1_000_003 * starts.index(law) + 7919 * count + dimension
        points = start(law, (seeds, count, dimension), torch.Generator().manual_seed(number))
        flow = Flow(kind, beta=beta)
        path = flow.run(points, steps, keep="last", measure_every=measure_every, progress=False)
        settings.append(Setting(count, dimension, beta, law, kind, path))
    return tuple(settings)
