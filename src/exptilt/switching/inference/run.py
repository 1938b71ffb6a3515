"""Running the compiled filters over series, on torch's number of threads (``torch.set_num_threads``)."""

from typing import Any

import numpy as np
import torch

from ..._support.threads import run_kernel
from ..arrays import METHODS, RECURSIONS, Parameters, Run, described, new_run, sizes_of
from ..checks import plain
from .plain.diffuse import as_row, first_steps
from .plain.step import Stepped
from .problem import Matrices, Problem, stopped

__all__ = ["METHODS", "RECURSIONS", "Lead", "check_failures", "lead_in", "over_series", "run_filter"]
Lead = list[list[Stepped]]


def over_series(kernel: str, frame: Any, starts: np.ndarray, least: int = 500) -> int:
    """Run a kernel over all series on at most torch's number of threads, with `least` rows or more for each.

    Returns the sum of the kernel's return values; for a filter, the number of series that failed.
    """
    threads = 1
    if len(starts) > 2:
        threads = min(len(starts) - 1, torch.get_num_threads(), max(1, int(starts[-1]) // least))
    return run_kernel(kernel, frame, threads)


def lead_in(problem: Problem, method: str) -> Lead:
    """The first steps of each series, as long as something is diffuse."""
    if not problem.begins_diffuse:
        return []
    each = enumerate(problem.data.cuts)
    return [first_steps(Matrices(problem, k), problem.data.tensor[cut], problem, method) for k, cut in each]


def run_filter(
    p: Parameters,
    y: np.ndarray,
    starts: np.ndarray,
    method: str,
    everything: bool = True,
    lead: Lead | None = None,
    window: tuple[str, int] | None = None,
    recurrence: np.ndarray | None = None,
) -> Run:
    """Filter all series by one of `RECURSIONS`; keep each step, or only the last of each series.

    With steps done before (`lead`) all steps are kept. Mixing probabilities are
    not kept where modes are windows; then `window` is the method's name and the number of true modes.
    """
    lead, everything = lead or [], everything or bool(lead)
    run = new_run(p, y, starts, everything, not window)._replace(recurrence=recurrence)
    if lead:
        run = run._replace(lead=np.array([len(steps) for steps in lead], np.int64))
    for series, steps in enumerate(lead):
        for t, step in enumerate(steps):
            for table, value in zip(run.out.steps[: 4 if window else 5], as_row(step), strict=False):
                table[starts[series] + t] = plain(value)
    if over_series("filter_series", described(run, method, everything), starts):
        name, modes = window or (method, sizes_of(p)[0])
        check_failures(run.out.failure, name, sizes_of(p)[0], modes)
    for series, steps in enumerate(lead):
        run.out.log_likelihood[series] += sum(float(step.term) for step in steps)
    return run


def check_failures(failure: np.ndarray, what: str, count: int, modes: int | None = None) -> None:
    """Raise the error for a failed series; the kernel has `count` modes, or windows of `modes` modes."""
    modes = modes or count
    for series in np.flatnonzero(failure[:, 0] >= 0)[:1]:
        t, mode = failure[series].tolist()
        mode = mode % modes if mode < count else modes
        raise stopped(f"{what}: at step {t} of series {series}", mode, modes)
