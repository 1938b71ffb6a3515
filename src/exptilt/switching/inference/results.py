"""What filters and smoothers have in common: moments by mode, and over modes where asked for."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from ..series import Data, arrange
from .moments import mixture, unknown


def shown(take: Callable[[Any], Any], names: str | None, doc: str) -> Any:
    """A property that shows what `take` gives in the layout of the data; `names` are those of columns."""
    return property(lambda self: arrange(take(self), self.data, names, last=self._last), doc=doc)


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

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(invalid="ignore"):
            mean, cov = mixture(self._weight, self._mode_mean, self._mode_covariance)
        return mean, unknown(cov)

    mode_probability = shown(lambda s: s._weight, "mode", "P(mode_t | y), ``(T, M)``.")
    mode_mean = shown(lambda s: s._mode_mean, None, "Mean of the state in each mode, ``(T, M, n)``.")
    mode_covariance = shown(
        lambda s: s._mode_covariance, None, "Covariance of the state in each mode, ``(T, M, n, n)``."
    )
    mean = shown(lambda s: s._moments[0], "state", "Mean of the state over modes, ``(T, n)``.")
    covariance = shown(lambda s: s._moments[1], None, "Covariance of the state over modes, ``(T, n, n)``.")
