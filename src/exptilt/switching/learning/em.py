r"""Expectation–maximisation under the chosen collapse.

The E-step is a filter and Kim's backward pass; it gives sums of E[z z'], E[r z'], E[r r'] for each mode (see
`csrc/switching/smoother.hpp`), where z = (x_{t−1}, 1, u_t), and likewise for the observations, where z =
(x_t, 1, u_t). The M-step then is weighted regression: with Θ = (W, c, B) and noise Q,

    the change Δ of Θ maximises −½ Σ_k tr Q_k^{-1} (rr_k − Δ_k rz_k' − rz_k Δ_k' + Δ_k zz_k Δ_k')
    with r = x − Θ z, and then Q_k = that bracket / count_k

over the free entries alone, which is one linear system even where entries are fixed or shared between modes.
A missing component is replaced by its mean given the state and the components that were seen, with its
variance (a row with nothing seen says nothing about the observation and is left out).

Exact EM never lowers the likelihood. With a collapsed E-step it can fall a little; falls are counted.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.progress import track
from ..checks import plain
from ..inference.moments import mixture
from ..inference.passes import run_smoother
from ..inference.problem import input_rows, pose
from ..inference.run import lead_in, run_filter
from ..parameters import RANKS, Model, ModelParameters
from ..series import Data
from .free_parameters import PROBABILITIES, Free

GROUPS = tuple(
    (name, f"{name}_offset", f"{name}_input", noise)
    for name, noise in (("dynamics", "process_noise"), ("observation", "observation_noise"))
)


class Sums(NamedTuple):
    """Sums for a regression on z, by mode; r is the residual under the present Θ."""

    total: np.ndarray  # (M,), expected number of steps in the mode
    zz: np.ndarray  # (M, C, C)
    rz: np.ndarray  # (M, R, C)
    rr: np.ndarray  # (M, R, R)


def expectation_maximisation(
    model: Model,
    data: Data,
    inputs: torch.Tensor,
    free: Free,
    method: str,
    max_steps: int,
    tolerance: float,
    progress: bool | None,
) -> tuple[Model, list[float], int]:
    """Repeat `em_step` until the log-likelihood rises by less than `tolerance`.

    It also ends when ten steps have found nothing better. Returns the best model met, the trace of
    log-likelihoods, and how often they fell.
    """
    trace: list[float] = []
    best, best_value, decreases, stale = model, -np.inf, 0, 0
    new = dict[str, np.ndarray]()
    for step in track(range(max_steps + 1), "EM", show=progress):
        try:
            model = model.replace(**new)
            value, new = em_step(model, data, inputs, free, method)
        except ArgumentError:
            if not step:
                raise
            break
        trace.append(value)
        stale += 1
        if value > best_value:
            best, best_value, stale = model, value, 0
        if step:
            rise = value - trace[-2]
            decreases += rise < -1e-9 * max(1.0, abs(value))
            if stale == 10 or abs(rise) < tolerance:
                break
    return best, trace, decreases


def em_step(
    model: ModelParameters, data: Data, inputs: torch.Tensor, free: Free, method: str
) -> tuple[float, dict[str, np.ndarray]]:
    """One step: the log-likelihood of `model` (numpy), and the new values of its free parameters."""
    with torch.no_grad():
        problem = pose(model, data, inputs, "fit")
    (M, n, _), rows = problem.sizes, len(data.rows)
    known = input_rows(inputs, data)
    with torch.no_grad():
        lead = lead_in(problem, method)
    filtered = run_filter(problem.parameters, data.rows, data.starts, method, lead=lead)
    back = run_smoother(filtered, problem, lead, _regressors(model, "dynamics", known))
    new: dict[str, np.ndarray] = {}
    if "transition" in free.masks:
        follows = np.ones(rows, dtype=bool)
        follows[data.starts[:-1]] = model.start != "first"
        pairs = back.pairs[follows].sum(0).reshape(M, M)
        total = pairs.sum(1, keepdims=True)
        moved = np.where(total > 1e-12, pairs / np.maximum(total, 1e-300), plain(model.transition))
        new["transition"] = moved / moved.sum(1, keepdims=True)
    initial = back.initial_mean.reshape(-1, M, n), back.initial_covariance.reshape(-1, M, n, n)
    new |= _initial(free, model, back.initial_probability, *initial)
    if free.any_of(GROUPS[0]):
        new |= _regress(free, model, Sums(back.total, back.zz, back.rz, back.rr), GROUPS[0])
    if free.any_of(GROUPS[1]):
        g = _regressors(model, "observation", known)
        mean, cov = back.mean.reshape(rows, M, n), back.covariance.reshape(rows, M, n, n)
        new |= _regress(
            free, model, observation_sums(model, data.rows, back.probability, mean, cov, g), GROUPS[1]
        )
    return float(filtered.out.log_likelihood.sum()), new


def _regressors(model: ModelParameters, name: str, known: np.ndarray) -> np.ndarray:
    """Regressors ``(rows, q)``: 1 if the equation has an offset, the inputs if it has an input matrix."""
    one = [] if getattr(model, f"{name}_offset") is None else [np.ones((len(known), 1))]
    inputs = [] if getattr(model, f"{name}_input") is None else [known]
    return np.concatenate([np.zeros((len(known), 0)), *one, *inputs], 1)


def _initial(
    free: Free, model: ModelParameters, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray
) -> dict[str, np.ndarray]:
    """The initial law: averages over series, given ``(series, M, ...)`` smoothed weights and moments."""
    new = {}
    if "initial_probability" in free.masks:
        new["initial_probability"] = weight.mean(0) / weight.mean(0).sum()
    for k, name in enumerate(("initial_mean", "initial_covariance")):
        if name not in free.masks:
            continue
        old = plain(getattr(model, name))
        if name in free.shared:
            everything = (weight / weight.sum()).reshape(-1), mean.reshape(-1, *mean.shape[2:])
            value = mixture(*everything, cov.reshape(-1, *cov.shape[2:]))[k]
            alive = np.ones(len(old), dtype=bool)
        else:
            share = weight / np.maximum(weight.sum(0), 1e-300)
            value = mixture(share.T, mean.swapaxes(0, 1), cov.swapaxes(0, 1))[k]
            alive = weight.sum(0) > 1e-12
        new[name] = np.where(free.masks[name] & alive.reshape(-1, *[1] * (old.ndim - 1)), value, old)
    return new


def observation_sums(
    model: ModelParameters,
    y: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    cov: np.ndarray,
    g: np.ndarray,
) -> Sums:
    """Sums for the regression of r = y − Θ z on z = (x, g), missing components filled in.

    Given the seen components o, a missing one has r_v = C r_o + noise of covariance R_vv − C R_ov,
    C = R_vo R_oo^{-1}.
    """
    M, n = mean.shape[1:]
    m, size = y.shape[1], n + g.shape[1]
    theta, R = coefficients(model, GROUPS[1]), plain(model.observation_noise)
    sums = Sums(np.zeros(M), np.zeros((M, size, size)), np.zeros((M, m, size)), np.zeros((M, m, m)))
    patterns, which = np.unique(~np.isnan(y), axis=0, return_inverse=True)
    for k, pattern in enumerate(patterns):
        if not pattern.any():
            continue
        at, o = which.reshape(-1) == k, np.flatnonzero(pattern)
        for j in range(M):
            w, z = weight[at, j], np.concatenate([mean[at, j], g[at]], 1)
            P, H = np.tensordot(w, cov[at, j], 1), theta[j][o, :n]
            r = y[at][:, o] - z @ theta[j][o].T
            zz, rz, rr = (w[:, None] * z).T @ z, (w[:, None] * r).T @ z, (w[:, None] * r).T @ r + H @ P @ H.T
            zz[:n, :n] += P
            rz[:, :n] -= H @ P
            C = R[j][:, o] @ np.linalg.pinv(R[j][np.ix_(o, o)])
            C[o] = np.eye(len(o))
            V = R[j] - C @ R[j][o]
            V[o], V[:, o] = 0.0, 0.0
            sums.total[j] += w.sum()
            sums.zz[j] += zz
            sums.rz[j] += C @ rz
            sums.rr[j] += C @ rr @ C.T + w.sum() * V
    return sums


def _columns(model: ModelParameters, group: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Matrix, offset and input matrix of an equation, if the model has them, as ``(M, R, columns)``."""
    values = {name: getattr(model, name) for name in group[:3]}
    arrays = {name: plain(value) for name, value in values.items() if value is not None}
    return {name: value[..., None] if value.ndim == 2 else value for name, value in arrays.items()}


def coefficients(model: ModelParameters, group: tuple[str, ...]) -> np.ndarray:
    """Θ: matrix, offset and input matrix side by side, ``(M, R, C)``."""
    return np.concatenate(list(_columns(model, group).values()), -1)


def _regress(free: Free, model: ModelParameters, sums: Sums, group: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The new Θ and noise: first the free entries of Θ given the noise, then the noise given Θ."""
    count, zz, rz, rr = sums
    new: dict[str, np.ndarray] = {}
    columns, noise = _columns(model, group), group[3]
    theta, Q = coefficients(model, group), plain(getattr(model, noise))
    delta = np.zeros_like(theta)
    # number the unknowns: shared entries have the same number in every mode, fixed ones −1
    unknowns, numbers = 0, []
    for name, value in columns.items():
        number = np.full(value.shape, -1)
        mask = free.masks.get(name, np.zeros(value.shape, dtype=bool)).reshape(value.shape)
        own = mask[:1] if name in free.shared else mask
        number[: len(own)][own] = unknowns + np.arange(own.sum())
        unknowns += int(own.sum())
        numbers.append(np.broadcast_to(number[:1], value.shape) if name in free.shared else number)
    if unknowns:
        number = np.concatenate(numbers, -1)
        A, b = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
        for k in range(len(theta)):
            P = np.linalg.pinv(Q[k], hermitian=True)
            index = number[k].reshape(-1)
            at = index >= 0
            np.add.at(b, index[at], (P @ rz[k]).reshape(-1)[at])
            np.add.at(A, (index[at][:, None], index[at][None, :]), np.kron(P, zz[k])[np.ix_(at, at)])
        change = np.linalg.lstsq(A, b, rcond=1e-13)[0]  # the least change, if the data do not determine it
        delta = np.where(number >= 0, change[number], 0.0)
        ends = np.cumsum([value.shape[-1] for value in columns.values()])
        for name, part in zip(columns, np.split(theta + delta, ends[:-1], -1), strict=True):
            if name in free.masks:
                new[name] = part.reshape(free.masks[name].shape)
    if noise in free.masks:
        left = delta @ rz.mT
        bracket = rr - left - left.mT + delta @ zz @ delta.mT
        if noise in free.shared:
            bracket, count = bracket.sum(0, keepdims=True), count.sum(keepdims=True)
        estimate = bracket / np.maximum(count, 1e-300)[:, None, None]
        alive = (count > 1e-8)[:, None, None]
        new[noise] = np.where(free.masks[noise] & alive, (estimate + estimate.mT) / 2, Q)
    return new


def check_em(model: ModelParameters, free: Free) -> None:
    """Raise if EM cannot learn a free parameter; the message says what to do instead."""
    for name in PROBABILITIES:
        if not free.masks.get(name, np.True_).all():
            raise ArgumentError(
                f'fit: EM cannot learn single entries of {name}. Fix all or none, or use method="mle".'
            )
    for group in GROUPS:
        if not free.any_of(group):
            continue
        for name in group:
            value = getattr(model, name)
            if value is not None and value.ndim == RANKS[name] + 1:
                raise ArgumentError(
                    f"fit: {name} varies in time, so EM cannot learn {[g for g in group if g in free.masks]}."
                    ' Fix them, or use method="mle".'
                )
        quiet = np.diagonal(plain(getattr(model, group[3])), axis1=1, axis2=2) == 0
        for name in group[:3]:
            if name not in free.masks:
                continue
            stuck = np.argwhere(free.masks[name].reshape(*quiet.shape, -1).any(-1) & quiet)
            if len(stuck):
                k, r = stuck[0]
                raise ArgumentError(
                    f"fit: {name} is to be learned, but {group[3]} of mode {k} is zero in row {r}: without "
                    'noise EM cannot move it. Fix that row, give it a positive variance, or use method="mle".'
                )
        if group is GROUPS[0] and model.maps is not None:
            raise ArgumentError(
                "fit: EM cannot learn dynamics between modes with maps. Fix dynamics and process_noise, or "
                'use method="mle".'
            )
