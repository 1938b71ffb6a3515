"""The slow, obvious smoother of nonlinear modes: Kim's pass in torch, covariances and pseudo-inverses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


def root(P):
    values, vectors = np.linalg.eigh((P + P.mT) / 2)
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


def wrap(difference: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """The difference with the components named in `angles` brought to (−π, π]."""
    if not angles:
        return difference
    out = difference.clone()
    part = difference[..., list(angles)]
    out[..., list(angles)] = torch.atan2(torch.sin(part), torch.cos(part))
    return out


def average(weight: torch.Tensor, points: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """Σ weight · points over the axis before the last, on the circle for angles."""
    weight = weight[..., None]
    out = (weight * points).sum(-2)
    if angles:
        part = points[..., list(angles)]
        sine, cosine = (weight * torch.sin(part)).sum(-2), (weight * torch.cos(part)).sum(-2)
        out[..., list(angles)] = torch.atan2(sine, cosine)
    return out


def collapse(
    weight: torch.Tensor, mean: torch.Tensor, cov: torch.Tensor, angles: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of mixtures: weight ``(..., K)``, mean ``(..., K, n)``, cov ``(..., K, n, n)``."""
    out = average(weight, mean, angles)
    delta = wrap(mean - out[..., None, :], angles)
    return out, (weight[..., None, None] * (cov + delta[..., None] * delta[..., None, :])).sum(-3)


@dataclass(frozen=True)
class Image:
    """The law of g(x) for a Gaussian x: its mean, and deviations X (n, p) of x and Y (m, p) of g(x).

    The covariances of x and g(x) and their cross-covariance are X X', Y Y' and X Y'.
    """

    mean: torch.Tensor
    X: torch.Tensor
    Y: torch.Tensor


def through(
    function, given: list[torch.Tensor], cov: torch.Tensor, angles: Sequence[int], unscented: bool
) -> Image:
    """The laws of function(x, ...) for x ~ N(mean, cov), ``(..., n)``; `given` is the mean (and inputs)."""
    mean, *rest = given
    n = mean.shape[-1]
    L = torch.linalg.qr(torch.from_numpy(root(cov.numpy())).mT).R.mT  # lower triangular, L L' = cov
    if not unscented:
        flat = [one.expand(*mean.shape[:-1], -1).reshape(-1, one.shape[-1]) for one in given]
        tangent = torch.func.vmap(torch.func.jacfwd(function))(*flat)
        return Image(function(*given), L, tangent.reshape(*mean.shape[:-1], -1, n) @ L)
    spread = n + max(3.0 - n, 0.5)
    shift = torch.cat([torch.zeros_like(mean)[..., None, :], L.mT, -L.mT], -2) * spread**0.5
    weight = torch.full((2 * n + 1,), 0.5 / spread, dtype=mean.dtype)
    weight[0] = 1 - n / spread
    image = function(mean[..., None, :] + shift, *(one[..., None, :] for one in rest))
    center = average(weight, image, angles)
    scale = torch.sqrt(weight)[:, None]
    return Image(center, (scale * shift).mT, (scale * wrap(image - center[..., None, :], angles)).mT)


@torch.no_grad()
def smooth_back(model, law, u, unscented):
    """Mode probabilities, means and covariances of one series; `law` are those of the filter.

    Axes of pairs are (mode before j, mode after k).
    """
    weight, mean, cov = (value.clone() for value in law)
    M, T = len(model.dynamics), len(mean)
    images = [
        through(
            model.dynamics[k],
            [mean[:-1], u[1:, None]][: 2 if model.inputs else 1],
            cov[:-1],
            model.angles,
            unscented,
        )
        for k in range(M)
    ]
    center, X, Y = (torch.stack([getattr(one, name) for one in images], 2) for name in ("mean", "X", "Y"))
    Q = model.process_noise
    J = X @ Y.mT @ torch.linalg.pinv(Y @ Y.mT + Q, hermitian=True)
    left = X - J @ Y
    base = left @ left.mT + J @ Q @ J.mT
    joint = weight[:-1, :, None] * model.transition
    reach = joint.sum(1, keepdim=True)
    share = torch.where(reach > 0, joint / torch.where(reach > 0, reach, 1.0), 0.0)
    for t in range(T - 2, -1, -1):
        pair = weight[t + 1] * share[t]
        gap = wrap(mean[t + 1] - center[t], model.angles)
        means = mean[t][:, None] + (J[t] @ gap[..., None])[..., 0]
        covs = base[t] + J[t] @ cov[t + 1] @ J[t].mT
        mine = pair.sum(1, keepdim=True)
        new_mean, new_cov = collapse(pair / torch.where(mine > 0, mine, 1.0), means, covs, model.angles)
        there = mine > 0
        mean[t] = torch.where(there, new_mean, mean[t])
        cov[t] = torch.where(there[..., None], (new_cov + new_cov.mT) / 2, cov[t])
        weight[t] = mine[:, 0]
    return weight, mean, cov
