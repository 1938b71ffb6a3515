r"""Several series at once: levels and vector autoregressions that switch with a Markov chain.

    "intercept"   y_t = c_{s_t} + Σ_k A_{k,s_t} y_{t−k} + e_t                          e_t ~ N(0, Σ_{s_t})
    "mean"        y_t = μ_{s_t} + Σ_k A_{k,s_t} (y_{t−k} − μ_{s_{t−k}}) + e_t

With "intercept" the modes of the chain are the regimes. With "mean", Hamilton's form, a jump is complete at
once, and modes are the regimes of the last order + 1 steps. Without lags both are levels, and missing
components are left out one by one. The likelihood is exact: log-densities of all modes go through
`hidden_chain.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..._support.checks import whole
from ..._support.errors import ArgumentError
from ..arrays import LOG_TWO_PI
from ..checks import plain
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
)
from ..learning.summary import Fit
from ..model import SwitchingLinearGaussian
from ..series import SeriesLike
from .hidden_chain import MOST, Modes, chain_model, density_likelihood
from .markov import fit_regression

LAGS = "autoregression"
LEVELS = ("observation_offset", "observation_noise")  # names of level and noise in `fit_levels`


def markov_var(
    y: SeriesLike,
    *,
    order: int = 1,
    regimes: int = 2,
    switching: str | Sequence[str] = ("intercept", "covariance"),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit a vector autoregression whose parameters switch with a Markov chain.

    `Fit.impulse_response` is the mean response to a shock, `Fit.future_paths` draws futures.

    Args:
        y: one series of m components, ``(T, m)``, without missing values; numpy, torch or pandas.
        order: how many lags.
        regimes: how many; 1 is a plain vector autoregression.
        switching: what switches: some of "intercept" or "mean", "autoregression" and "covariance". The
            intercept is the constant of the equation: a series goes gradually to its new level. A mean is the
            level itself, which jumps; lags are deviations from the level of their own time.
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name: "autoregression" is ``(order, m, m)`` or
            ``(regimes, order, m, m)``, "covariance" ``(m, m)`` or ``(regimes, m, m)``.
        constraints: texts such as "intercept[1, 0] = 2 * intercept[0, 0]"; the left side is computed.
    """
    what, values = "markov_var", plain(y)
    values = values[:, None] if values.ndim == 1 else values
    named_parts = [switching] if isinstance(switching, str) else list(switching)
    level = "mean" if "mean" in named_parts else "intercept"
    names = check_switching(what, named_parts, [level, LAGS, "covariance"], regimes, starts)
    order = whole(what, "order", order)
    if values.ndim != 2 or len(values) <= order + 1:
        raise ArgumentError(
            f"{what}: y has shape {values.shape}. Pass (T, m), with more than {order + 1} rows."
        )
    if not np.isfinite(values).all():
        raise ArgumentError(f"{what}: y holds NaN or infinite values, which cannot be lags. Fill them.")
    if level == "mean" and regimes ** (order + 1) > MOST:
        raise ArgumentError(
            f"{what}: {regimes} regimes over {order + 1} steps are {regimes ** (order + 1)} modes, more than "
            f'{MOST}. Pass fewer regimes, a lower order, or switching="intercept".'
        )
    m, seen = values.shape[1], values[order:]
    lags = np.concatenate([values[order - k : len(values) - k] for k in range(1, order + 1)], 1)
    columns = list(getattr(y, "columns", [f"column {a}" for a in range(m)]))
    check_columns(what, seen, True, list(getattr(y, "columns", range(m))))
    check_columns(f"{what}: the lags", lags, True, [(k + 1, a) for k in range(order) for a in range(m)])
    start, left = _start(regimes, names, level, seen, lags)
    if not fixed:
        check_noise(what, left, seen, columns)
    unit = np.sqrt(np.diagonal(start["covariance"], axis1=1, axis2=2)).mean(0)
    scales = {
        level: unit,
        LAGS: 0.3 * unit[:, None] / unit,
        "covariance": np.where(np.eye(m, dtype=bool), 0.5, 0.5 * unit[:, None]),
    }
    leans = {("intercept", LAGS): lags.mean(0)} if level == "intercept" else {}
    named = name_parameters(what, start, names, {}, fixed, constraints, {}, scales, leans)
    modes = Modes.of(regimes, order if level == "mean" else 0, 1)
    rank_by = level if level in names or not names else sorted(names)[-1]
    found = _climb(
        what,
        seen,
        lags,
        modes,
        named,
        (level, "covariance"),
        rank_by,
        (unit, starts, seed, 1e-9, None),
        order=order,
        regimes=regimes,
        y=y.iloc[order:] if hasattr(y, "iloc") else seen,
        inputs=lags,
    )
    parts = found.estimates
    A = parts[LAGS]
    offset, now = _offsets(modes, parts[level], A), modes.paths[:, 0]
    matrix = A.transpose(0, 2, 1, 3).reshape(regimes, m, -1)[now]
    P = parts["transition"][None, :, None]
    return replace(found, model=chain_model(modes, P, offset, matrix, parts["covariance"][now]))


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

    `start` are estimates to start from, in place of dividing the rows by size.
    """
    what, (_, m), (level, noise) = "fit_named_model", y.shape, LEVELS
    if m == 1:
        return _fit_level(what, y, regimes, starts, seed, start, progress)
    unit, eye = np.nanstd(y, 0), np.eye(m, dtype=bool)
    check_columns(what, y[~np.isnan(y).any(1)], True, range(m) if names is None else names)
    values = {"transition": even_transition(regimes), **divided_levels(y, unit, regimes)}
    scales = {level: unit, noise: np.where(eye, 0.5, 0.5 * unit[:, None])}
    named = name_parameters(what, dict(start or values), frozenset(scales), {}, None, (), {}, scales)
    modes, tolerance = Modes.of(regimes, 0, 1), 1e-7 if start is None else COARSE
    options = unit, starts, seed, tolerance, progress
    found = _climb(what, y, None, modes, named, LEVELS, level, options, regimes=regimes, y=y)
    P, offset = found.estimates["transition"][None, :, None], found.estimates[level]
    model = chain_model(modes, P, offset, np.zeros((regimes, m, 0)), found.estimates[noise])
    return replace(found, model=model)


def _fit_level(
    what: str,
    y: np.ndarray,
    regimes: int,
    starts: int,
    seed: int,
    start: Mapping[str, np.ndarray] | None,
    progress: bool | None,
) -> Fit[SwitchingLinearGaussian]:
    """`fit_levels` of one column by `fit_regression`, whose likelihood is compiled."""
    (level, noise), parts = LEVELS, ("intercept", "deviation")
    if start is not None:
        values = start[level][:, 0], np.sqrt(start[noise][:, 0, 0])
        start = {"transition": start["transition"], **dict(zip(parts, values, strict=True))}
    found = fit_regression(what, y, None, regimes, 0, parts, starts, seed, start=start, progress=progress)
    at, deviation = found.estimates, found.estimates["deviation"][:, None, None]
    errors = found.standard_errors
    estimates = {"transition": at["transition"], level: at["intercept"][:, None], noise: deviation**2}
    spread = {"transition": errors["transition"], level: errors["intercept"][:, None]}
    spread[noise] = 2 * deviation * errors["deviation"][:, None, None]
    return replace(found, estimates=estimates, standard_errors=spread, bounds={}, y=y)


def _climb(
    what: str,
    y: np.ndarray,
    lags: np.ndarray | None,
    modes: Modes,
    named: Named,
    parts: tuple[str, str],
    rank_by: str,
    options: tuple[np.ndarray, int, int, float, bool | None],
    /,
    **fields: Any,
) -> Fit[Any]:
    """Climb from several starts; `options` are units, starts, seed, tolerance and whether to show a bar."""
    (unit, starts, seed, tolerance, progress), search = options, None
    seen = int((~np.isnan(y)).sum())
    check_enough(what, 0 if named.free is None else named.free.size, seen)
    if (rows := some_rows(len(y))) is not None:
        search = _objective(modes, y[rows], None if lags is None else lags[rows], named, parts)
    return climb_named(
        what,
        named,
        _objective(modes, y, lags, named, parts),
        rank_by,
        starts,
        seed,
        tolerance,
        (16, 20),
        {parts[1]: (unit, 1)},
        search=search,
        progress=progress,
        observations=seen,
        filter="imm",
        **fields,
    )


def divided_levels(y: np.ndarray, unit: np.ndarray, regimes: int) -> dict[str, np.ndarray]:
    """Levels and variances of groups of rows, which are divided by their mean in units of each column."""
    seen = ~np.isnan(y)
    rank = (np.where(seen, y - np.nanmean(y, 0), 0.0) / unit).sum(1) / np.maximum(seen.sum(1), 1)
    parts = [y[part] for part in np.array_split(np.argsort(rank, kind="stable"), regimes)]
    whole = [part if (~np.isnan(part)).any(0).all() else y for part in parts]
    noise = np.linspace(0.5, 1.0, regimes)[:, None, None] * np.diag(unit**2)
    return dict(zip(LEVELS, (np.stack([np.nanmean(part, 0) for part in whole]), noise), strict=True))


def _start(
    M: int, switching: frozenset[str], level: str, y: np.ndarray, lags: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Starting values by least squares, with residuals divided among regimes by size; and the residuals."""
    m, design = y.shape[1], np.concatenate([np.ones((len(y), 1)), lags], 1)
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    left = y - design @ solution
    cov, constant = left.T @ left / len(y), np.repeat(solution[:1], M, 0)
    if level in switching:
        constant = constant + divided_levels(left, left.std(0), M)[LEVELS[0]]
    A = solution[1:].reshape(-1, m, m).mT
    if level == "mean":
        rest = np.eye(m) - A.sum(0)
        constant = (
            constant @ np.linalg.inv(rest).T if np.linalg.cond(rest) < 1e3 else y.mean(0) + 0 * constant
        )
    apart = np.exp(np.linspace(-1.0, 1.0, M)) if "covariance" in switching and M > 1 else np.ones(M)
    parts = {
        "transition": even_transition(M),
        level: constant,
        LAGS: np.repeat(A[None], M, 0),
        "covariance": apart[:, None, None] * cov,
    }
    return parts, left


def _offsets(modes: Modes, level: np.ndarray, A: np.ndarray | None) -> np.ndarray:
    """The constant of each mode ``(K, m)``: c_{s_t}, or μ_{s_t} − Σ_k A_{k,s_t} μ_{s_{t−k}}."""
    offset: np.ndarray = level[modes.paths[:, 0]]
    if A is None or not modes.order:
        return offset
    offset -= np.einsum("koab,kob->ka", A[modes.paths[:, 0]], level[modes.paths[:, 1:]])
    return offset


def _objective(
    modes: Modes, y: np.ndarray, lags: np.ndarray | None, named: Named, parts: tuple[str, str]
) -> Objective:
    """Minus the log-likelihood and its gradient in unconstrained numbers; `parts` name level and noise.

    Rows with the same components missing are computed together.
    """
    patterns, which = np.unique(~np.isnan(y), axis=0, return_inverse=True)
    groups = [(np.flatnonzero(which == k), np.flatnonzero(seen)) for k, seen in enumerate(patterns)]
    cells = [(rows, at, np.ascontiguousarray(y[rows][:, at])) for rows, at in groups if len(at)]
    now, before, K = modes.paths[:, 0], modes.paths[:, 1:], len(modes.age)

    @np.errstate(all="ignore")  # a line search may try extreme values
    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        values, back = named.values_at(theta)
        P, level, noise, A = values["transition"], *(values[k] for k in parts), values.get(LAGS)
        M, m = level.shape
        offset = _offsets(modes, level, A)
        densities, kept = np.zeros((len(y), K)), list[tuple[np.ndarray, np.ndarray]]()
        bars = {name: np.zeros(value.shape) for name, value in values.items()}
        offset_bar = np.zeros(offset.shape)
        try:
            for rows, at, seen in cells:
                inverse = np.linalg.inv(np.linalg.cholesky(noise[:, at[:, None], at]))
                left: np.ndarray = seen[None]
                if A is not None and lags is not None:
                    left = (left - lags @ A.transpose(0, 1, 3, 2).reshape(M, -1, m))[now]
                z = (left - offset[:, None, at]) @ inverse[now].mT  # (K, rows, seen)
                scale = np.log(np.diagonal(inverse, axis1=1, axis2=2)).sum(1) - 0.5 * LOG_TWO_PI * len(at)
                densities[rows] = scale[now] - 0.5 * (z * z).sum(2).T
                kept.append((inverse, z))
            total, P_bar, weight = density_likelihood(modes, P[None, :, None], densities)
        except (ArgumentError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(theta)
        for (rows, at, _), (inverse, z) in zip(cells, kept, strict=True):
            share = weight[rows].T[:, :, None]
            spread = (share * z).mT @ z - share.sum(1)[:, :, None] * np.eye(len(at))
            spread = spread.reshape(M, K // M, len(at), len(at)).sum(1)  # modes of one regime lie together
            bars[parts[1]][:, at[:, None], at] += 0.5 * inverse.mT @ spread @ inverse
            if lags is None:
                offset_bar[:, at] += ((share.mT @ z) @ inverse[now])[:, 0]
            else:
                pull = (share * z) @ inverse[now]  # (K, rows, m): derivatives in the mean of each row
                offset_bar += pull.sum(1)
                slope = pull.reshape(M, K // M, *pull.shape[1:]).sum(1).mT @ lags
                bars[LAGS] += slope.reshape(M, m, -1, m).transpose(0, 2, 1, 3)
        np.add.at(bars[parts[0]], now, offset_bar)
        if A is not None and modes.order:
            np.add.at(bars[parts[0]], before, -np.einsum("koab,ka->kob", A[now], offset_bar))
            np.add.at(bars[LAGS], now, -np.einsum("ka,kob->koab", offset_bar, level[before]))
        slope = back(bars | {"transition": P_bar[0, :, 0]})
        ok = np.isfinite(total) and np.isfinite(slope).all()
        return (-total, -slope) if ok else (np.inf, np.zeros_like(theta))

    return remembered(evaluate)
