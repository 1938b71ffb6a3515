"""Flows with the whole N×N matrix, and tests of Gaussianity by their definitions: float64, nothing shared."""

import math

import torch


def visible(i, j, N, M, causal, mask):
    return not (causal and j > i + M - N) and (mask is None or bool(mask[i, j]))


def slope(points, patterns, beta, causal=False, mask=None, log_weight=None):
    """(G, g) of one cloud (N, D) on patterns (M, D), by a double loop."""
    N, M = len(points), len(patterns)
    G, gradient = torch.full((N,), -math.inf, dtype=torch.float64), torch.zeros_like(points)
    for i in range(N):
        seen = [j for j in range(M) if visible(i, j, N, M, causal, mask)]
        scores = [
            beta * float(points[i] @ patterns[j]) + (0.0 if log_weight is None else float(log_weight[j]))
            for j in seen
        ]
        if not seen or max(scores) == -math.inf:
            continue
        top = max(scores)
        total = math.fsum(math.exp(s - top) for s in scores)
        G[i] = top + math.log(total)
        for j, s in zip(seen, scores, strict=True):
            gradient[i] += math.exp(s - top) / total * patterns[j]
    return G, gradient


def layer(x):
    return torch.stack([(p - p.mean()) / math.sqrt(float(((p - p.mean()) ** 2).mean())) for p in x])


def rms(x):
    return torch.stack([p / math.sqrt(float((p**2).mean())) for p in x])


def sphere(x):
    return torch.stack([p / math.sqrt(float(p @ p)) for p in x])


def batch(x):
    return layer(x.mT).mT


def covariance(x):
    centred = x - x.mean(0)
    return sum(torch.outer(p, p) for p in centred) / len(x)


def whiten(x):
    """By Denman and Beavers' iteration for the inverse square root: no eigenvectors."""
    y, z = covariance(x), torch.eye(x.shape[1], dtype=torch.float64)
    for _ in range(60):
        y, z = (y + torch.linalg.inv(z)) / 2, (z + torch.linalg.inv(y)) / 2
    return (x - x.mean(0)) @ z.mT


RENORMALIZERS = {
    "layer": layer,
    "rms": rms,
    "sphere": sphere,
    "batch": batch,
    "whiten": whiten,
    None: lambda x: x,
}


def update(points, renormalize, beta, step, patterns=None, **options):
    _, gradient = slope(points, points if patterns is None else patterns, beta, **options)
    return RENORMALIZERS[renormalize](points + step * gradient)


def mardia(x):
    """(b₁, b₂) by the double sum over pairs."""
    centred = x - x.mean(0)
    m = centred @ torch.linalg.inv(covariance(x)) @ centred.mT
    return float((m**3).sum()) / len(x) ** 2, float((m.diagonal() ** 2).mean())


def clusters(x, radius):
    """Labels of connected components by repeated relabelling of all close pairs."""
    labels = list(range(len(x)))
    for i in range(len(x)):
        for j in range(i):
            if math.dist(x[i].tolist(), x[j].tolist()) <= radius and labels[i] != labels[j]:
                old, new = labels[i], labels[j]
                labels = [new if label == old else label for label in labels]
    return labels
