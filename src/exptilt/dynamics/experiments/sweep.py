r"""Is the equilibrium Gaussian when the measure is that of the moving points? (THEORY B5)

    η_i ← RN(η_i + Σ_j softmax_j(β<η_j,η_i>) η_j)        from N points of a named law, under a named renormaliser, over seeds.

The papers leave it open; `equilibrium_sweep` measures it: cluster counts and Gaussianity by step, each with its 95% interval over seeds.
All seeds of a setting run as one batch.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from exptilt._support.errors import MissingExtraError
from exptilt._support.intervals import Interval, mean_interval
from exptilt._support.progress import track
from exptilt.dynamics.experiments.arguments import check_several, check_whole
from exptilt.dynamics.experiments.starts import check_start, start
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.renormalizers import as_renormalizer
from exptilt.dynamics.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Number = Literal["clusters", "effective", "skewness", "kurtosis", "sliced", "mean_cosine"]
NUMBERS: tuple[Number, ...] = ("clusters", "effective", "skewness", "kurtosis", "sliced", "mean_cosine")


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep, and what it did over the seeds. T rows, S seeds.

    Attributes:
        count: N, how many points.
        dimension: D.
        beta: factor of the scores.
        start: the law of the start.
        renormalizer: its name.
        steps: ``(T,)``.
        clusters: ``(T, S)``, how many.
        effective: ``(T, S)``, their effective number.
        skewness: ``(T, S)``, Mardia's b₁.
        kurtosis: ``(T, S)``, Mardia's b₂ over its Gaussian value, minus 1.
        sliced: ``(T, S)``, Anderson and Darling's A², mean over directions.
        mean_cosine: ``(T, S)``.
    """

    count: int
    dimension: int
    beta: float
    start: str
    renormalizer: str
    steps: Tensor
    clusters: Tensor
    effective: Tensor
    skewness: Tensor
    kurtosis: Tensor
    sliced: Tensor
    mean_cosine: Tensor

    def interval(self, number: Number) -> Interval:
        """Mean over seeds with its 95% interval, by step.

        Args:
            number: clusters, effective, skewness, kurtosis, sliced or mean_cosine.
        """
        return mean_interval(getattr(self, number).double())

    @property
    def final(self) -> dict[int, int]:
        """How many seeds ended with each count of clusters."""
        return dict(sorted(Counter(self.clusters[-1].tolist()).items()))

    @property
    def label(self) -> str:
        """A few words."""
        return f"{self.renormalizer}, {self.start}, N={self.count}, D={self.dimension}, β={self.beta:g}"


@dataclass(frozen=True)
class Sweep:
    """Every setting of a sweep.

    Attributes:
        settings: one for each combination.
    """

    settings: tuple[Setting, ...]

    def select(
        self, *, count: int | None = None, dimension: int | None = None, beta: float | None = None, start: str | None = None,
        renormalizer: str | None = None,
    ) -> "Sweep":  # fmt: skip
        """The settings that agree with what is given.

        Args:
            count: N.
            dimension: D.
            beta: factor of the scores.
            start: the law of the start.
            renormalizer: its name.
        """
        wanted = {
            "count": count,
            "dimension": dimension,
            "beta": beta,
            "start": start,
            "renormalizer": renormalizer,
        }
        return Sweep(
            tuple(
                s
                for s in self.settings
                if all(value in (None, getattr(s, name)) for name, value in wanted.items())
            )
        )

    def to_frame(self) -> "DataFrame":
        """A pandas table with one row for each setting and measured step: means and 95% intervals over seeds."""
        try:
            import pandas
        except ImportError as problem:
            raise MissingExtraError("pandas", "report") from problem
        rows = []
        for s in self.settings:
            intervals = {name: s.interval(name) for name in NUMBERS}
            for place, step in enumerate(s.steps.tolist()):
                row = {
                    "renormalizer": s.renormalizer,
                    "start": s.start,
                    "count": s.count,
                    "dimension": s.dimension,
                    "beta": s.beta,
                }
                row["step"] = step
                for name, interval in intervals.items():
                    row[name], row[f"{name}_low"], row[f"{name}_high"] = (float(x[place]) for x in interval)
                rows.append(row)
        return pandas.DataFrame(rows)

    def plot(self) -> "Figure":
        """The phase picture: effective number of clusters and Gaussianity against step, a column for each renormaliser."""
        from exptilt.dynamics import pictures

        return pictures.sweep(self)


def equilibrium_sweep(
    *, counts: tuple[int, ...] = (1000,), dimensions: tuple[int, ...] = (4,), betas: tuple[float, ...] = (1.0,),
    starts: tuple[str, ...] = ("gaussian", "laplace", "uniform"),
    renormalizers: tuple[str, ...] = ("sphere", "layer", "batch", "whiten"), seeds: int = 8, steps: int = 300, measure_every: int = 5,
    seed: int = 0, progress: bool | None = None,
) -> Sweep:  # fmt: skip
    """Run flows of moving points over all combinations of settings.

    Args:
        counts: N.
        dimensions: D.
        betas: factors of the scores.
        starts: laws of independent coordinates with variance 1: gaussian, laplace, student, uniform, bimodal, skewed.
        renormalizers: names as in `Flow`.
        seeds: how many runs of each setting.
        steps: of each run.
        measure_every: so many steps.
        seed: from which all draws follow.
        progress: as for `Flow.run`.

    Example:
        >>> found = equilibrium_sweep(
        ...     counts=(60,), dimensions=(2,), starts=("laplace",), seeds=3, steps=150, measure_every=50
        ... )
        >>> {s.renormalizer: s.final for s in found.select(renormalizer="whiten").settings}
        {'whiten': {3: 3}}
    """
    name = "equilibrium_sweep"
    check_several(
        name, counts=counts, dimensions=dimensions, betas=betas, starts=starts, renormalizers=renormalizers
    )
    for count, dimension in itertools.product(counts, dimensions):
        check_whole(name, 1, counts=count, dimensions=dimension, seeds=seeds, measure_every=measure_every)
    check_whole(name, 0, steps=steps)
    for law in starts:
        check_start(law)
    for kind in renormalizers:
        as_renormalizer(kind)
    settings = []
    every = list(itertools.product(counts, dimensions, betas, starts, renormalizers))
    for count, dimension, beta, law, kind in track(every, "sweep", show=progress):
        # The same draws for every β and renormaliser, so that these are compared on equal starts.
        generator = torch.Generator().manual_seed(
            seed + 1_000_003 * starts.index(law) + 7919 * count + dimension
        )
        points = start(law, (seeds, count, dimension), generator)
        path = Flow(kind, beta=beta).run(
            points, steps, keep="last", measure_every=measure_every, progress=False
        )
        settings.append(_setting(count, dimension, beta, law, kind, path))
    return Sweep(tuple(settings))


def _setting(count: int, dimension: int, beta: float, name: str, kind: str, path: Trajectory) -> Setting:
    g = path.gaussianity
    return Setting(
        count, dimension, beta, name, kind, path.steps, path.clusters.count, path.clusters.effective, g.skewness, g.kurtosis, g.sliced,
        path.mean_cosine,
    )  # fmt: skip
