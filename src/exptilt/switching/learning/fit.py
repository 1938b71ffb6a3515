"""Learning: one call for EM and maximum likelihood, with restarts, standard errors and a reason to stop.

EM climbs by solving regressions (`em.py`); maximum likelihood climbs the gradient of the log-likelihood with
L-BFGS (`maximum_likelihood.py`) over the unconstrained numbers of `free_parameters.py`. Both maximise the
likelihood of the filter they are given: with a collapse it is that filter's approximation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..inference.problem import read_inputs
from ..inference.run import METHODS
from ..parameters import RANKS, Model
from ..series import SeriesLike
from .chain import read_chain
from .constraints import apply_constraints, read_constraints
from .em import check_em, expectation_maximisation
from .free_parameters import choose
from .maximum_likelihood import (
    FitStatus,
    checked_data,
    climb,
    curvature,
    delta_method,
    objective,
    starts_around,
)
from .summary import Learned


@dataclass(frozen=True, eq=False)
class Fit(Learned, Generic[Model]):
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
        estimates: for each learned parameter an array of its shape, NaN where an entry was fixed. With
            covariates and durations "transition" is the base law, and "transition_input" ``(M, M, k)`` and
            "transition_age" ``(M,)`` say what moves it.
        regimes: how many there are; the model has more modes where their ages are told apart.
        y, inputs: what was fitted.
        filter: the filter whose likelihood it is.
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
    estimates: dict[str, np.ndarray] = field(repr=False, default_factory=dict)
    regimes: int = 0
    y: Any = field(repr=False, default=None)
    inputs: Any = field(repr=False, default=None)
    filter: str = "gpb2"

    @property
    def value(self) -> Model:
        """The fitted model."""
        return self.model


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
    constraints: str | Sequence[str] = (),
    initial: str = "given",
    transition_inputs: ArrayLike | None = None,
    durations: int = 1,
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
    chain = read_chain(base, int(data.lengths.max()), initial, transition_inputs, durations)
    values = {name: value for name in RANKS if (value := getattr(base, name)) is not None}
    values |= chain.extra(plain(base.transition))
    ties, tied = read_constraints(constraints, values)
    if method == "em" and (ties or not chain.plain):
        raise ArgumentError(
            "fit: EM takes no constraints, initial law, covariates or durations that are tied to parameters. "
            'Use method="mle".'
        )
    if chain.initial == "stationary" and learn_initial:
        raise ArgumentError('fit: learn_initial=True and initial="stationary" exclude each other.')
    held = {name: tied.get(name, False) | mask for name, mask in chain.held(plain(base.transition)).items()}
    free = choose(values, fixed, shared, learn_initial, tied | held)
    if method == "em":
        check_em(base, free)
    theta = free.vector(values)
    constants = {name: torch.from_numpy(np.asarray(value)) for name, value in values.items()}
    learned = [name for name in values if name in free.masks or name in tied]

    def natural(x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters with something learned."""
        found = free.natural(x)
        if ties:
            every = apply_constraints(ties, tied, constants | found)
            return {name: every[name] for name in learned}
        return found

    def build(x: torch.Tensor, strict: bool = False) -> Model:
        named = natural(x)
        return base._replaced(**(named if chain.plain else chain.assemble(base, constants | named, strict)))

    def concrete(x: np.ndarray) -> Model:
        made = build(torch.from_numpy(x), strict=True)
        return base.replace(**{name: plain(getattr(made, name)) for name in values if name in RANKS})

    evaluate = objective(build, data, u, filter, skip)
    if not chain.plain or ties:
        concrete(theta)  # says what is wrong with the start
    ends: list[tuple[float, np.ndarray | Model, FitStatus, list[float], int]] = []
    for start in starts_around(theta, restarts, 0.3, generator):
        try:
            if method == "em":
                found, status, trace, decreases = expectation_maximisation(
                    concrete(start), data, u, free, filter, max_steps, tolerance, progress
                )
                ends.append((max(trace), found, status, trace, decreases))
            else:
                point, status, trace = climb(evaluate, start, max_steps, tolerance, progress)
                concrete(point)
                ends.append((-evaluate(point)[0], point, status, trace, 0))
        except ArgumentError:
            if not ends:
                raise
            ends.append((-np.inf, theta, FitStatus.STALLED, [-np.inf], 0))
    value, end, status, trace, decreases = max(ends, key=lambda found: found[0])
    if isinstance(end, np.ndarray):
        point, found = end, concrete(end)
        named = {name: array.numpy() for name, array in natural(torch.from_numpy(point)).items()}
    else:
        found = end
        named = {name: plain(getattr(end, name)) for name in learned}
    errors = None
    if standard_errors:
        try:
            point = point if isinstance(end, np.ndarray) else free.vector(named)
            errors = delta_method(natural, point, curvature(evaluate, point))
        except ArgumentError:  # a noise that went to zero has no curvature to speak of
            errors = {name: np.full(array.shape, np.nan) for name, array in named.items()}
    if model.is_torch:
        present = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "start"}
        kept = model.transition.dtype
        tensors = {k: torch.as_tensor(v, dtype=kept) for k, v in present.items() if v is not None}
        found = found._replaced(**tensors)
    told = {name: free.masks.get(name, False) | tied.get(name, np.False_) for name in learned}
    return Fit(
        model=found,
        log_likelihood=value,
        status=status,
        residual=trace[-1] - trace[-2] if len(trace) > 1 else 0.0,
        steps=len(trace) - 1,
        trace=np.array(trace),
        decreases=decreases,
        standard_errors=errors,
        free_parameters=free.size,
        observations=int((~np.isnan(data.rows)).sum()),
        restarts=tuple(end[0] for end in ends),
        estimates={name: np.where(told[name], array, np.nan) for name, array in named.items()},
        regimes=base.modes,
        y=y,
        inputs=inputs,
        filter=filter,
    )
