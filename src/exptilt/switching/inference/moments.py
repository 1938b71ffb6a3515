"""Kalman arithmetic on arrays, for all steps or paths at once.

Leading axes are free, and arrays may be numpy's or tensors; the compiled form of the same moves is
csrc/switching/gaussian.hpp. Collapsing and moving by a linear map commute: the moments of mode j one step
ahead are W_j · collapse_i(w_{i|j}, law_i), whatever the filter.
"""

from typing import Any, TypeVar

import numpy as np
import torch

from ..arrays import LOG_TWO_PI, ROUNDING, Parameters

A = TypeVar("A", np.ndarray, torch.Tensor)
Moments = tuple[np.ndarray, np.ndarray, np.ndarray]
STEP = ("transition", "dynamics", "dynamics_offset", "process_noise")
SENSOR = ("observation", "observation_offset", "observation_noise")


def predict(W: A, mean: A, cov: A, c: A | float, Q: A) -> tuple[A, A]:
    """Moments of W x + c + noise of covariance Q."""
    return (W @ mean[..., None])[..., 0] + c, W @ cov @ W.mT + Q


def mixture(weight: A, mean: A, cov: A) -> tuple[A, A]:
    """Mean ``(..., n)`` and covariance ``(..., n, n)`` of mixtures with weights ``(..., M)``."""
    if isinstance(cov, torch.Tensor) and cov.requires_grad and (infinite := torch.isinf(cov)).any():
        limit = unknown(mixture(weight.detach(), mean.detach(), cov.detach())[1])
        mean, finite = mixture(weight, mean, torch.where(infinite, 0.0, cov))
        return mean, torch.where(infinite.any(-3), limit, finite)  # infinite moments have no derivative
    einsum = torch.einsum if isinstance(weight, torch.Tensor) else np.einsum
    out = einsum("...j,...jk->...k", weight, mean)
    delta = mean - out[..., None, :]
    spread = einsum("...j,...jkl->...kl", weight, cov)
    return out, spread + (weight[..., None] * delta).mT @ delta


def terms(H: torch.Tensor, cov: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    """Size of the terms that are summed on the diagonal of H P H' + R, ``(..., m)``."""
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


def rauch(x: A, P: A, J: A, F: A, Q: A, gap: A, later: A | float) -> tuple[A, A]:
    """Smoothed mean and covariance of x ~ (x, P) by Rauch's gain J; the next state is F x + c + N(0, Q).

    `gap` is the smoothed mean of the next state less its prediction, `later` its smoothed covariance.
    """
    xp: Any = torch if isinstance(P, torch.Tensor) else np
    left = xp.eye(P.shape[-1], dtype=P.dtype) - J @ F
    cov = left @ P @ left.mT + J @ (later + Q) @ J.mT
    return x + (J @ gap[..., None])[..., 0], (cov + cov.mT) / 2


def step_ahead(
    log_mode: A, mean: A, cov: A, now: list[A], maps: tuple[A, A] | None, one: bool = False
) -> tuple[A, A, A]:
    """Mode probabilities and moments one step on, by the transition, W, c, Q in `now`.

    With `one` all modes are collapsed to one first (GPB1).
    """
    xp: Any = torch if isinstance(mean, torch.Tensor) else np
    transition, W, c, Q = now
    mu = xp.exp(log_mode)[..., :, None]
    joint = mu * transition  # (..., i, j)
    reach = joint.sum(-2)
    there = reach[..., None, :] > 0
    weight = mu + 0 * joint if one else xp.where(there, joint / xp.where(there, reach[..., None, :], 1.0), mu)
    mean, cov = mean[..., None, :, :], cov[..., None, :, :, :]  # (..., j, i, n)
    if maps is not None:
        mean, cov = predict(maps[0].swapaxes(0, 1), mean, cov, 0.0, maps[1].swapaxes(0, 1))
    with np.errstate(invalid="ignore"):  # covariances of diffuse states are infinite
        mixed, mixed_cov = mixture(weight.mT, mean, cov)
        ahead, ahead_cov = predict(W, mixed, mixed_cov, c, Q)
    return reach, ahead, unknown((ahead_cov + ahead_cov.mT) / 2)


def unknown(cov: A) -> A:
    """Covariances with NaN, which sums of infinities give, replaced by infinity."""
    xp: Any = torch if isinstance(cov, torch.Tensor) else np
    return xp.where(xp.isnan(cov), xp.inf, cov)  # type: ignore[no-any-return]


def observe(probability: A, mean: A, cov: A, now: list[A]) -> list[A]:
    """Moments of y: by mode ``(..., M, m)``, ``(..., M, m, m)``, and those over modes."""
    H, d, R = now
    with np.errstate(invalid="ignore"):
        means, covs = predict(H, mean, cov, d, R)
        center, spread = mixture(probability, means, unknown(covs))
    return [means, unknown(covs), center, unknown(spread)]


def by_row(p: Parameters, starts: np.ndarray, which: tuple[str, ...], M: int) -> list[Any]:
    """Parameters broadcast over rows: (rows or 1, M, ...); arrays, or tensors where `p` holds tensors."""
    n, m = p.initial_mean.shape[-1] // M, p.observation_offset.shape[-1] // M
    square, output = (M, n, n), (M, m, n)
    shapes = dict(
        zip(STEP + SENSOR, ((M, M), square, (M, n), square, output, (M, m), (M, m, m)), strict=True)
    )
    time = np.concatenate([np.arange(k) for k in np.diff(starts)])
    series = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    out = []
    for name in which:
        value = getattr(p, name)
        if value.shape[:2] == (1, 1):
            value = value[0]
        else:
            value = value[series if value.shape[0] > 1 else 0, time if value.shape[1] > 1 else 0]
        out.append(value.reshape(-1, *shapes[name]))
    return out


def maps_of(p: Parameters, M: int) -> tuple[Any, Any] | None:
    """Maps between modes and their covariances as ``(M, M, n, n)``, or None."""
    n, maps = p.initial_mean.shape[-1] // M, p.maps
    return None if len(maps) == 0 else (maps.reshape(M, M, n, n), p.map_covariance.reshape(M, M, n, n))


def predicted(
    p: Parameters, starts: np.ndarray, log_mode: A, mean: A, cov: A, diffuse: np.ndarray, one: bool
) -> tuple[A, A, A]:
    """P(mode), mean and covariance by mode of x_t before y_t is seen, for every row.

    Variances of `diffuse` initial states are infinite.
    """
    M, n = mean.shape[1:]
    xp: Any = torch if isinstance(mean, torch.Tensor) else np
    initial_cov = p.initial_covariance.reshape(-1, M, n, n)
    if diffuse.any():
        infinite = np.diag(diffuse)
        initial_cov = xp.where(torch.from_numpy(infinite) if xp is torch else infinite, xp.inf, initial_cov)
    initial: Any = (p.initial_log_probability, p.initial_mean.reshape(-1, M, n), initial_cov)
    begins = np.zeros(len(mean), dtype=bool)
    begins[starts[:-1]] = True
    own = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) if len(initial[0]) > 1 else 0
    marks = torch.from_numpy(begins) if xp is torch else begins

    def begun(value: A, start: A) -> A:
        """The value, with `start` in the first row of each series."""
        first = marks.reshape(-1, *(1,) * (value.ndim - 1))
        return xp.where(first, start[own], value)  # type: ignore[no-any-return]

    law: Any = [begun(xp.roll(v, 1, 0), s) for v, s in zip((log_mode, mean, cov), initial, strict=True)]
    ahead: Any = step_ahead(law[0], law[1], law[2], by_row(p, starts, STEP, M), maps_of(p, M), one)
    if not p.first:
        return ahead  # type: ignore[no-any-return]
    firsts = (xp.exp(initial[0]), *initial[1:])
    found: Any = tuple(begun(value, start) for value, start in zip(ahead, firsts, strict=True))
    return found  # type: ignore[no-any-return]
