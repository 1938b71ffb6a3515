"""Learning: one call for EM and maximum likelihood, with restarts, standard errors and a reason to stop.

Maximum likelihood climbs the gradient of the log-likelihood with L-BFGS (`climb.py`) over the unconstrained
numbers of `free_parameters.py`. EM first climbs by solving regressions (`em.py`), and L-BFGS goes on from its
end. Both maximise the likelihood of the chosen filter, which with a collapse is an approximation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..inference.problem import input_rows, read_inputs
from ..inference.run import METHODS
from ..inference.window import check_method
from ..parameters import RANKS, Model
from ..series import Data, SeriesLike
from .chain import read_chain
from .climb import FLOOR, LEAST, FitStatus, Limits, delta_method, highest, starts_around
from .constraints import apply_constraints, read_constraints
from .em import check_em, expectation_maximisation
from .free_parameters import Free, choose, units
from .maximum_likelihood import check_columns, check_enough, checked_data, objective
from .summary import Fit


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
    skip: int = 0,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    constraints: str | Sequence[str] = (),
    initial: str = "given",
    transition_inputs: ArrayLike | None = None,
    durations: int = 1,
    diagonal: str | Sequence[str] = (),
) -> Fit[Model]:
    """Learn the parameters of a model, which is the start; arguments as for `SwitchingLinearGaussian.fit`."""
    if method not in ("em", "mle"):
        raise ArgumentError(f'fit: method is {method!r}. Pass "em" or "mle".')
    check_method(filter, "fit", "exact", argument="filter")
    if method == "em" and filter not in METHODS:
        raise ArgumentError(
            f'fit: filter is {filter!r}, and EM takes one of {[*METHODS]}. Use method="mle" for others.'
        )
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
    if chain.initial != "given" and learn_initial:
        raise ArgumentError(
            f'fit: learn_initial=True and initial="{chain.initial}" exclude each other. Pass one of them.'
        )
    held = {name: tied.get(name, False) | mask for name, mask in chain.held(plain(base.transition)).items()}
    scales, deviations = units(values, data.rows, u.numpy())
    free = choose(values, fixed, shared, learn_initial, tied | held, scales, diagonal)
    low, floor = (
        free.low({name: least * size for name, size in deviations.items()}) for least in (LEAST, FLOOR)
    )
    low = np.minimum(low, 0.0)  # the start
    if method == "em":
        check_em(base, free)
    check_enough("fit", free.size, int((~np.isnan(data.rows)).sum()))
    for name in ("dynamics", "observation"):
        if f"{name}_input" in free.masks and data.series == 1:
            known = input_rows(u, data)
            check_columns("fit: inputs", known, f"{name}_offset" in free.masks, range(known.shape[1]))
    theta = np.zeros(free.size)
    constants = {name: torch.from_numpy(np.asarray(value)) for name, value in values.items()}
    learned = [name for name in values if name in free.masks or name in tied]

    def natural(x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters that have learned entries."""
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
        concrete(theta)  # raises if the start makes no valid model
    starts, traces, drops = starts_around(theta, restarts, 0.5, generator), None, dict[float, int]()
    if method == "em":
        starts, traces, drops = _em_starts(
            starts, free, concrete, data, u, filter, (max_steps, tolerance, progress)
        )
    limits = max_steps, tolerance, progress
    ends, end, same = highest(evaluate, starts, limits, free.bounded, low, floor, traces)
    if end.status is FitStatus.STALLED:
        end = replace(end, reason=free.same_regimes(end.point) or end.reason)
    named = {name: array.numpy() for name, array in natural(torch.from_numpy(end.point)).items()}
    found = concrete(end.point)
    if model.is_torch:
        present = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "start"}
        kept = model.transition.dtype
        tensors = {k: torch.as_tensor(v, dtype=kept) for k, v in present.items() if v is not None}
        found = found._replaced(**tensors)
    told = {name: free.masks.get(name, False) | tied.get(name, np.False_) for name in learned}
    return Fit._of(
        ends,
        end,
        same,
        free.label,
        model=found,
        decreases=drops.get(end.trace[0], 0),
        standard_errors=delta_method(natural, end.point, end.inverse),
        free_parameters=free.size,
        observations=int((~np.isnan(data.rows)).sum()),
        estimates={name: np.where(told[name], array, np.nan) for name, array in named.items()},
        regimes=base.modes,
        y=y,
        inputs=inputs,
        filter=filter,
    )


def _em_starts(
    starts: Sequence[np.ndarray],
    free: Free,
    concrete: Callable[[np.ndarray], Model],
    data: Data,
    inputs: torch.Tensor,
    filter: str,
    limits: Limits,
) -> tuple[list[np.ndarray], list[list[float]], dict[float, int]]:
    """Ends of EM, their traces, and how often the likelihood fell, keyed by the first entry of the trace.

    A start from which EM cannot run is left out, unless it is the first. Where EM ends at a noise of zero,
    that start is kept in its place.
    """
    points, traces, drops = list[np.ndarray](), list[list[float]](), dict[float, int]()
    for start in starts:
        try:
            model = concrete(start)
            best, trace, fell = expectation_maximisation(model, data, inputs, free, filter, *limits)
        except ArgumentError:
            if not points:
                raise
            continue
        try:
            point = free.vector({name: plain(getattr(best, name)) for name in free.masks})
            trace = trace[: int(np.argmax(trace)) + 1]
        except ArgumentError:
            point, trace = start, trace[:1]
        points.append(point)
        traces.append(trace)
        drops[trace[0]] = fell
    return points, traces, drops
