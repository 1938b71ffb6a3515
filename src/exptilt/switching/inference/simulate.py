"""Drawing from a model: forwards, and from the posterior given data.

Posterior draws go forwards with a filter and backwards with draws: the last mode and state from the filtered law, then, for t = T − 1 … 1,

    P(s_t = j | s_{t+1} = k, x_{t+1})  ∝  μ_j π_jk N(x_{t+1}; F m_j + c_k, F P_j F' + Q_k),     x_t | j, x_{t+1}  Gaussian, by Rauch's gain

with F = W_k (times the map from j to k). Given one mode they are exact; with a collapsed filter as good as its mode-conditioned moments.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..kernels.kalman import LOG_TWO_PI
from ..model import SwitchingLinearGaussian
from ..series import Data, flatten, parameters, read
from .filter import filter_series
from .moments import by_row, maps_of


@dataclass(frozen=True)
class Sample:
    """One draw of everything; arrays, or tensors for a model of tensors.

    Attributes:
        modes: ``(T,)``, whole numbers.
        states: ``(T, n)``.
        y: ``(T, m)``.
    """

    modes: Any
    states: Any
    y: Any


@dataclass(frozen=True)
class Draws:
    """Draws from the posterior of one series.

    Attributes:
        modes: ``(draws, T)``, whole numbers.
        states: ``(draws, T, n)``.
    """

    modes: Any
    states: Any


def root(P: np.ndarray) -> np.ndarray:
    """A matrix A with A A' = P, for positive semi-definite P ``(..., n, n)``."""
    values, vectors = np.linalg.eigh((P + P.swapaxes(-1, -2)) / 2)
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


def _normal(generator: torch.Generator | None, *shape: int) -> np.ndarray:
    return torch.randn(*shape, dtype=torch.float64, generator=generator).numpy()


def _uniform(generator: torch.Generator | None, *shape: int) -> np.ndarray:
    return torch.rand(*shape, dtype=torch.float64, generator=generator).numpy()


def _draw(probability: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Indices drawn from rows of probabilities, by their cumulative sums; an outcome of probability 0 is never drawn."""
    total = np.cumsum(probability, -1)
    return np.minimum((u[..., None] * total[..., -1:] >= total).sum(-1), probability.shape[-1] - 1)


def sample(
    model: SwitchingLinearGaussian,
    steps: int,
    *,
    inputs: Any = None,
    generator: torch.Generator | None = None,
) -> Sample:
    """Draw modes, states and observations for `steps` steps.

    Args:
        model: the model.
        steps: T.
        inputs: ``(T, r)`` where the model has input matrices.
        generator: a torch generator; None uses torch's own.
    """
    if steps < 1:
        raise ArgumentError(f"sample: steps is {steps}. Pass at least 1.")
    if np.isposinf(np.asarray(torch.as_tensor(model.initial_covariance).detach())).any():
        raise ArgumentError(
            "sample: the initial state is diffuse, so there is no law to draw it from. Pass a model with a finite initial_covariance."
        )
    M, n, m = model.modes, model.states, model.outputs
    data = read(np.zeros((steps, m)), m, what="sample")
    with torch.no_grad():
        p = parameters(flatten(model, data, inputs, "sample"), int(model.start == "first"))
    names = (
        "transition",
        "dynamics",
        "dynamics_offset",
        "process_noise",
        "observation",
        "observation_offset",
        "observation_noise",
    )
    transition, W, c, Q, H, d, R = by_row(p, data.starts, names, M)
    Qr, Rr, maps = root(Q), root(R), maps_of(p, M)
    u, ex, ey, em = (
        _uniform(generator, steps + 1),
        _normal(generator, steps + 1, n),
        _normal(generator, steps, m),
        _normal(generator, steps, n),
    )
    modes, states, y = np.empty(steps, np.int64), np.empty((steps, n)), np.empty((steps, m))
    mode = int(_draw(np.exp(p.initial_log_probability), u[steps]))
    x = p.initial_mean.reshape(M, n)[mode] + root(p.initial_covariance.reshape(M, n, n)[mode]) @ ex[steps]
    for t in range(steps):

        def now(value: np.ndarray, t: int = t) -> np.ndarray:
            return value[t if len(value) > 1 else 0]

        if t or model.start == "before":
            before, mode = mode, int(_draw(now(transition)[mode], u[t]))
            if maps is not None:
                x = maps[0][before, mode] @ x + root(maps[1][before, mode]) @ em[t]
            x = now(W)[mode] @ x + now(c)[mode] + now(Qr)[mode] @ ex[t]
        modes[t], states[t] = mode, x
        y[t] = now(H)[mode] @ x + now(d)[mode] + now(Rr)[mode] @ ey[t]
    if isinstance(model.transition, torch.Tensor):
        dtype = model.transition.dtype
        return Sample(
            torch.from_numpy(modes), torch.from_numpy(states).to(dtype), torch.from_numpy(y).to(dtype)
        )
    return Sample(modes, states, y)


def posterior_draws(
    model: SwitchingLinearGaussian,
    y: Any,
    draws: int,
    *,
    method: str = "gpb2",
    inputs: Any = None,
    generator: torch.Generator | None = None,
) -> Draws:
    """Draw modes and states given one series.

    Args:
        model: the model.
        y: one series, ``(T, m)``.
        draws: how many.
        method: the filter that goes forwards.
        inputs: as for `filter`.
        generator: a torch generator; None uses torch's own.
    """
    if draws < 1:
        raise ArgumentError(f"posterior_draws: draws is {draws}. Pass at least 1.")
    with torch.no_grad():
        post = filter_series(model, y, method=method, inputs=inputs)
    data: Data = post.data
    if data.series != 1 or data.layout != "single":
        raise ArgumentError("posterior_draws: pass one series (T, m), not a batch.")
    p, T, M, n = post.parameters, len(data.rows), model.modes, model.states
    names = ("transition", "dynamics", "dynamics_offset", "process_noise")
    transition, W, c, Q = by_row(p, data.starts, names, M)
    maps = maps_of(p, M)
    modes, states = np.empty((draws, T), np.int64), np.empty((draws, T, n))
    u, e = _uniform(generator, T, draws), _normal(generator, T, draws, n)
    mode = _draw(np.broadcast_to(np.exp(post._log_mode[-1]), (draws, M)), u[-1])
    x = post._mode_mean[-1, mode] + np.einsum("dij,dj->di", root(post._mode_covariance[-1])[mode], e[-1])
    modes[:, -1], states[:, -1] = mode, x
    for t in range(T - 2, -1, -1):
        after = t + 1
        pi, Wt, ct, Qt = (value[after if len(value) > 1 else 0] for value in (transition, W, c, Q))
        F = np.broadcast_to(Wt[None], (M, M, n, n)) if maps is None else Wt[None] @ maps[0]
        noise = Qt[None] if maps is None else Qt[None] + Wt[None] @ maps[1] @ Wt.swapaxes(-1, -2)[None]
        m, P = post._mode_mean[t], post._mode_covariance[t]
        ahead = np.einsum("jkab,jb->jka", F, m) + ct[None]
        ahead_cov = F @ P[:, None] @ F.swapaxes(-1, -2) + noise
        values, vectors = np.linalg.eigh((ahead_cov + ahead_cov.swapaxes(-1, -2)) / 2)
        kept = values > 1e-12 * np.maximum(values[..., -1:], 1e-300)
        inverse = np.where(kept, 1.0 / np.where(kept, values, 1.0), 0.0)
        precision = np.einsum("jkab,jkb,jkcb->jkac", vectors, inverse, vectors)
        log_determinant = np.where(kept, np.log(np.where(kept, values, 1.0)), 0.0).sum(-1)
        J = P[:, None] @ F.swapaxes(-1, -2) @ precision
        left = np.eye(n) - J @ F
        spread = left @ P[:, None] @ left.swapaxes(-1, -2) + J @ noise @ J.swapaxes(-1, -2)
        gap = x[:, None] - ahead[:, mode].swapaxes(0, 1)  # (draws, j, n), k is each draw's later mode
        square = np.einsum("dja,djab,djb->dj", gap, precision[:, mode].swapaxes(0, 1), gap)
        with np.errstate(divide="ignore"):
            score = post._log_mode[t] + np.log(pi[:, mode].T)
        rank = kept.sum(-1)
        score = score - 0.5 * (square + (log_determinant + rank * LOG_TWO_PI)[:, mode].T)
        score -= score.max(1, keepdims=True)
        j = _draw(np.exp(score), u[t])
        x = m[j] + np.einsum("dab,db->da", J[j, mode], gap[np.arange(draws), j])
        x = x + np.einsum("dab,db->da", root(spread)[j, mode], e[t])
        mode = j
        modes[:, t], states[:, t] = mode, x
    if data.kind == "torch":
        return Draws(torch.from_numpy(modes), torch.from_numpy(states).to(data.dtype))
    return Draws(modes, states)
