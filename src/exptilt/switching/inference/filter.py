"""`filter_series` brings data and linear models into the kernels' form and runs any of the filters."""

from collections.abc import Sequence

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import METHODS, Stored
from ..checks import plain
from ..parameters import Model, ModelParameters
from ..series import SeriesLike
from .gaussian_laws import Computed, GaussianLaws
from .passes import filter_terms, run_particles
from .plain.exact import filter_exact
from .problem import Problem, as_models, prepare
from .results import Filtered
from .run import lead_in, run_filter
from .window import check_method, merged, over_windows

__all__ = ["Filtered", "filter_problem", "filter_series", "run", "totals"]


def filter_series(
    model: Model | Sequence[Model],
    y: SeriesLike,
    *,
    method: str = "gpb2",
    inputs: SeriesLike | None = None,
    store: str = "all",
    particles: int = 500,
    generator: torch.Generator | None = None,
) -> Filtered[Model]:
    """Filter one series, a batch, or a list of series of different lengths.

    Args:
        model: the model, or a list of models of the same sizes, one for each series.
        y: ``(T, m)``, ``(B, T, m)`` or a list of ``(T, m)``; numpy, torch or pandas. NaN is missing,
            component by component; a step with nothing observed is a prediction.
        method: "gpb2", "imm", "gpb1", "exact" (all mode paths, small T) or "rbpf" (particles).
        inputs: ``(T, r)``, or one for each series, where the model has input matrices.
        store: "all", or "last" to keep only the last step of each series, in O(1) memory.
        particles: how many, for "rbpf".
        generator: randomness, for "rbpf".
    """
    if store not in ("all", "last"):
        raise ArgumentError(f'filter: store is {store!r}. Pass "all" or "last".')
    if method in ("exact", "rbpf") and store == "last":
        raise ArgumentError(
            f'filter: store="last" is for {list(METHODS)}. Pass store="all" with method={method!r}.'
        )
    return filter_problem(
        model,
        prepare(model, y, inputs, "filter", proper=method == "rbpf"),
        method,
        store,
        particles,
        generator,
    )


def filter_problem(
    model: Model | Sequence[Model],
    problem: Problem,
    method: str,
    store: str = "all",
    particles: int = 500,
    generator: torch.Generator | None = None,
) -> Filtered[Model]:
    """`filter_series` for a problem that `prepare` has made."""
    check_method(method, "filter", "exact", "rbpf")
    data, (M, n, _) = problem.data, problem.sizes
    ess, tensors = None, None
    found: Stored | Computed
    if method == "rbpf":
        terms, arrays, ess = _particles(problem, particles, generator)
        found = Computed(totals(problem, terms), terms, *arrays)
    elif method == "exact" or problem.wants_grad:
        if store == "last":
            raise ArgumentError(
                'filter: store="last" keeps nothing to differentiate. Pass store="all", or torch.no_grad().'
            )
        terms, rest = run(problem, method)
        found = Computed(totals(problem, terms), terms, *map(plain, rest))
        if terms.requires_grad:
            shapes = ((M,), (M, n), (M, n, n))
            tensors = tuple(value.reshape(-1, *shape) for value, shape in zip(rest, shapes, strict=False))
    else:
        found = _compiled(problem, method, store == "all")
    flat = problem.flat if tensors is not None else ()
    models = as_models(model, "filter")
    laws = GaussianLaws(models, method, data, problem.parameters, found, store == "all", ess, tensors, flat)
    own = model if isinstance(model, ModelParameters) else tuple(model)
    return Filtered(method, data, laws, own, store)  # type: ignore[arg-type]


def run(problem: Problem, method: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-likelihood terms and the arrays of `Stored` from `log_mode` to `mixing`, with their graphs."""
    if method == "exact":
        terms, *rest = filter_exact(problem)
    elif problem.wants_grad:
        wide, name, window = over_windows(problem, method, "filter")
        terms, *rest = filter_terms(wide, name)
        rest = merged(problem.sizes[0], *rest[:3]) if window else rest
    else:
        found = _compiled(problem, method, True)
        names = Computed._fields[1:]
        terms, *rest = (torch.from_numpy(getattr(found, name)) for name in names)
    return terms, rest


def _compiled(problem: Problem, method: str, everything: bool) -> Stored | Computed:
    """Results of a compiled filter at each step, or at the last step of each series."""
    data, (wide, name, window) = problem.data, over_windows(problem, method, "filter")
    lead = lead_in(wide, name)
    out = run_filter(wide.parameters, data.rows, data.starts, name, everything, lead, window).out
    if not window and (everything or not lead):
        return out
    steps = list(out.steps)
    if lead and not everything:
        steps = [value[data.starts[1:] - 1] for value in steps]
    if window:
        steps = [steps[0], *merged(problem.sizes[0], *steps[1:4])]
        if problem.first and everything:  # the first step has no mode before
            steps[4][data.starts[:-1]] = np.eye(problem.sizes[0]).reshape(-1)
    return Computed(out.log_likelihood, *steps)


def totals(problem: Problem, terms: torch.Tensor) -> torch.Tensor:
    """The sum of the terms of each series."""
    data = problem.data
    if terms.requires_grad:
        series = torch.from_numpy(np.repeat(np.arange(data.series), data.lengths))
        return torch.zeros(data.series, dtype=torch.float64).index_add(0, series, terms)
    return torch.from_numpy(data.totals(terms.numpy()))  # a forked child may not enter torch's thread pool


def _particles(
    problem: Problem, particles: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, list[np.ndarray], np.ndarray]:
    if problem.wants_grad:
        raise ArgumentError(
            "filter: a particle filter has no derivative. Use another method, or torch.no_grad()."
        )
    if particles < 1:
        raise ArgumentError(f"filter: particles is {particles}. Pass at least 1.")
    data = problem.data
    filtered, ess, _ = run_particles(problem.parameters, data.rows, data.starts, particles, generator)
    return torch.from_numpy(filtered.out.terms), list(filtered.out.steps[1:]), ess
