r"""Is a head's query–key map a canonical link (THEORY E7)?

Conjecture: W_q, W_k approximate the canonical link f = ∇G*, which takes a mean parameter μ to its natural parameter η. Then

    symmetric    a gradient map has a symmetric Jacobian: M = W_q W_kᵀ should be symmetric;
    definite     G* is convex: its symmetric part should have no negative eigenvalue;
    linear       η_i should be a linear function of μ_i = ∇G(η_i). For Gaussian keys it is: η = C⁻¹(μ − m).

    symmetry      ‖(M + Mᵀ)/2‖² / ‖M‖²: 1 symmetric, ½ as any random matrix, 0 antisymmetric;
    definiteness  Σ of positive eigenvalues of (M + Mᵀ)/2 over Σ of absolute ones: 1 positive, ½ balanced, 0 negative;
    link R²       of the linear regression of η on μ, fitted on every other query and tested on the rest, both ways.

M is width × width but of rank D: everything is read off D × D matrices. W_q and W_k are the affine maps from the attention module's
input to query and key at one and the same position, where rotary embeddings cancel.
"""

import torch
from torch import Tensor


def symmetry(query_weight: Tensor, key_weight: Tensor) -> Tensor:
    r"""Share of W_q W_kᵀ that is symmetric, ½ + ½ tr(MM)/tr(MMᵀ).

    Args:
        query_weight: ``(head, width, D)``.
        key_weight: ``(head, width, D)``, grouped heads repeated.

    Returns:
        ``(head,)``; NaN for a head whose map is 0.
    """
    q, k = query_weight.double(), key_weight.double()
    inner = k.mT @ q
    size = ((q.mT @ q) * (k.mT @ k)).sum((-2, -1))
    return 0.5 + 0.5 * (inner * inner.mT).sum((-2, -1)) / size


def definiteness(query_weight: Tensor, key_weight: Tensor) -> Tensor:
    r"""Share of positive eigenvalues, by size, of the symmetric part of W_q W_kᵀ.

    Args:
        query_weight: ``(head, width, D)``.
        key_weight: ``(head, width, D)``, grouped heads repeated.

    Returns:
        ``(head,)``; NaN for a head whose map is 0.
    """
    q, k = query_weight.double(), key_weight.double()
    D = q.shape[-1]
    # (M + Mᵀ)/2 = ½ [q k] J [q k]ᵀ, J swapping the two: its nonzero eigenvalues are those of ½ R J Rᵀ, [q k] = (orthonormal) R.
    R = torch.linalg.qr(torch.cat([q, k], -1), mode="r").R
    half = R[..., :D] @ R[..., D:].mT
    eigenvalues = torch.linalg.eigvalsh((half + half.mT) / 2)
    return eigenvalues.clamp_min(0).sum(-1) / eigenvalues.abs().sum(-1)


def link_r2(natural: Tensor, mean: Tensor) -> Tensor:
    r"""Out-of-sample R² of a linear map from mean to natural parameters, all coordinates together.

    Args:
        natural: ``(head, query, D)``, η: queries as the scores see them, times scale.
        mean: ``(head, query, D)``, ∇G(η): mean keys.

    Returns:
        ``(head,)``; NaN where a half has fewer than 2(D + 1) queries, which would fit anything.
    """
    heads, Q, D = natural.shape
    if Q // 2 < 2 * (D + 1):
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    x, y = mean.double(), natural.double()
    left = total = torch.zeros(heads, dtype=torch.float64, device=y.device)
    for fit, test in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        x_mean, y_mean = x[:, fit].mean(1, keepdim=True), y[:, fit].mean(1, keepdim=True)
        coefficients = _solve(x[:, fit] - x_mean, y[:, fit] - y_mean)
        left = left + (y[:, test] - y_mean - (x[:, test] - x_mean) @ coefficients).square().sum((-2, -1))
        total = total + (y[:, test] - y_mean).square().sum((-2, -1))
    return 1 - left / total


def _solve(x: Tensor, y: Tensor) -> Tensor:
    """Least squares; directions in which x hardly varies (10⁻⁴ of the most) are left alone, for they would fit rounding."""
    values, vectors = torch.linalg.eigh(x.mT @ x)
    inverse = torch.where(values > 1e-8 * values[..., -1:], 1 / values, 0.0)
    return vectors @ (inverse[..., None] * (vectors.mT @ (x.mT @ y)))
