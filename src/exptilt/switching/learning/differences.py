"""Maximum likelihood of models whose filter has no derivative: slopes are differences of log-likelihoods."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..series import SeriesLike
from .climb import Objective, remembered
from .maximum_likelihood import parametric_fit
from .summary import Fit

if TYPE_CHECKING:
    from ..nonlinear import RecurrentSwitching, SwitchingNonlinear


def fit_nonlinear(
    build: "Callable[[torch.Tensor], SwitchingNonlinear | RecurrentSwitching]",
    start: ArrayLike,
    y: SeriesLike,
    *,
    method: str = "imm",
    linearize: str = "extended",
    inputs: SeriesLike | None = None,
    max_steps: int = 200,
    tolerance: float = 1e-6,
    progress: bool | None = None,
) -> Fit[Any]:
    """Maximum likelihood of a nonlinear or recurrent model, a function of a vector; slopes by differences.

    Args:
        build: from a ``(k,)`` float64 tensor to a model.
        start: ``(k,)`` numbers.
        y: the data, as for the model's `filter`.
        method: "imm", "gpb2" or "gpb1", the filter whose likelihood is maximised; not asked of a recurrent
            model, whose filter is GPB2.
        linearize: "extended" or "unscented"; not asked of a recurrent model.
        inputs: as for the model's `filter`.
        max_steps: how many at most.
        tolerance: stop when the log-likelihood rises by less than this.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    origin = np.array(plain(start)).reshape(-1)
    first: Any = build(torch.from_numpy(origin))
    chosen = {"method": method, "linearize": linearize} if hasattr(first, "_read") else {}
    data, *_ = (
        first._read(y, inputs, *chosen.values(), "fit_nonlinear")
        if chosen
        else first._prepared(y, inputs, "fit_nonlinear")
    )

    def value(theta: np.ndarray) -> float:
        try:
            model: Any = build(torch.from_numpy(theta))
            post = model.filter(y, inputs=inputs, **chosen)
        except ArgumentError:
            return np.inf
        return -float(np.sum(plain(post.log_likelihood)))

    limits, seen = (max_steps, tolerance, progress), int((~np.isnan(data.rows)).sum())
    return parametric_fit(build, by_differences(value), [origin], limits, seen)


def by_differences(value: Callable[[np.ndarray], float]) -> Objective:
    """A function and its gradient by central differences; +inf, and no slope, where it has no value."""

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        here, slope = value(theta), np.zeros_like(theta)
        if not np.isfinite(here):
            return np.inf, slope
        for k in range(len(theta)):
            step = np.zeros_like(theta)
            step[k] = 1e-5 * max(1.0, abs(theta[k]))
            up, down = value(theta + step), value(theta - step)
            slope[k] = (up - down) / (2 * step[k]) if np.isfinite(up + down) else 0.0
        return here, slope

    return remembered(evaluate)
