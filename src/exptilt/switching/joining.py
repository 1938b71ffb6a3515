"""Modes whose states differ in dimension, through maps between them.

A target that either glides (position, velocity) or manoeuvres (position, velocity, acceleration) has states of 2 and 3 numbers. Going
from mode i to mode j a
state is first read as one of mode j, x ← map_ij x + noise of covariance spread_ij, and then moved by mode j's dynamics. `join_modes` pads
all
states with zeros to the largest dimension, where the padding has no mean, no variance and no effect, and gives one model with `maps`.

The moments of each mode stand in its first n_j places. Moments over all modes mix places by number, so let shared quantities come first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._support.errors import ArgumentError
from .model import SwitchingLinearGaussian


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
