r"""Regressions and autoregressions whose coefficients switch with a Markov chain (Hamilton 1989).

    y_t = a_{s_t} + x_t'b_{s_t} + Σ_k φ_{k,s_t} (y_{t−k} − a_{s_{t−k}} − x_{t−k}'b_{s_{t−k}}) + σ_{s_t} e_t

Given the regimes of the last `order` steps this is a regression on known numbers, so the chain of those
regimes, M^{order + 1} modes of a `SwitchingLinearGaussian` without a state, gives the exact likelihood. The
initial law is the stationary one of the chain, tied to its transition probabilities while they are learned.
The first `order` observations are given, as elsewhere. Transitions may be driven by covariates and by the age
of a regime (`learning/chain.py`): where all regimes of a mode are the same, its age is part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.checks import whole
from ..._support.errors import ArgumentError
from ..checks import plain
from ..learning.chain import INPUT, Chain, read_covariates
from ..learning.climb import Objective, remembered
from ..learning.maximum_likelihood import check_columns, check_enough, check_noise
from ..learning.named import (
    COARSE,
    Fixed,
    Named,
    check_switching,
    climb_named,
    even_transition,
    name_parameters,
    some_rows,
    split_regimes,
)
from ..learning.summary import Fit
from ..model import SwitchingLinearGaussian
from ..series import SeriesLike, read
from .hidden_chain import MOST, PARTS, Laws, Modes, chain_model, likelihood, transitions

MarkovFit = Fit  # the name in older pickles


def markov_regression(
    y: SeriesLike,
    x: ArrayLike | None = None,
    *,
    regimes: int = 2,
    switching: str | Sequence[str] = ("intercept", "coefficients"),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
    transition_inputs: ArrayLike | None = None,
    durations: int = 1,
) -> Fit[SwitchingLinearGaussian]:
    """Fit a regression whose coefficients switch with a Markov chain.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        x: regressors besides the constant, ``(T, k)`` or ``(T,)``.
        regimes: how many; 1 is a plain regression.
        switching: what switches: some of "intercept", "coefficients", "deviation".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name.
        constraints: texts such as "deviation[1] = 2 * deviation[0]"; the left side is computed, not learned.
        transition_inputs: ``(T, k)`` covariates that drive the transitions; row t those into step t.
        durations: how many ages of a regime to tell apart: the chance that it ends then depends on how long
            it has lasted.
    """
    options = starts, seed, fixed, constraints, transition_inputs, durations
    return fit_regression("markov_regression", y, x, regimes, 0, switching, *options, profile=True)


def markov_autoregression(
    y: SeriesLike,
    x: ArrayLike | None = None,
    *,
    order: int,
    regimes: int = 2,
    switching: str | Sequence[str] = ("intercept", "coefficients"),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
    transition_inputs: ArrayLike | None = None,
    durations: int = 1,
) -> Fit[SwitchingLinearGaussian]:
    """Fit Hamilton's autoregression: deviations from a level that switches with a Markov chain.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``, without missing values; numpy, torch or pandas.
        x: regressors besides the constant, ``(T, k)`` or ``(T,)``.
        order: how many lags.
        regimes: how many; 1 is a plain regression.
        switching: what switches: some of "intercept", "coefficients", "autoregression", "deviation".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name.
        constraints: texts such as "deviation[1] = 2 * deviation[0]"; the left side is computed, not learned.
        transition_inputs: ``(T, k)`` covariates that drive the transitions; row t those into step t.
        durations: how many ages of a regime to tell apart: the chance that it ends then depends on how long
            it has lasted.
    """
    whole("markov_autoregression", "order", order, otherwise=", or markov_regression")
    options = starts, seed, fixed, constraints, transition_inputs, durations
    return fit_regression("markov_autoregression", y, x, regimes, order, switching, *options, profile=True)


def build(modes: Modes, covariates: torch.Tensor | None, named: Mapping[str, Any]) -> SwitchingLinearGaussian:
    """The model of the expanded chain."""
    arrays = {name: plain(value) for name, value in named.items()}
    P, _ = transitions(modes, covariates, arrays)
    laws = Laws(modes, arrays)
    return chain_model(
        modes, P, laws.offset[:, None], laws.matrix[:, None], (laws.deviation**2)[:, None, None]
    )


def _objective(
    modes: Modes, y: np.ndarray, inputs: np.ndarray, covariates: torch.Tensor | None, named: Named
) -> Objective:
    """Minus the log-likelihood and its gradient in unconstrained numbers."""

    @np.errstate(all="ignore")  # a line search may try extreme values
    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        none = np.inf, np.zeros_like(theta)
        try:
            values, back = named.values_at(theta)
            P, back_chain = transitions(modes, covariates, values)
            total, P_bar, bars = likelihood(modes, y, inputs, P, {k: values[k] for k in PARTS if k in values})
        except ArgumentError:
            return none
        if not np.isfinite(total):
            return none
        slope = back(bars | back_chain(P_bar))
        return (-total, -slope) if np.isfinite(slope).all() else none

    return remembered(evaluate)


def fit_regression(
    what: str,
    y: SeriesLike,
    x: ArrayLike | None,
    regimes: int,
    order: int,
    switching: str | Sequence[str],
    starts: int,
    seed: int,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
    transition_inputs: ArrayLike | None = None,
    durations: int = 1,
    start: Mapping[str, np.ndarray] | None = None,
    progress: bool | None = None,
    profile: bool = False,
) -> Fit[SwitchingLinearGaussian]:
    """Fit a regression or an autoregression; arguments as for `markov_autoregression`.

    `start` are estimates to start from, in place of dividing the residuals by size; if they have fewer
    regimes, these are split. `profile` is whether intervals are taken by profile likelihood.
    """
    known = [name for name in PARTS if order or name != "autoregression"]
    names = check_switching(what, switching, known, regimes, starts)
    count = regimes ** (order + 1) + regimes * max(0, whole(what, "durations", durations) - order - 1)
    if count > MOST:
        raise ArgumentError(
            f"{what}: {regimes} regimes over {order + 1} steps with {durations} ages are {count} modes, more "
            f"than {MOST}. Pass fewer regimes, a lower order or fewer ages."
        )
    data = read(y, 1, what=what)
    if data.series != 1:
        raise ArgumentError(f"{what}: there are {data.series} series. Pass one, (T,) or (T, 1).")
    values = data.rows[:, 0]
    if order and np.isnan(values).any():
        raise ArgumentError(f"{what}: y holds NaN, which cannot be a lag. Fill it, or use markov_regression.")
    given = np.zeros((len(values), 0))
    if x is not None:
        width = int(np.shape(x)[-1]) if len(np.shape(x)) > 1 else 1
        given = read(x, width, what=f"{what}: x", missing=False).rows
    if len(given) != len(values):
        raise ArgumentError(f"{what}: y has {len(values)} rows, x has {len(given)}. Pass as many of both.")
    lags = [np.arange(order, len(values)) - k for k in range(1, order + 1)]
    inputs = np.concatenate(
        [given[order:], *(values[at][:, None] for at in lags), *(given[at] for at in lags)], 1
    )
    z = None if transition_inputs is None else read_covariates(transition_inputs, len(values), what)
    k, seen = given.shape[1], values[order:][~np.isnan(values[order:])]
    if len(seen) < 2 or np.ptp(seen) == 0:
        raise ArgumentError(f"{what}: y has no two different values. Pass a series that varies.")
    if k and "coefficients" not in (fixed or {}):
        check_columns(f"{what}: x", given[order:], True, getattr(x, "columns", range(k)))
    if z is not None and INPUT not in (fixed or {}):
        names_of = getattr(transition_inputs, "columns", range(z.shape[1]))
        check_columns(f"{what}: transition_inputs", z.numpy(), True, names_of)
    chain = Chain(inputs=z, durations=durations)
    first, left = _start(regimes, names, values[order:], given[order:], inputs[:, k : k + order])
    if not fixed:
        check_noise(what, left[:, None], seen[:, None], ["y"])
    first |= chain.extra(first["transition"])
    unit = np.exp(np.log(first["deviation"]).mean())
    more = start is not None and len(start["transition"]) < regimes
    first = dict(first if start is None or more else start)
    bounds = {"deviation": (0.0, np.inf)}
    scales = {"intercept": unit, "autoregression": 0.3, "deviation": 0.5}
    leans = {}
    if k:
        scales["coefficients"] = unit / given.std(0)
        leans["intercept", "coefficients"] = given.mean(0)
    held = chain.held(first["transition"])
    named = name_parameters(what, first, names, bounds, fixed, constraints, held, scales, leans)
    count = 0 if named.free is None else named.free.size
    check_enough(what, count, len(seen))
    modes = Modes.of(regimes, order, durations)
    evaluate, search = _objective(modes, values[order:], inputs, z, named), None
    if z is None and (rows := some_rows(len(inputs))) is not None:
        search = _objective(modes, values[order:][rows], inputs[rows], z, named)
    rank_by = "intercept" if "intercept" in names or not names else sorted(names, key=PARTS.index)[-1]
    found = climb_named(
        what,
        named,
        evaluate,
        rank_by,
        starts,
        seed,
        1e-9 if start is None or more else COARSE,
        (16, 20),
        {"deviation": (unit, 1)},
        search=search,
        progress=progress,
        profile=profile,
        others=split_regimes(dict(start), "intercept", "deviation") if more and start else (),
        observations=len(seen),
        regimes=regimes,
        order=order,
        y=y.iloc[order:] if hasattr(y, "iloc") else values[order:, None],
        inputs=inputs if inputs.shape[1] else None,
        filter="imm",
    )
    return replace(found, model=build(modes, z, found.estimates))


def _start(
    M: int, switching: frozenset[str], y: np.ndarray, x: np.ndarray, lags: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Starting values by least squares, with residuals divided among regimes by size; and the residuals."""
    seen = ~np.isnan(y)
    design = np.concatenate([np.ones((len(y), 1)), x, lags], 1)[seen]
    solution = np.linalg.lstsq(design, y[seen], rcond=None)[0]
    left = y[seen] - design @ solution
    phi = solution[1 + x.shape[1] :]
    shrink = 1 - phi.sum() if abs(1 - phi.sum()) > 0.1 else 1.0
    middle = np.array([np.mean(part) for part in np.array_split(np.sort(left), M)])
    apart = np.linspace(-0.5, 0.5, M) if "deviation" in switching else np.zeros(M)
    if "intercept" not in switching:
        middle = np.zeros(M)
    stay = 1 / (1 + (M - 1) * np.exp(-2.0))
    parts = {
        "transition": even_transition(M, stay),
        "intercept": (solution[0] + middle) / shrink,
        "coefficients": np.tile(solution[1 : 1 + x.shape[1]], (M, 1)),
        "autoregression": np.tile(phi, (M, 1)),
        "deviation": max(left.std(), 1e-300) * np.exp(apart),
    }
    return {name: np.asarray(value, dtype=np.float64) for name, value in parts.items() if value.size}, left
