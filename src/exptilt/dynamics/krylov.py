r"""Krylov spaces of many small problems at once.

Arnoldi's process builds, for every sample by itself, an orthonormal basis V of span{b, Ab, A²b, ...} and the Hessenberg matrix H̄ with

    A V_j = V_{j+1} H̄_j,       H̄ of size (j+1) × j.

**GMRES** takes the u = V y with the least ‖b − A u‖ = ‖βe₁ − H̄ y‖. Its residual is known without y: H̄ᵀ has one null vector c, c₀ = 1, whose
next entry is c_{j+1} = −Σ_{i≤j} c_i h_{ij} / h_{j+1,j}, and the part of βe₁ along it is what no y can reach, β / ‖c‖.

**Ritz values**, the eigenvalues of the square H, are those of A to within |h_{j+1,j}| times the last entry of their vector.

The operator works on all samples in one call, so the cost is that of the hardest one; a sample whose space is exhausted adds zero vectors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class Arnoldi(NamedTuple):
    """Basis ``(S, j+1, n)`` and Hessenberg matrix ``(S, j+1, j)``."""

    basis: Tensor
    hessenberg: Tensor


def _extend(operator: Operator, basis: Tensor, hessenberg: Tensor, j: int) -> Tensor:
    """One more vector. Returns which samples ran out of new directions ``(S,)``."""
    known = basis[:, : j + 1]
    image = operator(basis[:, j])
    before = torch.linalg.vector_norm(image, dim=-1)
    total = torch.zeros_like(hessenberg[:, : j + 1, j])
    for _ in range(2):  # twice is enough: the second pass takes off what rounding left in the first
        part = torch.bmm(known, image.unsqueeze(-1)).squeeze(-1)
        image = image - torch.bmm(part.unsqueeze(1), known).squeeze(1)
        total = total + part
    size = torch.linalg.vector_norm(image, dim=-1)
    exhausted = ~(size > 8 * torch.finfo(basis.dtype).eps * before)
    size = size.masked_fill(exhausted, 0.0)
    hessenberg[:, : j + 1, j] = total
    hessenberg[:, j + 1, j] = size
    basis[:, j + 1] = image * torch.where(exhausted, 0.0, 1 / size).unsqueeze(-1)
    return exhausted


def arnoldi(operator: Operator, start: Tensor, dimension: int) -> Arnoldi:
    """The whole space of this dimension from ``start (S, n)``."""
    samples, n = start.shape
    basis, hessenberg = start.new_zeros(samples, dimension + 1, n), start.new_zeros(samples, dimension + 1, dimension)
    basis[:, 0] = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
    for j in range(dimension):
        if bool(_extend(operator, basis, hessenberg, j).all()):
            return Arnoldi(basis[:, : j + 2], hessenberg[:, : j + 2, : j + 1])
    return Arnoldi(basis, hessenberg)


def gmres(
    operator: Operator, right: Tensor, tolerance: float | Tensor, *, restart: int = 30, max_restarts: int = 20
) -> tuple[Tensor, Tensor]:
    """Solve to ‖b − A u‖ ≤ tolerance ‖b‖, sample by sample, or as near as it gets.

    Args:
        operator: A, on ``(S, n)``; samples do not interact.
        right: b, ``(S, n)``.
        tolerance: relative, a number or ``(S,)``.
        restart: largest dimension of a space.
        max_restarts: how many spaces are built, fewer if one brings no sample nearer.

    Returns:
        u ``(S, n)`` and ‖b − A u‖ ``(S,)``, computed anew from u and not by the recurrence.
    """
    samples, n = right.shape
    solution, residual = torch.zeros_like(right), right
    beta = torch.linalg.vector_norm(right, dim=-1)
    goal = tolerance * beta
    dimension = min(restart, n)
    for _ in range(max_restarts):
        wanting = beta > goal
        if not bool(wanting.any()):
            break
        basis, hessenberg = right.new_zeros(samples, dimension + 1, n), right.new_zeros(samples, dimension + 1, dimension)
        basis[:, 0] = residual * torch.where(beta > 0, 1 / beta, 0.0).unsqueeze(-1)
        null = right.new_zeros(samples, dimension + 1)
        null[:, 0] = 1
        for j in range(dimension):
            exhausted = _extend(operator, basis, hessenberg, j)
            along = -(null[:, : j + 1] * hessenberg[:, : j + 1, j]).sum(-1)
            null[:, j + 1] = torch.where(exhausted, 0.0, along / hessenberg[:, j + 1, j])
            left = beta / torch.linalg.vector_norm(null, dim=-1)
            # An exhausted sample has the exact answer, or none in this space: either way it asks for no more.
            if not bool((left.masked_fill(exhausted, 0.0) > goal).any()):
                break
        solution = solution + _least_squares(basis[:, : j + 1], hessenberg[:, : j + 2, : j + 1], beta)
        residual = right - operator(solution)
        before, beta = beta, torch.linalg.vector_norm(residual, dim=-1)
        if not bool((wanting & (beta < 0.5 * before)).any()):
            break
    return solution, beta


def _least_squares(basis: Tensor, hessenberg: Tensor, beta: Tensor) -> Tensor:
    """V y with y the minimiser of ‖βe₁ − H̄ y‖; a direction in which H̄ is singular, or never filled by an exhausted sample, left out."""
    q, r = torch.linalg.qr(hessenberg)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    diagonal.masked_fill_(diagonal.abs() <= torch.finfo(r.dtype).eps * r.abs().amax((-2, -1)).unsqueeze(-1), torch.inf)
    y = torch.linalg.solve_triangular(r, (q[:, 0] * beta.unsqueeze(-1)).unsqueeze(-1), upper=True)
    return torch.bmm(y.mT, basis).squeeze(1)
