"""Climbing the likelihood: L-BFGS over unconstrained numbers with the exact gradient, then its curvature.

Standard errors come from the Hessian: central differences of the gradient, inverted, and carried to named
parameters by the delta method. `fit_parameters` does all this for any model that is a differentiable function
of a vector.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import scipy.optimize
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..._support.plotting import html_curves, html_table
from ..._support.progress import track
from ..checks import plain
from ..inference.filter import run
from ..inference.problem import pose, read_inputs
from ..inference.run import METHODS
from ..parameters import Model, ModelParameters
from ..series import Data, SeriesLike, read


class FitStatus(enum.Enum):
    """Why a fit stopped; the value is the message."""

    CONVERGED = "converged: the log-likelihood rose by less than the tolerance"
    MAX_STEPS = "stopped at max_steps; the log-likelihood was still rising"
    DECREASED = (
        "stopped: EM has lowered the log-likelihood for ten steps (the collapse makes its E-step "
        "approximate); the best step is returned"
    )
    DEGENERATE = (
        "stopped: a noise or a regime has vanished, there is no maximum here; the best step is returned"
    )
    STALLED = "stopped: the line search found no better point, though the gradient is not zero"


def checked_data(model: ModelParameters, y: SeriesLike, skip: int) -> Data:
    """The data of a fit, without a graph; without enough to see, or with too large a `skip`, refused."""
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


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def remembered(evaluate: Objective) -> Objective:
    """The same function, which keeps its last point: a climb ends where the curvature is asked for."""
    last: list[Any] = [None, None]

    def again(theta: np.ndarray) -> tuple[float, np.ndarray]:
        if last[0] is None or not np.array_equal(last[0], theta):
            last[:] = theta.copy(), evaluate(theta)
        value, slope = last[1]
        return value, slope.copy()

    return again


def objective(
    build: Callable[[torch.Tensor], ModelParameters], data: Data, inputs: torch.Tensor, method: str, skip: int
) -> Objective:
    """Minus the log-likelihood and its gradient in the numbers `build` takes; +inf where they make no model.

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
        if not len(theta):  # every parameter is held
            return -float(value), theta
        (slope,) = torch.autograd.grad(value, x)
        return -float(value.detach()), -slope.numpy()

    return remembered(evaluate)


def climb(
    evaluate: Objective, start: np.ndarray, max_steps: int, tolerance: float, progress: bool | None
) -> tuple[np.ndarray, FitStatus, list[float]]:
    """L-BFGS from `start`; returns the best point, why it stopped, and the trace of log-likelihoods."""
    best_value, _ = evaluate(start)
    if not np.isfinite(best_value):
        raise ArgumentError(
            "fit: the filter cannot run at the start (an innovation covariance is singular). "
            "Start from larger noises."
        )
    trace = [-best_value]
    bar = iter(track(range(max_steps), "maximum likelihood", show=progress))

    def note(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        trace.append(-float(intermediate_result.fun))
        next(bar, None)
        if trace[-1] - trace[-2] < tolerance:  # scipy's own test is relative to the log-likelihood
            raise StopIteration

    far = 1e10 * max(abs(best_value), 1.0)

    def bounded(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = evaluate(theta)
        return (value, slope) if np.isfinite(value) else (far, slope)

    options = {"maxiter": max_steps, "maxfun": 20 * max_steps, "ftol": 0.0, "gtol": 1e-7, "maxcor": 20}
    result = scipy.optimize.minimize(
        bounded, start, jac=True, method="L-BFGS-B", callback=note, options=options
    )
    bar.close()  # type: ignore[attr-defined]
    small = len(trace) > 1 and trace[-1] - trace[-2] < tolerance
    left = 0.5 * float(result.jac @ result.hess_inv(result.jac))  # to rise, as the curvature met says
    if result.status == 1 and not small:
        status = FitStatus.MAX_STEPS
    elif small or result.status == 0 or left < tolerance:
        status = FitStatus.CONVERGED
    else:
        status = FitStatus.STALLED
    return result.x, status, trace


Limits = tuple[int, float, bool | None]  # most steps, tolerance, whether to show a bar
End = tuple[float, np.ndarray, FitStatus, list[float]]  # log-likelihood, point, status, trace


def climb_all(evaluate: Objective, starts: list[np.ndarray], limits: Limits) -> list[End]:
    """The end of the climb from each start; one where the filter cannot run is left out, unless the first."""
    ends = list[End]()
    for start in starts:
        try:
            end, status, trace = climb(evaluate, start, *limits)
        except ArgumentError:
            if not ends:
                raise
            continue
        ends.append((-evaluate(end)[0], end, status, trace))
    return ends


def curvature(evaluate: Objective, theta: np.ndarray) -> np.ndarray:
    """The inverse Hessian of minus the log-likelihood, NaN for numbers without effect.

    Such a number moves the log-likelihood by less than its rounding (the logit of a transition that has gone
    to 0); the others' errors are then those with it fixed. NaN throughout where this point is no maximum.
    """
    k, spread = len(theta), np.full((len(theta), len(theta)), np.nan)
    H, steps, here = np.empty((k, k)), 1e-4 * np.maximum(1.0, np.abs(theta)), evaluate(theta)[0]
    for i, h in enumerate(steps):
        step = h * np.eye(k)[i]
        (up, up_slope), (down, down_slope) = evaluate(theta + step), evaluate(theta - step)
        if not (np.isfinite(up) and np.isfinite(down)):
            return spread
        H[i] = (up_slope - down_slope) / (2 * h)
    told = np.abs(H.diagonal()) * steps**2 > 1e-12 * max(1.0, abs(here))
    H = ((H + H.T) / 2)[np.ix_(told, told)]
    try:
        np.linalg.cholesky(H)
    except np.linalg.LinAlgError:
        return spread
    spread[np.ix_(told, told)] = np.linalg.inv(H)
    return spread


def delta_method(
    natural: Callable[[torch.Tensor], dict[str, torch.Tensor]], theta: np.ndarray, spread: np.ndarray
) -> dict[str, np.ndarray]:
    """Standard errors of named functions of theta, sqrt diag(J spread J'), NaN where `spread` is."""
    point, lost = torch.tensor(theta, requires_grad=True), np.isnan(spread.diagonal())
    out = {}
    for name, value in natural(point).items():
        flat = np.zeros((value.numel(), len(theta)))
        for row, one in zip(flat, value.reshape(-1).unbind() if value.requires_grad else (), strict=False):
            row[:] = torch.autograd.grad(one, point, retain_graph=True)[0]
        errors = np.sqrt(np.maximum(np.einsum("ki,ij,kj->k", flat, np.nan_to_num(spread), flat), 0.0))
        unknown = np.abs(flat[:, lost]).max(1, initial=0.0) > 1e-3 * np.abs(flat).max(1)
        errors[unknown | ~flat.any(1)] = np.nan
        out[name] = errors.reshape(tuple(value.shape))
    return out


@dataclass(frozen=True, eq=False)
class ParametricFit(Generic[Model]):
    """Maximum likelihood of a model given as a function of a few numbers.

    Attributes:
        model: the model at the end.
        parameters: ``(k,)``, the numbers.
        standard_errors: ``(k,)``, NaN where the curvature is not that of a maximum.
        log_likelihood: at the end, over all series, without the terms skipped.
        status: why it stopped; ``status.value`` says it in words.
        steps: how many steps were made.
        trace: the log-likelihood at every step.
        restarts: the final log-likelihood of every start that ran.
    """

    model: Model
    parameters: np.ndarray
    standard_errors: np.ndarray
    log_likelihood: float
    status: FitStatus
    steps: int
    trace: np.ndarray = field(repr=False)
    restarts: tuple[float, ...]

    def _repr_html_(self) -> str:
        """The fit in a notebook: its numbers with errors, and the way of the log-likelihood."""
        caption = f"log-likelihood {self.log_likelihood:.2f}, {self.status.value}"
        numbers = zip(map(float, self.parameters), map(float, self.standard_errors), strict=True)
        rows = [(k, *pair) for k, pair in enumerate(numbers)]
        table = html_table(("parameter", "estimate", "standard error"), rows, caption)
        return table + html_curves(np.asarray(self.trace)[:, None], "log-likelihood by step")


def fit_parameters(
    build: Callable[[torch.Tensor], Model],
    start: ArrayLike,
    y: SeriesLike,
    *,
    filter: str = "gpb2",
    inputs: SeriesLike | None = None,
    restarts: int = 0,
    spread: float = 0.3,
    max_steps: int = 500,
    tolerance: float = 1e-6,
    skip: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> ParametricFit[Model]:
    """Maximum likelihood of any model that is a differentiable function of a vector.

    Args:
        build: from a ``(k,)`` float64 tensor to a model made of tensors; structure, shared and fixed entries
            are what it makes them.
        start: ``(k,)`` numbers.
        y: the data, as for `filter`.
        filter: the filter whose likelihood is maximised, "gpb2", "imm", "gpb1" or "exact".
        inputs: as for `filter`.
        restarts: how many more starts, Gaussian around the first.
        spread: their standard deviation, relative to the larger of 1 and each number.
        max_steps: of each start.
        tolerance: stop when the log-likelihood rises by less than this.
        skip: leave the first terms of each series out of the likelihood.
        generator: randomness of the restarts.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    if filter not in (*METHODS, "exact"):
        raise ArgumentError(f"fit_parameters: filter is {filter!r}. Pass one of {[*METHODS, 'exact']}.")
    origin = np.array(plain(start)).reshape(-1)
    first = build(torch.from_numpy(origin))
    data = checked_data(first, y, skip)
    evaluate = objective(build, data, read_inputs(first, data, inputs, "fit_parameters"), filter, skip)
    starts = starts_around(origin, restarts, spread, generator)
    return parametric_fit(build, evaluate, starts, (max_steps, tolerance, progress))


def parametric_fit(
    build: Callable[[torch.Tensor], Any], evaluate: Objective, starts: list[np.ndarray], limits: Limits
) -> ParametricFit[Any]:
    """The best end of climbs from the starts, with its curvature and its model."""
    ends = climb_all(evaluate, starts, limits)
    value, end, status, trace = max(ends, key=lambda found: found[0])
    errors = np.sqrt(curvature(evaluate, end).diagonal())
    with torch.no_grad():
        model = build(torch.from_numpy(end))
    finals = tuple(found[0] for found in ends)
    return ParametricFit(model, end, errors, value, status, len(trace) - 1, np.array(trace), finals)


def starts_around(
    origin: np.ndarray, restarts: int, spread: float, generator: torch.Generator | None
) -> list[np.ndarray]:
    """The start itself, and others drawn around it."""
    noise = [torch.randn(len(origin), dtype=torch.float64, generator=generator) for _ in range(restarts)]
    return [origin, *(origin + spread * z.numpy() * np.maximum(np.abs(origin), 1.0) for z in noise)]
