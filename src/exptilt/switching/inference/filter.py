"""One call for all filters, and what it returns.

`filter_series` brings data and model into the kernels' form, runs the method asked for and wraps what came
out. `Filtered` keeps, for each step, only what the recursion itself needs (mode probabilities and the moments
of each mode); everything else is worked out when asked for. A linear map and a collapse commute, so predicted
moments, innovations and forecasts follow exactly from those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import METHODS, Parameters, Stored
from ..checks import plain
from ..parameters import Model, ModelParameters
from ..series import Data, SeriesLike, Values, arrange, arrange_total
from .exact import filter_exact
from .forecast import Forecast, forecast
from .moments import SENSOR, Moments, by_row, mixture, observe, predicted
from .passes import filter_terms, run_particles
from .problem import Problem, as_models, prepare
from .results import ByMode, shown
from .run import lead_in, run_filter
from .window import check_method, collapse_order, merged, over_windows


class Computed(NamedTuple):
    """What `Stored` holds, from filters that are not the compiled ones, or with a graph."""

    log_likelihood: torch.Tensor | np.ndarray
    terms: torch.Tensor | np.ndarray
    log_mode: np.ndarray
    mode_mean: np.ndarray
    mode_covariance: np.ndarray
    mixing: np.ndarray


@dataclass(frozen=True, eq=False)
class Filtered(ByMode, Generic[Model]):
    """What a filter knows after each step.

    Leading axes are as in the data: ``(T, ...)``, ``(B, T, ...)``, or a list of ``(T, ...)``. With
    ``store="last"`` there is one entry per series, its last step, in place of the T axis.

    Attributes:
        model: the model.
        method: the filter that was used.
        data: the data, as the kernels take them.
        stored: "all" or "last".
        parameters: the model, as the kernels take it.
    """

    model: Model
    method: str
    data: Data
    stored: str
    parameters: Parameters = field(repr=False)
    _found: Any = field(repr=False)  # a `Stored`, or the same by other means: `Computed`
    _ess: np.ndarray | None = field(repr=False, default=None)
    _tensors: tuple[torch.Tensor, ...] | None = field(repr=False, default=None)
    _flat: tuple[torch.Tensor, ...] = field(repr=False, default=())

    @property
    def _terms(self) -> Any:  # an array, or a tensor with its graph
        return self._found.terms

    @property
    def _total(self) -> Any:
        return self._found.log_likelihood

    @property
    def _log_mode(self) -> np.ndarray:
        found: np.ndarray = self._found.log_mode
        return found

    def _by_mode(self, value: np.ndarray, *axes: int) -> np.ndarray:
        rows, M = self._log_mode.shape
        return value.reshape(rows, M, *axes)

    @cached_property
    def _mode_mean(self) -> np.ndarray:  # type: ignore[override]
        return self._by_mode(self._found.mode_mean, -1)

    @cached_property
    def _mode_covariance(self) -> np.ndarray:  # type: ignore[override]
        n = self._mode_mean.shape[-1]
        return self._by_mode(self._found.mode_covariance, n, n)

    @property
    def _mixing(self) -> np.ndarray:
        return self._by_mode(self._found.mixing, -1)

    @property
    def _weight(self) -> np.ndarray:
        return np.asarray(np.exp(self._log_mode))

    @property
    def _last(self) -> bool:
        return self.stored == "last"

    @property
    def _end(self) -> Moments:
        """Log mode probabilities and moments by mode after the last step of each series."""
        last = np.arange(self.data.series) if self._last else self.data.starts[1:] - 1
        return self._log_mode[last], self._mode_mean[last], self._mode_covariance[last]

    @property
    def _graph(self) -> tuple[torch.Tensor, ...] | None:
        return self._tensors if torch.is_grad_enabled() else None

    @property
    def _models(self) -> list[ModelParameters]:
        return as_models(self.model, "filter")

    def _need_all(self, what: str) -> None:
        if self.stored == "last":
            raise ArgumentError(f'{what}: only the last step was stored. Call filter with store="all".')

    def _predicted(self, p: Parameters, log_mode: Any, mean: Any, cov: Any) -> tuple[Any, Any, Any]:
        self._need_all("predicted moments")
        diffuse = self._models[0].diffuse
        if diffuse.any():
            self._refuse_grad("a predicted moment of a model with diffuse states")
        return predicted(p, self.data.starts, log_mode, mean, cov, diffuse, self.method == "gpb1")

    @cached_property
    def _plain_ahead(self) -> Moments:
        return self._predicted(self.parameters, self._log_mode, self._mode_mean, self._mode_covariance)

    @property
    def _live_parameters(self) -> Parameters:
        p = self.parameters
        return p if self._graph is None else Parameters._make([*self._flat, p.first])

    @property
    def _ahead(self) -> tuple[Any, Any, Any]:
        graph = self._graph
        return self._plain_ahead if graph is None else self._predicted(self._live_parameters, *graph)

    @property
    def _ahead_moments(self) -> tuple[Any, Any]:
        return mixture(*self._ahead)

    @property
    def _output(self) -> list[Any]:
        now = by_row(self._live_parameters, self.data.starts, SENSOR, self._log_mode.shape[1])
        return observe(*self._ahead, now)

    @property
    def log_likelihood(self) -> Values:
        """log p(y), a number or ``(B,)``; differentiable in tensors that require grad."""
        return arrange_total(self._total, self.data)

    @property
    def log_likelihood_terms(self) -> Values:
        """log p(y_t | y_1 … y_{t−1}), ``(T,)``."""
        self._need_all("log_likelihood_terms")
        return arrange(self._terms, self.data, None)

    @property
    def ess(self) -> Values:
        """Effective number of particles at each step, ``(T,)``; None for methods other than "rbpf"."""
        return None if self._ess is None else arrange(self._ess, self.data, None)

    @property
    def laws_kept(self) -> int | None:
        """How many laws go from step to step: 1 for GPB1, M for IMM and GPB2, M^{k−1} for GPB_k.

        With "exact" as many as there are paths at the end of the longest series; None for particles.
        """
        M, steps = self._log_mode.shape[1], int(self.data.lengths.max()) + 1 - self.parameters.first
        powers = {"gpb1": 0, "exact": steps, "imm": 1}
        power = powers.get(self.method, collapse_order(self.method) - 1)
        return None if self.method == "rbpf" else int(M**power)

    log_mode_probability = shown(
        lambda s: s._log_mode if s._graph is None else s._graph[0],
        "mode",
        "log P(mode_t | y_1 … y_t), ``(T, M)``; it ranks modes even where P is 0.",
    )
    mixing_probability = shown(
        lambda s: s._mixing,
        None,
        "[i, j] = P(mode i before | mode j now), ``(T, M, M)``: given y up to now for GPB2, exact and rbpf, "
        "up to the step before for IMM and GPB1.",
        live=False,
    )
    predicted_mode_probability = shown(
        lambda s: s._ahead[0], "mode", "P(mode_t | y_1 … y_{t−1}), ``(T, M)``."
    )
    predicted_mode_mean = shown(
        lambda s: s._ahead[1], None, "Mean of x_t in each mode given y_1 … y_{t−1}, ``(T, M, n)``."
    )
    predicted_mode_covariance = shown(
        lambda s: s._ahead[2], None, "Covariance of x_t in each mode given y_1 … y_{t−1}, ``(T, M, n, n)``."
    )
    predicted_mean = shown(
        lambda s: s._ahead_moments[0], "state", "Mean of x_t given y_1 … y_{t−1}, ``(T, n)``."
    )
    predicted_covariance = shown(
        lambda s: s._ahead_moments[1], None, "Covariance of x_t given y_1 … y_{t−1}, ``(T, n, n)``."
    )
    innovation = shown(
        lambda s: (s.data.rows if s._graph is None else s.data.tensor) - s._output[2],
        "output",
        "y_t minus its mean given y_1 … y_{t−1}, ``(T, m)``, NaN where y is missing.",
    )
    innovation_covariance = shown(
        lambda s: s._output[3], None, "Covariance of y_t given y_1 … y_{t−1}, ``(T, m, m)``."
    )

    def forecast(self, steps: int, *, inputs: SeriesLike | None = None, level: float = 0.9) -> Forecast:
        """Means, covariances, intervals and mode probabilities of the steps after the data.

        Args:
            steps: how many.
            inputs: ``(h, r)``, or one for each series: those of the steps ahead, where the model has input
                matrices.
            level: of the intervals, between 0 and 1.
        """
        self._refuse_grad("forecast")
        return forecast(self._models, self.data, self._end, steps, inputs, level)


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
    """`filter_series` for a problem that has been prepared."""
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
    return Filtered(
        model if isinstance(model, ModelParameters) else tuple(model),  # type: ignore[arg-type]
        method,
        data,
        store,
        problem.parameters,
        found,
        ess,
        tensors,
        problem.flat if tensors is not None else (),
    )


def run(problem: Problem, method: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-likelihood terms, and what `Stored` holds from `log_mode` to `mixing`, graphs kept."""
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
    """What a compiled filter finds at each step, or at the last of each series."""
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
