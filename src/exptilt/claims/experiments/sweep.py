r"""Is the equilibrium Gaussian when the measure is that of the moving points? (THEORY B5a)

    η_i ← RN(η_i + Σ_j softmax_j(β⟨η_j,η_i⟩) η_j)

from N points of a named law, under a named renormaliser, over seeds.

The papers leave it open; `equilibrium_sweep` measures it: cluster counts and Gaussianity by step, each with
its 95% interval over seeds. All seeds of a setting run as one batch.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, needed
from exptilt._support.intervals import Interval, mean_interval
from exptilt._support.plotting import COLOURS, caption, new_figure, whole_log
from exptilt._support.progress import track
from exptilt.claims.experiments.arguments import check_several, check_whole
from exptilt.claims.experiments.starts import check_start, start
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.renormalizers import as_renormalizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Number = Literal["clusters", "effective", "skewness", "kurtosis", "sliced", "mean_cosine"]
NUMBERS: tuple[Number, ...] = ("clusters", "effective", "skewness", "kurtosis", "sliced", "mean_cosine")
_VARIED = ("renormalizer", "start", "count", "dimension", "beta")
_WORDS = {"start": "{}", "count": "N={}", "dimension": "D={}", "beta": "β={:g}"}


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep and its measurements: T rows, S seeds.

    Attributes:
        count: N, how many points.
        dimension: D.
        beta: factor of the scores.
        start: the law of the start.
        renormalizer: its name.
        steps: ``(T,)``.
        clusters: ``(T, S)``, number of clusters.
        effective: ``(T, S)``, effective number of clusters.
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
        """The setting in a few words."""
        return f"{self.renormalizer}, {self.start}, N={self.count}, D={self.dimension}, β={self.beta:g}"


@dataclass(frozen=True)
class Sweep:
    """Every setting of a sweep.

    Attributes:
        settings: one for each combination.
    """

    settings: tuple[Setting, ...]

    def select(
        self,
        *,
        count: int | None = None,
        dimension: int | None = None,
        beta: float | None = None,
        start: str | None = None,
        renormalizer: str | None = None,
    ) -> "Sweep":
        """The sweep with only the settings that have the given values; None allows any.

        Args:
            count: N.
            dimension: D.
            beta: factor of the scores.
            start: the law of the start.
            renormalizer: its name.
        """
        wanted = dict(zip(_VARIED, (renormalizer, start, count, dimension, beta), strict=True))
        chosen = [
            s for s in self.settings if all(x in (None, getattr(s, name)) for name, x in wanted.items())
        ]
        return Sweep(tuple(chosen))

    def to_frame(self) -> "DataFrame":
        """A pandas table, a row for each setting and measured step: means and 95% intervals over seeds."""
        rows = []
        for s in self.settings:
            intervals = {name: s.interval(name) for name in NUMBERS}
            for place, step in enumerate(s.steps.tolist()):
                row = {name: getattr(s, name) for name in _VARIED} | {"step": step}
                for name, interval in intervals.items():
                    row[name], row[f"{name}_low"], row[f"{name}_high"] = (float(x[place]) for x in interval)
                rows.append(row)
        return needed("pandas", "report").DataFrame(rows)

    def plot(self) -> "Figure":
        """Effective number of clusters and Gaussianity against step, a column for each renormaliser."""
        if not self.settings:
            raise ArgumentError("Sweep.plot: no settings are left to draw.")
        kinds = list(dict.fromkeys(s.renormalizer for s in self.settings))
        varied = [name for name in _VARIED[1:] if len({getattr(s, name) for s in self.settings}) > 1] or [
            "start"
        ]
        labels = [", ".join(_WORDS[name].format(getattr(s, name)) for name in varied) for s in self.settings]
        names = list(dict.fromkeys(labels))
        with new_figure(2.6 * len(kinds) + 1.6, 5.2) as figure:
            panels: Any = figure.subplots(2, len(kinds), sharex=True, sharey="row", squeeze=False)
            for setting, label in zip(self.settings, labels, strict=True):
                upper, lower = panels[:, kinds.index(setting.renormalizer)]
                colour = COLOURS[names.index(label) % 6]
                for axes, interval in (
                    (upper, _of_logs(setting.effective, 1.0)),
                    (lower, _of_logs(setting.sliced)),
                ):
                    axes.plot(setting.steps, interval.mean, color=colour, label=label)
                    axes.fill_between(
                        setting.steps, interval.low, interval.high, color=colour, alpha=0.2, linewidth=0
                    )
                if bool(setting.sliced.isnan().any()) and not lower.texts:
                    words = "a line ends where\na cloud is one point"
                    style: Any = {"ha": "right", "va": "bottom", "fontsize": 7, "color": "0.4"}
                    lower.text(0.97, 0.16, words, transform=lower.transAxes, **style)
            for (upper, lower), kind in zip(panels.T, kinds, strict=True):
                whole_log(upper)
                upper.set_ylim(bottom=0.8)
                caption(upper, kind, "")
                lower.set(yscale="log", xlabel="step")
                lower.set_ylim(bottom=0.2)
                lower.axhline(0.385, color="0.3", linewidth=0.9, linestyle="--")
                lower.set_xscale("symlog", linthresh=10)  # most happens early: the first steps get room
                lower.set_xlim(left=0)
            panels[0, 0].set_ylabel("effective clusters\n(geometric mean, 95%, cut at 1)")
            panels[1, 0].set_ylabel("sliced A² (dashed: Gaussian)\n(geometric mean, 95%)")
            handles, shown = panels[0, 0].get_legend_handles_labels()
            figure.legend(handles, shown, loc="outside lower center", ncols=min(6, len(shown)))
        return figure


def _of_logs(values: Tensor, least: float = 0.0) -> Interval:
    """Geometric mean over seeds with Student's interval of the logarithms, ≥ `least`; NaN if a seed is."""
    found = mean_interval(values.double().log())
    there = ~values.isnan().any(-1)
    return Interval(*(torch.where(there, x.exp().clamp_min(least), torch.nan) for x in found))


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
    progress: bool | None = None,
) -> Sweep:
    """Run flows of moving points over all combinations of settings.

    Args:
        counts: N.
        dimensions: D.
        betas: factors of the scores.
        starts: laws of independent coordinates with variance 1: gaussian, laplace, student, uniform,
            bimodal, skewed.
        renormalizers: names as in `Flow`.
        seeds: number of runs of each setting.
        steps: of each run.
        measure_every: steps between measurements.
        seed: of all draws.
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
        number = seed + 1_000_003 * starts.index(law) + 7919 * count + dimension
        points = start(law, (seeds, count, dimension), torch.Generator().manual_seed(number))
        flow = Flow(kind, beta=beta)
        path = flow.run(points, steps, keep="last", measure_every=measure_every, progress=False)
        g, found = path.gaussianity, path.clusters
        measured = (
            path.steps,
            found.count,
            found.effective,
            g.skewness,
            g.kurtosis,
            g.sliced,
            path.mean_cosine,
        )
        settings.append(Setting(count, dimension, beta, law, kind, *measured))
    return Sweep(tuple(settings))
