"""What a flow went through: the states that were kept, and by step the numbers that were measured."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.dynamics.observe.clusters import Clusters
from exptilt.dynamics.observe.gaussianity import Gaussianity
from exptilt.dynamics.observe.snapshot import Growth, Norms, Snapshot, measure, stacked

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Trajectory:
    """States and measurements of a flow. T rows were measured, K states kept; ``...`` are the batch axes of the points.

    Attributes:
        states: ``(K, ..., N, D)``.
        kept: ``(K,)``, the step of each kept state.
        steps: ``(T,)``, the step of each row.
        time: ``(T,)``, step count times step size, or the time of the continuous flow.
        log_normalizer: ``(T, ...)``, mean of G over the points.
        norms: lengths of the points, each ``(T, ...)``.
        covariance_trace: ``(T, ...)``.
        spectrum: ``(T, ..., D)``, eigenvalues of the covariance, falling.
        mean_cosine: ``(T, ...)``, over pairs of points.
        gaussianity: Mardia's and the sliced tests, each ``(T, ...)``.
        clusters: count and sizes, each ``(T, ...)``.
        growth: expansion by the ascent and contraction by the renormaliser in the step that led to the row, each ``(T, ...)``; NaN
            where no step did: in row 0, and in every row of `Flow.ode`.
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
        """Whether it is of `Flow.ode`, which has no steps."""
        return len(self.steps) > 1 and bool(self.growth.expansion.isnan().all())

    def to_frame(self) -> "DataFrame":
        """A pandas table with one row for each measured step and batch item; spectra and sizes become numbered columns."""
        try:
            import pandas
        except ImportError as problem:
            raise MissingExtraError("pandas", "report") from problem
        batch = self.log_normalizer.shape[1:]
        rows, items = len(self.steps), batch.numel()
        columns: dict[str, Any] = {
            "step": self.steps.repeat_interleave(items).numpy(),
            "time": self.time.repeat_interleave(items).numpy(),
        }
        for axis, places in enumerate(zip(*itertools.product(*map(range, batch)), strict=True)):
            columns[f"batch_{axis}"] = list(places) * rows
        for name, value in _flat(self):
            flat = value.reshape(rows * items, -1).cpu()
            for number, column in enumerate(flat.unbind(-1)):
                columns[name if value.ndim == self.log_normalizer.ndim else f"{name}_{number}"] = (
                    column.numpy()
                )
        return pandas.DataFrame(columns)

    def plot(self) -> "Figure":
        """Six panels against time: G, lengths, spectrum, Gaussianity, clusters, expansion. Batch items are drawn one over the other."""
        from exptilt.dynamics import pictures

        return pictures.trajectory(self)

    def animate(self, *, item: tuple[int, ...] = (), interval: int = 80) -> "FuncAnimation":
        """A film of the kept states in two or three dimensions.

        ``.save("flow.gif", writer="pillow")`` writes it, ``.to_jshtml()`` puts it into a notebook.

        Args:
            item: which item of the batch, one index for each batch axis.
            interval: milliseconds between frames.
        """
        from exptilt.dynamics import pictures

        shape = self.states.shape
        if shape[-1] not in (2, 3):
            raise ArgumentError(
                f"animate: points have {shape[-1]} dimensions. Only 2 or 3 can be drawn; project the states first."
            )
        batch = shape[1:-2]
        good = isinstance(item, tuple) and len(item) == len(batch) and all(isinstance(i, int) for i in item)
        if not good or not all(-size <= i < size for i, size in zip(item, batch, strict=True)):
            raise ArgumentError(
                f"animate: states are {tuple(shape)}, with {len(batch)} batch axes; item is {item!r}. Pass a tuple of one index each."
            )
        times = dict(zip(self.steps.tolist(), self.time.tolist(), strict=True)) if self.continuous else {}
        titles = [
            f"time {times[step]:.3g}" if self.continuous else f"step {step}" for step in self.kept.tolist()
        ]
        return pictures.film(self.states.movedim(0, -3)[item], titles, interval=interval)


def _flat(record: Any) -> list[tuple[str, Tensor]]:
    """Measured tensors by name, nested records opened."""
    found: list[tuple[str, Tensor]] = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in {"states", "kept", "steps", "time"}:
            continue
        if isinstance(value, Tensor):
            found.append((f"norm_{field.name}" if isinstance(record, Norms) else field.name, value))
        else:
            found += [
                (f"cluster_{name}" if isinstance(value, Clusters) else name, x) for name, x in _flat(value)
            ]
    return found


def kept_steps(keep: Literal["all", "last"] | int, steps: int) -> set[int]:
    """Which of the states 0..steps are kept."""
    if keep == "all":
        return set(range(steps + 1))
    if keep == "last":
        return {steps}
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ArgumentError(
            f'Flow: keep is {keep!r}. Pass "all", "last", or an integer k ≥ 1 for every k-th state.'
        )
    return {*range(0, steps + 1, keep), steps}


class Recorder:
    """Collects states and measurements while a flow runs."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._states: list[tuple[int, Tensor]] = []
        self._rows: list[tuple[int, float, Snapshot]] = []

    def add(
        self,
        count: int,
        time: float,
        points: Tensor,
        log_normalizer: Tensor,
        grew: Growth | None,
        keep: bool,
        measured: bool,
    ) -> None:
        """Take note of the state ``(..., N, D)`` after `count` steps."""
        if keep:
            self._states.append((count, points))
        if measured:
            self._rows.append((count, time, measure(points, log_normalizer, grew, tolerance=self._tolerance)))

    def trajectory(self) -> Trajectory:
        """All that was noted."""
        snapshot = stacked([row for _, _, row in self._rows])
        return Trajectory(
            torch.stack([state for _, state in self._states]),
            torch.tensor([count for count, _ in self._states]),
            torch.tensor([count for count, _, _ in self._rows]),
            torch.tensor([time for _, time, _ in self._rows], dtype=torch.float64),
            **{field.name: getattr(snapshot, field.name) for field in dataclasses.fields(snapshot)},
        )
