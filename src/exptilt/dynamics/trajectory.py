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
        with new_figure(10.5, 5.6) as figure:
            panels: Any = figure.subplots(2, 3, sharex=True)
            draw = (_lengths, _spectrum, _gaussianity, _clusters, _growth)
            _lines(panels.flat[0], self, self.log_normalizer, 0, "mean G")
            _logarithmic(panels.flat[0], self.log_normalizer)
            caption(panels.flat[0], "Log-normalizer, mean over points", "")
            for axes, panel in zip(panels.flat[1:], draw, strict=True):
                panel(axes, self)
                if panel is not _spectrum and axes.get_legend_handles_labels()[0]:
                    axes.legend()
            for axes in panels[1]:
                axes.set_xlabel("time")
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


def _lines(axes: Any, path: Trajectory, values: Tensor, colour: int, label: str | None) -> None:
    """Plot ``values (T, ...)`` against time, one line for each batch item; the first carries the label."""
    columns = values.reshape(len(path.time), -1).cpu().unbind(-1)
    for place, column in enumerate(columns):
        alpha, name = 1.0 if len(columns) == 1 else 0.6, label if place == 0 else None
        axes.plot(path.time, column, color=COLOURS[colour], alpha=alpha, label=name)


def _logarithmic(axes: Any, *values: Tensor) -> None:
    """Make the y axis logarithmic if values are positive and span more than three decades."""
    every = torch.cat([value.flatten() for value in values])
    every = every[every.isfinite()]
    if len(every) and 0 < 1e3 * float(every.min()) < float(every.max()):
        axes.set_yscale("log")


def _say(axes: Any, words: str) -> None:
    """Write words in the middle of empty axes."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="0.4")
    axes.set_yticks([])


def _lengths(axes: Any, path: Trajectory) -> None:
    for name, colour in (("largest", 1), ("mean", 0), ("smallest", 2)):
        _lines(axes, path, getattr(path.norms, name), colour, name)
    axes.ticklabel_format(useOffset=False)
    low, high = axes.get_ylim()
    if high - low < 0.02 * high:  # constant but for rounding
        axes.set_ylim(0, 1.5 * high)
    _logarithmic(axes, path.norms.smallest, path.norms.largest)
    caption(axes, "Lengths of the points", "")


def _spectrum(axes: Any, path: Trajectory) -> None:
    """Plot the eigenvalues of the dimensions that the cloud fills; the others are rounding."""
    values = path.spectrum[..., :8].cpu()
    filled = torch.arange(values.shape[-1]) < path.gaussianity.rank.unsqueeze(-1)
    values = torch.where(filled & values.isfinite(), values, torch.nan)
    if bool(values.isnan().all()):
        _say(axes, "one point: no spread")
    else:
        for column in values.unbind(-1):
            _lines(axes, path, column, 0, None)
        top, least = float(values.nan_to_num(0.0).max()), float(values.nan_to_num(torch.inf).min())
        axes.set_yscale("log")
        axes.set_ylim(min(least / 2, top / 20), 2 * top)
    caption(axes, "Spectrum of the covariance", "")


def _gaussianity(axes: Any, path: Trajectory) -> None:
    g = path.gaussianity
    if bool(g.kurtosis.isnan().all()):
        _say(axes, "nothing to test: one point, or too few")
    else:
        _lines(axes, path, g.kurtosis, 0, "kurtosis over Gaussian − 1")
        _lines(axes, path, g.sliced / 0.385 - 1, 1, "sliced A² over Gaussian − 1")
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=1)
    caption(axes, "Gaussianity: 0 is Gaussian", "")


def _clusters(axes: Any, path: Trajectory) -> None:
    _lines(axes, path, path.clusters.count.double(), 0, "count")
    _lines(axes, path, path.clusters.effective, 1, "effective")
    whole_log(axes)
    axes.set_ylim(0.8, max(2.5, 1.3 * float(path.clusters.count.max())))
    caption(axes, "Clusters", "")


def _growth(axes: Any, path: Trajectory) -> None:
    if bool(path.growth.expansion.isnan().all()):
        _say(axes, "continuous: no steps" if path.continuous else "no steps")
    else:
        _lines(axes, path, path.growth.expansion, 1, "ascent")
        _lines(axes, path, path.growth.contraction, 0, "renormaliser")
        axes.axhline(1, color="0.4", linewidth=0.8)
    caption(axes, "Growth of lengths in a step", "")
