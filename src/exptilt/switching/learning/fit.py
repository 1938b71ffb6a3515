"""Learning: one call for EM and maximum likelihood, with restarts, standard errors, and a stated reason to stop.

EM climbs by solving regressions (`em`); maximum likelihood climbs the gradient of the log-likelihood (`adjoint`) with L-BFGS over the
unconstrained numbers
of `free`. Both maximise the likelihood of the filter they are given: with a collapse it is that filter's approximation.

Standard errors come from the curvature at the end: the Hessian of the log-likelihood by central differences of its exact gradient,
inverted, and carried to
the parameters themselves by the delta method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.progress import track
from ..checks import plain
from ..inference.run import METHODS
from ..model import SwitchingLinearGaussian
from ..series import Data, _inputs, diffuse
from .em import em_step
from .free_parameters import Free, choose, to_parameters, to_vector
from .maximum_likelihood import FitStatus, checked_data, climb, curvature, delta_method, objective


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
    data = checked_data(model, y, skip)
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
        changed: dict[str, Any] = {
            k: v if k == "start" or v is None else torch.as_tensor(v, dtype=kept) for k, v in values.items()
        }
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
