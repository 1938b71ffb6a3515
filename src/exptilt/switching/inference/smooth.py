"""Smoothed laws of modes and states, and the most likely sequence of modes, given the whole series.

Viterbi's recursion keeps for each mode j only the best way into it:

    score_j = max_i  score_i + log π_ij + log p_j(y_t | the Kalman filter along the path kept for i)

It is GPB2 with the collapse replaced by a choice, and so one of the methods of csrc/switching/switching.hpp.
Without a continuous state (a hidden Markov model) this is Viterbi's algorithm, and exact.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..parameters import ModelParameters
from ..series import SeriesLike, Values, arrange
from .passes import run_smoother
from .plain.exact import filter_exact, smooth_exact
from .problem import Problem, prepare
from .results import Laws, Smoothed
from .run import lead_in, run_filter
from .window import check_method, merged_smoothing, over_windows


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
        data = problem.data
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
            arrays = list(run_smoother(run, wide, lead, over=True)[:4])
            if window:
                arrays = merged_smoothing(problem, *arrays[:3])
    return smoothed(method, problem, arrays, totals)


def smoothed(method: str, problem: Problem, arrays: list[np.ndarray], totals: np.ndarray) -> Smoothed:
    """The result, from probabilities, means, covariances and pairs ``(rows, ...)``, and log-likelihoods."""
    probability, mean, cov, pairs = arrays
    rows, (M, n, _) = len(probability), problem.sizes
    with np.errstate(divide="ignore"):
        log_mode = np.log(probability)
    laws = Laws(log_mode, mean.reshape(rows, M, n), cov.reshape(rows, M, n, n), total=totals)
    return Smoothed(method, problem.data, laws, pairs.reshape(rows, M, M))


def most_likely_path(
    model: ModelParameters, y: SeriesLike, *, method: str = "viterbi", inputs: SeriesLike | None = None
) -> Values:
    """The most likely modes; arguments as for `SwitchingLinearGaussian.most_likely_path`."""
    if method not in ("viterbi", "exact"):
        raise ArgumentError(f'most_likely_path: method is {method!r}. Pass "viterbi" or "exact".')
    with torch.no_grad():
        problem = prepare(model, y, inputs, "most_likely_path")
        data, M = problem.data, problem.sizes[0]
        if method == "exact":
            pieces = [smooth_exact(problem, k, "most_likely_path").path for k in range(data.series)]
            return arrange(torch.cat(pieces).numpy(), data, None)
        lead = lead_in(problem, method)
        out = run_filter(problem.parameters, data.rows, data.starts, method, lead=lead).out
    chosen = out.mixing.reshape(-1, M, M).argmax(1)
    path = np.empty(len(data.rows), np.int64)
    for cut in data.cuts:
        mode, modes = int(out.log_mode[cut.stop - 1].argmax()), list[int]()
        for before in chosen[cut][::-1].tolist():
            modes.append(mode)
            mode = before[mode]
        path[cut] = modes[::-1]
    return arrange(path, data, None)
