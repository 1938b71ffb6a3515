"""The exact posterior, by following every path of modes (THEORY E1).

Given its modes s_0 … s_t a path is a plain linear-Gaussian model with log weight log P(s_0 … s_t) + log p(y_1
… y_t | s_0 … s_t); the posterior is the mixture of all of them. There are M^T (M^{T+1} if the initial law
lies one step before the data), so this is for small T: the other filters are compared with it. Written
in torch, all paths at once, and differentiable by autograd.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...._support.errors import ArgumentError
from ...checks import safe_log
from ..moments import condition, joseph, mixture, predict, rauch, terms
from ..problem import Matrices, Problem, stopped
from .diffuse import back_gain, carried, initial_laws, move, with_infinities
from .step import least_rank

LIMIT = 300_000  # paths; beyond, a gigabyte would not hold the smoother's moments


@dataclass(frozen=True)
class Step:
    """Moments and log weights of all paths; the leading axis counts paths, the last mode fastest."""

    ahead_mean: torch.Tensor
    ahead_cov: torch.Tensor
    mean: torch.Tensor
    cov: torch.Tensor
    log_weight: torch.Tensor
    factors: list[np.ndarray]  # A of `diffuse.Law` for each path; empty if nothing is diffuse


def walk(p: Matrices, y: torch.Tensor, problem: Problem, what: str) -> list[Step]:
    """Every path's moments at every step."""
    first = problem.first
    M, n = p.mean.shape
    paths = M ** (len(y) + (0 if first else 1))
    if paths > LIMIT:
        raise ArgumentError(
            f"{what}: method='exact' would follow {paths:.3g} paths of {M} modes over {len(y)} steps, "
            f"more than {LIMIT}. Use fewer steps, or method='gpb2'."
        )
    mean, cov, log_weight = p.mean, p.cov, p.log_probability
    laws = initial_laws(mean, cov, problem.diffuse) if problem.diffuse.any() else []
    steps = []
    for t, row in enumerate(y):
        now = p.at(t)
        transition, W, c, Q, H, d, R = now
        if t or not first:
            # paths that end in mode i go on to mode j: axes (shorter path, i, j, ...)
            noise = Q + W @ p.spread @ W.mT
            moved = predict(W @ p.maps, mean.reshape(-1, M, 1, n), cov.reshape(-1, M, 1, n, n), c, noise)
            mean, cov = moved[0].reshape(-1, n), moved[1].reshape(-1, n, n)
            log_weight = (log_weight.reshape(-1, M, 1) + safe_log(transition)).reshape(-1)
            if laws:
                full = W @ p.maps
                laws = [
                    move(law, full[k % M, j], c[j], noise.expand(M, M, n, n)[k % M, j])
                    for k, law in enumerate(laws)
                    for j in range(M)
                ]
        seen = ~torch.isnan(row)
        if laws:
            step = partial(carried, f"{what}: at step {t}", now, row, True)
            found = [step(law, k % M) for k, law in enumerate(laws)]
            ahead = torch.stack([law.mean for law in laws]), torch.stack([law.P for law in laws])
            density = torch.stack([one[1] for one in found])
            log_weight = least_rank(log_weight + density, np.array([one[2] for one in found]))
            laws = [one[0] for one in found]
            mean, cov = torch.stack([law.mean for law in laws]), torch.stack([law.P for law in laws])
            steps.append(Step(*ahead, mean, cov, log_weight, [law.A for law in laws]))
            laws = laws if any(law.A.shape[1] for law in laws) else []
            continue
        ahead = mean, cov
        if seen.any():
            count = len(mean) // M
            Ht, dt = H[:, seen].repeat(count, 1, 1), d[:, seen].repeat(count, 1)
            Rt = R[:, seen][:, :, seen].repeat(count, 1, 1)
            center, S = predict(Ht, mean, cov, dt, Rt)
            e = row[seen] - center
            dead = torch.isneginf(log_weight)[:, None, None]
            S = torch.where(dead, torch.eye(S.shape[-1], dtype=S.dtype), S)  # paths that cannot happen
            K, density, bad = condition(e, S, cov @ Ht.mT, torch.where(dead[..., 0], 0.0, terms(Ht, cov, Rt)))
            if bad.any():
                raise stopped(f"{what}: at step {t}", int(torch.nonzero(bad)[0]) % M, M)
            K = torch.where(dead, 0.0, K)  # their laws stay predictions: a gain by S = 1 would let them grow
            log_weight = log_weight + density
            mean, cov = mean + (K @ e[..., None])[..., 0], joseph(K, Ht, cov, Rt)
        steps.append(Step(*ahead, mean, cov, log_weight, []))
    return steps


def by_mode(
    mean: torch.Tensor, cov: torch.Tensor, log_weight: torch.Tensor, M: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log P(mode), mean and covariance by last mode; a mode out of reach gets the average of its paths."""
    n = mean.shape[-1]
    log_mode = torch.logsumexp(log_weight.reshape(-1, M), 0)
    weight = torch.softmax(log_weight.reshape(-1, M), 0)
    weight = torch.where(torch.isneginf(log_mode), 1.0 / len(weight), weight)
    means, covs = mean.reshape(-1, M, n).swapaxes(0, 1), cov.reshape(-1, M, n, n).swapaxes(0, 1)
    return log_mode, *mixture(weight.mT, means, covs)


def filter_exact(problem: Problem) -> list[torch.Tensor]:
    """Terms, log mode probabilities, mode means and covariances and mixing probabilities for all series."""
    M, first = problem.sizes[0], problem.first
    columns: list[list[torch.Tensor]] = [[], [], [], [], []]
    for series, cut in enumerate(problem.data.cuts):
        before = torch.zeros((), dtype=torch.float64)
        for t, step in enumerate(
            walk(Matrices(problem, series), problem.data.tensor[cut], problem, "filter")
        ):
            log_mode, mean, cov = by_mode(step.mean, shown(step), step.log_weight, M)
            total = torch.logsumexp(step.log_weight, 0)
            if not torch.isfinite(total):
                raise stopped(f"filter: at step {t} of series {series}", M, M)
            if t or not first:
                pairs = torch.logsumexp(step.log_weight.reshape(-1, M, M), 0)
            else:
                pairs = torch.eye(M, dtype=torch.float64).log()
            mixing = torch.nan_to_num(torch.softmax(pairs, 0), 1 / M)
            for column, value in zip(
                columns, (total - before, log_mode - total, mean, cov, mixing), strict=True
            ):
                column.append(value)
            before = total
    return [torch.stack(column) for column in columns]


def shown(step: Step) -> torch.Tensor:
    """Covariances of all paths, infinite where something is diffuse."""
    if not any(A.shape[1] for A in step.factors):
        return step.cov
    return torch.stack([with_infinities(P, A) for P, A in zip(step.cov, step.factors, strict=True)])


@dataclass(frozen=True)
class ExactSmoothing:
    """Smoothed modes, moments and pairs of modes of one series, and the modes ``(T,)`` of the best path."""

    probability: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor
    pairs: torch.Tensor
    path: torch.Tensor


def smooth_exact(problem: Problem, series: int, what: str) -> ExactSmoothing:
    r"""Smoothed moments of one series: those along every path, then the mixture over paths.

    Along a path, later observations give a score ρ and its information G, and the smoothed law is x + P ρ,
    P − P G P (Bryson and Frazier). Only covariances of observations are inverted:

        r = H'S⁻¹e + (I − K H)'ρ,   N = H'S⁻¹H + (I − K H)' G (I − K H),   ρ = F'r,   G = F'N F

    While something is diffuse, Rauch's recursion in the limit takes its place.
    """
    M, first = problem.sizes[0], problem.first
    p, y = Matrices(problem, series), problem.data.tensor[problem.data.cuts[series]].detach()
    steps = walk(p, y, problem, what)
    log_weight = steps[-1].log_weight
    number = torch.arange(len(log_weight))
    posterior = log_weight - torch.logsumexp(log_weight, 0)
    best = int(log_weight.argmax())
    mean, cov = steps[-1].mean, shown(steps[-1])
    score, information = torch.zeros_like(mean), torch.zeros_like(cov)
    rows: list[tuple[torch.Tensor, ...]] = []
    for t in range(len(y) - 1, -1, -1):
        scale = M ** (len(y) - 1 - t)  # a path's number in base M spells its modes
        child, parent = number // scale, number // (scale * M)
        mode, before = child % M, parent % M
        order = torch.argsort(mode, stable=True).reshape(M, -1).T.reshape(-1)
        log_mode, x, P = by_mode(mean[order], cov[order], posterior[order], M)
        pair = torch.zeros(M * M, dtype=torch.float64).index_add(0, before * M + mode, posterior.exp())
        pairs = pair.reshape(M, M) if t or not first else torch.diag(pair.reshape(M, M).sum(0))
        rows.append((log_mode.exp(), x, P, pairs, mode[best]))
        if t == 0:
            break
        old, now, (_, W, _, Q, H, d, R) = steps[t - 1], steps[t], p.at(t)
        F = W[mode] @ p.maps[before, mode]
        if old.factors:
            noise = Q[mode] + W[mode] @ p.spread[before, mode] @ W[mode].mT
            gains = [
                back_gain(old.cov[k].numpy(), old.factors[k], F[i].numpy(), noise[i].numpy())
                for i, k in enumerate(parent.tolist())
            ]
            J, gap = torch.from_numpy(np.stack(gains)), mean - now.ahead_mean[child]
            mean, cov = rauch(old.mean[parent], old.cov[parent], J, F, noise, gap, cov)
            continue
        seen = ~torch.isnan(y[t])
        if seen.any():
            H, d, R = H[:, seen][mode], d[:, seen][mode], R[:, seen][:, :, seen][mode]
            ahead = now.ahead_cov[child]
            center, S = predict(H, now.ahead_mean[child], ahead, d, R)
            dead = torch.isneginf(posterior)[:, None, None]
            L = torch.linalg.cholesky(torch.where(dead, torch.eye(S.shape[-1], dtype=S.dtype), S))
            whitened = torch.linalg.solve_triangular(L, torch.where(dead, 0.0, H), upper=False)
            e = torch.linalg.solve_triangular(L, (y[t][seen] - center)[..., None], upper=False)
            rest = torch.eye(len(F[0]), dtype=F.dtype) - ahead @ whitened.mT @ whitened
            score = (whitened.mT @ e + rest.mT @ score[..., None])[..., 0]
            information = whitened.mT @ whitened + rest.mT @ information @ rest
        score, information = (F.mT @ score[..., None])[..., 0], F.mT @ information @ F
        x, P = old.mean[parent], old.cov[parent]
        mean, cov = x + (P @ score[..., None])[..., 0], P - P @ information @ P
        cov = (cov + cov.mT) / 2
    return ExactSmoothing(*(torch.stack(column) for column in zip(*rows[::-1], strict=True)))
