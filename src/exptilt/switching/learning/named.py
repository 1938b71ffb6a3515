"""Fits of models with named parameters of their own, climbed from several starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.checks import whole
from ..._support.errors import ArgumentError
from .chain import AGE, INPUT
from .climb import FLOOR, LEAST, FitStatus, Objective, best_starts, delta_method, highest, starts_around
from .constraints import apply_constraints, read_constraints
from .free_parameters import Bounds, Free
from .profile import freedom, profile_errors
from .summary import Fit

# With more than twice PART rows, starts are chosen on PART of them, taken in stretches of BLOCK.
PART, BLOCK = 2000, 200
COARSE = 1e-4  # nats: tolerance of a fit that starts where that of a longer series ended
Fixed = Mapping[str, ArrayLike]
Arrays = dict[str, np.ndarray]
Options = tuple[int, int, Fixed | None, str | Sequence[str]]  # starts, seed, fixed, constraints


@dataclass(frozen=True)
class Named:
    """Named parameters of a fit, which of them are learned, and their constraints.

    Attributes:
        values: ``(M, ...)`` arrays by name, the start.
        free: the learned entries; None if there are none.
        natural: from unconstrained numbers to all parameters.
        tied: whether constraints tie some of them.
    """

    values: dict[str, np.ndarray]
    free: Free | None
    natural: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    tied: bool

    def values_at(self, theta: np.ndarray) -> tuple[Arrays, Callable[[Arrays], np.ndarray]]:
        """All parameters at `theta`, and the function that takes derivatives in them back."""
        if self.free is None:
            return self.values, lambda bars: np.zeros(0)
        if self.tied:
            found, pull = pulled(lambda x: self.natural(x["theta"]), {"theta": theta})
            return found, lambda bars: pull(bars)["theta"]
        free = self.free
        arrays, back = free.values(theta)
        return self.values | dict(zip(free.masks, arrays, strict=True)), lambda bars: back(
            [bars[name] for name in free.masks]
        )


def pulled(
    function: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], given: Arrays
) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """Value of a torch function of arrays, and the function that pulls derivatives back to them."""
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in given.items()}
    made = function(leaves)

    def pull(bars: Arrays) -> Arrays:
        moved = [name for name, value in made.items() if value.requires_grad]
        weights = [torch.from_numpy(bars[name]) for name in moved]
        slopes = torch.autograd.grad([made[name] for name in moved], list(leaves.values()), weights)
        return {name: slope.numpy() for name, slope in zip(leaves, slopes, strict=True)}

    return {name: value.detach().numpy() for name, value in made.items()}, pull


def name_parameters(
    what: str,
    values: dict[str, np.ndarray],
    switching: frozenset[str],
    bounds: Bounds,
    fixed: Fixed | None,
    constraints: str | Sequence[str],
    held: Mapping[str, np.ndarray],
    scales: Mapping[str, np.ndarray],
    leans: Mapping[tuple[str, str], np.ndarray] | None = None,
) -> Named:
    """Named parameters with `fixed` put in where it is not NaN; entries in `held` are never learned.

    `scales` are the deviations of drawn starts, in units of the parameter; `leans` is as in `Free`.
    """
    values, free = dict(values), dict[str, np.ndarray]()
    for name, value in (fixed or {}).items():
        if name not in values:
            raise ArgumentError(f"{what}: fixed has {name!r}. Pass some of {sorted(values)}.")
        given = np.asarray(value, dtype=np.float64)
        if given.ndim == values[name].ndim - 1 and name != "transition" and values[name].ndim > 1:
            given = given[None] if given.shape == values[name].shape[1:] else given[..., None]
        try:
            given = np.broadcast_to(given, values[name].shape)
            free[name] = np.isnan(given)
            values[name] = np.where(free[name], values[name], given)
        except ValueError:
            raise ArgumentError(
                f"{what}: fixed {name} has shape {np.shape(value)}. Pass {values[name].shape}."
            ) from None
    ties, tied = read_constraints(constraints, values)
    masks = {}
    for name, value in values.items():
        mask = free.get(name, np.ones(value.shape, dtype=bool))
        mask &= ~(tied.get(name, np.zeros_like(mask)) | held.get(name, np.zeros_like(mask)))
        if mask.any() and not (name == "transition" and len(value) == 1):
            masks[name] = mask
    own = (*switching, "transition", INPUT, AGE)
    alike = [name for name, mask in masks.items() if (mask == mask[:1]).all()]
    shared = frozenset(name for name in alike if name not in own and name not in held)
    learned = Free(values, masks, shared, bounds, scales, leans) if masks else None
    constants = {name: torch.from_numpy(value) for name, value in values.items()}

    def natural(theta: torch.Tensor) -> dict[str, torch.Tensor]:
        found = constants if learned is None else constants | learned.natural(theta)
        return apply_constraints(ties, tied, found) if ties else found

    return Named(values, learned, natural, bool(ties))


def climb_named(
    what: str,
    named: Named,
    evaluate: Objective,
    rank_by: str,
    starts: int,
    seed: int,
    tolerance: float,
    draws: tuple[int, int],
    noises: Mapping[str, tuple[ArrayLike, int]],
    search: Objective | None = None,
    progress: bool | None = None,
    profile: bool = False,
    others: Sequence[Arrays] = (),
    **fields: Any,
) -> Fit[Any]:
    """Climb from several starts; the fit without its model, regimes in order of `rank_by`.

    Args:
        what: the caller, for messages.
        named: the parameters.
        evaluate: minus the log-likelihood and its gradient.
        rank_by: the parameter that orders regimes.
        starts, seed: how many starts, and the seed of those after the first.
        tolerance: in nats.
        draws: how many points are drawn for each start, and steps made from each; the best are climbed from.
        noises: for each noise the deviation of its data, and 1 if the noise is a deviation, 2 if a variance.
        search: the objective by which drawn points are chosen; `evaluate` if None.
        progress: show a bar: True, False, or None for only on a terminal.
        profile: whether intervals are taken by profile likelihood.
        others: more parameters to start from; the first and the best two are climbed from, too.
        fields: of the fit, `observations` among them.
    """

    def values_of(point: np.ndarray) -> Arrays:
        return {name: array.numpy() for name, array in named.natural(torch.from_numpy(point)).items()}

    def level_of(table: Arrays) -> np.ndarray:
        return table[rank_by].reshape(len(table[rank_by]), -1)[:, 0]

    free, origin = named.free, np.zeros(0 if named.free is None else named.free.size)
    if not np.isfinite(evaluate(origin)[0]):
        raise ArgumentError(f"{what}: the filter cannot run at the start or the fixed values. Pass others.")
    bounded, walls = np.zeros(0, dtype=bool), [np.zeros(0)] * 2
    if free is not None:
        bounded = free.bounded
        walls = [
            free.low({name: (least * np.asarray(unit)) ** power for name, (unit, power) in noises.items()})
            for least in (LEAST, FLOOR)
        ]
    starts = 1 if len(named.values[rank_by]) == 1 else starts  # one regime has a single maximum
    generator = torch.Generator().manual_seed(seed)
    drawn = starts_around(origin, draws[0] * (starts - 1) if len(origin) else 0, 1.0, generator)
    judge = search or evaluate
    chosen = best_starts(judge, drawn, starts, walls[0], draws[1], progress)
    if free is not None and others:
        chosen += best_starts(judge, [free.vector(x) for x in others], 3, walls[0], draws[1], progress)
    if search is not None:  # the best three on all rows
        chosen = sorted(chosen, key=lambda start: evaluate(start)[0])[:3]
    ends, end, same = highest(evaluate, chosen, (500, tolerance, progress), bounded, walls[0], walls[1])
    estimates = values_of(end.point)
    errors = {name: np.full(array.shape, np.nan) for name, array in estimates.items()}
    if len(origin):
        errors = delta_method(named.natural, end.point, end.inverse)
    order = np.argsort(level_of(estimates), kind="stable")

    def arranged(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        out = {name: array[order] for name, array in table.items()}
        return out | {name: out[name][:, order] for name in ("transition", INPUT) if name in out}

    def label(number: int) -> str:
        if free is None or end.blamed is None:
            return "" if free is None else free.label(number, np.argsort(order))
        levels = level_of(values_of(end.blamed))  # the regimes of this point are not those of the fit
        rank = np.argsort(np.argsort(levels, kind="stable"))
        said = free.label(number, rank)
        regime = said.rpartition(" of regime ")[2]
        level = f" ({rank_by} {np.sort(levels)[int(regime)]:.4g} there)" if regime.isdigit() else ""
        return said + level

    if free is not None and end.status is FitStatus.STALLED:
        end = replace(end, reason=free.same_regimes(end.point, np.argsort(order)) or end.reason)
    found: dict[str, Any] = {"estimates": arranged(estimates), "standard_errors": arranged(errors)}
    if profile and end.status is FitStatus.CONVERGED:
        found["profile_errors"] = arranged(
            profile_errors(named, evaluate, end, errors, fields["observations"])
        )
        found["freedom"] = freedom(named, fields["observations"])
    found |= {"model": None, "bounds": {} if free is None else free.bounds}
    return Fit._of(ends, end, same, label, free_parameters=len(origin), **found, **fields)


def split_regimes(values: Arrays, level: str, deviation: str) -> list[Arrays]:
    """Parameters with one regime more: each is split into two that differ in level, or in deviation."""
    M, out = len(values["transition"]), list[Arrays]()
    for k in range(M):
        which, pair, sides = [*range(M), k], [k, M], np.array([-1.0, 1.0])
        P = values["transition"][np.ix_(which, which)]
        P[:, pair] /= 2
        P[np.ix_(pair, pair)] = P[k, pair].sum() * np.array([[0.9, 0.1], [0.1, 0.9]])
        P = np.maximum(P, 1e-3)
        for apart, ratio in ((0.7, 1.0), (0.0, 1.6)):
            new = {name: array[which] for name, array in values.items()}
            new["transition"] = P / P.sum(1, keepdims=True)
            new[level][pair] += apart * sides * new[deviation][pair]
            new[deviation][pair] *= ratio**sides
            out.append(new)
    return out


def some_rows(T: int) -> np.ndarray | None:
    """The rows on which starts are chosen; None for all."""
    if T <= 2 * PART:
        return None
    first = np.linspace(0, T - BLOCK, PART // BLOCK).astype(int)
    return np.asarray((first[:, None] + np.arange(BLOCK)).reshape(-1))


def check_switching(
    what: str, switching: str | Sequence[str], known: Sequence[str], regimes: int, starts: int
) -> frozenset[str]:
    """The names of what switches."""
    for name, value in (("regimes", regimes), ("starts", starts)):
        whole(what, name, value)
    names = frozenset([switching] if isinstance(switching, str) else switching)
    if not names <= set(known) or (regimes > 1 and not names):
        raise ArgumentError(f"{what}: switching is {sorted(names)}. Pass some of {list(known)}.")
    return names


def even_transition(regimes: int, stay: float = 0.88) -> np.ndarray:
    """Transition matrix that mostly stays, with equal probabilities of the other regimes."""
    if regimes == 1:
        return np.ones((1, 1))
    return np.where(np.eye(regimes, dtype=bool), stay, (1 - stay) / (regimes - 1))
