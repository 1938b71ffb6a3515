"""Kalman arithmetic on arrays, for all steps or paths at once.

Leading axes are free, and arrays may be numpy's or tensors; the compiled form of the same moves is
`kernels/kalman.py`. Collapsing and moving by a linear map commute: the moments of mode j one step ahead are
W_j · collapse_i(w_{i|j}, law_i), whatever the filter.
"""

from typing import TypeVar

import numpy as np
import torch

from ..kernels.buffers import Parameters
from ..kernels.kalman import LOG_TWO_PI, ROUNDING

A = TypeVar("A", np.ndarray, torch.Tensor)
Moments = tuple[np.ndarray, np.ndarray, np.ndarray]
STEP = ("transition", "dynamics", "dynamics_offset", "process_noise")
SENSOR = ("observation", "observation_offset", "observation_noise")


def predict(W: A, mean: A, cov: A, c: A | float, Q: A) -> tuple[A, A]:
    """Moments of W x + c + noise of covariance Q."""
    return (W @ mean[..., None])[..., 0] + c, W @ cov @ W.mT + Q


def mixture(weight: A, mean: A, cov: A) -> tuple[A, A]:
    """Mean ``(..., n)`` and covariance ``(..., n, n)`` of mixtures with weights ``(..., M)``."""
    einsum = torch.einsum if isinstance(weight, torch.Tensor) else np.einsum
    out = einsum("...j,...jk->...k", weight, mean)
    delta = mean - out[..., None, :]
    spread = einsum("...j,...jkl->...kl", weight, cov)
    return out, spread + (weight[..., None] * delta).mT @ delta


def terms(H: torch.Tensor, cov: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    """How large the terms are that the rows of H P H' + R are sums of, ``(..., m)``."""
    own = R.diagonal(dim1=-2, dim2=-1)
    return own + ((H * H) @ cov.diagonal(dim1=-2, dim2=-1)[..., None])[..., 0]


def condition(
    e: torch.Tensor, S: torch.Tensor, cross: torch.Tensor, size: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gain K = cross S^{-1}, the log-density of e under N(0, S), and where S is not positive definite.

    A pivot that is rounding beside `size` ``(..., m)`` counts as zero, as in the kernels.
    """
    L, bad = torch.linalg.cholesky_ex(S)
    pivots = L.detach().diagonal(dim1=-2, dim2=-1) ** 2
    small = pivots <= ROUNDING * sum(cross.shape[-2:]) * size.detach()
    bad = (bad != 0) | small.any(-1)
    z = torch.linalg.solve_triangular(L, e[..., None], upper=False)[..., 0]
    square, logarithms = (z * z).sum(-1), L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    gain = torch.cholesky_solve(cross.mT, L).mT
    return gain, -0.5 * (e.shape[-1] * LOG_TWO_PI + square) - logarithms, bad


def joseph(K: torch.Tensor, H: torch.Tensor, cov: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    """The covariance after an update, (I − K H) P (I − K H)' + K R K'."""
    rest = torch.eye(cov.shape[-1], dtype=cov.dtype) - K @ H
    out = rest @ cov @ rest.mT + K @ R @ K.mT
    return (out + out.mT) / 2


def step_ahead(
    log_mode: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
    now: list[np.ndarray],
    maps: tuple[np.ndarray, np.ndarray] | None,
    one: bool = False,
) -> Moments:
    """Mode probabilities and moments one step on, by the transition, W, c, Q in `now`.

    With `one` all modes are collapsed to one first (GPB1).
    """
    transition, W, c, Q = now
    mu = np.exp(log_mode)[..., :, None]
    joint = mu * transition  # (..., i, j)
    reach = joint.sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where((reach[..., None, :] > 0) & ~np.array(one), joint / reach[..., None, :], mu)
    mean, cov = mean[..., None, :, :], cov[..., None, :, :, :]  # (..., j, i, n)
    if maps is not None:
        mean, cov = predict(maps[0].swapaxes(0, 1), mean, cov, 0.0, maps[1].swapaxes(0, 1))
    with np.errstate(invalid="ignore"):  # covariances of diffuse states are infinite
        mixed, mixed_cov = mixture(weight.mT, mean, cov)
        ahead, ahead_cov = predict(W, mixed, mixed_cov, c, Q)
    return reach, ahead, unknown((ahead_cov + ahead_cov.mT) / 2)


def unknown(cov: np.ndarray) -> np.ndarray:
    """Covariances with infinity in place of NaN, which is what sums of infinities give."""
    return np.where(np.isnan(cov), np.inf, cov)


def observe(
    probability: np.ndarray, mean: np.ndarray, cov: np.ndarray, now: list[np.ndarray]
) -> list[np.ndarray]:
    """Moments of y: by mode ``(..., M, m)``, ``(..., M, m, m)``, and those over modes."""
    H, d, R = now
    with np.errstate(invalid="ignore"):
        means, covs = predict(H, mean, cov, d, R)
        center, spread = mixture(probability, means, unknown(covs))
    return [means, unknown(covs), center, unknown(spread)]


def by_row(p: Parameters, starts: np.ndarray, which: tuple[str, ...], M: int) -> list[np.ndarray]:
    """Parameters broadcast over rows: (rows or 1, M, ...)."""
    n, m = len(p.initial_mean) // M, p.observation_offset.shape[-1] // M
    square, output = (M, n, n), (M, m, n)
    shapes = dict(
        zip(STEP + SENSOR, ((M, M), square, (M, n), square, output, (M, m), (M, m, m)), strict=True)
    )
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
        out.append(value.reshape(-1, *shapes[name]))
    return out


def maps_of(p: Parameters, M: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Maps between modes and their covariances as ``(M, M, n, n)``, or None."""
    n = len(p.initial_mean) // M
    return None if p.maps.size == 0 else (p.maps.reshape(M, M, n, n), p.map_covariance.reshape(M, M, n, n))


def predicted(
    p: Parameters,
    starts: np.ndarray,
    log_mode: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
    initial_cov: np.ndarray,
    one: bool,
) -> Moments:
    """P(mode), mean and covariance by mode of x_t before y_t is seen, for every row.

    `initial_cov` is the initial covariance, infinite for diffuse states.
    """
    M, n = mean.shape[1:]
    initial = (p.initial_log_probability, p.initial_mean.reshape(M, n), initial_cov.reshape(M, n, n))

    def before(value: np.ndarray, start: np.ndarray) -> np.ndarray:
        shifted = np.roll(value, 1, 0)
        shifted[starts[:-1]] = start
        return shifted

    law = (before(log_mode, initial[0]), before(mean, initial[1]), before(cov, initial[2]))
    ahead = step_ahead(*law, by_row(p, starts, STEP, M), maps_of(p, M), one)
    if p.first:
        for value, start in zip(ahead, (np.exp(initial[0]), *initial[1:]), strict=True):
            value[starts[:-1]] = start
    return ahead
