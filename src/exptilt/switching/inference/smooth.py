"""Smoothing: the law of modes and states given the whole series."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..parameters import ModelParameters
from ..series import Data, SeriesLike, Values, arrange_total
from .exact import filter_exact, smooth_exact
from .passes import run_smoother
from .problem import prepare
from .results import ByMode, shown
from .run import lead_in, run_filter
from .window import check_method, merged_smoothing, over_windows


@dataclass(frozen=True, eq=False)
class Smoothed(ByMode):
    """The law of modes and states given all of y; leading axes ``(T, ...)``, ``(B, T, ...)`` or a list.

    Attributes:
        method: the filter underneath.
        data: the data, as the kernels take them.
        log_likelihood: of the filter underneath, a number or one per series.
    """

    method: str
    data: Data
    log_likelihood: Values
    _probability: np.ndarray = field(repr=False)
    _mode_mean: np.ndarray = field(repr=False)
    _mode_covariance: np.ndarray = field(repr=False)
    _pairs: np.ndarray = field(repr=False)

    @property
    def _weight(self) -> np.ndarray:
        return self._probability

    pair_probability = shown(
        lambda s: s._pairs,
        None,
        "[t, i, j] = P(mode_{t−1} = i, mode_t = j | y), ``(T, M, M)``. At t = 0 mode_{−1} is that of the "
        'initial law; with ``start="first"`` there is none, and the matrix is diagonal.',
    )


def smooth_series(
    model: ModelParameters | Sequence[ModelParameters],
    y: SeriesLike,
    *,
    method: str = "gpb2",
    inputs: SeriesLike | None = None,
) -> Smoothed:
    """The law given the whole series; arguments as for `SwitchingLinearGaussian.smooth`."""
    check_method(method, "smooth", "exact")
    problem = prepare(model, y, inputs, "smooth")
    if problem.wants_grad:
        raise ArgumentError(
            "smooth: smoothed laws have no derivative, and something here requires one. Call it under "
            "torch.no_grad()."
        )
    with torch.no_grad():
        data, (M, n, _) = problem.data, problem.sizes
        if method == "exact":
            totals = data.totals(filter_exact(problem)[0].numpy())
            pieces = [smooth_exact(problem, series, "smooth") for series in range(data.series)]
            names = ("probability", "mean", "covariance", "pairs")
            arrays = [torch.cat([getattr(piece, name) for piece in pieces]).numpy() for name in names]
        else:
            wide, name, window = over_windows(problem, method, "smooth")
            lead = lead_in(wide, name)
            run = run_filter(wide.parameters, data.rows, data.starts, name, lead=lead, window=window)
            totals = run.out.log_likelihood
            arrays = list(run_smoother(run, wide, lead, pairs=not window)[:4])
            if window:
                arrays = merged_smoothing(problem, *arrays[:3])
    probability, mean, cov, pairs = arrays
    rows = len(probability)
    return Smoothed(
        method,
        data,
        arrange_total(totals, data),
        probability,
        mean.reshape(rows, M, n),
        cov.reshape(rows, M, n, n),
        pairs.reshape(rows, M, M),
    )
