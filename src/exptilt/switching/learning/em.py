r"""Expectation–maximisation under the chosen collapse.

The E-step is a filter and Kim's backward pass; it leaves sums of E[z z'], E[x z'], E[x x'] for each mode (see `backward`), where z =
(x_{t−1}, 1, u_t), and
likewise for the observations, where z = (x_t, 1, u_t). The M-step then is weighted regression: with Θ = (W, c, B) and noise Q,

    Θ maximises −½ Σ_k tr Q_k^{-1} (xx_k − Θ_k xz_k' − xz_k Θ_k' + Θ_k zz_k Θ_k'),    Q_k = that bracket / count_k

over the free entries alone, which is one linear system even where entries are fixed or shared between modes. A missing component is
replaced by its mean
given the state and the components that were seen, with its variance (a row with nothing seen says nothing about the observation and is
left out).

Exact EM never lowers the likelihood. A collapsed E-step may, by a little; the caller is told.
"""

from typing import Any

import numpy as np
import torch

from ..checks import plain
from ..inference.moments import mixture
from ..inference.run import run_filter
from ..inference.smooth import run_smoother
from ..model import SwitchingLinearGaussian
from ..series import Data, flatten, parameters
from .free_parameters import Free

Sums = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray
]  # count (M,), zz (M, C, C), xz (M, R, C), xx (M, R, R)


def em_step(
    model: SwitchingLinearGaussian, data: Data, inputs: Any, u: np.ndarray, free: Free, method: str
) -> tuple[float, dict[str, np.ndarray]]:
    """One step: the log-likelihood of `model`, and the new values of its free parameters.

    Args:
        model: the present one, numpy.
        data: the series.
        inputs: as the user gave them.
        u: the same, ``(rows, r)``.
        free: what is learned.
        method: the filter.
    """
    with torch.no_grad():
        p = parameters(flatten(model, data, inputs, "fit"), int(model.start == "first"))
    M, n = model.modes, model.states
    one = np.ones((len(data.rows), 1))
    g = np.concatenate(
        [
            one[:, : 0 if model.dynamics_offset is None else 1],
            u[:, : 0 if model.dynamics_input is None else u.shape[1]],
        ],
        1,
    )
    out = run_filter(p, data.rows, data.starts, method, True)
    back = run_smoother(p, data.rows, data.starts, out, np.ascontiguousarray(g))
    new: dict[str, np.ndarray] = {}
    if "transition" in free.masks:
        first = np.zeros(len(data.rows), dtype=bool)
        first[data.starts[:-1]] = model.start == "first"
        pairs = back.pairs[~first].sum(0).reshape(M, M)
        total = pairs.sum(1, keepdims=True)
        new["transition"] = np.where(
            total > 1e-12, pairs / np.maximum(total, 1e-300), plain(model.transition)
        )
        new["transition"] /= new["transition"].sum(1, keepdims=True)
    _initial(
        new,
        free,
        model,
        back.initial_probability,
        back.initial_mean.reshape(-1, M, n),
        back.initial_covariance.reshape(-1, M, n, n),
    )
    names = ("dynamics", "dynamics_offset", "dynamics_input", "process_noise")
    if any(name in free.masks for name in names):
        _regress(new, free, model, (back.total, back.zz, back.xz, back.xx), names)
    names = ("observation", "observation_offset", "observation_input", "observation_noise")
    if any(name in free.masks for name in names):
        g = np.concatenate(
            [
                one[:, : 0 if model.observation_offset is None else 1],
                u[:, : 0 if model.observation_input is None else u.shape[1]],
            ],
            1,
        )
        rows = len(data.rows)
        sums = observation_sums(
            model,
            data.rows,
            back.probability,
            back.mean.reshape(rows, M, n),
            back.covariance.reshape(rows, M, n, n),
            g,
        )
        _regress(new, free, model, sums, names)
    return float(out.log_likelihood.sum()), new


def _initial(
    new: dict[str, np.ndarray],
    free: Free,
    model: SwitchingLinearGaussian,
    weight: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
) -> None:
    """The initial law: averages over series."""
    if "initial_probability" in free.masks:
        new["initial_probability"] = weight.mean(0) / weight.mean(0).sum()
    for name in ("initial_mean", "initial_covariance"):
        if name not in free.masks:
            continue
        share = weight / np.maximum(weight.sum(0), 1e-300)
        if name in free.shared:
            share = np.broadcast_to(
                (weight / weight.sum())[:, None, :], (len(weight), model.modes, model.modes)
            )
            centers = [
                mixture(
                    share[:, k].reshape(-1),
                    mean.reshape(-1, mean.shape[-1]),
                    cov.reshape(-1, *cov.shape[-2:]),
                )
                for k in range(model.modes)
            ]
        else:
            centers = [mixture(share[:, k], mean[:, k], cov[:, k]) for k in range(model.modes)]
        value = np.stack([center[0 if name == "initial_mean" else 1] for center in centers])
        alive = (weight.sum(0) > 1e-12).reshape(-1, *[1] * (value.ndim - 1)) | (name in free.shared)
        old = plain(getattr(model, name))
        new[name] = np.where(free.masks[name] & alive, value, old)


def observation_sums(
    model: SwitchingLinearGaussian,
    y: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
    g: np.ndarray,
) -> Sums:
    """Sums for the regression of y on (x, g), missing components filled in by their law given what was seen.

    For a set of seen components o and missing ones, ỹ = B z + C y_o + noise of covariance V, with B = 0 and C = 1 on the rows seen and,
    on the others,
    C = R_mo R_oo^{-1}, B = Θ_m − C Θ_o, V = R_mm − C R_om.
    """
    _rows, M, n = mean.shape
    q, m = g.shape[1], y.shape[1]
    theta = coefficients(model, ("observation", "observation_offset", "observation_input"))
    R = np.broadcast_to(plain(model.observation_noise), (M, m, m))
    count, zz, xz, xx = np.zeros(M), np.zeros((M, n + q, n + q)), np.zeros((M, m, n + q)), np.zeros((M, m, m))
    seen = ~np.isnan(y)
    patterns, which = np.unique(seen, axis=0, return_inverse=True)
    for k, pattern in enumerate(patterns):
        if not pattern.any():
            continue
        at = which.reshape(-1) == k
        o, v = np.flatnonzero(pattern), np.flatnonzero(~pattern)
        yo, gk = y[at][:, o], g[at]
        for j in range(M):
            w, x, P = weight[at, j], mean[at, j], cov[at, j]
            z = np.concatenate([x, gk], 1)
            wz = w[:, None] * z
            Szz = wz.T @ z
            Szz[:n, :n] += np.tensordot(w, P, 1)
            Syz, Syy = (w[:, None] * yo).T @ z, (w[:, None] * yo).T @ yo
            B, C, V = np.zeros((m, n + q)), np.zeros((m, len(o))), np.zeros((m, m))
            C[o, np.arange(len(o))] = 1.0
            if len(v):
                tie = R[j][np.ix_(v, o)] @ np.linalg.pinv(R[j][np.ix_(o, o)])
                C[v] = tie
                B[v] = theta[j][v] - tie @ theta[j][o]
                V[np.ix_(v, v)] = R[j][np.ix_(v, v)] - tie @ R[j][np.ix_(o, v)]
            cross = B @ Szz + C @ Syz
            count[j] += w.sum()
            zz[j] += Szz
            xz[j] += cross
            mixed = B @ Syz.T @ C.T
            xx[j] += B @ Szz @ B.T + mixed + mixed.T + C @ Syy @ C.T + w.sum() * V
    return count, zz, xz, xx


def coefficients(model: SwitchingLinearGaussian, names: tuple[str, ...]) -> np.ndarray:
    """Matrix, offset and input matrix side by side, ``(M, R, C)``; those that are None take no columns."""
    parts = [plain(getattr(model, name)) for name in names if getattr(model, name) is not None]
    return np.concatenate([part[..., None] if part.ndim == 2 else part for part in parts], -1)


def _regress(
    new: dict[str, np.ndarray], free: Free, model: SwitchingLinearGaussian, sums: Sums, names: tuple[str, ...]
) -> None:
    """Maximise over the free entries of Θ given the noise, then over the noise given Θ."""
    count, zz, xz, xx = sums
    linear, noise = [name for name in names[:3] if getattr(model, name) is not None], names[3]
    theta = coefficients(model, tuple(linear))
    Q = plain(getattr(model, noise)).copy()
    M, R, _C = theta.shape
    # number the unknowns: shared entries have the same number in every mode, fixed ones −1
    number = np.full(theta.shape, -1)
    unknowns, column = 0, 0
    for name in linear:
        value = plain(getattr(model, name))
        width = 1 if value.ndim == 2 else value.shape[-1]
        mask = free.masks.get(name, np.zeros(value.shape, dtype=bool)).reshape(M, R, width)
        for k in range(M):
            if name in free.shared and k:
                number[k, :, column : column + width] = number[0, :, column : column + width]
            else:
                size = int(mask[k].sum())
                number[k, :, column : column + width][mask[k]] = unknowns + np.arange(size)
                unknowns += size
        column += width
    if unknowns:
        A, b = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
        for k in range(M):
            P = np.linalg.pinv(Q[k], hermitian=True)
            index = number[k].reshape(-1)
            at = index >= 0
            full = np.kron(P, zz[k])[np.ix_(at, at)]
            residual = (P @ (xz[k] - theta[k] @ zz[k])).reshape(-1)[at]
            np.add.at(b, index[at], residual)
            np.add.at(A, (index[at][:, None], index[at][None, :]), full)
        change = np.linalg.lstsq(A, b, rcond=1e-13)[0]  # least change where the data do not tell
        theta = theta + np.where(number >= 0, change[number], 0.0)
        column = 0
        for name in linear:
            value = plain(getattr(model, name))
            width = 1 if value.ndim == 2 else value.shape[-1]
            if name in free.masks:
                new[name] = theta[:, :, column : column + width].reshape(value.shape)
            column += width
    if noise in free.masks:
        left = np.einsum("krc,ksc->krs", theta, xz)
        bracket = xx - left - left.swapaxes(-1, -2) + theta @ zz @ theta.swapaxes(-1, -2)
        if noise in free.shared:
            estimate = np.broadcast_to(bracket.sum(0) / max(count.sum(), 1e-300), bracket.shape)
        else:
            estimate = bracket / np.maximum(count, 1e-300)[:, None, None]
        alive = (count > 1e-8)[:, None, None] | (noise in free.shared)
        estimate = (estimate + estimate.swapaxes(-1, -2)) / 2
        new[noise] = np.where(free.masks[noise] & alive, estimate, Q)
