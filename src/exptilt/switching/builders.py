"""Models whose modes have states of different dimension, and ready models for a series.

`join_modes` is for modes whose states differ. A target that either glides (position, velocity) or manoeuvres
(position, velocity, acceleration) has states of 2 and 3 numbers. Going from mode i to mode j a state is first
read as one of mode j, x ← map_ij x + noise of covariance spread_ij, and then moved by mode j's dynamics. All
states are padded with zeros to the largest dimension, where the padding has no mean, no variance and no
effect. The moments of mode j are in its first n_j places. Moments over all modes average place by place, so
put quantities that the modes share first.

`fit_named_model` fits one of the ready models:

    "level"         y_t = d_{s_t} + v_t,  v_t ~ N(0, R_{s_t}): each regime has a level and a variance
    "local-level"   x_t = x_{t−1} + w_t,  w_t ~ N(0, Q_{s_t}),  y_t = x_t + v_t: the level wanders, each
                    regime at its own pace; diffuse start
    "autoregression"  `markov_autoregression` whose level and deviation switch
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError
from .checks import plain
from .learning.named import even_transition
from .learning.summary import Fit
from .model import SwitchingLinearGaussian
from .parameters import CORES, INITIAL
from .regression.markov import fit_regression
from .regression.vector import fit_levels

KINDS = ("level", "local-level", "autoregression")


def join_modes(
    *,
    transition: ArrayLike,
    dynamics: Sequence[ArrayLike],
    process_noise: Sequence[ArrayLike],
    observation: Sequence[ArrayLike],
    observation_noise: ArrayLike,
    initial_mean: Sequence[ArrayLike],
    initial_covariance: Sequence[ArrayLike],
    initial_probability: ArrayLike,
    maps: Mapping[tuple[int, int], ArrayLike],
    map_covariance: Mapping[tuple[int, int], ArrayLike] | None = None,
    dynamics_offset: Sequence[ArrayLike] | None = None,
    observation_offset: ArrayLike | None = None,
    start: str = "before",
) -> SwitchingLinearGaussian:
    """One model from modes with states of n_0, n_1, … numbers.

    Args:
        transition: ``(M, M)``.
        dynamics, process_noise: one ``(n_j, n_j)`` a mode.
        observation: one ``(m, n_j)`` a mode.
        observation_noise: ``(M, m, m)`` or ``(m, m)``.
        initial_mean, initial_covariance: one ``(n_j,)`` and ``(n_j, n_j)`` a mode.
        initial_probability: ``(M,)``.
        maps: for pairs (i, j), the ``(n_j, n_i)`` matrix that reads a state of mode i as one of mode j. A
            pair that is left out has the identity, so pairs of different dimensions must be given.
        map_covariance: for pairs (i, j), the ``(n_j, n_j)`` covariance of noise added after the map, for
            components that mode i does not have.
        dynamics_offset: one ``(n_j,)`` a mode.
        observation_offset: ``(M, m)`` or ``(m,)``.
        start: as in `SwitchingLinearGaussian`.
    """
    sizes = [np.shape(W)[-1] for W in dynamics]
    M, n, m = len(sizes), max(sizes), np.shape(observation[0])[0]

    def pad(name: str, value: ArrayLike, shape: tuple[int, ...], j: int | tuple[int, int]) -> np.ndarray:
        """The value padded with zeros: every axis but the observed one grows to n."""
        array = np.asarray(value, dtype=np.float64)
        if array.shape != shape:
            raise ArgumentError(f"join_modes: {name} of mode {j} has shape {array.shape}, expected {shape}.")
        out = np.zeros((m, n) if name == "observation" else (n,) * len(shape))
        out[tuple(slice(0, k) for k in shape)] = array
        return out

    given = {
        "dynamics": dynamics,
        "process_noise": process_noise,
        "observation": observation,
        "initial_mean": initial_mean,
        "initial_covariance": initial_covariance,
    }
    given |= {} if dynamics_offset is None else {"dynamics_offset": dynamics_offset}
    stacked = {}
    for name, values in given.items():
        if len(values) != M:
            raise ArgumentError(
                f"join_modes: dynamics has {M} modes, {name} has {len(values)}. Pass one of each a mode."
            )
        axes = [tuple({"n": k, "m": m}[letter] for letter in CORES[name]) for k in sizes]
        stacked[name] = np.stack([pad(name, value, axes[j], j) for j, value in enumerate(values)])
    tie, spread = np.zeros((M, M, n, n)), np.zeros((M, M, n, n))
    for i in range(M):
        for j in range(M):
            if (i, j) in maps:
                tie[i, j] = pad("maps", maps[i, j], (sizes[j], sizes[i]), (i, j))
            elif sizes[i] == sizes[j]:
                tie[i, j, : sizes[j], : sizes[i]] = np.eye(sizes[i])
            else:
                raise ArgumentError(
                    f"join_modes: modes {i} and {j} have {sizes[i]} and {sizes[j]} states. "
                    f"Pass maps[{i}, {j}], a {(sizes[j], sizes[i])} matrix."
                )
            if map_covariance is not None and (i, j) in map_covariance:
                spread[i, j] = pad("map_covariance", map_covariance[i, j], (sizes[j], sizes[j]), (i, j))
    return SwitchingLinearGaussian(
        transition=transition,
        observation_noise=observation_noise,
        initial_probability=initial_probability,
        observation_offset=observation_offset,
        start=start,
        maps=tie,
        map_covariance=spread,
        **stacked,
    )


def fit_named_model(
    y: ArrayLike,
    *,
    kind: str = "level",
    modes: int = 2,
    order: int = 1,
    starts: int = 5,
    seed: int = 0,
    start: Fit[SwitchingLinearGaussian] | None = None,
    progress: bool | None = None,
) -> Fit[SwitchingLinearGaussian]:
    """Fit one of the ready models; regimes are numbered from low level, or slow pace, upwards.

    Args:
        y: one series, ``(T, m)`` or ``(T,)``; NaN is missing; columns of a table are named in messages.
        kind: "level", "local-level" or "autoregression".
        modes: how many regimes.
        order: how many lags an autoregression has.
        starts: how many starts.
        seed: of the starts after the first.
        start: a fit of the same kind that is the only start, for example of a longer series. For one column
            it may have one regime less: its regimes are then split, beside the other starts.
        progress: show a bar: True, False, or None for only on a terminal.
    """
    if kind not in KINDS:
        raise ArgumentError(f"fit_named_model: kind is {kind!r}. Pass one of {list(KINDS)}.")
    if modes < 1 or starts < 1:
        raise ArgumentError(f"fit_named_model: modes={modes}, starts={starts}. Pass at least 1 of each.")
    values, names = plain(y), list(getattr(y, "columns", ()))
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or len(values) < 3 * modes:
        raise ArgumentError(
            f"fit_named_model: the series has shape {values.shape}. "
            f"Pass (T, m) with at least {3 * modes} rows for {modes} regimes."
        )
    if np.isinf(values).any():
        raise ArgumentError(
            "fit_named_model: the series holds infinite values. Remove them, or pass NaN where a value is "
            "missing."
        )
    for a, column in enumerate(values.T):
        seen = column[~np.isnan(column)]
        if len(seen) < 2 or np.ptp(seen) == 0:
            what = "has fewer than two observed values" if len(seen) < 2 else f"is constant ({seen[0]:g})"
            raise ArgumentError(
                f"fit_named_model: component {a} {what}. Leave it out, or pass a series that varies."
            )
    estimates = None if start is None else start.estimates
    grows = estimates is not None and len(estimates["transition"]) < modes
    starts = starts if start is None or grows else 1
    if kind == "autoregression":
        if values.shape[1] != 1:
            raise ArgumentError(
                f"fit_named_model: an autoregression needs one column, the series has {values.shape[1]}."
            )
        parts, what = ("intercept", "deviation"), "fit_named_model"
        options = values, None, modes, order, parts, starts, seed
        return fit_regression(what, *options, start=estimates, progress=progress)
    if kind == "level":
        return fit_levels(values, modes, starts, seed, names or None, estimates, progress)
    off = ~np.eye(values.shape[1], dtype=bool)
    found = (_wandering(values, modes) if start is None else start.model).fit(
        values,
        method="mle",
        fixed={
            "dynamics": True,
            "observation": True,
            "transition": modes == 1,
            "process_noise": off,
            "observation_noise": off,
        },
        shared=("observation_noise",),
        restarts=starts - 1,
        generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )
    rank = np.argsort(np.trace(plain(found.model.process_noise), axis1=1, axis2=2), kind="stable")

    def ordered(table: Mapping[str, Any]) -> dict[str, np.ndarray]:
        out = {name: plain(value)[rank] for name, value in table.items()}
        return out | ({"transition": out["transition"][:, rank]} if "transition" in out else {})

    names = ["transition", "dynamics", "process_noise", "observation", "observation_noise", *INITIAL]
    model = found.model.replace(**ordered({name: getattr(found.model, name) for name in names}))
    return replace(
        found, model=model, estimates=ordered(found.estimates), standard_errors=ordered(found.standard_errors)
    )


def _wandering(y: np.ndarray, modes: int) -> SwitchingLinearGaussian:
    """Starting model for wandering levels of y ``(T, m)``, with clearly different paces."""
    m, variance = y.shape[1], np.nanvar(np.diff(y, axis=0), 0)
    variance = np.where(np.isfinite(variance) & (variance > 0), variance, np.nanvar(y, 0))
    pace = np.geomspace(0.1, 2.0, modes) if modes > 1 else np.ones(1)
    return SwitchingLinearGaussian(
        transition=even_transition(modes, 0.9),
        dynamics=np.eye(m),
        process_noise=pace[:, None, None] * np.diag(variance),
        observation=np.eye(m),
        observation_noise=np.diag(0.2 * variance),
        initial_mean=np.zeros(m),
        initial_covariance=np.diag(np.full(m, np.inf)),
        initial_probability=np.full(modes, 1 / modes),
        start="first",
    )
