"""The exact posterior, by following every path of modes (THEORY E1).

Given its modes s_0 … s_t a path is a plain linear-Gaussian model with log weight log P(s_0 … s_t) + log p(y_1 … y_t | s_0 … s_t); the
posterior is the
mixture of all of them. There are M^T (M^{T+1} if the initial law lies one step before the data), so this is for small T: it is what the
other filters
are held against. Written in torch, all paths at once, and differentiable by autograd.
"""

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import safe_log
from ..kernels.kalman import LOG_TWO_PI

LIMIT = 300_000  # paths; beyond, a gigabyte would not hold the smoother's moments


class Paths:
    """One series' parameters, unflattened: ``at(name, t)`` gives the matrices of all modes at step t."""

    def __init__(self, flat: list[torch.Tensor], series: int, M: int, n: int, m: int) -> None:
        shapes = [(M, M), (M, n, n), (M, n), (M, n, n), (M, m, n), (M, m), (M, m, m)]
        picked = [value[series if len(value) > 1 else 0] if value.ndim == 3 else value for value in flat[:7]]
        self.values = [value.reshape(len(value), *shape) for value, shape in zip(picked, shapes, strict=True)]
        self.mean, self.cov, self.log_probability = flat[7].reshape(M, n), flat[8].reshape(M, n, n), flat[9]
        maps = (
            flat[10].reshape(M, M, n, n)
            if flat[10].numel()
            else torch.eye(n, dtype=torch.float64).expand(M, M, n, n)
        )
        spread = (
            flat[11].reshape(M, M, n, n) if flat[11].numel() else torch.zeros(M, M, n, n, dtype=torch.float64)
        )
        self.maps, self.spread = maps, spread

    def at(self, t: int) -> list[torch.Tensor]:
        """transition, W, c, Q, H, d, R of step t."""
        return [value[t if len(value) > 1 else 0] for value in self.values]


def walk(p: Paths, y: torch.Tensor, first: int, what: str) -> list[dict[str, torch.Tensor]]:
    """Every path's moments at every step: a list over t of tensors whose leading axis counts paths, the last mode fastest."""
    M, n = p.mean.shape
    paths = M ** (len(y) + (0 if first else 1))
    if paths > LIMIT:
        raise ArgumentError(
            f"{what}: method='exact' would follow {paths:.3g} paths of {M} modes over {len(y)} steps, more than {LIMIT}. "
            "Use fewer steps, or method='gpb2'."
        )
    mean, cov, log_weight = p.mean, p.cov, p.log_probability
    steps = []
    for t in range(len(y)):
        transition, W, c, Q, H, d, R = p.at(t)
        if t or not first:
            # paths that end in mode i go on to mode j: axes (shorter path, i, j, ...)
            old_mean, old_cov = mean.reshape(-1, M, 1, n, 1), cov.reshape(-1, M, 1, n, n)
            move = W[None] @ p.maps  # (i, j, n, n)
            noise = Q[None] + W[None] @ p.spread @ W.mT[None]
            mean = ((move @ old_mean)[..., 0] + c).reshape(-1, n)
            cov = (move @ old_cov @ move.mT + noise).reshape(-1, n, n)
            log_weight = (log_weight.reshape(-1, M, 1) + safe_log(transition)).reshape(-1)
        seen = ~torch.isnan(y[t])
        count = len(mean) // M
        step = {"ahead_mean": mean, "ahead_cov": cov}
        if seen.any():
            Ht, dt, Rt = (
                H[:, seen].repeat(count, 1, 1),
                d[:, seen].repeat(count, 1),
                R[:, seen][:, :, seen].repeat(count, 1, 1),
            )
            e = y[t, seen] - dt - (Ht @ mean[..., None])[..., 0]
            S = Ht @ cov @ Ht.mT + Rt
            L, bad = torch.linalg.cholesky_ex(S)
            if bad.any():
                mode = int(torch.nonzero(bad)[0]) % M
                raise ArgumentError(
                    f"{what}: at step {t} the innovation covariance H P H' + R of mode {mode} is not positive definite."
                )
            K = torch.cholesky_solve(Ht @ cov, L).mT
            z = torch.linalg.solve_triangular(L, e[..., None], upper=False)[..., 0]
            log_weight = (
                log_weight
                - 0.5 * (int(seen.sum()) * LOG_TWO_PI + (z * z).sum(-1))
                - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            )
            mean = mean + (K @ e[..., None])[..., 0]
            A = torch.eye(n, dtype=torch.float64) - K @ Ht
            cov = A @ cov @ A.mT + K @ Rt @ K.mT
            cov = (cov + cov.mT) / 2
        steps.append(step | {"mean": mean, "cov": cov, "log_weight": log_weight})
    return steps


def merge(
    mean: torch.Tensor, cov: torch.Tensor, log_weight: torch.Tensor, M: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Moments by last mode: log P(mode), mean and covariance of each; a mode no path can be in gets the moments of all paths."""
    n = mean.shape[-1]
    log_mode = torch.logsumexp(log_weight.reshape(-1, M), 0)
    weight = torch.softmax(log_weight.reshape(-1, M), 0)
    every = torch.softmax(log_weight, 0).reshape(-1, M)
    weight = torch.where(torch.isneginf(log_mode), every / every.sum(0).clamp_min(1e-300), weight)
    weight = torch.where(
        torch.isnan(weight) | (torch.isneginf(log_mode) & (every.sum(0) == 0)), 1.0 / len(weight), weight
    )
    means, covs = mean.reshape(-1, M, n), cov.reshape(-1, M, n, n)
    out = torch.einsum("pj,pjk->jk", weight, means)
    delta = means - out
    return log_mode, out, torch.einsum("pj,pjkl->jkl", weight, covs + delta[..., None] * delta[..., None, :])


def filter_exact(
    flat: list[torch.Tensor], first: int, y: torch.Tensor, starts: np.ndarray, sizes: tuple[int, int, int]
) -> list[torch.Tensor]:
    """Terms, log mode probabilities, mode means, mode covariances and mixing probabilities for all series, end to end."""
    M = sizes[0]
    columns: list[list[torch.Tensor]] = [[], [], [], [], []]
    for series in range(len(starts) - 1):
        before = torch.zeros((), dtype=torch.float64)
        steps = walk(Paths(flat, series, *sizes), y[starts[series] : starts[series + 1]], first, "filter")
        for t, step in enumerate(steps):
            log_mode, mean, cov = merge(step["mean"], step["cov"], step["log_weight"], M)
            total = torch.logsumexp(step["log_weight"], 0)
            if not torch.isfinite(total):
                raise ArgumentError(
                    f"filter: at step {t} of series {series} the observation has zero density in every mode that can be reached."
                )
            pairs = (
                torch.logsumexp(step["log_weight"].reshape(-1, M, M), 0)
                if t or not first
                else torch.eye(M, dtype=torch.float64).log()
            )
            for column, value in zip(
                columns,
                (
                    total - before,
                    log_mode - total,
                    mean,
                    cov,
                    torch.nan_to_num(torch.softmax(pairs, 0), 1 / M),
                ),
                strict=True,
            ):
                column.append(value)
            before = total
    return [torch.stack(column) for column in columns]


def smooth_exact(
    flat: list[torch.Tensor], first: int, y: torch.Tensor, sizes: tuple[int, int, int], series: int
) -> dict[str, torch.Tensor]:
    """Smoothed moments of one series: Rauch's recursion along every path, then the mixture over paths.

    Returns:
        ``log_mode`` (T, M), ``mean`` (T, M, n), ``cov`` (T, M, n, n), ``pairs`` (T, M, M) with [t, i, j] = P(s_{t−1} = i, s_t = j | y),
        and ``path``
        (T,), the modes of the most likely path.
    """
    M, _n, _ = sizes
    p = Paths(flat, series, *sizes)
    steps = walk(p, y, first, "smooth")
    log_weight = steps[-1]["log_weight"]
    total = len(log_weight)
    number = torch.arange(total)
    mean, cov = steps[-1]["mean"], steps[-1]["cov"]
    out: dict[str, list[torch.Tensor]] = {"log_mode": [], "mean": [], "cov": [], "pairs": []}
    path, best = [], int(log_weight.argmax())
    posterior = log_weight - torch.logsumexp(log_weight, 0)
    for t in range(len(y) - 1, -1, -1):
        scale = M ** (len(y) - 1 - t)  # a path's number in base M spells its modes
        mode = (number // scale) % M
        order = torch.argsort(mode, stable=True).reshape(M, -1).T.reshape(-1)
        log_mode, m, P = merge(mean[order], cov[order], posterior[order], M)
        out["log_mode"].append(log_mode)
        out["mean"].append(m)
        out["cov"].append(P)
        before = (number // (scale * M)) % M
        pair = torch.zeros(M * M, dtype=torch.float64).index_add(0, before * M + mode, posterior.exp())
        out["pairs"].append(pair.reshape(M, M) if t or not first else torch.diag(pair.reshape(M, M).sum(0)))
        path.append(int(mode[best]))
        if t:
            _, W, _, _Q, _, _, _ = p.at(t)
            parent = number // (scale * M)
            child = number // scale
            P0, m0 = steps[t - 1]["cov"][parent], steps[t - 1]["mean"][parent]
            move = W[mode] @ p.maps[before, mode]
            Pp, mp = steps[t]["ahead_cov"][child], steps[t]["ahead_mean"][child]
            J = P0 @ move.mT @ torch.linalg.pinv(Pp, hermitian=True)
            mean = m0 + (J @ (mean - mp)[..., None])[..., 0]
            cov = P0 + J @ (cov - Pp) @ J.mT
            cov = (cov + cov.mT) / 2
    stacked = {name: torch.stack(values[::-1]) for name, values in out.items()}
    return stacked | {"path": torch.tensor(path[::-1])}
