"""Two ready models for a series one knows little about.

    "level"         y_t = d_{s_t} + v_t,  v_t ~ N(0, R_{s_t}): each regime has its own level and its own variance (Hamilton's regression)
    "local-level"   x_t = x_{t−1} + w_t,  w_t ~ N(0, Q_{s_t}),  y_t = x_t + v_t: the level wanders, each regime at its own pace; diffuse
    start

`fit_ready` starts each from the data, learns it from several starts, leaves out ends where a regime has shrunk onto single points (there
the likelihood has
no maximum), and numbers the regimes from low level, or slow pace, upwards.

Modes whose states differ in dimension, through maps between them (`join_modes`): A target that either glides (position, velocity) or manoeuvres (position, velocity, acceleration) has states of 2 and 3 numbers. Going
from mode i to mode j a
state is first read as one of mode j, x ← map_ij x + noise of covariance spread_ij, and then moved by mode j's dynamics. `join_modes` pads
all
states with zeros to the largest dimension, where the padding has no mean, no variance and no effect, and gives one model with `maps`.

The moments of each mode stand in its first n_j places. Moments over all modes mix places by number, so let shared quantities come first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._support.errors import ArgumentError, ConvergenceError
from .._support.progress import track
from .checks import plain
from .learning.fit import Fit
from .learning.maximum_likelihood import checked_data
from .model import SwitchingLinearGaussian

KINDS = ("level", "local-level")


def start_model(y: np.ndarray, kind: str, modes: int) -> SwitchingLinearGaussian:
    """A start for the series y ``(T, m)`` (NaN where missing), with modes far enough apart to tell."""
    m = y.shape[1]
    stay = np.full((modes, modes), 0.1 / max(modes - 1, 1))
    np.fill_diagonal(stay, 0.9 if modes > 1 else 1.0)
    eye = np.eye(m)
    if kind == "level":
        deviation = np.nanstd(y, 0)
        rank = np.nanmean((y - np.nanmean(y, 0)) / deviation, 1, where=~np.isnan(y)) if m > 1 else y[:, 0]
        order = np.argsort(np.where(np.isnan(rank), np.nanmedian(rank), rank))
        levels = np.stack(
            [
                np.nanmean(y[part], 0) if (~np.isnan(y[part])).any(0).all() else np.nanmean(y, 0)
                for part in np.array_split(order, modes)
            ]
        )
        spread = np.linspace(0.5, 1.0, modes)[:, None, None] * np.diag(deviation**2)
        return SwitchingLinearGaussian(
            transition=stay,
            dynamics=np.zeros((1, 1)),
            process_noise=np.zeros((1, 1)),
            observation=np.zeros((m, 1)),
            observation_noise=spread,
            initial_mean=np.zeros(1),
            initial_covariance=np.zeros((1, 1)),
            initial_probability=np.full(modes, 1 / modes),
            observation_offset=levels,
            start="first",
        )
    steps = np.diff(y, axis=0)
    variance = np.nanvar(steps, 0)
    variance = np.where(np.isfinite(variance) & (variance > 0), variance, np.nanvar(y, 0))
    pace = np.geomspace(0.1, 2.0, modes) if modes > 1 else np.ones(1)
    return SwitchingLinearGaussian(
        transition=stay,
        dynamics=eye,
        process_noise=pace[:, None, None] * np.diag(variance),
        observation=eye,
        observation_noise=np.diag(0.2 * variance),
        initial_mean=np.zeros(m),
        initial_covariance=np.diag(np.full(m, np.inf)),
        initial_probability=np.full(modes, 1 / modes),
        start="first",
    )


def fit_ready(
    y: Any,
    *,
    kind: str = "level",
    modes: int = 2,
    starts: int = 5,
    seed: int = 0,
    progress: bool | None = None,
) -> Fit:
    """Fit one of the ready models.

    Args:
        y: one series, ``(T, m)`` or ``(T,)``; NaN is missing.
        kind: "level" or "local-level".
        modes: how many regimes.
        starts: how many starts.
        seed: of the starts after the first.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    if kind not in KINDS:
        raise ArgumentError(f"fit_ready: kind is {kind!r}. Pass one of {list(KINDS)}.")
    if modes < 1 or starts < 1:
        raise ArgumentError(f"fit_ready: modes={modes}, starts={starts}. Pass at least 1 of each.")
    values = plain(y)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or len(values) < 3 * modes:
        raise ArgumentError(
            f"fit_ready: the series has shape {values.shape}. Pass (T, m) with at least {3 * modes} rows for {modes} regimes."
        )
    if np.isinf(values).any():
        raise ArgumentError(
            "fit_ready: the series holds infinite values. Remove them, or pass NaN where a value is missing."
        )
    m = values.shape[1]
    for a in range(m):
        seen = values[~np.isnan(values[:, a]), a]
        if len(seen) < 2 or np.ptp(seen) == 0:
            what = "has fewer than two observed values" if len(seen) < 2 else f"is constant ({seen[0]:g})"
            raise ArgumentError(
                f"fit_ready: component {a} {what}. Leave it out, or pass a series that varies."
            )
    base = start_model(values, kind, modes)
    checked_data(base, values, 0)
    off = ~np.eye(m, dtype=bool)
    if kind == "level":
        options: dict[str, Any] = {"method": "em", "fixed": ("dynamics", "process_noise", "observation")}
    else:
        held = {"dynamics": True, "observation": True, "process_noise": off, "observation_noise": off}
        options = {"method": "mle", "fixed": held, "shared": ("observation_noise",)}
    if modes == 1:
        fixed = options["fixed"]
        options["fixed"] = (
            (*fixed, "transition") if isinstance(fixed, tuple) else fixed | {"transition": True}
        )
    rng = np.random.default_rng(seed)
    scale = np.nanvar(values, 0)
    best: Fit | None = None
    ends = []
    for attempt in track(range(starts), f"{starts} starts", show=progress):
        start = base if attempt == 0 else _shaken(base, kind, rng, scale)
        try:
            found = start.fit(values, **options, standard_errors=False, max_steps=1000, progress=False)
        except ArgumentError:
            continue  # this start ended where a noise vanished
        noise = plain(
            found.model.observation_noise
            if kind == "level"
            else found.model.process_noise + found.model.observation_noise
        )
        if (np.linalg.eigvalsh(noise / np.sqrt(scale[:, None] * scale))[:, 0] < 1e-6).any():
            continue
        ends.append(found.log_likelihood)
        if best is None or found.log_likelihood > best.log_likelihood:
            best = found
    if best is None:
        raise ConvergenceError(
            f"fit_ready: none of {starts} starts ended at a proper maximum with {modes} regimes. Try fewer regimes or the other model."
        )
    ordered = reorder(best.model, kind)
    final = ordered.fit(values, **options, max_steps=1, progress=False)  # for the standard errors
    return replace(best, model=ordered, standard_errors=final.standard_errors, restarts=tuple(ends))


def _shaken(
    base: SwitchingLinearGaussian, kind: str, rng: np.random.Generator, scale: np.ndarray
) -> SwitchingLinearGaussian:
    """Another start: levels, noises and persistence changed at random."""
    M = base.modes
    stay = rng.uniform(0.7, 0.98, M)
    transition = np.full((M, M), 1.0) * ((1 - stay) / max(M - 1, 1))[:, None]
    np.fill_diagonal(transition, stay if M > 1 else 1.0)
    changes: dict[str, Any] = {
        "transition": transition,
        "observation_noise": base.observation_noise * rng.uniform(0.3, 1.5, (M, 1, 1)),
    }
    if kind == "level":
        changes["observation_offset"] = base.observation_offset + 0.5 * np.sqrt(scale) * rng.normal(
            size=base.observation_offset.shape
        )
    else:
        changes["observation_noise"] = base.observation_noise * rng.uniform(0.1, 3.0)
        changes["process_noise"] = base.process_noise * np.exp(rng.normal(size=(M, 1, 1)))
    return base.replace(**changes)


def reorder(model: SwitchingLinearGaussian, kind: str) -> SwitchingLinearGaussian:
    """Number the regimes from low level (or slow pace) upwards."""
    key = (
        plain(model.observation_offset)[:, 0]
        if kind == "level"
        else np.trace(plain(model.process_noise), axis1=1, axis2=2)
    )
    order = np.argsort(key, kind="stable")
    names = (
        "dynamics",
        "process_noise",
        "observation",
        "observation_noise",
        "initial_mean",
        "initial_covariance",
        "initial_probability",
    )
    changes = {name: plain(getattr(model, name))[order] for name in names}
    if model.observation_offset is not None:
        changes["observation_offset"] = plain(model.observation_offset)[order]
    return model.replace(transition=plain(model.transition)[np.ix_(order, order)], **changes)


def join_modes(
    *,
    transition: Any,
    dynamics: Sequence[Any],
    process_noise: Sequence[Any],
    observation: Sequence[Any],
    observation_noise: Any,
    initial_mean: Sequence[Any],
    initial_covariance: Sequence[Any],
    initial_probability: Any,
    maps: Mapping[tuple[int, int], Any],
    map_covariance: Mapping[tuple[int, int], Any] | None = None,
    dynamics_offset: Sequence[Any] | None = None,
    observation_offset: Any = None,
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
        maps: for pairs (i, j), the ``(n_j, n_i)`` matrix that reads a state of mode i as one of mode j. A pair of equal dimensions that
            is left out is read as it
            is; a pair of different ones must be given.
        map_covariance: for pairs (i, j), an ``(n_j, n_j)`` covariance added in reading: what is not known of the new state.
        dynamics_offset: one ``(n_j,)`` a mode.
        observation_offset: ``(M, m)`` or ``(m,)``.
        start: as in `SwitchingLinearGaussian`.
    """
    sizes = [np.shape(W)[-1] for W in dynamics]
    M, n = len(sizes), max(sizes)
    given = {
        "process_noise": process_noise,
        "observation": observation,
        "initial_mean": initial_mean,
        "initial_covariance": initial_covariance,
    }
    for name, values in given.items():
        if len(values) != M:
            raise ArgumentError(
                f"join_modes: dynamics has {M} modes, {name} has {len(values)}. Pass one of each a mode."
            )

    def pad(name: str, value: Any, shape: tuple[int, ...], full: tuple[int, ...], j: Any) -> np.ndarray:
        array = np.asarray(value, dtype=np.float64)
        if array.shape != shape:
            raise ArgumentError(f"join_modes: {name} of mode {j} has shape {array.shape}, expected {shape}.")
        out = np.zeros(full)
        out[tuple(slice(0, k) for k in shape)] = array
        return out

    m = int(np.shape(observation[0])[0])
    W = [
        pad("dynamics", value, (k, k), (n, n), j)
        for j, (value, k) in enumerate(zip(dynamics, sizes, strict=True))
    ]
    Q = [
        pad("process_noise", value, (k, k), (n, n), j)
        for j, (value, k) in enumerate(zip(process_noise, sizes, strict=True))
    ]
    H = [
        pad("observation", value, (m, k), (m, n), j)
        for j, (value, k) in enumerate(zip(observation, sizes, strict=True))
    ]
    mean = [
        pad("initial_mean", value, (k,), (n,), j)
        for j, (value, k) in enumerate(zip(initial_mean, sizes, strict=True))
    ]
    cov = [
        pad("initial_covariance", value, (k, k), (n, n), j)
        for j, (value, k) in enumerate(zip(initial_covariance, sizes, strict=True))
    ]
    offset = None
    if dynamics_offset is not None:
        offset = np.stack(
            [
                pad("dynamics_offset", value, (k,), (n,), j)
                for j, (value, k) in enumerate(zip(dynamics_offset, sizes, strict=True))
            ]
        )
    tie, spread = np.zeros((M, M, n, n)), np.zeros((M, M, n, n))
    for i in range(M):
        for j in range(M):
            if (i, j) in maps:
                tie[i, j] = pad("maps", maps[i, j], (sizes[j], sizes[i]), (n, n), (i, j))
            elif sizes[i] == sizes[j]:
                tie[i, j, : sizes[j], : sizes[i]] = np.eye(sizes[i])
            else:
                raise ArgumentError(
                    f"join_modes: modes {i} and {j} have {sizes[i]} and {sizes[j]} states. Pass maps[{i}, {j}], a "
                    f"{(sizes[j], sizes[i])} matrix."
                )
            if map_covariance is not None and (i, j) in map_covariance:
                spread[i, j] = pad(
                    "map_covariance", map_covariance[i, j], (sizes[j], sizes[j]), (n, n), (i, j)
                )
    return SwitchingLinearGaussian(
        transition=transition,
        dynamics=np.stack(W),
        process_noise=np.stack(Q),
        observation=np.stack(H),
        observation_noise=observation_noise,
        initial_mean=np.stack(mean),
        initial_covariance=np.stack(cov),
        initial_probability=initial_probability,
        dynamics_offset=offset,
        observation_offset=observation_offset,
        start=start,
        maps=tie,
        map_covariance=spread,
    )
