"""One call for all filters, and what it returns.

`filter_series` brings data and model into the kernels' form, runs the method asked for and wraps what came out. `Filtered` keeps, for
each step, only
what the recursion itself needs (mode probabilities and the moments of each mode); everything else is worked out when asked for. A linear
map
and a collapse commute, so predicted moments, innovations and forecasts follow exactly from those.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import plain
from ..kernels.buffers import Parameters
from ..model import SwitchingLinearGaussian
from ..series import Data, arrange, diffuse, flatten, parameters, read
from .exact import filter_exact
from .forecast import Forecast, forecast
from .moments import innovations, mixture, predicted
from .run import METHODS, FilterTerms, run_filter, run_particles


@dataclass(frozen=True, eq=False)
class Filtered:
    """What a filter knows after each step. Leading axes are as in the data: ``(T, ...)``, ``(B, T, ...)``, or a list of ``(T, ...)``.

    With ``store="last"`` there is one entry per series, its last step, in place of the T axis.

    Attributes:
        model: the model.
        method: the filter that was used.
        data: the data, as the kernels take them.
        stored: "all" or "last".
        parameters: the model, as the kernels take it.
        log_likelihood: a number, or one per series; differentiable in every parameter where those are tensors that require grad.
        ess: effective sample size at each step (``method="rbpf"`` only, else None).
    """

    model: SwitchingLinearGaussian
    method: str
    data: Data
    stored: str
    parameters: Parameters = field(repr=False)
    _terms: torch.Tensor = field(repr=False)
    _total: torch.Tensor = field(repr=False)
    _log_mode: np.ndarray = field(repr=False)
    _mode_mean: np.ndarray = field(repr=False)
    _mode_covariance: np.ndarray = field(repr=False)
    _mixing: np.ndarray = field(repr=False)
    _ess: np.ndarray | None = field(repr=False)

    def _out(self, value: Any, names: str | None = None) -> Any:
        return arrange(value, self.data, names, last=self.stored == "last")

    def _need_all(self, what: str) -> None:
        if self.stored == "last":
            raise ArgumentError(f'{what}: only the last step was stored. Call filter with store="all".')

    @property
    def log_likelihood(self) -> Any:
        """Log p(y), ``()`` or ``(B,)``."""
        total = self._total if self.data.layout != "single" else self._total[0]
        if self.data.kind == "torch":
            return total.to(self.data.dtype)
        return float(total) if self.data.layout == "single" else total.detach().numpy()

    @property
    def log_likelihood_terms(self) -> Any:
        """Log p(y_t | y_1 … y_{t−1}), ``(T,)``."""
        self._need_all("log_likelihood_terms")
        return self._out(self._terms)

    @property
    def mode_probability(self) -> Any:
        """P(mode | y_1 … y_t), ``(T, M)``."""
        return self._out(np.exp(self._log_mode), "mode")

    @property
    def log_mode_probability(self) -> Any:
        """Its logarithm, which still ranks modes whose probability is below 1e-300."""
        return self._out(self._log_mode, "mode")

    @property
    def mode_mean(self) -> Any:
        """Mean of the state in each mode, ``(T, M, n)``."""
        return self._out(self._mode_mean)

    @property
    def mode_covariance(self) -> Any:
        """Covariance of the state in each mode, ``(T, M, n, n)``."""
        return self._out(self._mode_covariance)

    @property
    def mixing_probability(self) -> Any:
        """[i, j] = P(mode i before | mode j now), ``(T, M, M)``: given y up to now for GPB2, exact and rbpf, up to the step before for
        IMM and GPB1.
        """
        return self._out(self._mixing)

    @property
    def ess(self) -> Any:
        """Effective number of particles at each step, None for the other methods."""
        return None if self._ess is None else arrange(self._ess, self.data, None, last=False)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        return mixture(np.exp(self._log_mode), self._mode_mean, self._mode_covariance)

    @property
    def mean(self) -> Any:
        """Mean of the state over modes, ``(T, n)``."""
        return self._out(self._moments[0], "state")

    @property
    def covariance(self) -> Any:
        """Covariance of the state over modes, ``(T, n, n)``."""
        return self._out(self._moments[1])

    @cached_property
    def _ahead(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._need_all("predicted moments")
        return predicted(
            self.parameters,
            self.data.starts,
            self._log_mode,
            self._mode_mean,
            self._mode_covariance,
            self.method == "gpb1",
        )

    @property
    def predicted_mode_probability(self) -> Any:
        """P(mode_t | y_1 … y_{t−1}), ``(T, M)``."""
        return self._out(self._ahead[0], "mode")

    @property
    def predicted_mode_mean(self) -> Any:
        """Mean of x_t in each mode given y_1 … y_{t−1}, ``(T, M, n)``."""
        return self._out(self._ahead[1])

    @property
    def predicted_mode_covariance(self) -> Any:
        """Its covariance, ``(T, M, n, n)``."""
        return self._out(self._ahead[2])

    @property
    def predicted_mean(self) -> Any:
        """Mean of x_t given y_1 … y_{t−1}, ``(T, n)``."""
        return self._out(mixture(*self._ahead)[0], "state")

    @property
    def predicted_covariance(self) -> Any:
        """Its covariance, ``(T, n, n)``."""
        return self._out(mixture(*self._ahead)[1])

    @cached_property
    def _innovations(self) -> tuple[np.ndarray, np.ndarray]:
        return innovations(self.parameters, self.data.rows, self.data.starts, *self._ahead)

    @property
    def innovation(self) -> Any:
        """y_t minus its mean given y_1 … y_{t−1}, ``(T, m)``, NaN where y is missing."""
        return self._out(self._innovations[0], "output")

    @property
    def innovation_covariance(self) -> Any:
        """Covariance of y_t given y_1 … y_{t−1}, ``(T, m, m)``."""
        return self._out(self._innovations[1])

    def forecast(self, steps: int, *, inputs: Any = None, level: float = 0.9) -> Forecast:
        """The steps after the data: means, covariances, intervals and mode probabilities.

        Args:
            steps: how many.
            inputs: ``(h, r)``, or one for each series, the inputs of the steps ahead, where the model has input matrices.
            level: of the intervals, between 0 and 1.
        """
        last = np.arange(self.data.series) if self.stored == "last" else self.data.starts[1:] - 1
        law = (self._log_mode[last], self._mode_mean[last], self._mode_covariance[last])
        return forecast(self.model, self.data, law, steps, inputs, level)


def filter_series(
    model: SwitchingLinearGaussian, y: Any, *, method: str = "gpb2", inputs: Any = None, store: str = "all", particles: int = 500,
    generator: torch.Generator | None = None,
) -> Filtered:  # fmt: skip
    """Filter one series, a batch, or a list of series of different lengths.

    Args:
        model: the model.
        y: ``(T, m)``, ``(B, T, m)`` or a list of ``(T, m)``; numpy, torch or pandas. NaN is missing, component by component; a step with
            nothing
            observed is a prediction.
        method: "gpb2", "imm", "gpb1", "exact" (all mode paths, small T) or "rbpf" (particles).
        inputs: ``(T, r)``, or one for each series, where the model has input matrices.
        store: "all", or "last" to keep only the last step of each series, in O(1) memory.
        particles: how many, for "rbpf".
        generator: randomness, for "rbpf".

    Returns:
        `Filtered`.
    """
    names = [*METHODS, "exact", "rbpf"]
    if method not in names:
        raise ArgumentError(f"filter: method is {method!r}. Pass one of {names}.")
    if store not in ("all", "last"):
        raise ArgumentError(f'filter: store is {store!r}. Pass "all" or "last".')
    tensors = isinstance(model.transition, torch.Tensor)
    data = read(y, model.outputs, what="filter", model_is_torch=tensors)
    wide, shift = diffuse(model, data)
    flat = flatten(wide, data, inputs, "filter")
    first = int(model.start == "first")
    M, n, m = model.modes, model.states, model.outputs
    p = parameters(flat, first)
    graph = torch.is_grad_enabled() and (
        data.tensor.requires_grad or any(value.requires_grad for value in flat)
    )
    everything = store == "all"
    if method in ("exact", "rbpf") and not everything:
        raise ArgumentError(
            f'filter: store="last" is for {list(METHODS)}. Pass store="all" with method={method!r}.'
        )
    ess = None
    if method == "exact":
        terms, *rest = filter_exact(flat, first, data.tensor, data.starts, (M, n, m))
        arrays = [plain(value) for value in rest]
    elif method == "rbpf":
        if graph:
            raise ArgumentError(
                "filter: a particle filter has no derivative. Use 'gpb2', 'imm', 'gpb1' or 'exact', or torch.no_grad()."
            )
        if particles < 1:
            raise ArgumentError(f"filter: particles is {particles}. Pass at least 1.")
        stored, ess = run_particles(p, data.rows, data.starts, particles, everything, generator)
        terms, arrays = torch.from_numpy(stored.terms), list(stored[2:6])
    elif graph and everything:
        terms, *rest = FilterTerms.apply(method, data.starts, first, data.tensor, *flat)
        arrays = [value.numpy() for value in rest]
    elif graph:
        raise ArgumentError(
            'filter: store="last" keeps nothing to differentiate. Pass store="all", or use torch.no_grad().'
        )
    else:
        stored = run_filter(p, data.rows, data.starts, method, everything)
        terms, arrays = torch.from_numpy(stored.terms), list(stored[2:6])
    rows = len(arrays[0])
    log_mode, mean, cov, mixing = arrays
    if not everything:
        total = terms
    elif terms.requires_grad:
        series = torch.from_numpy(np.repeat(np.arange(data.series), data.lengths))
        total = torch.zeros(data.series, dtype=torch.float64).index_add(0, series, terms)
        if shift:
            terms = terms.index_add(
                0, torch.from_numpy(data.starts[:-1]), torch.full((data.series,), shift, dtype=torch.float64)
            )
    else:  # numpy, not torch: a forked child may not enter torch's thread pool
        values = terms.numpy().copy()
        total = torch.from_numpy(np.add.reduceat(values, data.starts[:-1]))
        values[data.starts[:-1]] += shift
        terms = torch.from_numpy(values)
    return Filtered(
        model, method, data, store, p, terms, total + shift, log_mode, mean.reshape(rows, M, n), cov.reshape(rows, M, n, n),
        mixing.reshape(rows, M, M), ess,
    )  # fmt: skip
