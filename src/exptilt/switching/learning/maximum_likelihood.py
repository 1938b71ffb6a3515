"""Maximum likelihood of any model that is a differentiable function of a vector.

`objective` is minus the log-likelihood of a filter with its exact gradient; `climb.py` climbs it. Standard
errors come from the Hessian there. Where a filter has no derivative, slopes are differences.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..inference.filter import run
from ..inference.problem import pose, read_inputs
from ..inference.window import check_method
from ..parameters import Model, ModelParameters
from ..series import Data, SeriesLike, read
from .climb import FitStatus as FitStatus  # older pickles import it from here
from .climb import Limits, Objective, climb, remembered
from .summary import Fit

if TYPE_CHECKING:
    from ..nonlinear import RecurrentSwitching, SwitchingNonlinear

ParametricFit = Fit  # the name in older pickles


def checked_data(model: ModelParameters, y: SeriesLike, skip: int) -> Data:
    """Read the data of a fit; raises if nothing is seen, a component is constant or `skip` is too large."""
    data = read(y, model.outputs, what="fit").detached()
    rows = data.rows
    if np.isnan(rows).all():
        raise ArgumentError("fit: every value is missing. Pass data with something observed.")
    for a in range(rows.shape[1]):
        seen = rows[~np.isnan(rows[:, a]), a]
        if len(seen) and np.ptp(seen) == 0:
            raise ArgumentError(
                f"fit: component {a} is constant ({seen[0]:g}), so its likelihood has no maximum. "
                "Leave it out, or pass a series that varies."
            )
    if not 0 <= skip < data.lengths.min():
        raise ArgumentError(
            f"fit: skip is {skip}, the shortest series has {data.lengths.min()} steps. Pass fewer."
        )
    return data


def check_enough(what: str, parameters: int, observations: int) -> None:
    """Raise if there are as many parameters as observations or more, so that a fit would be exact."""
    if parameters >= observations:
        raise ArgumentError(
            f"{what}: {parameters} parameters from {observations} observations. Pass a longer series, or fix "
            "some parameters."
        )


def check_columns(
    what: str, table: np.ndarray, constant: bool, names: Sequence[Any], least: float = 1e-7
) -> None:
    """Raise if a column of ``(T, k)`` is a linear combination of those before it (and of 1, if `constant`).

    Less than the share `least` of its deviation (of its size, without a constant) is then left unexplained.
    """
    columns = table - table.mean(0) if constant else table
    size = np.sqrt((columns**2).sum(0))
    for k in range(table.shape[1]):
        if size[k] <= 1e-13 * np.abs(table[:, k]).max() * len(table) ** 0.5:
            raise ArgumentError(f"{what}: column {names[k]!r} is constant ({table[0, k]:g}). Leave it out.")
        before = columns[:, :k] / size[:k]
        weight = np.linalg.lstsq(before, columns[:, k], rcond=None)[0]
        left = columns[:, k] - before @ weight
        if np.sqrt((left**2).sum()) < least * size[k]:
            used = [names[j] for j in np.flatnonzero(np.abs(weight) > 10 * least * size[k]).tolist()]
            raise ArgumentError(
                f"{what}: column {names[k]!r} is a combination of {used}{' and a constant' * constant}: its "
                "coefficient is not determined. Leave it out."
            )


def check_noise(what: str, left: np.ndarray, y: np.ndarray, names: Sequence[Any]) -> None:
    """Raise if the residuals `left` of a column of y ``(T, m)`` are next to nothing."""
    exact = np.flatnonzero(left.std(0) < 1e-9 * y.std(0))
    if len(exact):
        raise ArgumentError(
            f"{what}: lags or regressors explain {names[int(exact[0])]} exactly, so that no noise is left. "
            "Leave it out, or pass other regressors."
        )


def objective(
    build: Callable[[torch.Tensor], ModelParameters], data: Data, inputs: torch.Tensor, method: str, skip: int
) -> Objective:
    """Minus the log-likelihood of `build(theta)` and its gradient in theta; +inf where there is no model.

    Data and inputs have been read: no step checks or joins them again.
    """
    time = np.concatenate([np.arange(length) for length in data.lengths])
    kept = torch.from_numpy(np.flatnonzero(time >= skip))

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
        try:
            problem = pose(build(x), data, inputs, "fit")
            terms, _ = run(problem, method)
        except ArgumentError:
            return np.inf, np.zeros_like(theta)
        value = terms[kept].sum()
        if not len(theta):  # every parameter is fixed
            return -float(value.detach()), theta
        (slope,) = torch.autograd.grad(value, x)
        return -float(value.detach()), -slope.numpy()

    return remembered(evaluate)


def fit_parameters(
    build: Callable[[torch.Tensor], Model],
    start: ArrayLike,
    y: SeriesLike,
    *,
    filter: str = "gpb2",
    inputs: SeriesLike | None = None,
    max_steps: int = 500,
    tolerance: float = 1e-6,
    skip: int = 0,
    progress: bool | None = None,
) -> Fit[Model]:
    """Maximum likelihood of any model that is a differentiable function of a vector.

    Args:
        build: from a ``(k,)`` float64 tensor to a model made of tensors; it decides which entries are shared,
            fixed or computed.
        start: ``(k,)`` numbers.
        y: the data, as for `filter`.
        filter: the filter whose likelihood is maximised, "gpb2", "imm", "gpb1", "gpb3" … or "exact".
        inputs: as for `filter`.
        max_steps: how many at most.
        tolerance: stop when the log-likelihood rises by less than this.
        skip: leave the first terms of each series out of the likelihood.
        progress: show a bar: True, False, or None for only on a terminal.
    """
    check_method(filter, "fit_parameters", "exact", argument="filter")
    if not callable(build):
        kind = type(build).__name__
        raise ArgumentError(f"fit_parameters: build is a {kind}. Pass a function from parameters to a model.")
    origin = np.array(plain(start)).reshape(-1)
    first = build(torch.from_numpy(origin))
    data = checked_data(first, y, skip)
    evaluate = objective(build, data, read_inputs(first, data, inputs, "fit_parameters"), filter, skip)
    seen = int((~np.isnan(data.rows)).sum())
    check_enough("fit_parameters", len(origin), seen)
    limits = max_steps, tolerance, progress
    return parametric_fit(build, evaluate, origin, limits, seen, y=y, inputs=inputs, filter=filter)


def parametric_fit(
    build: Callable[[torch.Tensor], Any],
    evaluate: Objective,
    start: np.ndarray,
    limits: Limits,
    observations: int,
    **data: Any,
) -> Fit[Any]:
    """The end of the climb from `start`, with its curvature and its model."""
    end = climb(evaluate, start, *limits)
    with torch.no_grad():
        model = build(torch.from_numpy(end.point))
    errors = np.sqrt(end.inverse.diagonal())
    return Fit._of(
        [end],
        end,
        1,
        "parameters[{}]".format,
        model=model,
        estimates={"parameters": end.point},
        standard_errors=errors,
        free_parameters=len(end.point),
        observations=observations,
        regimes=len(model.transition),
        **data,
    )


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
        progress: show a bar: True, False, or None for only on a terminal.
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
    return parametric_fit(build, by_differences(value), origin, limits, seen)


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
