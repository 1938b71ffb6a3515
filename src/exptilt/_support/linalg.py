r"""Small linear algebra that the families share.

A symmetric matrix has D(D+1)/2 free entries. `pack` lays them out as a vector with the off-diagonal ones
times √2, so that

    ⟨pack(A), pack(B)⟩ = trace(A B)

and a matrix-valued statistic becomes a flat, minimal one. `check_covariance` is the one place where a
covariance is judged: it says which matrix of the batch fails and by how much. `repaired` mends one on request
and warns with the amount added.
"""

import math
import warnings

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.transforms import is_concrete


def common_shape(*shapes: torch.Size) -> torch.Size:
    """The broadcast shape; equal shapes skip `torch.broadcast_shapes`, which is slow."""
    return shapes[0] if all(shape == shapes[0] for shape in shapes) else torch.broadcast_shapes(*shapes)


def packed_size(dimension: int) -> int:
    """Number of free entries of a symmetric matrix of this dimension."""
    return dimension * (dimension + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """A symmetric matrix as a vector, inner products kept.

    Args:
        matrix: ``(..., D, D)``, symmetric; the lower triangle is read.

    Returns:
        ``(..., D(D+1)/2)``.

    Example:
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> float(pack(a) @ pack(a)), float((a @ a).trace())
        (15.0, 15.0)
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ArgumentError(f"pack: matrix has shape {tuple(matrix.shape)}. Pass (..., D, D).")
    rows, columns = torch.tril_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    scale = torch.full_like(rows, math.sqrt(2.0), dtype=matrix.dtype).masked_fill(rows == columns, 1.0)
    return matrix[..., rows, columns] * scale


def unpack(vector: Tensor) -> Tensor:
    """Inverse of `pack`.

    Args:
        vector: ``(..., D(D+1)/2)``.

    Returns:
        ``(..., D, D)``, symmetric.
    """
    size = vector.shape[-1]
    dimension = (math.isqrt(8 * size + 1) - 1) // 2
    if packed_size(dimension) != size:
        raise ArgumentError(f"unpack: vector has {size} entries. Pass D(D+1)/2 of them: 1, 3, 6, 10, ...")
    rows, columns = torch.tril_indices(dimension, dimension, device=vector.device)
    scale = torch.full_like(rows, math.sqrt(0.5), dtype=vector.dtype).masked_fill(rows == columns, 1.0)
    # Entry (i, j) with i ≥ j is number i(i+1)/2 + j of the triangle.
    index = torch.arange(dimension, device=vector.device)
    high, low = torch.maximum(index[:, None], index), torch.minimum(index[:, None], index)
    return (vector * scale)[..., high * (high + 1) // 2 + low]


def check_covariance(matrix: Tensor, name: str) -> None:
    """Raise at the first matrix of ``(..., D, D)`` that is not finite, symmetric and positive definite."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ArgumentError(
            f"{name} must be (..., D, D), square in its last two axes; got shape {tuple(matrix.shape)}."
        )
    if not is_concrete(matrix):
        return
    gap = (matrix - matrix.mT).abs().amax((-2, -1))
    size = matrix.abs().amax((-2, -1))
    slack = 16 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    _, info = torch.linalg.cholesky_ex(matrix)
    bad = ~(gap <= slack * size) | (info != 0) | ~size.isfinite()
    if not bad.any():
        return
    index = tuple(bad.nonzero()[0].tolist())
    where = f"{name}[{', '.join(map(str, index))}]" if index else name
    if not bool(size[index].isfinite()):
        raise ArgumentError(f"{where} holds NaN or infinity. Pass finite numbers.")
    if not bool(gap[index] <= slack * size[index]):
        got = float(gap[index])
        raise ArgumentError(
            f"{where} is not symmetric: entries differ by up to {got:.3g}. "
            "Pass (a + a.mT) / 2, or repaired(a)."
        )
    smallest = float(torch.linalg.eigvalsh(matrix[index].double())[0])
    raise ArgumentError(
        f"{where} is not positive definite: its smallest eigenvalue is {smallest:.3g}. "
        "Pass a positive definite matrix, or repaired(a)."
    )


def repaired(matrix: Tensor, *, floor: float | None = None) -> Tensor:
    """The symmetric part of each matrix plus the least multiple of I that lifts its eigenvalues to a floor.

    Warns with the largest amount added, and to which matrix.

    Args:
        matrix: ``(..., D, D)``.
        floor: relative to the largest absolute eigenvalue, or to 1 where all are 0; default the square root
            of the dtype's precision.

    Returns:
        ``(..., D, D)``.
    """
    if (
        not isinstance(matrix, Tensor)
        or not matrix.is_floating_point()
        or matrix.ndim < 2
        or matrix.shape[-1] != matrix.shape[-2]
    ):
        got = f"{matrix.dtype} {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ArgumentError(f"repaired: matrix must be a floating-point tensor (..., D, D); got {got}.")
    if matrix.numel() == 0:
        raise ArgumentError(f"repaired: there is no matrix to repair; got shape {tuple(matrix.shape)}.")
    if floor is not None and not 0 < floor < math.inf:
        raise ArgumentError(f"repaired: floor must be positive and finite; got {floor}.")
    if is_concrete(matrix) and not bool(matrix.isfinite().all()):
        raise ArgumentError(
            f"repaired: matrix[{_worst(~matrix.isfinite())}] is NaN or infinite, which cannot be repaired."
        )
    symmetric = (matrix + matrix.mT) / 2
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    largest = eigenvalues.abs().amax(-1, keepdim=True)
    relative = torch.finfo(matrix.dtype).eps ** 0.5 if floor is None else floor
    added = (relative * torch.where(largest > 0, largest, 1.0) - eigenvalues[..., :1]).clamp_min(0)
    if is_concrete(matrix):
        gap, most = (matrix - matrix.mT).abs().amax((-2, -1)), added[..., 0]
        if bool((gap > 0).any() | (most > 0).any()):
            where = f" (matrix [{_worst(most)}])" if most.ndim and bool((most > 0).any()) else ""
            text = f"repaired: added up to {float(most.max()):.3g} to the diagonal{where} and averaged away "
            text += f"an asymmetry of up to {float(gap.max()):.3g}."
            warnings.warn(text, ExptiltWarning, stacklevel=2)
    return symmetric + torch.diag_embed(added.expand_as(eigenvalues))


def _worst(size: Tensor) -> str:
    """Index of the largest entry, as text."""
    return ", ".join(str(int(i)) for i in torch.unravel_index(size.to(torch.float64).argmax(), size.shape))


def factorize(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of ``(..., D, D)``; NaN, not an error, where a matrix has none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return torch.where((info == 0)[..., None, None], factor, torch.nan)


def symmetric(matrix: Tensor) -> Tensor:
    """``(...)``: whether each matrix is symmetric, up to the square root of the dtype's precision."""
    gap, size = ((matrix - matrix.mT).abs().amax((-2, -1)), matrix.abs().amax((-2, -1)))
    within: Tensor = gap <= torch.finfo(matrix.dtype).eps ** 0.5 * size
    return within


def positive_definite(matrix: Tensor) -> Tensor:
    """``(...)``: whether each matrix has a Cholesky factor."""
    info: Tensor = torch.linalg.cholesky_ex(matrix).info
    return (info == 0) & matrix.isfinite().all(-1).all(-1)


def indefiniteness(matrix: Tensor) -> Tensor:
    """``(...)``: −λ_min ≥ 0 of each matrix that is not positive definite, some number < 0 for the others."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    inside: Tensor = -(factor.diagonal(dim1=-2, dim2=-1) ** 2).amin(-1)
    if is_concrete(matrix) and bool((info == 0).all()):
        return inside
    return torch.where(
        (info == 0) & matrix.isfinite().all(-1).all(-1),
        inside,
        -torch.linalg.eigvalsh(matrix.nan_to_num())[..., 0].clamp_max(0),
    )


def total(x: Tensor) -> Tensor:
    """Sum over the last axis; an axis of one entry is squeezed, which is faster than torch's sum."""
    return x.squeeze(-1) if x.shape[-1] == 1 else x.sum(-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis."""
    return (a * b).sum(-1)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """``(..., I, J)`` times ``(..., J)``."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def log_determinant(factor: Tensor) -> Tensor:
    """Log-determinant of L L' from its Cholesky factor L ``(..., D, D)``."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse_from_cholesky(factor: Tensor) -> Tensor:
    """(L L')⁻¹, symmetric to the last bit."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand(factor.shape)
    half: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return half.mT @ half


def solve_cholesky(factor: Tensor, vector: Tensor) -> Tensor:
    """(L L')⁻¹ v for L ``(..., D, D)``, v ``(..., D)``."""
    half = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
    whole: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return whole.squeeze(-1)


def multivariate_digamma(a: Tensor, dimension: int) -> Tensor:
    """Derivative of log Γ_D(a): Σ_{i<D} ψ(a − i/2)."""
    return torch.digamma(_less_halves(a, dimension)).sum(-1)


def multivariate_log_gamma(a: Tensor, dimension: int) -> Tensor:
    """Log Γ_D(a) = D(D−1)/4 log π + Σ_{i<D} log Γ(a − i/2)."""
    constant = dimension * (dimension - 1) / 4 * math.log(math.pi)
    return torch.lgamma(_less_halves(a, dimension)).sum(-1) + constant


def _less_halves(a: Tensor, dimension: int) -> Tensor:
    """``(..., D)``: a − i/2 for all i < D."""
    return a.unsqueeze(-1) - torch.arange(dimension, dtype=a.dtype, device=a.device) / 2
