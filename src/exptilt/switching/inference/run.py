"""Running the kernels: which build, on how many threads, and as a differentiable operation.

Series are independent, so the threads of ``_support/kernels.py`` take them in turn. How many there are is
torch's to say (``torch.set_num_threads``). Long runs of small models filter with a build for their exact
sizes (see `kalman.count`); all else uses one build for all sizes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.kernels import run_chunks
from ..kernels.adjoint import filter_adjoint
from ..kernels.buffers import Parameters, Run, Sizes, Stored
from ..kernels.filters import GPB1, GPB2, IMM, forward
from ..kernels.particles import swarm
from ..kernels.smoother import Smoothing, smooth_back
from .problem import Problem, as_arrays

METHODS = {"imm": IMM, "gpb1": GPB1, "gpb2": GPB2}
LONG = 5000  # rows from which a build for exact sizes is worth its compilation, once per machine
SMALL = (16, 16, 8)  # largest M, n, m of such a build; beyond, unrolled code grows too large


def over_series(starts: np.ndarray, work: Callable[[int, int], None]) -> None:
    """Do ``work(begin, end)`` over all series, in as many threads as torch would use, if there is work."""
    series, rows = len(starts) - 1, int(starts[-1])
    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, series, threads=min(series, torch.get_num_threads(), max(1, rows // 500)))


def sizes_of(p: Parameters) -> Sizes:
    """M, n and m."""
    M = len(p.initial_log_probability)
    return M, len(p.initial_mean) // M, p.observation_offset.shape[-1] // M


def build_sizes(p: Parameters, rows: int) -> Any:
    """M, n and m in the form that picks the build: tuples for a build of exactly these sizes."""
    sizes = sizes_of(p)
    if rows >= LONG and all(size <= most for size, most in zip(sizes, SMALL, strict=True)):
        return tuple((0,) * size for size in sizes)
    return sizes


def new_run(p: Parameters, y: np.ndarray, starts: np.ndarray, everything: bool = True) -> Run:
    """A run with room for each step, or for the last of each series."""
    (M, n, _), series = sizes_of(p), len(starts) - 1
    kept = len(y) if everything else series
    columns = [np.empty((kept, size)) for size in (M, M * n, M * n * n, M * M)]
    out = Stored._make([np.empty(series), np.empty(kept), *columns, np.full((series, 2), -1)])
    return Run(p, np.ascontiguousarray(y), starts, out)


def run_filter(p: Parameters, y: np.ndarray, starts: np.ndarray, method: str, everything: bool = True) -> Run:
    """Filter all series by one of `METHODS`; keep each step, or only the last of each series."""
    run, sizes = new_run(p, y, starts, everything), build_sizes(p, len(y))

    def work(begin: int, end: int) -> None:
        forward(run, begin, end, METHODS[method], everything, sizes)

    over_series(starts, work)
    check_failures(run, method)
    return run


def check_failures(run: Run, what: str) -> None:
    """Turn a kernel's note of where it stopped into an error."""
    failure = run.out.failure
    for series in np.flatnonzero(failure[:, 0] >= 0)[:1]:
        t, mode = failure[series].tolist()
        where = f"{what}: at step {t} of series {series}"
        if mode == len(run.p.initial_log_probability):
            raise ArgumentError(
                f"{where} the observation has zero density in every mode that can be reached. "
                "Scale the data, or widen observation_noise."
            )
        raise ArgumentError(
            f"{where} the innovation covariance H P H' + R of mode {mode} is not positive definite. Some "
            "combination of the observed components has no variance at all: give observation_noise "
            "(or process_noise) a positive one."
        )


class FilterTerms(torch.autograd.Function):
    """Log-likelihood terms of a filter, differentiable in data and parameters; other outputs are not."""

    @staticmethod
    def forward(
        ctx: Any, method: str, starts: np.ndarray, first: int, y: torch.Tensor, *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The fields of `Stored` from `terms` to `mixing`."""
        run = run_filter(as_arrays(flat, first), y.detach().numpy(), starts, method)
        ctx.run, ctx.method = run, method
        results = tuple(torch.from_numpy(value) for value in run.out[1:6])
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, terms_bar: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """One pass backwards; see `adjoint`."""
        g, y_bar = run_adjoint(ctx.run, ctx.method, np.ascontiguousarray(terms_bar.numpy()))
        return (None, None, None, *(torch.from_numpy(value) for value in (y_bar, *g[:-1])))


def filter_terms(problem: Problem, method: str) -> tuple[torch.Tensor, ...]:
    """`FilterTerms` of a problem."""
    data = problem.data
    apply: Any = FilterTerms.apply
    return tuple(apply(method, data.starts, problem.first, data.tensor, *problem.flat))


def run_adjoint(run: Run, method: str, terms_bar: np.ndarray) -> tuple[Parameters, np.ndarray]:
    """Derivatives of ``terms_bar · terms`` in the parameters, in the same shapes, and in the data."""
    p, y_bar, parts = run.p, np.zeros(run.y.shape), []

    def work(begin: int, end: int) -> None:
        mine = Parameters._make([*map(np.zeros_like, p[:-1]), p.first])
        parts.append(mine)  # each thread adds into arrays of its own
        filter_adjoint(run, begin, end, METHODS[method], terms_bar, mine, y_bar, sizes_of(p))

    over_series(run.starts, work)
    sums = [np.sum(values, axis=0) for values in list(zip(*parts, strict=True))[:-1]]
    return Parameters._make([*sums, p.first]), y_bar


def run_smoother(run: Run, regressors: np.ndarray | None = None) -> Smoothing:
    """The backward pass over all series of a filter's run; with `regressors` (rows, q), EM's sums too."""
    (M, n, _), rows, series = sizes_of(run.p), len(run.y), len(run.starts) - 1
    known = np.empty((rows, 0)) if regressors is None else regressors
    q, wanted = n + known.shape[1], regressors is not None
    sizes = [(rows, k) for k in (M, M * n, M * n * n, M * M)] + [(series, k) for k in (M, M * n, M * n * n)]
    shared, parts = [np.empty(size) for size in sizes], []
    build = build_sizes(run.p, rows)

    def work(begin: int, end: int) -> None:
        sums = [np.zeros(size) for size in ((M,), (M, q, q), (M, n, q), (M, n, n))]
        parts.append(sums)  # each thread adds into arrays of its own
        smooth_back(run, begin, end, Smoothing._make([*shared, *sums]), known, wanted, build)

    over_series(run.starts, work)
    return Smoothing._make([*shared, *(np.sum(values, axis=0) for values in zip(*parts, strict=True))])


def run_particles(
    p: Parameters, y: np.ndarray, starts: np.ndarray, particles: int, generator: torch.Generator | None
) -> tuple[Run, np.ndarray]:
    """Filter with `particles` particles; returns what other filters do, and effective sample sizes."""
    run, ess, series = new_run(p, y, starts), np.empty(len(y)), len(starts) - 1
    uniform = torch.rand(len(y), particles + 1, dtype=torch.float64, generator=generator).numpy()
    probability = torch.from_numpy(np.exp(p.initial_log_probability))
    chosen = torch.multinomial(probability, series * particles, replacement=True, generator=generator)
    swarm(run, uniform, chosen.reshape(series, particles).numpy(), ess, sizes_of(p))
    check_failures(run, "rbpf")
    return run, ess
