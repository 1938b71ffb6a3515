"""Learning: one call for EM and maximum likelihood, with restarts, standard errors and a reason to stop.

EM climbs by solving regressions (`em.py`); maximum likelihood climbs the gradient of the log-likelihood with
L-BFGS (`maximum_likelihood.py`) over the unconstrained numbers of `free_parameters.py`. Both maximise the
likelihood of the filter they are given: with a collapse it is that filter's approximation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..inference.problem import read_inputs
from ..inference.run import METHODS
from ..parameters import Model
from ..series import SeriesLike
from .em import check_em, expectation_maximisation
from .free_parameters import choose, to_parameters, to_vector
from .maximum_likelihood import (
    FitStatus,
    checked_data,
    climb,
    curvature,
    delta_method,
    objective,
    starts_around,
)


@dataclass(frozen=True, eq=False)
class Fit(Generic[Model]):
    """What was learned.

    Attributes:
        model: the fitted model.
        log_likelihood: at the end, over all series.
        status: why it stopped; ``status.value`` says it in words.
        residual: the last rise of the log-likelihood.
        steps: how many steps were made.
        trace: the log-likelihood at every step.
        decreases: how often a step lowered it.
        standard_errors: for each learned parameter an array of its shape, NaN where an entry was fixed or the
            curvature does not tell; None if not asked for.
        free_parameters: how many real numbers were learned.
        observations: how many observed components there were.
        restarts: the final log-likelihood of every start, the first being the model's own.
    """

    model: Model
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
    def value(self) -> Model:
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


def fit_model(
    model: Model,
    y: SeriesLike,
    *,
    method: str = "em",
    filter: str = "gpb2",
    fixed: str | Sequence[str] | Mapping[str, ArrayLike] = (),
    shared: str | Sequence[str] = (),
    inputs: SeriesLike | None = None,
    learn_initial: bool = False,
    restarts: int = 0,
    max_steps: int = 500,
    tolerance: float = 1e-6,
    standard_errors: bool = True,
    skip: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fit[Model]:
    """Learn the parameters of a model, which is the start; arguments as for `SwitchingLinearGaussian.fit`."""
    filters = [*METHODS, "exact"] if method == "mle" else list(METHODS)
    if method not in ("em", "mle"):
        raise ArgumentError(f'fit: method is {method!r}. Pass "em" or "mle".')
    if filter not in filters:
        raise ArgumentError(f"fit: filter is {filter!r}. With method={method!r} pass one of {filters}.")
    if method == "em" and skip:
        raise ArgumentError('fit: EM cannot leave terms out. Use method="mle", or skip=0.')
    if restarts < 0 or max_steps < 1 or not tolerance > 0:
        raise ArgumentError(
            f"fit: restarts={restarts}, max_steps={max_steps}, tolerance={tolerance}. "
            "Pass at least 0, at least 1, and above 0."
        )
    data = checked_data(model, y, skip)
    u = read_inputs(model, data, inputs, "fit")
    arrays = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "start"}
    base = model._replaced(
        **{name: value if value is None else plain(value) for name, value in arrays.items()}
    )
    free = choose(base, fixed, shared, learn_initial)
    if method == "em":
        check_em(base, free)
    theta = to_vector(free, base)

    def natural(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return to_parameters(free, base, x)

    def concrete(x: np.ndarray) -> Model:
        return base.replace(**{name: value.numpy() for name, value in natural(torch.from_numpy(x)).items()})

    evaluate = objective(lambda x: base._replaced(**natural(x)), data, u, filter, skip)
    ends: list[tuple[float, Model, FitStatus, list[float], int]] = []
    for start in starts_around(theta, restarts, 0.3, generator):
        try:
            if method == "em":
                found, status, trace, decreases = expectation_maximisation(
                    concrete(start), data, u, free, filter, max_steps, tolerance, progress
                )
                ends.append((max(trace), found, status, trace, decreases))
            else:
                point, status, trace = climb(evaluate, start, max_steps, tolerance, progress)
                ends.append((-evaluate(point)[0], concrete(point), status, trace, 0))
        except ArgumentError:
            if not ends:
                raise
            ends.append((-np.inf, base, FitStatus.STALLED, [-np.inf], 0))
    value, found, status, trace, decreases = max(ends, key=lambda end: end[0])
    errors = None
    if standard_errors:
        try:
            point = to_vector(free, found)
            errors = delta_method(natural, point, curvature(evaluate, point))
        except ArgumentError:  # a noise that went to zero has no curvature to speak of
            errors = {name: np.full(mask.shape, np.nan) for name, mask in free.masks.items()}
    if model.is_torch:
        learned = {name: getattr(found, name) for name, old in arrays.items() if old is not None}
        kept = model.transition.dtype
        found = found._replaced(**{name: torch.as_tensor(v, dtype=kept) for name, v in learned.items()})
    return Fit(
        model=found,
        log_likelihood=value,
        status=status,
        residual=trace[-1] - trace[-2] if len(trace) > 1 else 0.0,
        steps=len(trace) - 1,
        trace=np.array(trace),
        decreases=decreases,
        standard_errors=errors,
        free_parameters=len(theta),
        observations=int((~np.isnan(data.rows)).sum()),
        restarts=tuple(end[0] for end in ends),
    )
