"""Maximum likelihood of models whose filter has no derivative: slopes are differences of log-likelihoods."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..series import SeriesLike
from .maximum_likelihood import ParametricFit, climb, curvature

if TYPE_CHECKING:
    from ..nonlinear import SwitchingNonlinear


def fit_nonlinear(
    build: "Callable[[torch.Tensor], SwitchingNonlinear]",
    start: ArrayLike,
    y: SeriesLike,
    *,
    method: str = "imm",
    linearize: str = "extended",
    inputs: SeriesLike | None = None,
    max_steps: int = 200,
    tolerance: float = 1e-6,
    progress: bool | None = None,
) -> ParametricFit[Any]:
    """Maximum likelihood of a model of nonlinear modes that is a function of a vector; slopes by differences.

    Args:
        build: from a ``(k,)`` float64 tensor to a model.
        start: ``(k,)`` numbers.
        y: the data, as for `SwitchingNonlinear.filter`.
        method: "imm", "gpb2" or "gpb1", the filter whose likelihood is maximised.
        linearize: "extended" or "unscented".
        inputs: as for `SwitchingNonlinear.filter`.
        max_steps: how many at most.
        tolerance: stop when the log-likelihood rises by less than this.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    origin = np.array(plain(start)).reshape(-1)
    build(torch.from_numpy(origin))._read(y, inputs, method, linearize, "fit_nonlinear")

    def value(theta: np.ndarray) -> float:
        try:
            post = build(torch.from_numpy(theta)).filter(y, method=method, linearize=linearize, inputs=inputs)
        except ArgumentError:
            return np.inf
        return -float(np.sum(plain(post.log_likelihood)))

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        slope = np.zeros_like(theta)
        for i in range(len(theta)):
            h = 1e-5 * max(1.0, abs(theta[i])) * np.eye(len(theta))[i]
            slope[i] = (value(theta + h) - value(theta - h)) / (2 * h[i])
        return value(theta), np.nan_to_num(slope, posinf=0.0, neginf=0.0)

    end, status, trace = climb(evaluate, origin, max_steps, tolerance, progress)
    best = -value(end)
    errors = np.sqrt(curvature(evaluate, end).diagonal())
    model = build(torch.from_numpy(end))
    return ParametricFit(model, end, errors, best, status, len(trace) - 1, np.array(trace), (best,))
