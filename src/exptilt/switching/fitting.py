"""Learning: one call for EM and maximum likelihood, with restarts, standard errors, and a stated reason to stop.

EM climbs by solving regressions (`em`); maximum likelihood climbs the gradient of the log-likelihood (`adjoint`) with L-BFGS over the
unconstrained numbers
of `free`. Both maximise the likelihood of the filter they are given: with a collapse it is that filter's approximation.

Standard errors come from the curvature at the end: the Hessian of the log-likelihood by central differences of its exact gradient,
inverted, and carried to
the parameters themselves by the delta method.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import scipy.optimize
import torch

from .._support.errors import ArgumentError
from .._support.progress import track
from .checks import plain
from .em import em_step
from .free import Free, choose, to_parameters, to_vector
from .inputs import Data, _inputs, diffuse, read
from .model import SwitchingLinearGaussian
from .running import METHODS


class FitStatus(enum.Enum):
    """Why a fit stopped; the value is the message."""

    CONVERGED = "converged: the log-likelihood rose by less than the tolerance"
    MAX_STEPS = "stopped at max_steps; the log-likelihood was still rising"
    DECREASED = (
        "stopped: EM has lowered the log-likelihood for ten steps (the collapse makes its E-step approximate); the best step is returned"
    )
    STALLED = "stopped: the line search found no better point, though the gradient is not zero"


@dataclass(frozen=True, eq=False)
class Fit:
    """What was learned.

    Attributes:
        model: the fitted model.
        log_likelihood: at the end, over all series.
        status: why it stopped; ``status.value`` says it in words.
        residual: the last rise of the log-likelihood.
        steps: how many steps were made.
        trace: the log-likelihood at every step.
        decreases: how often a step lowered it.
        standard_errors: for each learned parameter an array of its shape, NaN where an entry was fixed or the curvature does not tell;
            None if not asked for.
        free_parameters: how many real numbers were learned.
        observations: how many observed components there were.
        restarts: the final log-likelihood of every start, the first being the model's own.
    """

    model: SwitchingLinearGaussian
    log_likelihood: float
    status: FitStatus
    residual: float
    steps: int
    trace: np.ndarray = field(repr=False)
    decreases: int
    standard_errors: dict[str, np.ndarray] | None = field(repr=False)
    free_parameters: int
    observations: int
    restarts: tuple[float, ...]

    @property
    def value(self) -> SwitchingLinearGaussian:
        """The fitted model."""
        return self.model

    @property
    def aic(self) -> float:
        """Akaike's criterion, 2k − 2 log L."""
        return 2 * self.free_parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion, k log N − 2 log L, N the number of observed components."""
        return self.free_parameters * float(np.log(self.observations)) - 2 * self.log_likelihood


def as_numpy(model: SwitchingLinearGaussian) -> SwitchingLinearGaussian:
    """The model with numpy fields."""
    values: dict[str, Any] = {f.name: getattr(model, f.name) for f in fields(model)}
    changed: dict[str, Any] = {k: v if k == "start" or v is None else plain(v) for k, v in values.items()}
    return SwitchingLinearGaussian(**changed)


def _data(model: SwitchingLinearGaussian, y: Any, skip: int) -> Data:
    data = read(y, model.outputs, what="fit")
    data = Data(data.tensor.detach(), data.starts, data.layout, data.kind, data.dtype, data.index, data.columns)
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
        raise ArgumentError(f"fit: skip is {skip}, the shortest series has {data.lengths.min()} steps. Pass fewer.")
    return data


def likelihood(model: SwitchingLinearGaussian, data: Data, inputs: Any, method: str, skip: int) -> torch.Tensor:
    """Σ of the log-likelihood terms, without the first `skip` of each series."""
    from .filtering import filter_series

    series = [data.tensor[a:b] for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
    post = filter_series(model, series, method=method, inputs=inputs)
    return torch.stack([part[skip:].sum() for part in post.log_likelihood_terms]).sum()


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def objective(build: Callable[[torch.Tensor], SwitchingLinearGaussian], data: Data, inputs: Any, method: str, skip: int) -> Objective:
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
        raise ArgumentError("fit: the filter cannot run at the start (an innovation covariance is singular). Start from larger noises.")
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


def expectation_maximisation(
    model: SwitchingLinearGaussian,
    data: Data,
    inputs: Any,
    free: Free,
    method: str,
    max_steps: int,
    tolerance: float,
    progress: bool | None,
) -> tuple[SwitchingLinearGaussian, FitStatus, list[float], int]:
    """Repeat `em_step` until the log-likelihood rises by less than `tolerance`; returns the best model met."""
    u = _rows_of_inputs(model, data, inputs)
    given = model.initial_covariance
    model, shift = diffuse(model, data)
    trace: list[float] = []
    best, best_value, decreases, stale = model, -np.inf, 0, 0
    status = FitStatus.MAX_STEPS
    for step in track(range(max_steps + 1), "EM", show=progress):
        value, new = em_step(model, data, inputs, u, free, method)
        value += shift * data.series
        trace.append(value)
        stale += 1
        if value > best_value:
            best, best_value, stale = model, value, 0
        if step:
            rise = value - trace[-2]
            if rise < -1e-9 * max(1.0, abs(value)):
                decreases += 1
            if stale == 10:
                status = FitStatus.DECREASED
                break
            if abs(rise) < tolerance:
                status = FitStatus.CONVERGED
                break
        if step < max_steps:
            model = model.replace(**new)
    return best.replace(initial_covariance=given) if shift else best, status, trace, decreases


def _rows_of_inputs(model: SwitchingLinearGaussian, data: Data, inputs: Any) -> np.ndarray:
    """Inputs with one row for every row of the data."""
    u = plain(_inputs(model, data, inputs, "fit"))
    if u.shape[-1] == 0:
        return np.zeros((len(data.rows), 0))
    return np.concatenate([u[b if len(u) > 1 else 0, :length] for b, length in enumerate(data.lengths)])


def fit_model(
    model: SwitchingLinearGaussian,
    y: Any,
    *,
    method: str = "em",
    filter: str = "gpb2",
    fixed: Sequence[str] | Mapping[str, Any] = (),
    shared: Sequence[str] = (),
    inputs: Any = None,
    learn_initial: bool = False,
    restarts: int = 0,
    max_steps: int = 500,
    tolerance: float = 1e-6,
    standard_errors: bool = True,
    skip: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fit:
    """Learn the parameters of a model, which is also the start.

    Args:
        model: start, and values of what is held fixed.
        y: as for `filter`; NaN is missing.
        method: "em" or "mle".
        filter: the filter whose likelihood is maximised, "gpb2", "imm" or "gpb1" ("mle" takes "exact" too).
        fixed: names held fixed, or a mapping from names to masks, True where an entry is held.
        shared: names that all modes have in common.
        inputs: as for `filter`.
        learn_initial: learn the initial law too. One series says next to nothing about it, so it is held unless asked for.
        restarts: how many more starts, drawn around the first; the best end is returned.
        max_steps: of each start.
        tolerance: stop when the log-likelihood rises by less than this, in nats.
        standard_errors: whether to work them out.
        skip: leave the first terms of each series out of the likelihood ("mle" only), as some published results do.
        generator: randomness of the restarts.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    filters = [*METHODS, "exact"] if method == "mle" else list(METHODS)
    if method not in ("em", "mle"):
        raise ArgumentError(f'fit: method is {method!r}. Pass "em" or "mle".')
    if filter not in filters:
        raise ArgumentError(f"fit: filter is {filter!r}. With method={method!r} pass one of {filters}.")
    if method == "em" and skip:
        raise ArgumentError('fit: EM cannot leave terms out. Use method="mle", or skip=0.')
    if restarts < 0 or max_steps < 1 or not tolerance > 0:
        raise ArgumentError(
            f"fit: restarts={restarts}, max_steps={max_steps}, tolerance={tolerance}. Pass at least 0, at least 1, and above 0."
        )
    data = _data(model, y, skip)
    base = as_numpy(model)
    free = choose(base, fixed, shared, learn_initial)
    if method == "em":
        _check_em(base, free)
    theta = to_vector(free, base)

    def natural(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return to_parameters(free, base, x)

    def build(x: torch.Tensor) -> SwitchingLinearGaussian:
        return base.replace(**natural(x))

    def concrete(x: np.ndarray) -> SwitchingLinearGaussian:
        return base.replace(**{k: v.numpy() for k, v in natural(torch.from_numpy(x)).items()})

    evaluate = objective(build, data, inputs, filter, skip)
    ends: list[tuple[float, SwitchingLinearGaussian, FitStatus, list[float], int]] = []
    for attempt in range(restarts + 1):
        noise = torch.randn(len(theta), dtype=torch.float64, generator=generator).numpy() if attempt else 0.0
        start = theta + 0.3 * noise * np.maximum(np.abs(theta), 1.0)
        try:
            if method == "em":
                found, status, trace, decreases = expectation_maximisation(
                    concrete(start), data, inputs, free, filter, max_steps, tolerance, progress
                )
                ends.append((max(trace), found, status, trace, decreases))
            else:
                point, status, trace = climb(evaluate, start, max_steps, tolerance, progress)
                ends.append((-evaluate(point)[0], concrete(point), status, trace, 0))
        except ArgumentError:
            if attempt == 0:
                raise
            ends.append((-np.inf, base, FitStatus.STALLED, [-np.inf], 0))
    best = max(ends, key=lambda end: end[0])
    value, found, status, trace, decreases = best
    errors = None
    if standard_errors:
        try:
            point = to_vector(free, found)
            errors = delta_method(natural, point, curvature(evaluate, point))
        except ArgumentError:  # a noise that went to zero has no curvature to speak of
            errors = {name: np.full(mask.shape, np.nan) for name, mask in free.masks.items()}
    result = found
    if isinstance(model.transition, torch.Tensor):
        kept = model.transition.dtype
        values = {f.name: getattr(found, f.name) for f in fields(found)}
        changed: dict[str, Any] = {k: v if k == "start" or v is None else torch.as_tensor(v, dtype=kept) for k, v in values.items()}
        result = SwitchingLinearGaussian(**changed)
    rise = trace[-1] - trace[-2] if len(trace) > 1 else 0.0
    return Fit(
        result, value, status, rise, len(trace) - 1, np.array(trace), decreases, errors, len(theta), int((~np.isnan(data.rows)).sum()),
        tuple(end[0] for end in ends),
    )  # fmt: skip


def _check_em(model: SwitchingLinearGaussian, free: Free) -> None:
    groups = (("dynamics", "dynamics_offset", "dynamics_input", "process_noise"),
              ("observation", "observation_offset", "observation_input", "observation_noise"))  # fmt: skip
    for group in groups:
        if not any(name in free.masks for name in group):
            continue
        for name in group:
            value = getattr(model, name)
            rank = 2 if name.endswith("offset") else 3
            if value is not None and value.ndim == rank + 1:
                raise ArgumentError(
                    f"fit: {name} varies in time, so EM cannot learn {[g for g in group if g in free.masks]}. Fix them, "
                    f'or use method="mle".'
                )
        noise = plain(getattr(model, group[3]))
        for name in group[:3]:
            rows = (
                free.masks[name].reshape(model.modes, noise.shape[-1], -1).any(-1)
                if name in free.masks
                else np.zeros(noise.shape[:2], dtype=bool)
            )
            stuck = rows & (np.diagonal(noise, axis1=1, axis2=2) == 0)
            if stuck.any():
                k, r = np.argwhere(stuck)[0]
                raise ArgumentError(
                    f"fit: {name} is to be learned, but {group[3]} of mode {k} is zero in row {r}: without noise EM cannot move it. "
                    'Fix that row, give it a positive variance, or use method="mle".'
                )
        if group[0] == "dynamics" and model.maps is not None:
            raise ArgumentError(
                'fit: EM cannot learn dynamics between modes with maps. Fix dynamics and process_noise, or use method="mle".'
            )


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
    data = _data(build(torch.from_numpy(origin)), y, skip)
    evaluate = objective(build, data, inputs, filter, skip)
    ends = []
    for attempt in range(restarts + 1):
        noise = torch.randn(len(origin), dtype=torch.float64, generator=generator).numpy() if attempt else 0.0
        try:
            point, status, trace = climb(
                evaluate, origin + spread * noise * np.maximum(np.abs(origin), 1.0), max_steps, tolerance, progress
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
    return ParametricFit(model, point, errors, value, status, len(trace) - 1, np.array(trace), tuple(end[0] for end in ends))
