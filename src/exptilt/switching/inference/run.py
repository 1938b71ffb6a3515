"""Running the kernels: which build, on how many threads, and as a differentiable operation.

Series are independent, so the threads of ``_support/kernels.py`` take them in turn. How many there are is
torch's to say (``torch.set_num_threads``). Long runs of small models filter with a build for their exact
sizes (see `kalman.count`); all else uses one build for all sizes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..._support.kernels import run_chunks
from ..checks import plain
from ..kernels.adjoint import Bars, filter_adjoint
from ..kernels.buffers import Parameters, Run, Sizes, Stored
from ..kernels.filters import GPB1, GPB2, IMM, VITERBI, forward
from ..kernels.particles import Cloud, swarm
from ..kernels.smoother import Smoothing, smooth_back
from .diffuse import Step, first_steps, smooth_first
from .problem import Matrices, Problem, as_arrays, stopped

METHODS = {"imm": IMM, "gpb1": GPB1, "gpb2": GPB2}
RECURSIONS = METHODS | {"viterbi": VITERBI}  # the last leaves a path, not a law
LONG = 5000  # rows from which a build for exact sizes is worth its compilation, once per machine
SMALL = (16, 8, 4)  # largest M, n, m of such a build; beyond, unrolled code grows too large


def over_series(starts: np.ndarray, work: Callable[[int, int], None], least: int = 500) -> None:
    """Do ``work(begin, end)`` over all series, on torch's number of threads with `least` rows for each."""
    series, rows = len(starts) - 1, int(starts[-1])
    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, series, threads=min(series, torch.get_num_threads(), max(1, rows // least)))


def sizes_of(p: Parameters) -> Sizes:
    """M, n and m."""
    M = p.initial_log_probability.shape[-1]
    return M, p.initial_mean.shape[-1] // M, p.observation_offset.shape[-1] // M


def build_sizes(p: Parameters, rows: int) -> Any:
    """n and m in the form that picks the build: tuples for a build of exactly these sizes."""
    sizes = sizes_of(p)
    if rows >= LONG and all(size <= most for size, most in zip(sizes, SMALL, strict=True)):
        return tuple((0,) * size for size in sizes[1:])
    return sizes[1:]


def new_run(p: Parameters, y: np.ndarray, starts: np.ndarray, everything: bool = True) -> Run:
    """A run with room for each step, or for the last of each series."""
    (M, n, _), series = sizes_of(p), len(starts) - 1
    kept = len(y) if everything else series
    columns = [np.empty((kept, size)) for size in (M, M * n, M * n * n, M * M)]
    out = Stored._make([np.empty(series), np.empty(kept), *columns, np.full((series, 2), -1)])
    return Run(p, np.ascontiguousarray(y), starts, out, np.zeros(series, np.int64))


Lead = list[list[Step]]


def lead_in(problem: Problem, method: str) -> Lead:
    """The steps of each series in which something is diffuse."""
    if not problem.diffuse.any():
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
) -> Run:
    """Filter all series by one of `RECURSIONS`; keep each step, or only the last of each series.

    With steps done before (`lead`) all steps are kept.
    """
    lead, everything = lead or [], everything or bool(lead)
    run, sizes = new_run(p, y, starts, everything), build_sizes(p, len(y))
    for series, steps in enumerate(lead):
        run.lead[series] = len(steps)
        for t, step in enumerate(steps):
            for table, value in zip(run.out[1:6], step.row, strict=True):
                table[starts[series] + t] = plain(value)

    def work(begin: int, end: int) -> None:
        forward(run, begin, end, RECURSIONS[method], everything, sizes)

    over_series(starts, work)
    check_failures(run.out.failure, method, sizes_of(p)[0])
    for series, steps in enumerate(lead):
        run.out.log_likelihood[series] += sum(float(step.term) for step in steps)
    return run


def check_failures(failure: np.ndarray, what: str, modes: int) -> None:
    """Turn a kernel's note of where it stopped into an error."""
    for series in np.flatnonzero(failure[:, 0] >= 0)[:1]:
        t, mode = failure[series].tolist()
        raise stopped(f"{what}: at step {t} of series {series}", mode, modes)


class FilterTerms(torch.autograd.Function):
    """What a filter gives, differentiable in data and parameters, but for the mixing probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        method: str,
        starts: np.ndarray,
        first: int,
        lead: Lead,
        y: torch.Tensor,
        _: torch.Tensor,
        *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The fields of `Stored` from `terms` to `mixing`."""
        run = run_filter(as_arrays(flat, first), y.detach().numpy(), starts, method, lead=lead)
        ctx.run, ctx.method = run, method
        results = tuple(torch.from_numpy(value) for value in run.out[1:6])
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One pass backwards; see `adjoint`."""
        some = any(bar is not None for bar in given[1:4])
        shapes = [value.shape if some or k == 0 else (0, 0) for k, value in enumerate(ctx.run.out[1:5])]
        bars = [
            np.zeros(shape) if bar is None else np.ascontiguousarray(bar.numpy())
            for bar, shape in zip(given[:4], shapes, strict=True)
        ]
        g, y_bar, lead_bar = run_adjoint(ctx.run, ctx.method, Bars._make(bars))
        return (None,) * 4 + tuple(torch.from_numpy(value) for value in (y_bar, lead_bar, *g[:-1]))


def filter_terms(problem: Problem, method: str) -> tuple[torch.Tensor, ...]:
    """`FilterTerms` of a problem."""
    data, lead = problem.data, lead_in(problem, method)
    apply: Any = FilterTerms.apply
    left = torch.zeros(data.series, 0, dtype=torch.float64)
    if lead:  # what the first steps leave, as the adjoint writes its derivative
        ends = [steps[-1] for steps in lead]
        laws = [[torch.cat([law.mean, law.P.reshape(-1)]) for law in end.laws] for end in ends]
        left = torch.stack([torch.cat([*row, end.log_mode]) for row, end in zip(laws, ends, strict=True)])
    results = list(apply(method, data.starts, problem.first, lead, data.tensor, left, *problem.flat))
    if lead:
        pieces = zip(data.starts, lead, strict=False)
        rows = torch.from_numpy(np.concatenate([start + np.arange(len(steps)) for start, steps in pieces]))
        done = zip(*(step.row for steps in lead for step in steps), strict=True)
        for k, values in enumerate(list(done)[:4]):
            results[k] = results[k].index_put((rows,), torch.stack(values))
    return tuple(results)


def run_adjoint(run: Run, method: str, bars: Bars) -> tuple[Parameters, np.ndarray, np.ndarray]:
    """Derivatives of ``bars · results`` in the parameters, in the same shapes, in the data, and in what
    steps done before left, ``(series, M (n + n²) + M)``.
    """
    p, y_bar, parts = run.p, np.zeros(run.y.shape), []
    M, n, _ = sizes_of(p)
    lead_bar = np.zeros((len(run.lead), M * (n + n * n) + M if run.lead.any() else 0))

    def work(begin: int, end: int) -> None:
        mine = Parameters._make([*map(np.zeros_like, p[:-1]), p.first])
        parts.append(mine)  # each thread adds into arrays of its own
        filter_adjoint(run, begin, end, METHODS[method], bars, mine, y_bar, lead_bar, sizes_of(p))

    over_series(run.starts, work)
    sums = [np.sum(values, axis=0) for values in list(zip(*parts, strict=True))[:-1]]
    return Parameters._make([*sums, p.first]), y_bar, lead_bar


def run_smoother(run: Run, problem: Problem, lead: Lead, regressors: np.ndarray | None = None) -> Smoothing:
    """The backward pass over all series of a filter's run; with `regressors` (rows, q), EM's sums too.

    `lead` holds the steps of the run that are not the kernel's.
    """
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
    s = Smoothing._make([*shared, *(np.sum(values, axis=0) for values in zip(*parts, strict=True))])
    for series, steps in enumerate(lead):
        smooth_first(run, problem, series, steps, s, known)
    return s


def run_particles(
    p: Parameters,
    y: np.ndarray,
    starts: np.ndarray,
    particles: int,
    generator: torch.Generator | None,
    keep: bool = False,
) -> tuple[Run, np.ndarray, Cloud]:
    """Filter with `particles` particles: what other filters return, effective sample sizes, the particles.

    The last have rows only if they are to be kept.
    """
    kept, n = len(y) if keep else 0, sizes_of(p)[1]
    cloud = Cloud(
        np.empty((kept, particles), np.int64), *(np.empty((kept, particles * k)) for k in (1, n, n * n))
    )
    run, ess, series = new_run(p, y, starts), np.empty(len(y)), len(starts) - 1
    uniform = torch.rand(len(y), particles + 1, dtype=torch.float64, generator=generator).numpy()
    probability = torch.from_numpy(np.exp(p.initial_log_probability))
    rows = probability.expand(series, -1)
    chosen = torch.multinomial(rows, particles, replacement=True, generator=generator)
    swarm(run, uniform, chosen.numpy(), ess, cloud, sizes_of(p))
    check_failures(run.out.failure, "rbpf", sizes_of(p)[0])
    return run, ess, cloud
