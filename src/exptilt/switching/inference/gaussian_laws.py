"""Laws of a filter of linear modes, and the predictions and innovations that follow from them.

A linear map and a collapse commute, so predicted moments, innovations and forecasts follow exactly from the
mode probabilities and moments of each mode that the recursion itself keeps.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import Parameters
from ..parameters import ModelParameters
from ..series import Data, SeriesLike
from .forecast import Forecast, forecast
from .moments import SENSOR, by_row, mixture, observe, predicted
from .results import Laws


class Computed(NamedTuple):
    """The arrays of a filter that ran in plain torch; the compiled filters keep theirs in `Stored`."""

    log_likelihood: torch.Tensor | np.ndarray
    terms: torch.Tensor | np.ndarray
    log_mode: np.ndarray
    mode_mean: np.ndarray
    mode_covariance: np.ndarray
    mixing: np.ndarray


class GaussianLaws(Laws):
    """Laws of linear modes, read from the filter's arrays when they are first used.

    Args:
        models: one for all series, or one for each.
        method: the filter.
        data: the data.
        parameters: the models, as the kernels take them.
        found: a `Stored` or a `Computed`.
        ess: effective numbers of particles.
        tensors: log mode probabilities and moments with their graph, where a derivative is wanted.
        flat: the parameters with their graph.
    """

    def __init__(
        self,
        models: Sequence[ModelParameters],
        method: str,
        data: Data,
        parameters: Parameters,
        found: Any,
        everything: bool = True,
        ess: np.ndarray | None = None,
        tensors: tuple[torch.Tensor, ...] | None = None,
        flat: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.models, self.method, self.data, self.parameters = models, method, data, parameters
        self.found, self.everything, self.ess, self.tensors, self.flat = found, everything, ess, tensors, flat

    @property
    def terms(self) -> Any:
        """Log-likelihood terms, an array, or a tensor with its graph."""
        return self.found.terms

    @property
    def total(self) -> Any:
        """The log-likelihood of each series."""
        return self.found.log_likelihood

    @property
    def log_mode(self) -> np.ndarray:
        """Log mode probabilities, ``(rows, M)``."""
        found: np.ndarray = self.found.log_mode
        return found

    def _by_mode(self, value: np.ndarray, *axes: int) -> np.ndarray:
        rows, M = self.log_mode.shape
        return value.reshape(rows, M, *axes)

    @cached_property
    def mode_mean(self) -> np.ndarray:
        """Means by mode, ``(rows, M, n)``."""
        return self._by_mode(self.found.mode_mean, -1)

    @cached_property
    def mode_covariance(self) -> np.ndarray:
        """Covariances by mode, ``(rows, M, n, n)``."""
        n = self.mode_mean.shape[-1]
        return self._by_mode(self.found.mode_covariance, n, n)

    @property
    def _graph(self) -> tuple[torch.Tensor, ...] | None:
        return self.tensors if torch.is_grad_enabled() else None

    def live(self, k: int) -> Any:
        """Log mode probabilities (k = 0), means or covariances by mode, with their graph if one is wanted."""
        graph = self._graph
        return super().live(k) if graph is None else graph[k]

    def refuse_grad(self, what: str) -> None:
        """Raise if a derivative is wanted."""
        if self._graph is not None:
            raise ArgumentError(
                f"{what} has no derivative, and something here requires one. Ask for it under "
                "torch.no_grad()."
            )

    def forecast(self, post: Any, steps: int, inputs: SeriesLike | None, level: float) -> Forecast:
        """Forecast from the law after the last step."""
        return forecast(self.models, self.data, post._end, steps, inputs, level)

    def known(self, name: str) -> Any:
        """Mixing probabilities, predicted moments or innovations, by the name of the property."""
        if name == "mixing_probability":
            self.refuse_grad("this result")
            return self._by_mode(self.found.mixing, -1)
        ahead = self.ahead
        if name.startswith("predicted_mode_"):
            return ahead[("probability", "mean", "covariance").index(name.removeprefix("predicted_mode_"))]
        if name.startswith("predicted_"):
            return mixture(*ahead)[name == "predicted_covariance"]
        center, spread = self.output[2:]
        if name == "innovation_covariance":
            return spread
        return (self.data.rows if self._graph is None else self.data.tensor) - center

    def _predicted(self, p: Parameters, log_mode: Any, mean: Any, cov: Any) -> tuple[Any, Any, Any]:
        if not self.everything:
            raise ArgumentError(
                'predicted moments: only the last step was stored. Call filter with store="all".'
            )
        diffuse = self.models[0].diffuse
        if diffuse.any():
            self.refuse_grad("a predicted moment of a model with diffuse states")
        return predicted(p, self.data.starts, log_mode, mean, cov, diffuse, self.method == "gpb1")

    @property
    def _live_parameters(self) -> Parameters:
        p = self.parameters
        assert p is not None
        return p if self._graph is None else Parameters._make([*self.flat, p.first])

    @cached_property
    def _plain_ahead(self) -> tuple[Any, Any, Any]:
        assert self.parameters is not None
        return self._predicted(self.parameters, self.log_mode, self.mode_mean, self.mode_covariance)

    @property
    def output(self) -> list[Any]:
        """Moments of y_t given what came before, by mode and over modes."""
        now = by_row(self._live_parameters, self.data.starts, SENSOR, self.log_mode.shape[1])
        return observe(*self.ahead, now)

    @property
    def ahead(self) -> tuple[Any, Any, Any]:
        """Mode probabilities and moments by mode of x_t before y_t is seen."""
        graph: Any = self._graph
        return self._plain_ahead if graph is None else self._predicted(self._live_parameters, *graph)
