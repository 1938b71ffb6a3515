"""Passes over series beyond the filter: its derivatives, smoothing, particles (csrc/switching/passes.cpp).

Series are independent, and torch's threads take them in turn. Sums over series (derivatives in shared
parameters, sums for EM) are first made for chunks of series. The number of chunks depends on the sizes of the
problem alone, so results do not depend on the number of threads.
"""

import ctypes
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..arrays import Bars, Cloud, Parameters, Run, Smoothing, address, described, filled, new_run, sizes_of
from .plain.diffuse import as_row, smooth_first
from .problem import Problem, as_arrays
from .run import Lead, check_failures, lead_in, over_series, run_filter

CHUNKS = 64  # largest number of chunks, and so of threads
ROOM = 2**22  # largest number of floats in the sums of all chunks, unless there are eight chunks or fewer


class FilterTerms(torch.autograd.Function):
    """Results of a filter, differentiable in data and parameters, except the mixing probabilities."""

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
        results = tuple(torch.from_numpy(value) for value in run.out.steps)
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """One pass backwards; see csrc/switching/adjoint.hpp."""
        some = any(bar is not None for bar in given[1:4])
        shapes = [value.shape if some or k == 0 else (0, 0) for k, value in enumerate(ctx.run.out.steps[:4])]
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
    if lead:  # the law after the first steps, in the layout of its derivative
        ends = [steps[-1] for steps in lead]
        laws = [[torch.cat([law.mean, law.P.reshape(-1)]) for law in end.laws] for end in ends]
        left = torch.stack([torch.cat([*row, end.log_mode]) for row, end in zip(laws, ends, strict=True)])
    results = list(apply(method, data.starts, problem.first, lead, data.tensor, left, *problem.flat))
    if lead:
        pieces = zip(data.starts, lead, strict=False)
        rows = torch.from_numpy(np.concatenate([start + np.arange(len(steps)) for start, steps in pieces]))
        done = zip(*(as_row(step) for steps in lead for step in steps), strict=True)
        for k, values in enumerate(list(done)[:4]):
            results[k] = results[k].index_put((rows,), torch.stack(values))
    return tuple(results)


def run_adjoint(run: Run, method: str, bars: Bars) -> tuple[Parameters, np.ndarray, np.ndarray]:
    """Derivatives of ``bars · results`` in the parameters, in the data, and in the law after the first steps.

    The first two have the shapes of parameters and data, the last is ``(series, M (n + n²) + M)``.
    """
    p, y_bar, series = run.p, np.zeros(run.y.shape), len(run.starts) - 1
    M, n, _ = sizes_of(p)
    left = np.zeros((series, M * (n + n * n) + M if run.lead is not None else 0))
    values = dict(zip(Parameters._fields, p[:-1], strict=False))
    shared = [name for name, value in values.items() if value.ndim == 1 or len(value) == 1]  # maps always are
    cuts = [0, *accumulate(values[name].size for name in shared)]
    chunks = min(series, CHUNKS, max(8, ROOM // max(cuts[-1], 1)))
    sums = np.zeros((chunks, cuts[-1]))
    first = address(sums)
    bar = {name: np.zeros_like(value) for name, value in values.items() if name not in shared}
    frame = described(run, method)
    fields: dict[str, Any] = {"run": ctypes.addressof(frame), "chunks": chunks, "apart": cuts[-1]}
    fields |= {name: first + 8 * cut for name, cut in zip(shared, cuts, strict=False)}
    fields |= {f"{name}_bar": value for name, value in bars._asdict().items() if len(value)}
    over_series("filter_adjoint", filled("Adjoint", **fields, **bar, y=y_bar, left=left), run.starts)
    whole = sums.sum(0)
    bar |= {name: whole[a:b] for name, a, b in zip(shared, cuts, cuts[1:], strict=False)}
    found = [bar[name].reshape(value.shape) for name, value in values.items()]
    return Parameters._make([*found, p.first]), y_bar, left


def run_smoother(
    run: Run, problem: Problem, lead: Lead, regressors: np.ndarray | None = None, over: bool = False
) -> Smoothing:
    """The backward pass over all series of a filter's run; with `regressors` (rows, q), EM's sums too.

    `lead` holds the first steps, which are not the kernel's. With `over` the smoother overwrites the filter's
    rows in place; pairs then have columns only if the filter kept mixing probabilities.
    """
    (M, n, _), rows, series = sizes_of(run.p), len(run.y), len(run.starts) - 1
    known = np.empty((rows, 0)) if regressors is None else np.ascontiguousarray(regressors)
    z, sizes = n + known.shape[1], (M, M * n, M * n * n)
    laws = list(run.out.steps[1:]) if over else [np.empty((rows, k)) for k in (*sizes, M * M)]
    laws += [np.empty((series, k)) for k in sizes]
    chunks = min(series, CHUNKS) if regressors is not None else series
    sums = np.zeros((chunks if regressors is not None else 0, M, 1 + z * z + n * z + n * n))
    frame = described(run, "gpb2")  # the pass back is the same for every filter
    fields = dict(zip(Smoothing._fields, laws, strict=False)) | {"regressors": known, "known": known.shape[1]}
    fields |= {"run": ctypes.addressof(frame), "chunks": chunks, "sums": sums}
    over_series("smooth_back", filled("Smoothing", **fields), run.starts)
    total, zz, rz, rr = np.split(sums.sum(0), np.cumsum([1, z * z, n * z]), 1)
    tables = total[:, 0], zz.reshape(M, z, z), rz.reshape(M, n, z), rr.reshape(M, n, n)
    s = Smoothing._make([*laws, *tables])
    for k, steps in enumerate(lead):
        smooth_first(run, problem, k, steps, s, known)
    return s


def run_particles(
    p: Parameters,
    y: np.ndarray,
    starts: np.ndarray,
    particles: int,
    generator: torch.Generator | None,
    keep: bool = False,
) -> tuple[Run, np.ndarray, Cloud]:
    """Filter with particles; returns the run, effective sample sizes, and the particles.

    The particles have rows only with `keep`.
    """
    kept, n = len(y) if keep else 0, sizes_of(p)[1]
    cloud = Cloud(
        np.empty((kept, particles), np.int64), *(np.empty((kept, particles * k)) for k in (1, n, n * n))
    )
    run, ess, series = new_run(p, y, starts), np.empty(len(y)), len(starts) - 1
    uniform = torch.rand(len(y), particles + 1, dtype=torch.float64, generator=generator).numpy()
    probability = torch.from_numpy(np.exp(p.initial_log_probability))
    rows = probability.expand(series, -1)
    chosen = torch.multinomial(rows, particles, replacement=True, generator=generator).numpy()
    frame, kept_cloud = described(run, "imm"), cloud._asdict() if keep else {}
    numbers = {"run": ctypes.addressof(frame), "particles": particles, "effective_size": ess}
    swarm = filled("Swarm", **numbers, **kept_cloud, uniform=uniform, chosen=chosen)
    over_series("swarm", swarm, starts, 500 // particles + 1)
    check_failures(run.out.failure, "rbpf", sizes_of(p)[0])
    return run, ess, cloud
