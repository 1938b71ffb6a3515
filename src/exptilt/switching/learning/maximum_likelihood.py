"""Climbing the likelihood: L-BFGS over unconstrained numbers with the exact gradient of `adjoint`, and the curvature at the end.

Standard errors come from the Hessian: central differences of the gradient, inverted, and carried to named parameters by the delta method.
`fit_parameters` does all this for any model that is a differentiable function of a vector.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.optimize
import torch

from ..._support.errors import ArgumentError
from ..._support.progress import track
from ..checks import plain
from ..inference.filter import filter_series
from ..inference.run import METHODS
from ..model import SwitchingLinearGaussian
from ..series import Data, read


class FitStatus(enum.Enum):
    """Why a fit stopped; the value is the message."""

    CONVERGED = "converged: the log-likelihood rose by less than the tolerance"
    MAX_STEPS = "stopped at max_steps; the log-likelihood was still rising"
    DECREASED = "stopped: EM has lowered the log-likelihood for ten steps (the collapse makes its E-step approximate); the best step is returned"
    STALLED = "stopped: the line search found no better point, though the gradient is not zero"


def checked_data(model: SwitchingLinearGaussian, y: Any, skip: int) -> Data:
    """The data of a fit, cut from any graph; nothing observed, a constant component or too large a `skip` is refused."""
    data = read(y, model.outputs, what="fit")
    data = Data(
        data.tensor.detach(), data.starts, data.layout, data.kind, data.dtype, data.index, data.columns
    )
    rows = data.rows
    if np.isnan(rows).all():
        raise ArgumentError("fit: every value is missing. Pass data with something observed.")
    for a in range(rows.shape[1]):
        seen = rows[~np.isnan(rows[:, a]), a]
        if len(seen) and np.ptp(seen) == 0:
            raise ArgumentError(
                f"fit: component {a} is constant ({seen[0]:g}), so its likelihood has no maximum. Leave it out, or "
                f"pass a series that varies."
            )
    if not 0 <= skip < data.lengths.min():
        raise ArgumentError(
            f"fit: skip is {skip}, the shortest series has {data.lengths.min()} steps. Pass fewer."
        )
    return data


def likelihood(
    model: SwitchingLinearGaussian, data: Data, inputs: Any, method: str, skip: int
) -> torch.Tensor:
    """Σ of the log-likelihood terms, without the first `skip` of each series."""
    series = [data.tensor[a:b] for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
    post = filter_series(model, series, method=method, inputs=inputs)
    return torch.stack([part[skip:].sum() for part in post.log_likelihood_terms]).sum()


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def objective(
    build: Callable[[torch.Tensor], SwitchingLinearGaussian], data: Data, inputs: Any, method: str, skip: int
) -> Objective:
    """Minus the log-likelihood and its gradient as functions of the unconstrained numbers; +inf where the model they stand for is
    impossible.
    """

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
        try:
            value = likelihood(build(x), data, inputs, method, skip)
        except ArgumentError:
            return np.inf, np.zeros_like(theta)
        (slope,) = torch.autograd.grad(value, x)
        return -float(value.detach()), -slope.numpy()

    return evaluate


def climb(
    evaluate: Objective, start: np.ndarray, max_steps: int, tolerance: float, progress: bool | None
) -> tuple[np.ndarray, FitStatus, list[float]]:
    """L-BFGS from `start`; returns the best point, why it stopped, and the trace of log-likelihoods."""
    best_value, _ = evaluate(start)
    if not np.isfinite(best_value):
        raise ArgumentError(
            "fit: the filter cannot run at the start (an innovation covariance is singular). Start from larger noises."
        )
    trace = [-best_value]
    bar = iter(track(range(max_steps), "maximum likelihood", show=progress))

    def note(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        trace.append(-float(intermediate_result.fun))
        next(bar, None)

    scale = max(abs(best_value), 1.0)

    def bounded(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = evaluate(theta)
        return (value, slope) if np.isfinite(value) else (1e10 * scale, slope)

    result = scipy.optimize.minimize(
        bounded, start, jac=True, method="L-BFGS-B", callback=note,
        options={"maxiter": max_steps, "maxfun": 20 * max_steps, "ftol": tolerance / scale, "gtol": 1e-7, "maxcor": 20},
    )  # fmt: skip
    bar.close()  # type: ignore[attr-defined]
    if result.status == 1:
        status = FitStatus.MAX_STEPS
    elif result.status == 0 or np.abs(result.jac).max() < 1e-4 * scale:
        status = FitStatus.CONVERGED
    else:
        status = FitStatus.STALLED
    return result.x, status, trace


def curvature(evaluate: Objective, theta: np.ndarray) -> np.ndarray | None:
    """The inverse Hessian of minus the log-likelihood, from central differences of its gradient; None where it is not positive definite."""
    k = len(theta)
    H = np.empty((k, k))
    for i in range(k):
        h = 1e-4 * max(1.0, abs(theta[i]))
        step = np.zeros(k)
        step[i] = h
        up, down = evaluate(theta + step), evaluate(theta - step)
        if not (np.isfinite(up[0]) and np.isfinite(down[0])):
            return None
        H[i] = (up[1] - down[1]) / (2 * h)
    H = (H + H.T) / 2
    try:
        np.linalg.cholesky(H)
    except np.linalg.LinAlgError:
        return None
    return np.linalg.inv(H)


def delta_method(
    natural: Callable[[torch.Tensor], dict[str, torch.Tensor]], theta: np.ndarray, spread: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Standard errors of named functions of theta: sqrt diag(J spread J')."""
    point = torch.tensor(theta, dtype=torch.float64)
    names = list(natural(point))
    out = {}
    for name in names:
        jacobian = torch.autograd.functional.jacobian(lambda x, name=name: natural(x)[name], point).numpy()
        flat = jacobian.reshape(-1, len(theta))
        if spread is None:
            errors = np.full(len(flat), np.nan)
        else:
            errors = np.sqrt(np.maximum(np.einsum("ki,ij,kj->k", flat, spread, flat), 0.0))
        errors[~flat.any(1)] = np.nan
        out[name] = errors.reshape(jacobian.shape[:-1])
    return out


@dataclass(frozen=True, eq=False)
class ParametricFit:
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

    model: SwitchingLinearGaussian
    parameters: np.ndarray
    standard_errors: np.ndarray
    log_likelihood: float
    status: FitStatus
    steps: int
    trace: np.ndarray = field(repr=False)
    restarts: tuple[float, ...]


def fit_parameters(
    build: Callable[[torch.Tensor], SwitchingLinearGaussian],
    start: Any,
    y: Any,
    *,
    filter: str = "gpb2",
    inputs: Any = None,
    restarts: int = 0,
    spread: float = 0.3,
    max_steps: int = 500,
    tolerance: float = 1e-6,
    skip: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> ParametricFit:
    """Maximum likelihood of any model that is a differentiable function of a vector: structure, shared and fixed entries are what `build`
    makes them.

    Args:
        build: from a ``(k,)`` float64 tensor to a model made of tensors.
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
    origin = np.array(plain(start), dtype=np.float64).reshape(-1)
    data = checked_data(build(torch.from_numpy(origin)), y, skip)
    evaluate = objective(build, data, inputs, filter, skip)
    ends = []
    for attempt in range(restarts + 1):
        noise = torch.randn(len(origin), dtype=torch.float64, generator=generator).numpy() if attempt else 0.0
        try:
            point, status, trace = climb(
                evaluate,
                origin + spread * noise * np.maximum(np.abs(origin), 1.0),
                max_steps,
                tolerance,
                progress,
            )
        except ArgumentError:
            if attempt == 0:
                raise
            continue
        ends.append((-evaluate(point)[0], point, status, trace))
    value, point, status, trace = max(ends, key=lambda end: end[0])
    inverse = curvature(evaluate, point)
    errors = np.full(len(point), np.nan) if inverse is None else np.sqrt(inverse.diagonal())
    with torch.no_grad():
        model = build(torch.from_numpy(point))
    return ParametricFit(
        model, point, errors, value, status, len(trace) - 1, np.array(trace), tuple(end[0] for end in ends)
    )
