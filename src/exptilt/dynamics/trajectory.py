"""The record of a flow: the states that were kept, and the numbers measured by step."""

import itertools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from exptilt._support.checks import whole
from exptilt._support.errors import needed
from exptilt._support.plotting import COLOURS, caption, new_figure, whole_log
from exptilt.dynamics.observe.clusters import Clusters
from exptilt.dynamics.observe.gaussianity import Gaussianity
from exptilt.dynamics.observe.snapshot import Growth, Norms, measure, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Trajectory:
    """States and measurements of a flow.

    T rows were measured, K states kept; ``...`` are the batch axes of the points.

    Attributes:
        states: ``(K, ..., N, D)``.
        kept: ``(K,)``, the step of each kept state.
        steps: ``(T,)``, the step of each row.
        time: ``(T,)``, step count times step size, or the time of the continuous flow.
        log_normalizer: ``(T, ...)``, mean of G over the points that see something.
        norms: lengths of the points, each ``(T, ...)``.
        covariance_trace: ``(T, ...)``.
        spectrum: ``(T, ..., D)``, eigenvalues of the covariance, falling.
        mean_cosine: ``(T, ...)``, over pairs of points that are not zero.
        gaussianity: Mardia's and the sliced tests, each ``(T, ...)``.
        clusters: count and sizes, each ``(T, ...)``.
        growth: expansion by the ascent and contraction by the renormaliser in the step that led to the row,
            each ``(T, ...)``; NaN where no step did: in row 0, and in every row of `Flow.ode`.
    """

    states: Tensor
    kept: Tensor
    steps: Tensor
    time: Tensor
    log_normalizer: Tensor
    norms: Norms
    covariance_trace: Tensor
    spectrum: Tensor
    mean_cosine: Tensor
    gaussianity: Gaussianity
    clusters: Clusters
    growth: Growth

    @property
    def last(self) -> Tensor:
        """The last state, ``(..., N, D)``."""
        return self.states[-1]

    @property
    def continuous(self) -> bool:
        """Whether the trajectory is one of `Flow.ode`, which has no steps."""
        return len(self.steps) > 1 and bool(self.growth.expansion.isnan().all())

    def to_frame(self) -> "DataFrame":
        """A pandas table, a row for each measured step and batch item; spectra have numbered columns."""
        batch = self.log_normalizer.shape[1:]
        rows, items = len(self.steps), batch.numel()
        columns: dict[str, Any] = {
            "step": self.steps.repeat_interleave(items).numpy(),
            "time": self.time.repeat_interleave(items).numpy(),
        }
        for axis, places in enumerate(zip(*itertools.product(*map(range, batch)), strict=True)):
            columns[f"batch_{axis}"] = list(places) * rows
        for name, value in _flat(self):
            alone = value.ndim == self.log_normalizer.ndim
            for place, column in enumerate(value.reshape(rows * items, -1).cpu().unbind(-1)):
                columns[name if alone else f"{name}_{place}"] = column.numpy()
        return needed("pandas", "report").DataFrame(columns)

    def plot(self) -> "Figure":
        """Six panels against time: G, lengths, spectrum, Gaussianity, clusters, expansion.

        Batch items are drawn one over the other.
        """
        norms, g, sliced = self.norms, self.gaussianity, self.gaussianity.sliced / 0.385 - 1
        spectrum = self.spectrum[..., :8].cpu()  # rounding beyond the dimensions that the cloud fills
        filled = torch.arange(spectrum.shape[-1]) < g.rank.unsqueeze(-1)
        spectrum = torch.where(filled & spectrum.isfinite(), spectrum, torch.nan)
        tests = {"kurtosis over Gaussian − 1": g.kurtosis, "sliced A² over Gaussian − 1": sliced}
        counts = {"count": self.clusters.count.double(), "effective": self.clusters.effective}
        grown = {"renormaliser": self.growth.contraction, "ascent": self.growth.expansion}
        none = "continuous: no steps" if self.continuous else "no steps"
        # Title, lines, and words where there is no number.
        panels: list[tuple[str, dict[str, Tensor], str]] = [
            ("Log-normalizer, mean over points", {"mean G": self.log_normalizer}, ""),
            ("Lengths of the points", {n: getattr(norms, n) for n in ("mean", "largest", "smallest")}, ""),
            ("Spectrum of the covariance", {"": spectrum}, "one point: no spread"),
            ("Gaussianity: 0 is Gaussian", tests, "nothing to test: one point, or too few"),
            ("Clusters", counts, ""),
            ("Growth of lengths in a step", grown, none),
        ]
        with new_figure(10.5, 5.6) as figure:
            axes: Any = figure.subplots(2, 3, sharex=True)
            for panel, (title, lines, words) in zip(axes.flat, panels, strict=True):
                _draw(panel, self.time, lines, words)
                caption(panel, title, "")
            _, lengths, _, gaussian, clusters, growth = axes.flat
            lengths.ticklabel_format(axis="x", useOffset=False)
            if not bool(g.kurtosis.isnan().all()):
                gaussian.set_yscale("symlog", linthresh=1)
                gaussian.axhline(0, color="0.4", linewidth=0.8)
            whole_log(clusters)
            clusters.set_ylim(0.8, max(2.5, 1.3 * float(self.clusters.count.max())))
            if not bool(self.growth.expansion.isnan().all()):
                growth.axhline(1, color="0.4", linewidth=0.8)
            for panel in axes[1]:
                panel.set_xlabel("time")
        return figure


def _flat(record: Any) -> list[tuple[str, Tensor]]:
    """Names and tensors of all measurements, nested records flattened."""
    found: list[tuple[str, Tensor]] = []
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in {"states", "kept", "steps", "time"}:
            continue
        if isinstance(value, Tensor):
            found.append((f"norm_{field.name}" if isinstance(record, Norms) else field.name, value))
        else:
            prefix = "cluster_" if isinstance(value, Clusters) else ""
            found += [(prefix + name, x) for name, x in _flat(value)]
    return found


def kept_steps(keep: Literal["all", "last"] | int, steps: int) -> set[int]:
    """The steps, from 0 to `steps`, whose states are kept."""
    if keep == "all" or keep == "last":
        return set(range(steps + 1)) if keep == "all" else {steps}
    every = whole("Flow", "keep", keep, otherwise=' for every k-th state, or "all" or "last"')
    return {*range(0, steps + 1, every), steps}


class Recorder:
    """Collects the states at the steps `kept`, and measurements at the steps `measured`, of a flow."""

    def __init__(self, tolerance: float, kept: set[int], measured: set[int]) -> None:
        self._tolerance, self._kept, self._measured = tolerance, kept, measured
        self._states: list[tuple[int, Tensor]] = []
        self._rows: list[tuple[int, float, dict[str, Any]]] = []

    def add(self, count: int, time: float, points: Tensor, G: Tensor, grew: Growth | None) -> None:
        """Keep and measure the state ``(..., N, D)`` after `count` steps, if asked for."""
        if count in self._kept:
            self._states.append((count, points))
        if count in self._measured:
            self._rows.append((count, time, measure(points, G, grew, tolerance=self._tolerance)))

    def trajectory(self) -> Trajectory:
        """The `Trajectory` of all states and measurements added."""
        rows = [row for _, _, row in self._rows]
        return Trajectory(
            torch.stack([state for _, state in self._states]),
            torch.tensor([count for count, _ in self._states]),
            torch.tensor([count for count, _, _ in self._rows]),
            torch.tensor([time for _, time, _ in self._rows], dtype=torch.float64),
            **{name: stacked([row[name] for row in rows]) for name in rows[0]},
        )


def _draw(axes: Any, time: Tensor, lines: dict[str, Tensor], words: str) -> None:
    """Plot each ``(T, ...)`` against time, a line for each batch item; words if there is no number at all."""
    every = torch.cat([value.flatten().cpu().double() for value in lines.values()])
    every = every[every.isfinite()]
    if not len(every):
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_yticks([])
        return
    for colour, (name, values) in enumerate(lines.items()):
        columns = values.reshape(len(time), -1).cpu().unbind(-1)
        for place, column in enumerate(columns):
            label, alpha = name if place == 0 else None, 1.0 if len(columns) == 1 else 0.6
            axes.plot(time, column, color=COLOURS[colour], alpha=alpha, label=label or None)
    low, high = float(every.min()), float(every.max())
    if 0 < 1e3 * low < high or "" in lines:  # three decades; the spectrum always
        axes.set_yscale("log")
    elif 0 < low > 0.98 * high:  # constant but for rounding
        axes.set_ylim(0, 1.5 * high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
