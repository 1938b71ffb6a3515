"""What filters and smoothers have in common: moments by mode, and over modes where asked for."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.plotting import html_curves, html_table
from ..series import Data, arrange
from .moments import mixture, unknown


def shown(take: Callable[[Any], Any], names: str | None, doc: str, live: bool = True) -> Any:
    """A property that shows what `take` gives in the layout of the data; `names` are those of columns.

    Where a derivative is wanted `take` gives tensors with their graph, unless it is not `live`.
    """

    def get(self: Any) -> Any:
        if not live:
            self._refuse_grad("this result")
        return arrange(take(self), self.data, names, last=self._last)

    return property(get, doc=doc)


class ByMode:
    """Mode probabilities ``(rows, M)`` and moments of the state by mode ``(rows, M, ...)``."""

    data: Data
    _mode_mean: np.ndarray
    _mode_covariance: np.ndarray

    @property
    def _weight(self) -> np.ndarray:
        raise NotImplementedError

    @property
    def _last(self) -> bool:  # whether there is one row per series instead of one per step
        return False

    @property
    def _graph(self) -> Any:  # log mode probabilities and moments as tensors, where a derivative is wanted
        return None

    def _refuse_grad(self, what: str) -> None:
        if self._graph is not None:
            raise ArgumentError(
                f"{what} has no derivative, and something here requires one. Ask for it under "
                "torch.no_grad()."
            )

    @property
    def _laws(self) -> tuple[Any, Any, Any]:
        """Mode probabilities and moments by mode, with their graph if a derivative is wanted."""
        if self._graph is not None:
            log_mode, mean, cov = self._graph
            return torch.exp(log_mode), mean, cov
        return self._weight, self._mode_mean, self._mode_covariance

    @cached_property
    def _plain_moments(self) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(invalid="ignore"):
            mean, cov = mixture(self._weight, self._mode_mean, self._mode_covariance)
        return mean, unknown(cov)

    @property
    def _moments(self) -> tuple[Any, Any]:
        return self._plain_moments if self._graph is None else mixture(*self._laws)

    def _repr_html_(self) -> str:
        """The result in a notebook: each mode's share, and the probabilities along the first series."""
        weight = self._weight
        first = weight if self._last else weight[: self.data.starts[1]]
        rows = [(f"mode {j}", float(x.mean()), float(first[-1, j])) for j, x in enumerate(weight.T)]
        caption = f"{type(self).__name__}: {self.data.starts[-1]} steps of {self.data.series} series"
        table = html_table(("mode", "mean probability", "at the end of the first series"), rows, caption)
        return table + ("" if self._last else html_curves(first, "mode probabilities, a colour each"))

    mode_probability = shown(lambda s: s._laws[0], "mode", "P(mode_t | y), ``(T, M)``.")
    mode_mean = shown(lambda s: s._laws[1], None, "Mean of the state in each mode, ``(T, M, n)``.")
    mode_covariance = shown(
        lambda s: s._laws[2], None, "Covariance of the state in each mode, ``(T, M, n, n)``."
    )
    mean = shown(lambda s: s._moments[0], "state", "Mean of the state over modes, ``(T, n)``.")
    covariance = shown(lambda s: s._moments[1], None, "Covariance of the state over modes, ``(T, n, n)``.")
