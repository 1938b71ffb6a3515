"""Memories by the obvious formulas in float64: the whole matrix of scores, sorting, bisection."""

import itertools
import math

import torch


def scores(patterns, state, similarity):
    """(Q, N) float64."""
    x, s = patterns.double(), state.double()
    if similarity == "cosine":
        return (s / s.norm(dim=-1, keepdim=True)) @ (x / x.norm(dim=-1, keepdim=True)).T
    if similarity == "euclidean":
        return -0.5 * (s[:, None] - x).square().sum(-1)
    return s @ x.T


def sparsemax(z):
    """The sort algorithm of Martins and Astudillo, row by row of (Q, N)."""
    ordered = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    total = ordered.cumsum(-1)
    support = (1 + k * ordered > total).sum(-1, keepdim=True)
    tau = (total.gather(-1, support - 1) - 1) / support
    return (z - tau).clamp_min(0)


def entmax(z, alpha):
    """Bisection on the threshold, row by row of (Q, N)."""
    d = (alpha - 1) * (z - z.amax(-1, keepdim=True))
    low, high = torch.full_like(d[:, :1], -1.0), torch.zeros_like(d[:, :1])
    for _ in range(200):
        middle = (low + high) / 2
        above = ((d - middle).clamp_min(0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (d - low).clamp_min(0) ** (1 / (alpha - 1))


def weights(z, beta, separation, parameter=None):
    """(Q, N) weights from scores z (Q, N)."""
    if separation == "softmax":
        return torch.softmax(beta * z, -1)
    if separation == "sparsemax":
        return sparsemax(beta * (z - z.amax(-1, keepdim=True)))
    if separation == "entmax":
        return entmax(beta * z, parameter or 1.5)
    if separation == "max":
        return torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).double()
    n = parameter or 3
    positive = z.clamp_min(0)
    norm = (positive**n).sum(-1, keepdim=True) ** (1 / n)
    return torch.where(norm > 0, (positive / norm) ** (n - 1), 0.0)


def step(patterns, state, beta, similarity="dot", separation="softmax", parameter=None):
    """One update of (Q, D)."""
    x = patterns.double()
    if similarity == "cosine":
        x = x / x.norm(dim=-1, keepdim=True)
    mean = weights(scores(patterns, state, similarity), beta, separation, parameter) @ x
    if similarity != "cosine":
        return mean
    size = mean.norm(dim=-1, keepdim=True)
    return torch.where(size > 0, mean / size, state.double() / state.double().norm(dim=-1, keepdim=True))


def omega(y, separation, parameter=None):
    """The convex function whose conjugate gives the weights, of (Q, N)."""
    if separation == "softmax":
        return torch.special.xlogy(y, y).sum(-1)
    if separation in ("sparsemax", "entmax"):
        alpha = 2.0 if separation == "sparsemax" else parameter or 1.5
        return ((y**alpha).sum(-1) - 1) / (alpha * (alpha - 1))
    return torch.zeros_like(y[:, 0])


def energy(patterns, state, beta, similarity="dot", separation="softmax", parameter=None):
    """E = −max_y(<y,s> − Ω(y)/β) + ½<q,q> − Ω(1/N)/β + ½M² of (Q, D), with y as found above."""
    z = scores(patterns, state, similarity)
    y = weights(z, beta, separation, parameter)
    uniform = torch.full_like(z, 1 / z.shape[-1])
    value = (
        -(y * z).sum(-1)
        + omega(y, separation, parameter) / beta
        - omega(uniform, separation, parameter) / beta
    )
    if similarity == "dot":
        return value + state.double().square().sum(-1) / 2 + patterns.double().square().sum(-1).max() / 2
    return value + 1.0 if similarity == "cosine" else value


def separation(patterns, similarity="dot"):
    """Δ (N,), with the N×N matrix."""
    z = scores(patterns, patterns, similarity)
    others = z.masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    return z.diagonal() - others.amax(-1)


def boltzmann_log_partition(weight, visible_bias, hidden_bias, levels):
    """Log Z of a machine with binary hidden units, one pair of states at a time."""
    V, H = weight.shape
    terms = []
    for v in itertools.product(levels, repeat=V):
        for h in itertools.product((0.0, 1.0), repeat=H):
            terms.append(
                sum(float(visible_bias[i]) * v[i] for i in range(V))
                + sum(float(hidden_bias[j]) * h[j] for j in range(H))
                + sum(v[i] * float(weight[i, j]) * h[j] for i in range(V) for j in range(H))
            )
    top = max(terms)
    return top + math.log(math.fsum(math.exp(t - top) for t in terms))
