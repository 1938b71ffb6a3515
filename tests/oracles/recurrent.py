"""Recurrent switching in plain numpy: GPB2 and Kim's smoother over laws that are tilted on a fine grid."""

from itertools import product

import numpy as np


def tilted(R, transition, mean, cov, nodes=(1, 1201, 201, 41), reach=9.0):
    """Chances ``(M, M)`` of going from i to j, and moments of the state of mode i on the way to j.

    The grid has `nodes` in each of 0, 1, … directions, and lies in the principal directions of the scores,
    not in those that the compiled core uses.
    """
    M, n = mean.shape
    chance, means, covs = np.empty((M, M)), np.empty((M, M, n)), np.empty((M, M, n, n))
    for i in range(M):
        values, vectors = np.linalg.eigh(cov[i])
        L = vectors * np.sqrt(values.clip(0))
        _, s, directions = np.linalg.svd((R - R[0]) @ L)
        V = directions[: int((s > 1e-12 * max(s.max(initial=0.0), 1e-300)).sum())].T
        line = np.linspace(-reach, reach, nodes[V.shape[1]])
        u = np.array(list(product(line, repeat=V.shape[1]))).reshape(len(line) ** V.shape[1], V.shape[1])
        weight = np.exp(-0.5 * (u**2).sum(1))
        with np.errstate(divide="ignore"):
            score = np.log(transition[i]) + (mean[i] + u @ (L @ V).T) @ R.T
        p = np.exp(score - score.max(1, keepdims=True))
        p *= (weight / weight.sum() / p.sum(1))[:, None]
        chance[i] = p.sum(0)
        for j in range(M):
            if chance[i, j] == 0:
                means[i, j], covs[i, j] = mean[i], cov[i]
                continue
            center = p[:, j] @ u / chance[i, j]
            spread = (p[:, j, None] * (u - center)).T @ (u - center) / chance[i, j]
            means[i, j] = mean[i] + L @ V @ center
            covs[i, j] = cov[i] + L @ V @ (spread - np.eye(V.shape[1])) @ V.T @ L.T
    return chance, means, covs


def collapsed(weight, mean, cov):
    """Mean and covariance of a mixture; weights ``(K,)``."""
    center = weight @ mean
    return center, np.einsum("k,kij->ij", weight, cov) + (weight * (mean - center).T) @ (mean - center)


def passes(model, R, y):
    """Log-likelihood, and by step filtered and smoothed mode probabilities, means and covariances by mode."""
    M, n = model.modes, model.states
    W, c, Q = model.dynamics, model.dynamics_offset, model.process_noise
    H, noise = model.observation, model.observation_noise
    now = model.initial_probability, model.initial_mean, model.initial_covariance
    total, steps, before = 0.0, [], []
    for t, row in enumerate(y):
        if t == 0 and model.start == "first":
            chance, means, covs = np.eye(M), np.broadcast_to(now[1], (M, M, n)), None
            covs = np.broadcast_to(now[2], (M, M, n, n))
            ahead, spread = means, covs
        else:
            chance, means, covs = tilted(R, model.transition, now[1], now[2])
            ahead = np.einsum("jab,ijb->ija", W, means) + c
            spread = W @ covs @ W.mT + Q
        before.append((now[0], chance, means, covs))
        joint, after, after_cov = now[0][:, None] * chance, ahead.copy(), spread.copy()
        seen = ~np.isnan(row)
        for i, j in product(range(M), repeat=2):
            e, S = row[seen] - H[j][seen] @ ahead[i, j], H[j][seen] @ spread[i, j] @ H[j][seen].T
            S = S + noise[j][np.ix_(seen, seen)]
            K = spread[i, j] @ H[j][seen].T @ np.linalg.inv(S)
            joint[i, j] *= np.exp(-0.5 * e @ np.linalg.solve(S, e)) / np.sqrt(np.linalg.det(2 * np.pi * S))
            after[i, j], after_cov[i, j] = ahead[i, j] + K @ e, spread[i, j] - K @ S @ K.T
        total += np.log(joint.sum())
        reach = joint.sum(0)
        laws = [collapsed(joint[:, j] / reach[j], after[:, j], after_cov[:, j]) for j in range(M)]
        now = reach / joint.sum(), *map(np.array, zip(*laws, strict=True))
        steps.append(now)
    back = [steps[-1]]
    for t in range(len(y) - 1, 0, -1):
        (mu, chance, means, covs), (later, x, P) = before[t], back[0]
        joint = mu[:, None] * chance
        pair = later * joint / joint.sum(0)
        laws = []
        for i in range(M):
            parts = []
            for j in range(M):
                S = W[j] @ covs[i, j] @ W[j].T + Q[j]
                J = covs[i, j] @ W[j].T @ np.linalg.inv(S)
                gap = x[j] - W[j] @ means[i, j] - c[j]
                parts.append((means[i, j] + J @ gap, covs[i, j] + J @ (P[j] - S) @ J.T))
            laws.append(collapsed(pair[i] / pair[i].sum(), *map(np.array, zip(*parts, strict=True))))
        back.insert(0, (pair.sum(1), *map(np.array, zip(*laws, strict=True))))
    return total, steps, back
