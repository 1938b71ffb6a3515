"""Drawing from a model: forwards, and from the posterior given data.

Posterior draws go forwards with a filter and backwards with draws: the last mode and state from the filtered
law, then, for t = T − 1 … 1,

    P(s_t = j | s_{t+1} = k, x_{t+1})  ∝  μ_j π_jk N(x_{t+1}; F x_j + c_k, F P_j F' + Q_k)
    x_t | j, x_{t+1}  Gaussian, by Rauch's gain

with F = W_k (times the map from j to k). Given one mode they are exact; with a collapsed filter as good as
its mode-conditioned moments.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..kernels.kalman import LOG_TWO_PI
from ..parameters import ModelParameters
from ..series import SeriesLike, Values
from .filter import filter_problem
from .moments import SENSOR, STEP, by_row, maps_of, predict
from .problem import prepare


@dataclass(frozen=True)
class Sample:
    """One draw of everything; arrays, or tensors for a model of tensors.

    Attributes:
        modes: ``(T,)``, whole numbers.
        states: ``(T, n)``.
        y: ``(T, m)``.
    """

    modes: Values
    states: Values
    y: Values


@dataclass(frozen=True)
class Draws:
    """Draws from the posterior of one series.

    Attributes:
        modes: ``(draws, T)``, whole numbers.
        states: ``(draws, T, n)``.
    """

    modes: Values
    states: Values


def root(P: np.ndarray) -> np.ndarray:
    """A matrix A with A A' = P, for positive semi-definite P ``(..., n, n)``."""
    values, vectors = np.linalg.eigh((P + P.mT) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :])


def _normal(generator: torch.Generator | None, *shape: int) -> np.ndarray:
    return torch.randn(*shape, dtype=torch.float64, generator=generator).numpy()


def _uniform(generator: torch.Generator | None, *shape: int) -> np.ndarray:
    return torch.rand(*shape, dtype=torch.float64, generator=generator).numpy()


def _draw(probability: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Indices drawn from rows of probabilities; an outcome of probability 0 is never drawn."""
    total = np.cumsum(probability, -1)
    return np.asarray(np.minimum((u[..., None] * total[..., -1:] >= total).sum(-1), total.shape[-1] - 1))


def sample(
    model: ModelParameters,
    steps: int,
    *,
    inputs: SeriesLike | None = None,
    generator: torch.Generator | None = None,
) -> Sample:
    """Draw modes, states and observations; arguments as for `SwitchingLinearGaussian.sample`."""
    if steps < 1:
        raise ArgumentError(f"sample: steps is {steps}. Pass at least 1.")
    if model.diffuse.any():
        raise ArgumentError(
            "sample: the initial state is diffuse, so there is no law to draw it from. "
            "Pass a model with a finite initial_covariance."
        )
    M, n, m = model.modes, model.states, model.outputs
    with torch.no_grad():
        problem = prepare(model, np.zeros((steps, m)), inputs, "sample")
    p = problem.parameters
    transition, W, c, Q, H, d, R = by_row(p, problem.data.starts, STEP + SENSOR, M)
    Qr, Rr, maps = root(Q), root(R), maps_of(p, M)
    u, ex = _uniform(generator, steps + 1), _normal(generator, steps + 1, n)
    ey, em = _normal(generator, steps, m), _normal(generator, steps, n)
    modes, states, y = np.empty(steps, np.int64), np.empty((steps, n)), np.empty((steps, m))
    mode = int(_draw(np.exp(p.initial_log_probability[0]), u[steps]))
    x = p.initial_mean.reshape(M, n)[mode] + root(p.initial_covariance.reshape(M, n, n)[mode]) @ ex[steps]
    for t in range(steps):
        now = [value[t if len(value) > 1 else 0] for value in (transition, W, c, Qr, H, d, Rr)]
        if t or model.start == "before":
            before, mode = mode, int(_draw(now[0][mode], u[t]))
            if maps is not None:
                x = maps[0][before, mode] @ x + root(maps[1][before, mode]) @ em[t]
            x = now[1][mode] @ x + now[2][mode] + now[3][mode] @ ex[t]
        modes[t], states[t] = mode, x
        y[t] = now[4][mode] @ x + now[5][mode] + now[6][mode] @ ey[t]
    if model.is_torch:
        kept = model.transition.dtype
        return Sample(
            torch.from_numpy(modes), torch.from_numpy(states).to(kept), torch.from_numpy(y).to(kept)
        )
    return Sample(modes, states, y)


def posterior_draws(
    model: ModelParameters,
    y: SeriesLike,
    draws: int,
    *,
    method: str = "gpb2",
    inputs: SeriesLike | None = None,
    generator: torch.Generator | None = None,
) -> Draws:
    """Draw modes and states given one series; arguments as for `SwitchingLinearGaussian.posterior_draws`."""
    if draws < 1:
        raise ArgumentError(f"posterior_draws: draws is {draws}. Pass at least 1.")
    with torch.no_grad():
        problem = prepare(model, y, inputs, "posterior_draws", wide=True)
        post = filter_problem(model, problem, method, generator=generator)
    data, log_mode, mean, cov = post.data, post._log_mode, post._mode_mean, post._mode_covariance
    if data.layout != "single":
        raise ArgumentError("posterior_draws: pass one series (T, m), not a batch.")
    T, M, n = mean.shape
    maps = maps_of(post.parameters, M)
    now = by_row(post.parameters, data.starts, STEP, M)
    modes, states = np.empty((draws, T), np.int64), np.empty((draws, T, n))
    u, e = _uniform(generator, T, draws), _normal(generator, T, draws, n)
    mode = _draw(np.broadcast_to(np.exp(log_mode[-1]), (draws, M)), u[-1])
    x = mean[-1, mode] + np.einsum("dij,dj->di", root(cov[-1])[mode], e[-1])
    modes[:, -1], states[:, -1] = mode, x
    for t in range(T - 2, -1, -1):
        transition, W, c, Q = (value[t + 1 if len(value) > 1 else 0] for value in now)
        F = np.broadcast_to(W, (M, M, n, n)) if maps is None else W @ maps[0]
        noise = Q if maps is None else Q + W @ maps[1] @ W.mT
        P = cov[t, :, None]
        ahead, ahead_cov = predict(F, mean[t, :, None], P, c, noise)  # (j, k, ...)
        values, vectors = np.linalg.eigh((ahead_cov + ahead_cov.mT) / 2)
        kept = values > 1e-12 * np.maximum(values[..., -1:], 1e-300)
        values = np.where(kept, values, 1.0)
        precision = (vectors * np.where(kept, 1.0 / values, 0.0)[..., None, :]) @ vectors.mT
        J = P @ F.mT @ precision
        left = np.eye(n) - J @ F
        spread = root(left @ P @ left.mT + J @ noise @ J.mT)
        gap = x[:, None] - ahead[:, mode].swapaxes(0, 1)  # (draws, j, n), k is each draw's later mode
        square = np.einsum("dja,djab,djb->dj", gap, precision[:, mode].swapaxes(0, 1), gap)
        constant = np.log(values).sum(-1) + kept.sum(-1) * LOG_TWO_PI
        with np.errstate(divide="ignore"):
            score = log_mode[t] + np.log(transition[:, mode].T) - 0.5 * (square + constant[:, mode].T)
        j = _draw(np.exp(score - score.max(1, keepdims=True)), u[t])
        x = mean[t, j] + np.einsum("dab,db->da", J[j, mode], gap[np.arange(draws), j])
        x = x + np.einsum("dab,db->da", spread[j, mode], e[t])
        mode = j
        modes[:, t], states[:, t] = mode, x
    if data.kind == "torch":
        return Draws(torch.from_numpy(modes), torch.from_numpy(states).to(data.dtype))
    return Draws(modes, states)
