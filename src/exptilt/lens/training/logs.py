"""Where readings go: a CSV file, or a function of the user's, called with the step and the readings."""

import csv
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.files import write_text
from exptilt.lens.training.readings import HeadReading

Log = Callable[[int, Sequence[HeadReading]], object]

COLUMNS = ("step", "layer", "name", "head", "queries", "score_max", "entropy", "log_normalizer")
CSV_NAME = "attention.csv"


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


def open_log(log: str | Log, folder: str | Path) -> Log:
    """The CSV log in `folder` for "csv"; a function is kept."""
    if log == "csv":
        return CsvLog(folder)
    if callable(log):
        return log
    raise ArgumentError(f"TrainingMonitor: log is {log!r}. Pass 'csv' or a function of (step, readings).")
