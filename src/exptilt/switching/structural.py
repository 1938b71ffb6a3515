r"""Structural time series whose parameters switch: trends, cycles and a common factor, in one call each.

    local_level           y_t = l_t + ε_t,  l_t = l_{t−1} + η_t
    local_linear_trend    as above, with l_t = l_{t−1} + b_{t−1} + η_t,  b_t = b_{t−1} + ζ_t
    unobserved_cycle      as local_level with a drift, and a cycle beside it that damps out
    dynamic_factor        y_t = Λ f_t + Σ_k Λ_k f_{t−k} + e_t, a factor and errors with autoregressions
    time_varying_regression   y_t = x_t'b_t + ε_t,  b_t = b_{t−1} + η_t

Levels and slopes start diffuse, cycles and factors from their stationary law, which moves with the parameters
as they are learned. Parts named in `switching` have a value for each regime.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .._support.checks import whole
from .._support.errors import ArgumentError
from .checks import plain
from .learning.chain import EDGE, Named, stationary, stationary_states
from .learning.maximum_likelihood import check_columns, check_enough, checked_data, objective
from .learning.named import Fixed, Options, check_switching, climb_named, even_transition, name_parameters
from .learning.summary import Fit
from .model import SwitchingLinearGaussian
from .series import SeriesLike

POSITIVE = (0.0, np.inf)
NOISES = ("irregular", "level", "slope", "cycle")
Build = Callable[[Named], Named]
Parts = dict[str, tuple[np.ndarray, tuple[float, float]]]


def local_level(
    y: SeriesLike,
    *,
    regimes: int = 2,
    switching: str | Sequence[str] = ("level",),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit a level that wanders, observed with noise.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        regimes: how many; 1 is the plain model.
        switching: what switches: some of the variances "irregular" and "level".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name.
        constraints: texts such as "level[1] = 4 * level[0]"; the left side is computed, not learned.
    """
    return _trend("local_level", y, regimes, switching, (starts, seed, fixed, constraints))


def local_linear_trend(
    y: SeriesLike,
    *,
    regimes: int = 2,
    switching: str | Sequence[str] = ("level",),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit a level whose slope wanders too, observed with noise.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        regimes: how many; 1 is the plain model.
        switching: what switches: some of the variances "irregular", "level" and "slope".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name.
        constraints: texts such as "level[1] = 4 * level[0]"; the left side is computed, not learned.
    """
    return _trend("local_linear_trend", y, regimes, switching, (starts, seed, fixed, constraints))


def unobserved_cycle(
    y: SeriesLike,
    *,
    order: int | None = None,
    periods: tuple[float, float] = (2.5, 50.0),
    regimes: int = 2,
    switching: str | Sequence[str] = ("drift",),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit a level with a drift and a cycle around it, observed with noise.

    The cycle is a damped wave, "damping" its factor a step and "frequency" its angle a step, driven by noise
    of variance "cycle"; or, with `order`, an autoregression, as in Lam's model of output.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        order: of an autoregressive cycle; None for a wave.
        periods: the shortest and the longest period of the wave, in steps.
        regimes: how many; 1 is the plain model.
        switching: what switches: some of "irregular", "level", "cycle" (variances), "drift", and "damping",
            "frequency" or "autoregression".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name; {"irregular": 0, "level": 0} leaves noises out.
        constraints: texts such as "drift[0] = -drift[1]"; the left side is computed, not learned.
    """
    if order is not None and order < 1:
        raise ArgumentError(f"unobserved_cycle: order is {order}. Pass at least 1, or None for a wave.")
    if not 2 <= periods[0] < periods[1]:
        raise ArgumentError(f"unobserved_cycle: periods is {periods}. Pass 2 <= low < high.")
    options = starts, seed, fixed, constraints
    return _trend("unobserved_cycle", y, regimes, switching, options, order, periods)


def dynamic_factor(
    y: SeriesLike,
    *,
    order: int = 1,
    error_order: int = 0,
    loading_lags: int = 0,
    regimes: int = 2,
    switching: str | Sequence[str] = ("mean",),
    starts: int = 5,
    seed: int = 0,
    skip: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit one factor behind several series; subtract their means first. Their units do not matter.

    The factor's noise has variance 1 (in regime 0, where "factor" switches), and the first loading starts
    positive, which fix its scale and sign.

    Args:
        y: one series of several components, ``(T, m)``; numpy, torch or pandas. NaN is missing.
        order: of the factor's autoregression.
        error_order: of the autoregression of each error; 0 for none.
        loading_lags: how many earlier values of the factor load on y too, by "lagged_loading" ``(m, lags)``.
        regimes: how many; 1 is the plain model.
        switching: what switches: some of "mean" and "factor" (the constant and the noise variance of the
            factor's equation; both have no other value to learn), "loading", "lagged_loading",
            "autoregression", "error" (the variances of the errors' noise) and "error_autoregression".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        skip: leave the first terms out of the likelihood, as some papers do.
        fixed: values of parts that are not learned, by name, NaN where an entry is.
        constraints: texts such as "mean[0] = -mean[1]"; the left side is computed, not learned.
    """
    what, values = "dynamic_factor", plain(y)
    if values.ndim != 2 or values.shape[1] < 2:
        raise ArgumentError(f"{what}: y has shape {values.shape}. Pass one series (T, m) of 2 components up.")
    if order < 1 or error_order < 0:
        raise ArgumentError(f"{what}: order={order}, error_order={error_order}. Pass at least 1 and 0.")
    whole(what, "loading_lags", loading_lags, least=0)
    m, q, own = values.shape[1], error_order, max(order, loading_lags + 1)
    n = own + m * q
    spread = np.nanvar(values, 0)
    size = np.sqrt(np.where(spread > 0, spread, 1.0))
    seen = np.nan_to_num((values - np.nanmean(values, 0)) / size)  # in units of each column
    weight = np.linalg.eigh(seen.T @ seen)[1][:, -1]
    weight = weight * np.where(weight[0] < 0, -1, 1)
    common = seen @ weight
    phi = float(np.clip(common[1:] @ common[:-1] / (common @ common), -0.8, 0.8))
    scale = common.std() * np.sqrt(1 - phi**2)
    names = _names(what, switching, regimes)
    apart = np.linspace(-1.0, 1.0, regimes) if "mean" in names else np.zeros(regimes)
    parts: Parts = {
        "loading": (_alike(regimes, weight * scale * size), (-np.inf, np.inf)),
        "autoregression": (_alike(regimes, [phi, *[0.0] * (order - 1)]), (-np.inf, np.inf)),
        "error": (_alike(regimes, spread * np.maximum(1 - (weight * common.std()) ** 2, 0.1)), POSITIVE),
        "mean": (apart, (-np.inf, np.inf)),
        "factor": (np.ones(regimes), POSITIVE),
    }
    if loading_lags:
        parts["lagged_loading"] = (_alike(regimes, np.zeros((m, loading_lags))), (-np.inf, np.inf))
    if q:
        parts["error_autoregression"] = (_alike(regimes, np.zeros((m, q))), (-np.inf, np.inf))
    if "factor" in names:
        parts["factor"] = (np.geomspace(1.0, 4.0, regimes), POSITIVE)
    held = {"factor": np.full(regimes, "factor" not in names), "mean": np.full(regimes, "mean" not in names)}
    held["factor"][0] = True

    def build(named: Named) -> Named:
        W, Q = (named["loading"].new_zeros(regimes, n, n) for _ in range(2))
        W[:, 0, :order] = named["autoregression"]
        W[:, range(1, own), range(own - 1)] = 1.0
        Q[:, 0, 0] = named["factor"]
        H, R = W.new_zeros(regimes, m, n), W.new_zeros(regimes, m, m)
        H[:, :, 0] = named["loading"]
        if loading_lags:
            H[:, :, 1 : loading_lags + 1] = named["lagged_loading"]
        for a in range(m if q else 0):
            at = own + a * q
            W[:, at, at : at + q] = named["error_autoregression"][:, a]
            W[:, range(at + 1, at + q), range(at, at + q - 1)] = 1.0
            Q[:, at, at], H[:, a, at] = named["error"][:, a], 1.0
        if not q:
            R = torch.diag_embed(named["error"])
        c = torch.cat([named["mean"][:, None], W.new_zeros(regimes, n - 1)], 1)
        return {
            "dynamics": W,
            "process_noise": Q,
            "observation": H,
            "observation_noise": R,
            "dynamics_offset": c,
        }

    diffuse, options = np.zeros(n, dtype=bool), (starts, seed, fixed, constraints)
    scales = {"loading": size, "lagged_loading": 0.3 * size[:, None]}
    noises: dict[str, tuple[ArrayLike, int]] = {"error": (size, 2), "factor": (1.0, 2)}
    return _fit(what, y, m, parts, build, diffuse, regimes, names, held, scales, noises, options, skip)


def time_varying_regression(
    y: SeriesLike,
    x: ArrayLike,
    *,
    regimes: int = 2,
    switching: str | Sequence[str] = ("irregular",),
    starts: int = 5,
    seed: int = 0,
    fixed: Fixed | None = None,
    constraints: str | Sequence[str] = (),
) -> Fit[SwitchingLinearGaussian]:
    """Fit a regression whose coefficients wander; `fit.model.smooth(y).mean` are their paths.

    Coefficients are random walks that start diffuse; there is no constant but a column of ones in x.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        x: regressors, ``(T, k)`` or ``(T,)``.
        regimes: how many; 1 is the plain model.
        switching: what switches: some of the variances "irregular" ``(regimes,)``, of what is left, and
            "coefficients" ``(regimes, k)``, of a step of each walk.
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
        fixed: values of parts that are not learned, by name, NaN where an entry is; {"coefficients":
            [0, nan]} keeps the first coefficient constant.
        constraints: texts such as "irregular[1] = 4 * irregular[0]"; the left side is computed, not learned.
    """
    what, values, given = "time_varying_regression", plain(y).reshape(-1), plain(x)
    given = given[:, None] if given.ndim == 1 else given
    if given.ndim != 2 or len(given) != len(values) or not np.isfinite(given).all():
        raise ArgumentError(
            f"{what}: y has {len(values)} rows, x has shape {given.shape}. Pass (T, k), all of it finite."
        )
    k, names, seen = given.shape[1], _names(what, switching, regimes), ~np.isnan(values)
    check_columns(f"{what}: x", given[seen], False, list(getattr(x, "columns", range(k))))
    solution = np.linalg.lstsq(given[seen], values[seen], rcond=None)[0]
    left = float(np.var(values[seen] - given[seen] @ solution)) or 1.0
    apart = np.geomspace(0.25, 4.0, regimes) if regimes > 1 else np.ones(1)
    size = np.sqrt((given**2).mean(0))
    walk = 0.01 * left / size**2 * (apart if "coefficients" in names else np.ones(regimes))[:, None]
    parts: Parts = {
        "irregular": (0.5 * left * (apart if "irregular" in names else np.ones(regimes)), POSITIVE),
        "coefficients": (walk, POSITIVE),
    }
    rows = torch.from_numpy(np.repeat(given[:, None, None], regimes, 1))

    def build(named: Named) -> Named:
        return {
            "dynamics": torch.eye(k, dtype=torch.float64).expand(regimes, k, k),
            "process_noise": torch.diag_embed(named["coefficients"]),
            "observation": rows,
            "observation_noise": named["irregular"][:, None, None],
        }

    noises = {"irregular": (left**0.5, 2), "coefficients": (left**0.5 / size, 2)}
    diffuse, options = np.ones(k, dtype=bool), (starts, seed, fixed, constraints)
    return _fit(what, y, 1, parts, build, diffuse, regimes, names, {}, {}, noises, options)


def _names(what: str, switching: str | Sequence[str], regimes: int) -> list[str]:
    """Names of the parts that switch; empty if there is one regime."""
    whole(what, "regimes", regimes)
    return [] if regimes == 1 else [switching] if isinstance(switching, str) else list(switching)


def _alike(regimes: int, value: ArrayLike) -> np.ndarray:
    """`value` repeated for every regime."""
    array = np.asarray(value, dtype=np.float64)
    return np.repeat(array[None], regimes, 0)


def _trend(
    what: str,
    y: SeriesLike,
    regimes: int,
    switching: str | Sequence[str],
    options: Options,
    order: int | None = None,
    periods: tuple[float, float] = (2.5, 50.0),
) -> Fit[SwitchingLinearGaussian]:
    """A level, with a slope or with a drift and a cycle, and noise."""
    values = plain(y).reshape(-1)
    names = _names(what, switching, regimes)
    steps = np.diff(values[~np.isnan(values)])
    variance = float(np.var(steps)) if len(steps) and np.var(steps) > 0 else 1.0
    drift = float(np.mean(steps)) if len(steps) else 0.0
    slope, cycle = what == "local_linear_trend", what == "unobserved_cycle"

    def start(name: str, share: float) -> np.ndarray:
        apart = np.geomspace(0.25, 4.0, regimes) if name in names else np.ones(regimes)
        return share * variance * apart

    parts: Parts = {
        "irregular": (start("irregular", 0.2), POSITIVE),
        "level": (start("level", 0.5), POSITIVE),
    }
    real = (-np.inf, np.inf)
    if slope:
        parts["slope"] = (start("slope", 0.05), POSITIVE)
    if cycle:
        apart = np.linspace(-1, 1, regimes) if "drift" in names else np.zeros(regimes)
        parts |= {
            "cycle": (start("cycle", 0.5), POSITIVE),
            "drift": (drift + apart * np.sqrt(variance), real),
        }
        if order is None:
            low, high = 2 * np.pi / periods[1], 2 * np.pi / periods[0]
            parts["damping"] = (np.full(regimes, 0.8), (0.0, EDGE))
            parts["frequency"] = (np.full(regimes, np.sqrt(low * high)), (low, high))
        else:
            parts["autoregression"] = (_alike(regimes, [0.8, *[0.0] * (order - 1)]), real)
    n = 1 + slope + ((order or 2) if cycle else 0)

    def build(named: Named) -> Named:
        W, Q = (named["level"].new_zeros(regimes, n, n) for _ in range(2))
        W[:, 0, 0], Q[:, 0, 0] = 1.0, named["level"]
        H = W.new_zeros(regimes, 1, n)
        H[:, 0, 0] = 1.0
        out = {"observation_noise": named["irregular"][:, None, None]}
        if slope:
            W[:, 0, 1], W[:, 1, 1], Q[:, 1, 1] = 1.0, 1.0, named["slope"]
        if cycle:
            H[:, 0, 1], Q[:, 1, 1] = 1.0, named["cycle"]
            out["dynamics_offset"] = torch.cat([named["drift"][:, None], W.new_zeros(regimes, n - 1)], 1)
            if order is None:
                a = named["damping"] * named["frequency"].cos()
                b = named["damping"] * named["frequency"].sin()
                W[:, 1, 1], W[:, 1, 2], W[:, 2, 1], W[:, 2, 2] = a, b, -b, a
                Q[:, 2, 2] = named["cycle"]
            else:
                W[:, 1, 1:] = named["autoregression"]
                W[:, range(2, n), range(1, n - 1)] = 1.0
        return out | {"dynamics": W, "process_noise": Q, "observation": H}

    diffuse, scales = np.arange(n) < 1 + slope, {"drift": np.sqrt(variance)}
    size = float(np.nanstd(values))
    noises = {name: (size, 2) for name in NOISES if name in parts}
    return _fit(what, y, 1, parts, build, diffuse, regimes, names, {}, scales, noises, options)


def _fit(
    what: str,
    y: SeriesLike,
    m: int,
    parts: Parts,
    build: Build,
    diffuse: np.ndarray,
    regimes: int,
    switching: Sequence[str],
    held: dict[str, np.ndarray],
    scales: dict[str, np.ndarray],
    noises: Mapping[str, tuple[ArrayLike, int]],
    options: Options,
    skip: int = 0,
) -> Fit[SwitchingLinearGaussian]:
    """Maximum likelihood of the model that `build` makes of the named parts."""
    starts, seed, fixed, constraints = options
    names = check_switching(what, switching, list(parts), regimes, starts)
    values = {"transition": even_transition(regimes), **{name: value for name, (value, _) in parts.items()}}
    bounds = {name: limits for name, (_, limits) in parts.items() if limits != (-np.inf, np.inf)}
    named = name_parameters(what, values, names, bounds, fixed, constraints, held, scales)
    n = len(diffuse)
    given = {"initial_mean": torch.zeros(regimes, n, dtype=torch.float64)}
    given["initial_covariance"] = torch.diag(torch.where(torch.from_numpy(diffuse), torch.inf, 0.0)).double()
    given["initial_covariance"] = given["initial_covariance"].expand(regimes, n, n)

    def assemble(every: Named, strict: bool = False) -> Named:
        out = build(every) | given | {"transition": every["transition"]}
        out |= stationary_states(out, diffuse, strict)
        return out | {"initial_probability": stationary(every["transition"]).clamp(min=0.0)}

    def model_of(every: dict[str, Any]) -> SwitchingLinearGaussian:
        tensors = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in every.items()}
        return SwitchingLinearGaussian(
            start="first", **{k: plain(v) for k, v in assemble(tensors, strict=True).items()}
        )

    base = model_of(named.values)
    data = checked_data(base, y, skip)
    if data.series != 1:
        raise ArgumentError(f"{what}: there are {data.series} series. Pass one.")
    none = torch.zeros(1, 1, 0, dtype=torch.float64)
    evaluate = objective(lambda x: base._replaced(**assemble(named.natural(x))), data, none, "gpb2", skip)
    rank = next((name for name in parts if name in names and name in ("drift", "mean")), None)
    rank = rank or next((name for name in parts if name in names), next(iter(parts)))
    seen = int((~np.isnan(data.rows)).sum())
    check_enough(what, 0 if named.free is None else named.free.size, seen)
    found = climb_named(
        what,
        named,
        evaluate,
        rank,
        starts,
        seed,
        1e-8,
        (8, 4),
        noises,
        observations=seen,
        regimes=regimes,
        y=y,
    )
    return replace(found, model=model_of(found.estimates))
