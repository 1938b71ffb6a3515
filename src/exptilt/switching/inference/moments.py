"""Moments that follow from the filtered ones, for all steps at once.

Collapsing and moving by a linear map commute: the moments of mode j one step ahead are W_j · collapse_i(w_{i|j}, state_i), whatever the
filter.
"""

import numpy as np

from ..kernels.buffers import Parameters

Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


def mixture(weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean ``(..., n)`` and covariance ``(..., n, n)`` of mixtures with weights ``(..., M)``."""
    out = np.einsum("...j,...jk->...k", weight, mean)
    delta = mean - out[..., None, :]
    spread = np.einsum("...j,...jkl->...kl", weight, cov)
    return out, spread + np.einsum("...jk,...jl->...kl", weight[..., None] * delta, delta)


def step_ahead(log_mode: np.ndarray, mean: np.ndarray, cov: np.ndarray, now: list[np.ndarray], maps: tuple[np.ndarray, np.ndarray] | None,
               one: bool) -> Moments:  # fmt: skip
    """Mode probabilities and moments one step on. Leading axes are free.

    Args:
        log_mode, mean, cov: ``(..., M)``, ``(..., M, n)``, ``(..., M, n, n)`` before the step.
        now: transition ``(..., M, M)``, W, c, Q of the step.
        maps: as in the model, or None.
        one: collapse all modes to one first (GPB1).
    """
    transition, W, c, Q = now
    mu = np.exp(log_mode)
    joint = mu[..., :, None] * transition  # (..., i, j)
    reach = joint.sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(reach[..., None, :] > 0, joint / reach[..., None, :], mu[..., :, None])
    if one:
        weight = np.broadcast_to(mu[..., :, None], weight.shape)
    if maps is None:
        means = np.broadcast_to(mean[..., None, :, :], (*mean.shape[:-2], mean.shape[-2], *mean.shape[-2:]))
        covs = np.broadcast_to(cov[..., None, :, :, :], (*cov.shape[:-3], cov.shape[-3], *cov.shape[-3:]))
    else:
        means = np.einsum("ijkl,...il->...jik", maps[0], mean)
        covs = np.einsum("ijkl,...ilm,ijnm->...jikn", maps[0], cov, maps[0]) + maps[1].swapaxes(0, 1)
    mixed, mixed_cov = mixture(weight.swapaxes(-1, -2), means, covs)
    ahead = np.einsum("...jkl,...jl->...jk", W, mixed) + c
    ahead_cov = W @ mixed_cov @ W.swapaxes(-1, -2) + Q
    return reach, ahead, (ahead_cov + ahead_cov.swapaxes(-1, -2)) / 2


def by_row(p: Parameters, starts: np.ndarray, which: tuple[str, ...], M: int) -> list[np.ndarray]:
    """Parameters broadcast over rows: (rows or 1, M, ...)."""
    n, m = len(p.initial_mean) // M, p.observation_offset.shape[-1] // M
    shapes = {
        "transition": (M, M), "dynamics": (M, n, n), "dynamics_offset": (M, n), "process_noise": (M, n, n), "observation": (M, m, n),
        "observation_offset": (M, m), "observation_noise": (M, m, m),
    }  # fmt: skip
    time = np.concatenate([np.arange(k) for k in np.diff(starts)])
    series = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    out = []
    for name in which:
        value = getattr(p, name)
        if value.ndim == 2:
            value = value[time] if len(value) > 1 else value
        elif value.shape[:2] == (1, 1):
            value = value[0]
        else:
            value = value[series if value.shape[0] > 1 else 0, time if value.shape[1] > 1 else 0]
        out.append(value.reshape(len(value), *shapes[name]))
    return out


def maps_of(p: Parameters, M: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Maps between modes as ``(M, M, n, n)``, or None."""
    n = len(p.initial_mean) // M
    return None if p.maps.size == 0 else (p.maps.reshape(M, M, n, n), p.map_covariance.reshape(M, M, n, n))


def predicted(
    p: Parameters, starts: np.ndarray, log_mode: np.ndarray, mean: np.ndarray, cov: np.ndarray, one: bool
) -> Moments:
    """P(mode), mean and covariance by mode of x_t before y_t is seen, for every row."""
    M, n = mean.shape[1:]
    initial = (p.initial_log_probability, p.initial_mean.reshape(M, n), p.initial_covariance.reshape(M, n, n))
    before = []
    for value, start in zip((log_mode, mean, cov), initial, strict=True):
        shifted = np.empty_like(value)
        shifted[1:] = value[:-1]
        shifted[starts[:-1]] = start
        before.append(shifted)
    now = by_row(p, starts, ("transition", "dynamics", "dynamics_offset", "process_noise"), M)
    reach, ahead, ahead_cov = step_ahead(before[0], before[1], before[2], now, maps_of(p, M), one)
    if p.first:
        reach[starts[:-1]], ahead[starts[:-1]], ahead_cov[starts[:-1]] = (
            np.exp(initial[0]),
            initial[1],
            initial[2],
        )
    return reach, ahead, ahead_cov


def observe(
    probability: np.ndarray, mean: np.ndarray, cov: np.ndarray, now: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Moments of y: by mode ``(..., M, m)``, ``(..., M, m, m)`` and over modes ``(..., m)``, ``(..., m, m)``."""
    H, d, R = now
    means = np.einsum("...jak,...jk->...ja", H, mean) + d
    covs = H @ cov @ H.swapaxes(-1, -2) + R
    return means, covs, *mixture(probability, means, covs)


def innovations(
    p: Parameters,
    y: np.ndarray,
    starts: np.ndarray,
    probability: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Y minus its predicted mean, and its predicted covariance, for every row."""
    now = by_row(p, starts, ("observation", "observation_offset", "observation_noise"), mean.shape[1])
    _, _, center, spread = observe(probability, mean, cov, now)
    return y - center, spread
