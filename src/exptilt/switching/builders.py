"""Models put together from parts: modes of different dimension, and two for a series one knows little about.

`join_modes` is for modes whose states differ. A target that either glides (position, velocity) or manoeuvres
(position, velocity, acceleration) has states of 2 and 3 numbers. Going from mode i to mode j a state is first
read as one of mode j, x ← map_ij x + noise of covariance spread_ij, and then moved by mode j's dynamics. All
states are padded with zeros to the largest dimension, where the padding has no mean, no variance and no
effect. The moments of each mode stand in its first n_j places. Moments over all modes mix places by number,
so let shared quantities come first.

`fit_named_model` fits one of

    "level"         y_t = d_{s_t} + v_t,  v_t ~ N(0, R_{s_t}): a level and a variance a regime
    "local-level"   x_t = x_{t−1} + w_t,  w_t ~ N(0, Q_{s_t}),  y_t = x_t + v_t: the level wanders, each
                    regime at its own pace; diffuse start

It starts from the data, learns from several starts, leaves out ends where a regime has shrunk onto single
points (there the likelihood has no maximum), and numbers the regimes from low level, or slow pace, upwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError, ConvergenceError
from .._support.progress import track
from .checks import plain
from .learning.climb import FitStatus
from .learning.maximum_likelihood import checked_data
from .learning.summary import Fit
from .model import SwitchingLinearGaussian
from .parameters import CORES, INITIAL

KINDS = ("level", "local-level")


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
            pair of equal dimensions that is left out is read as it is; a pair of different ones must be
            given.
        map_covariance: for pairs (i, j), an ``(n_j, n_j)`` covariance added in reading: what is not known of
            the new state.
        dynamics_offset: one ``(n_j,)`` a mode.
        observation_offset: ``(M, m)`` or ``(m,)``.
        start: as in `SwitchingLinearGaussian`.
    """
    sizes = [np.shape(W)[-1] for W in dynamics]
    M, n, m = len(sizes), max(sizes), np.shape(observation[0])[0]

    def pad(name: str, value: ArrayLike, shape: tuple[int, ...], j: int | tuple[int, int]) -> np.ndarray:
        """The value in the corner of zeros; all axes but the observed one grow to n."""
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


def start_model(y: np.ndarray, kind: str, modes: int) -> SwitchingLinearGaussian:
    """A start for the series y ``(T, m)`` (NaN where missing), with modes far enough apart to tell."""
    m = y.shape[1]
    stay = np.full((modes, modes), 0.1 / max(modes - 1, 1))
    np.fill_diagonal(stay, 0.9 if modes > 1 else 1.0)
    common: dict[str, Any] = {
        "transition": stay,
        "initial_probability": np.full(modes, 1 / modes),
        "start": "first",
    }
    if kind == "level":
        deviation = np.nanstd(y, 0)
        rank = np.nanmean((y - np.nanmean(y, 0)) / deviation, 1, where=~np.isnan(y)) if m > 1 else y[:, 0]
        order = np.argsort(np.where(np.isnan(rank), np.nanmedian(rank), rank))
        parts = [y[part] for part in np.array_split(order, modes)]
        seen = [(~np.isnan(part)).any(0).all() for part in parts]
        levels = [np.nanmean(part if ok else y, 0) for part, ok in zip(parts, seen, strict=True)]
        return SwitchingLinearGaussian(
            dynamics=np.zeros((1, 1)),
            process_noise=np.zeros((1, 1)),
            observation=np.zeros((m, 1)),
            observation_noise=np.linspace(0.5, 1.0, modes)[:, None, None] * np.diag(deviation**2),
            initial_mean=np.zeros(1),
            initial_covariance=np.zeros((1, 1)),
            observation_offset=np.stack(levels),
            **common,
        )
    variance = np.nanvar(np.diff(y, axis=0), 0)
    variance = np.where(np.isfinite(variance) & (variance > 0), variance, np.nanvar(y, 0))
    pace = np.geomspace(0.1, 2.0, modes) if modes > 1 else np.ones(1)
    return SwitchingLinearGaussian(
        dynamics=np.eye(m),
        process_noise=pace[:, None, None] * np.diag(variance),
        observation=np.eye(m),
        observation_noise=np.diag(0.2 * variance),
        initial_mean=np.zeros(m),
        initial_covariance=np.diag(np.full(m, np.inf)),
        **common,
    )


def fit_named_model(
    y: ArrayLike,
    *,
    kind: str = "level",
    modes: int = 2,
    starts: int = 5,
    seed: int = 0,
    progress: bool | None = None,
) -> Fit[SwitchingLinearGaussian]:
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
        raise ArgumentError(f"fit_named_model: kind is {kind!r}. Pass one of {list(KINDS)}.")
    if modes < 1 or starts < 1:
        raise ArgumentError(f"fit_named_model: modes={modes}, starts={starts}. Pass at least 1 of each.")
    values = plain(y)
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
    base = start_model(values, kind, modes)
    checked_data(base, values, 0)
    off = ~np.eye(values.shape[1], dtype=bool)
    held: dict[str, ArrayLike] = {"dynamics": True, "observation": True, "transition": modes == 1}
    options: dict[str, Any] = {"method": "em", "fixed": held | {"process_noise": True}}
    if kind == "local-level":
        held |= {"process_noise": off, "observation_noise": off}
        options = {"method": "mle", "fixed": held, "shared": ("observation_noise",)}
    rng = np.random.default_rng(seed)
    scale = np.nanvar(values, 0)
    ends: list[Fit[SwitchingLinearGaussian]] = []
    for attempt in track(range(starts), f"{starts} starts", show=progress):
        start = base if attempt == 0 else _shaken(base, kind, rng, scale)
        try:
            found = start.fit(values, **options, standard_errors=False, max_steps=1000, progress=False)
        except ArgumentError:
            continue  # this start led to where a noise vanishes
        noise = plain(found.model.observation_noise)
        noise = noise if kind == "level" else noise + plain(found.model.process_noise)
        proper = found.status is not FitStatus.DEGENERATE
        if proper and (np.linalg.eigvalsh(noise / np.sqrt(scale[:, None] * scale))[:, 0] >= 1e-6).all():
            ends.append(found)
    if not ends:
        raise ConvergenceError(
            f"fit_named_model: none of {starts} starts ended at a proper maximum with {modes} regimes. "
            "Try fewer regimes or the other model."
        )
    best = max(ends, key=lambda end: end.log_likelihood)
    ordered = reorder(best.model, kind)
    final = ordered.fit(values, **options, max_steps=1, progress=False)  # for the standard errors
    finals = tuple(end.log_likelihood for end in ends)
    return replace(best, model=ordered, standard_errors=final.standard_errors, restarts=finals)


def _shaken(
    base: SwitchingLinearGaussian, kind: str, rng: np.random.Generator, scale: np.ndarray
) -> SwitchingLinearGaussian:
    """Another start: levels, noises and persistence changed at random."""
    M = base.modes
    stay = rng.uniform(0.7, 0.98, M)
    transition = np.full((M, M), 1.0) * ((1 - stay) / max(M - 1, 1))[:, None]
    np.fill_diagonal(transition, stay if M > 1 else 1.0)
    changes: dict[str, Any] = {"transition": transition}
    noise = rng.uniform(0.3, 1.5, (M, 1, 1))
    if kind == "level":
        changes["observation_noise"] = base.observation_noise * noise
        shift = rng.normal(size=base.observation_offset.shape)
        changes["observation_offset"] = base.observation_offset + 0.5 * np.sqrt(scale) * shift
    else:
        changes["observation_noise"] = base.observation_noise * rng.uniform(0.1, 3.0)
        changes["process_noise"] = base.process_noise * np.exp(rng.normal(size=(M, 1, 1)))
    return base.replace(**changes)


def reorder(model: SwitchingLinearGaussian, kind: str) -> SwitchingLinearGaussian:
    """The model with its regimes numbered from low level (or slow pace) upwards."""
    pace = np.trace(plain(model.process_noise), axis1=1, axis2=2)
    order = np.argsort(plain(model.observation_offset)[:, 0] if kind == "level" else pace, kind="stable")
    names = ["dynamics", "process_noise", "observation", "observation_noise", *INITIAL]
    names += ["observation_offset"] if model.observation_offset is not None else []
    changes = {name: plain(getattr(model, name))[order] for name in names}
    return model.replace(transition=plain(model.transition)[np.ix_(order, order)], **changes)
