"""Where readings go: a CSV file, TensorBoard, Weights & Biases, or a function of the user's.

A log is a callable ``log(step, readings)``. Its files are opened at the first reading, so that building a
monitor touches no disk.
"""

import csv
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from exptilt._support.errors import ArgumentError, BackendError, ExptiltWarning
from exptilt._support.files import write_text
from exptilt.lens.training.readings import HeadReading

Log = Callable[[int, Sequence[HeadReading]], object]

STATISTICS = ("score_max", "entropy", "log_normalizer")
COLUMNS = ("step", "layer", "name", "head", "queries", *STATISTICS)
CSV_NAME = "attention.csv"


def _charts(readings: Sequence[HeadReading]) -> Iterator[tuple[str, float]]:
    """Name and value of each chart; layer and head have two digits, so that names sort as numbers do."""
    for r in readings:
        for statistic in STATISTICS:
            name = f"attention_{statistic}/layer_{r.layer:02d}_head_{r.head:02d}"
            yield name, getattr(r, statistic)


class CsvLog:
    """Log to ``attention.csv``, one line per step, layer and head; the file is closed after every step.

    A run resumed from a checkpoint continues the same file. Lines that an earlier run left for the same or
    later steps, and a line cut short by a crash, are removed with a warning.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / CSV_NAME
        self._ready = False

    def __call__(self, step: int, readings: Sequence[HeadReading]) -> None:
        """Append the readings of one step."""
        if not self._ready:
            self._prepare(step)
            self._ready = True
        text = io.StringIO()
        rows = ([step, *(getattr(r, column) for column in COLUMNS[1:])] for r in readings)
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())

    def _prepare(self, step: int) -> None:
        header = ",".join(COLUMNS) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or self.path.stat().st_size == 0:
            self.path.write_text(header, "utf-8")
            return
        first, *lines = self.path.read_text("utf-8").splitlines(keepends=True)
        if first != header:
            raise ArgumentError(
                f"TrainingMonitor: {self.path} has the columns {first.strip()[:200]!r}, not "
                f"{header.strip()!r}. It is another program's file; pass another folder."
            )
        commas = len(COLUMNS) - 1
        whole = [line for line in lines if line.endswith("\n") and line.count(",") >= commas]
        kept = [line for line in whole if int(line.split(",")[0]) < step]
        if len(kept) < len(lines):
            write_text(self.path, "".join([header, *kept]))
            warnings.warn(
                f"TrainingMonitor: this run begins at step {step}; took {len(lines) - len(kept)} lines of "
                f"that step and later ones, left by an earlier run, out of {self.path}.",
                ExptiltWarning,
                stacklevel=2,
            )


class TensorBoardLog:
    """Log to TensorBoard, one chart per statistic, layer and head.

    A resumed run hides the events that an earlier run left for the same or later steps.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BackendError(
                "TrainingMonitor: log='tensorboard' needs tensorboard. Install it: pip install tensorboard"
            ) from None
        self._make: Any = SummaryWriter
        self._folder, self._writer = str(folder), cast(Any, None)

    def __call__(self, step: int, readings: Sequence[HeadReading]) -> None:
        """Add the readings of one step to the charts."""
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=step)
        for name, value in _charts(readings):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLog:
    """Log the charts of `TensorBoardLog` to the current Weights & Biases run, over ``attention_step``.

    If no run is active, one is started with its files in `folder`. The run is left open.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            import wandb
        except ImportError:
            raise BackendError(
                "TrainingMonitor: log='wandb' needs Weights & Biases. Install it: pip install wandb. Or pass "
                "log='csv'."
            ) from None
        self._wandb: Any = wandb
        self._folder, self._ready = Path(folder), False

    def __call__(self, step: int, readings: Sequence[HeadReading]) -> None:
        """Add the readings of one step to the charts."""
        if not self._ready:
            if self._wandb.run is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._wandb.init(dir=str(self._folder))
            for statistic in STATISTICS:
                self._wandb.define_metric(f"attention_{statistic}/*", step_metric="attention_step")
            self._ready = True
        self._wandb.log({"attention_step": step, **dict(_charts(readings))})


_KINDS: dict[str, Callable[[str | Path], Log]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
}


def open_log(log: str | Log, folder: str | Path) -> Log:
    """The log called "csv", "tensorboard" or "wandb", with its files in `folder`; a function is kept."""
    if isinstance(log, str) and log in _KINDS:
        return _KINDS[log](folder)
    if callable(log):
        return log
    raise ArgumentError(
        f"TrainingMonitor: log is {log!r}. Pass 'csv', 'tensorboard', 'wandb' or a function of (step, "
        "readings)."
    )
