"""Drawing from a model: forwards, and from the posterior given data.

Posterior draws go forwards with a filter and backwards with draws: the last mode and state from the filtered
law, then for t = T − 1 … 1

    P(s_t = j | s_{t+1} = k, x_{t+1})  ∝  μ_j π_jk N(x_{t+1}; F x_j + c_k, F P_j F' + Q_k)
    x_t | j, x_{t+1}  Gaussian, by Rauch's gain

with F = W_k (times the map from j to k). They are exact if there is one mode; with a collapsed filter they
are as good as its moments by mode. With particles (``method="rbpf"``) j runs over particles, each with a
weight, a mode and a Gaussian, in place of modes: nothing is collapsed, and draws are exact as particles
become many.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import LOG_TWO_PI
from ..parameters import ModelParameters
from ..series import SeriesLike, Values
from .filter import filter_problem
from .moments import SENSOR, STEP, by_row, maps_of, predict, rauch
from .passes import run_particles
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
    particles: int = 500,
    generator: torch.Generator | None = None,
) -> Draws:
    """Draw modes and states given one series; arguments as for `SwitchingLinearGaussian.posterior_draws`."""
    if draws < 1:
        raise ArgumentError(f"posterior_draws: draws is {draws}. Pass at least 1.")
    problem = prepare(model, y, inputs, "posterior_draws", proper=True)
    data, p, (M, n, _) = problem.data, problem.parameters, problem.sizes
    if data.layout != "single":
        raise ArgumentError("posterior_draws: pass one series (T, m), not a batch.")
    T = len(data.rows)
    if method == "rbpf":
        if particles < 1:
            raise ArgumentError(f"posterior_draws: particles is {particles}. Pass at least 1.")
        cloud = run_particles(p, data.rows, data.starts, particles, generator, keep=True)[2]
        which, log_weight = cloud.mode, cloud.log_weight
        mean, cov = cloud.mean.reshape(T, -1, n), cloud.covariance.reshape(T, -1, n, n)
    else:
        with torch.no_grad():
            post = filter_problem(model, problem, method)
        log_weight, mean, cov = (getattr(post._law, k) for k in ("log_mode", "mode_mean", "mode_covariance"))
        which = np.broadcast_to(np.arange(M), (T, M))
    maps, now = maps_of(p, M), by_row(p, data.starts, STEP, M)
    modes, states = np.empty((draws, T), np.int64), np.empty((draws, T, n))
    u, e = _uniform(generator, T, draws), _normal(generator, T, draws, n)
    part = _draw(np.broadcast_to(np.exp(log_weight[-1]), (draws, mean.shape[1])), u[-1])
    mode = which[-1, part]
    x = mean[-1, part] + np.einsum("dij,dj->di", root(cov[-1])[part], e[-1])
    modes[:, -1], states[:, -1] = mode, x
    for t in range(T - 2, -1, -1):
        transition, W, c, Q = (value[t + 1 if len(value) > 1 else 0] for value in now)
        before, N = which[t], mean.shape[1]  # components j of the filtered law, and later modes k
        F = np.broadcast_to(W, (N, M, n, n)) if maps is None else (W @ maps[0])[before]
        noise = Q if maps is None else (Q + W @ maps[1] @ W.mT)[before]
        P = cov[t, :, None]
        ahead, ahead_cov = predict(F, mean[t, :, None], P, c, noise)  # (j, k, ...)
        values, vectors = np.linalg.eigh((ahead_cov + ahead_cov.mT) / 2)
        kept = values > 1e-12 * np.maximum(values[..., -1:], 1e-300)
        values = np.where(kept, values, 1.0)
        precision = (vectors * np.where(kept, 1.0 / values, 0.0)[..., None, :]) @ vectors.mT
        J = P @ F.mT @ precision
        constant = np.log(values).sum(-1) + kept.sum(-1) * LOG_TWO_PI
        score = np.empty((draws, N))
        gap = np.empty((draws, N, n))
        for k in np.unique(mode):  # draws whose later mode is k
            mine = mode == k
            gap[mine] = x[mine, None] - ahead[:, k]
            square = np.einsum("dja,jab,djb->dj", gap[mine], precision[:, k], gap[mine])
            with np.errstate(divide="ignore"):
                score[mine] = log_weight[t] + np.log(transition[before, k]) - 0.5 * (square + constant[:, k])
        part = _draw(np.exp(score - score.max(1, keepdims=True)), u[t])
        own = J[part, mode], F[part, mode], np.broadcast_to(noise, F.shape)[part, mode]
        back, spread = rauch(mean[t, part], P[part, 0], *own, gap[np.arange(draws), part], 0.0)
        x = back + np.einsum("dab,db->da", root(spread), e[t])
        mode = before[part]
        modes[:, t], states[:, t] = mode, x
    if data.kind == "torch":
        return Draws(torch.from_numpy(modes), torch.from_numpy(states).to(data.dtype))
    return Draws(modes, states)
