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

from .._support.checks import whole
from .._support.errors import ArgumentError
from .arrays import LOG_TWO_PI
from .checks import plain
from .hidden_chain import PARTS, Laws, Modes, density_likelihood, likelihood, transitions
from .learning.chain import INPUT, Chain, read_covariates
from .learning.climb import Objective, remembered
from .learning.maximum_likelihood import check_columns, check_enough
from .learning.named import Fixed, Named, check_switching, climb_named, even_transition, name_parameters
from .learning.summary import Fit
from .model import SwitchingLinearGaussian
from .series import SeriesLike, read

MarkovFit = Fit  # the name in older pickles
MOST = 256  # modes: regimes to the power of order + 1
# Of a series of more than twice as many rows starts are looked for in this many, in stretches of BLOCK.
PART, BLOCK = 2000, 200


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
    return _fit("markov_regression", y, x, regimes, 0, switching, *options)


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
    return _fit("markov_autoregression", y, x, regimes, order, switching, *options)


def build(modes: Modes, covariates: torch.Tensor | None, named: Mapping[str, Any]) -> SwitchingLinearGaussian:
    """The model of the expanded chain."""
    arrays = {name: plain(value) for name, value in named.items()}
    P, _ = transitions(modes, covariates, arrays)
    laws, initial, K = Laws(modes, arrays), modes.initial(P)[0], len(modes.age)
    dense = np.zeros((len(P), K, K))
    np.put_along_axis(
        dense, np.broadcast_to(modes.after, (len(P), *modes.after.shape)), P[:, laws.now, modes.age], 2
    )
    zero = np.zeros((1, 1))
    return SwitchingLinearGaussian(
        transition=dense[0] if len(dense) == 1 else dense[modes.order :],
        dynamics=zero,
        process_noise=zero,
        observation=zero,
        observation_noise=(laws.deviation**2)[:, None, None],
        observation_offset=laws.offset[:, None],
        observation_input=laws.matrix[:, None] if laws.matrix.size else None,
        initial_mean=zero[0],
        initial_covariance=zero,
        initial_probability=initial / initial.sum(),
        start="first",
    )


def _objective(
    modes: Modes, y: np.ndarray, inputs: np.ndarray, covariates: torch.Tensor | None, named: Named
) -> Objective:
    """Minus the log-likelihood and its gradient in unconstrained numbers."""

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


def _fit(
    what: str,
    y: SeriesLike,
    x: ArrayLike | None,
    regimes: int,
    order: int,
    switching: str | Sequence[str],
    starts: int,
    seed: int,
    fixed: Fixed | None,
    constraints: str | Sequence[str],
    transition_inputs: ArrayLike | None,
    durations: int,
) -> Fit[SwitchingLinearGaussian]:
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
    start = _start(regimes, names, values[order:], given[order:], inputs[:, k : k + order])
    start |= chain.extra(start["transition"])
    bounds = {"deviation": (0.0, np.inf)}
    unit = np.exp(np.log(start["deviation"]).mean())
    scales = {"intercept": unit, "autoregression": 0.3, "deviation": 0.5}
    leans = {}
    if k:
        scales["coefficients"] = unit / given.std(0)
        leans["intercept", "coefficients"] = given.mean(0)
    held = chain.held(start["transition"])
    named = name_parameters(what, start, names, bounds, fixed, constraints, held, scales, leans)
    count = 0 if named.free is None else named.free.size
    check_enough(what, count, len(seen))
    modes = Modes.of(regimes, order, durations)
    evaluate = _objective(modes, values[order:], inputs, z, named)
    rank_by = "intercept" if "intercept" in names or not names else sorted(names, key=PARTS.index)[-1]
    found = climb_named(
        what,
        named,
        evaluate,
        rank_by,
        starts,
        seed,
        1e-9,
        (16, 20),
        {"deviation": (unit, 1)},
        observations=len(seen),
        regimes=regimes,
        order=order,
        y=y.iloc[order:] if hasattr(y, "iloc") else values[order:, None],
        inputs=inputs if inputs.shape[1] else None,
        filter="imm",
    )
    return replace(found, model=build(modes, z, found.estimates))


def fit_levels(
    y: np.ndarray,
    regimes: int,
    starts: int,
    seed: int,
    names: Sequence[Any] | None = None,
    start: Mapping[str, np.ndarray] | None = None,
    progress: bool | None = None,
) -> Fit[SwitchingLinearGaussian]:
    """Fit a level and a covariance a regime to y ``(T, m)``, NaN where missing; `names` are of its columns.

    `start` are estimates to start from, instead of a division of the rows by size.
    """
    what, (T, m) = "fit_named_model", y.shape
    unit, eye = np.nanstd(y, 0), np.eye(m, dtype=bool)
    check_columns(what, y[~np.isnan(y).any(1)], True, range(m) if names is None else names)
    values = {"transition": even_transition(regimes), **divided_levels(y, unit, regimes)}
    scales = {"observation_offset": unit, "observation_noise": np.where(eye, 0.5, 0.5 * unit[:, None])}
    switches = frozenset(scales)
    named = name_parameters(what, dict(start or values), switches, {}, None, (), {}, scales)
    seen, modes = int((~np.isnan(y)).sum()), Modes.of(regimes, 0, 1)
    check_enough(what, 0 if named.free is None else named.free.size, seen)
    blocks = np.linspace(0, T - BLOCK, PART // BLOCK).astype(int)[:, None] + np.arange(BLOCK)
    found = climb_named(
        what,
        named,
        _level_objective(modes, y, named),
        "observation_offset",
        starts,
        seed,
        1e-7,
        (16, 20),
        {"observation_noise": (unit, 1)},
        search=_level_objective(modes, y[blocks.reshape(-1)], named) if T > 2 * PART else None,
        progress=progress,
        observations=seen,
        regimes=regimes,
        y=y,
        filter="imm",
    )
    zero, P = np.zeros((1, 1)), found.estimates["transition"]
    model = SwitchingLinearGaussian(
        dynamics=zero,
        process_noise=zero,
        observation=np.zeros((m, 1)),
        initial_mean=zero[0],
        initial_covariance=zero,
        initial_probability=modes.initial(P[None, :, None])[0],
        start="first",
        **found.estimates,
    )
    return replace(found, model=model)


def divided_levels(y: np.ndarray, unit: np.ndarray, regimes: int) -> dict[str, np.ndarray]:
    """Levels and variances of rows that are divided by their mean size, in units of each column."""
    seen = ~np.isnan(y)
    rank = (np.where(seen, y - np.nanmean(y, 0), 0.0) / unit).sum(1) / np.maximum(seen.sum(1), 1)
    parts = [y[part] for part in np.array_split(np.argsort(rank, kind="stable"), regimes)]
    whole = [part if (~np.isnan(part)).any(0).all() else y for part in parts]
    noise = np.linspace(0.5, 1.0, regimes)[:, None, None] * np.diag(unit**2)
    return {
        "observation_offset": np.stack([np.nanmean(part, 0) for part in whole]),
        "observation_noise": noise,
    }


def _level_objective(modes: Modes, y: np.ndarray, named: Named) -> Objective:
    """Minus the log-likelihood of levels and covariances, and its gradient in unconstrained numbers.

    Rows with the same components missing are worked on together.
    """
    patterns, which = np.unique(~np.isnan(y), axis=0, return_inverse=True)
    groups = [(np.flatnonzero(which == k), np.flatnonzero(seen)) for k, seen in enumerate(patterns)]
    parts = [(rows, at, np.ascontiguousarray(y[rows][:, at])) for rows, at in groups if len(at)]

    @np.errstate(all="ignore")  # a climb may look too far
    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        values, back = named.values_at(theta)
        P, level, noise = (values[k] for k in ("transition", "observation_offset", "observation_noise"))
        densities, kept = np.zeros((len(y), len(P))), list[tuple[np.ndarray, np.ndarray]]()
        bars = {name: np.zeros(value.shape) for name, value in values.items()}
        try:
            for rows, at, cells in parts:
                inverse = np.linalg.inv(np.linalg.cholesky(noise[:, at[:, None], at]))
                z = (cells - level[:, None, at]) @ inverse.mT  # (M, rows, seen)
                scale = np.log(np.diagonal(inverse, axis1=1, axis2=2)).sum(1) - 0.5 * LOG_TWO_PI * len(at)
                densities[rows] = scale - 0.5 * (z * z).sum(2).T
                kept.append((inverse, z))
            total, P_bar, weight = density_likelihood(modes, P[None, :, None], densities)
        except (ArgumentError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(theta)
        for (rows, at, _), (inverse, z) in zip(parts, kept, strict=True):
            share = weight[rows].T[:, :, None]
            spread = (share * z).mT @ z - share.sum(1)[:, :, None] * np.eye(len(at))
            bars["observation_offset"][:, at] += ((share.mT @ z) @ inverse)[:, 0]
            bars["observation_noise"][:, at[:, None], at] += 0.5 * inverse.mT @ spread @ inverse
        slope = back(bars | {"transition": P_bar[0, :, 0]})
        ok = np.isfinite(total) and np.isfinite(slope).all()
        return (-total, -slope) if ok else (np.inf, np.zeros_like(theta))

    return remembered(evaluate)


def _start(
    M: int, switching: frozenset[str], y: np.ndarray, x: np.ndarray, lags: np.ndarray
) -> dict[str, np.ndarray]:
    """Where to start: least squares, its residuals split by size among the regimes."""
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
    return {name: np.asarray(value, dtype=np.float64) for name, value in parts.items() if value.size}
