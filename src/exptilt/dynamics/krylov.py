r"""Krylov spaces of many small problems at once.

Arnoldi's process builds, for every sample by itself, an orthonormal basis V of span{b, Jb, J²b, ...} and the Hessenberg matrix H̄ with

    J V_j = V_{j+1} H̄_j,       H̄ of size (j+1) × j.

**GMRES** solves u = b + J u. The space of A = I − J is that of J, and its matrix Ā is I − H̄, with zeros below I; building it from J loses
nothing where J is small, while A b and b would then be nearly parallel. It takes the u = V y with the least ‖b − A u‖ = ‖βe₁ − Ā y‖. This
residual is known without y: Āᵀ has one null vector c, c₀ = 1, whose next entry is c_{j+1} = −Σ_{i≤j} c_i a_{ij} / a_{j+1,j}, and the part
of βe₁ along it is what no y can reach, β / ‖c‖.

**Ritz values**, the eigenvalues of the square H, are those of J to within |h_{j+1,j}| times the last entry of their vector.

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
    known, image = basis[:, : j + 1], operator(basis[:, j]).unsqueeze(1)
    before = torch.linalg.vector_norm(image, dim=-1)
    total = torch.bmm(image, known.mT)
    image = torch.baddbmm(image, total, known, alpha=-1)
    size = torch.linalg.vector_norm(image, dim=-1)
    if bool((size < 0.1 * before).any()):  # where much was taken off, rounding left some of it: take that off too, and it is enough
        part = torch.bmm(image, known.mT)
        image, total = torch.baddbmm(image, part, known, alpha=-1), total + part
        size = torch.linalg.vector_norm(image, dim=-1)
    exhausted = ~(size > 8 * torch.finfo(basis.dtype).eps * before)
    size = size.masked_fill(exhausted, 0.0)
    hessenberg[:, : j + 1, j] = total.squeeze(1)
    hessenberg[:, j + 1 : j + 2, j] = size
    torch.mul(image.squeeze(1), torch.where(exhausted, 0.0, 1 / size), out=basis[:, j + 1])
    return exhausted.squeeze(1)


def arnoldi(operator: Operator, start: Tensor, dimension: int) -> Arnoldi:
    """The whole space of this dimension from ``start (S, n)``."""
    samples, n = start.shape
    basis, hessenberg = start.new_empty(samples, dimension + 1, n), start.new_zeros(samples, dimension + 1, dimension)
    basis[:, 0] = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
    for j in range(dimension):
        if bool(_extend(operator, basis, hessenberg, j).all()):
            return Arnoldi(basis[:, : j + 2], hessenberg[:, : j + 2, : j + 1])
    return Arnoldi(basis, hessenberg)


def gmres(
    operator: Operator, right: Tensor, tolerance: float | Tensor, *, restart: int = 30, max_restarts: int = 20, verify: bool = True
) -> tuple[Tensor, Tensor]:
    """Solve u = b + J u to ‖b − (I − J) u‖ ≤ tolerance ‖b‖, sample by sample, or as near as it gets.

    Args:
        operator: J, on ``(S, n)``; samples do not interact.
        right: b, ``(S, n)``.
        tolerance: relative, a number or ``(S,)``.
        restart: largest dimension of a space.
        max_restarts: how many spaces are built, fewer if one brings no sample nearer.
        verify: compute the residual from u even where the recurrence says that it is small. That costs one product more.

    Returns:
        u ``(S, n)`` and ‖b − (I − J) u‖ ``(S,)``.
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
        basis, matrix = right.new_empty(samples, dimension + 1, n), right.new_zeros(samples, dimension + 1, dimension)
        torch.mul(residual, torch.where(beta > 0, 1 / beta, 0.0).unsqueeze(-1), out=basis[:, 0])
        null = right.new_zeros(samples, dimension + 1)
        null[:, 0] = 1
        for j in range(dimension):
            exhausted = _extend(operator, basis, matrix, j)
            column = matrix[:, : j + 2, j].neg_()
            column[:, j] += 1
            torch.div((null[:, : j + 1] * column[:, :-1]).sum(-1), -column[:, -1], out=null[:, j + 1])
            out = bool(exhausted.any())
            if out:  # such a sample has the exact answer, or none in this space: either way it asks for no more
                null[:, j + 1].masked_fill_(exhausted, 0.0)
            left = beta / torch.linalg.vector_norm(null[:, : j + 2], dim=-1)
            far = (left > goal) & ~exhausted if out else left > goal
            if not bool(far.any()):
                break
        solution = solution + _least_squares(basis[:, : j + 1], matrix[:, : j + 2, : j + 1], beta)
        if not (verify or out or bool(far.any())):
            return solution, left
        residual = right - solution + operator(solution)
        before, beta = beta, torch.linalg.vector_norm(residual, dim=-1)
        if not bool((wanting & (beta < 0.5 * before)).any()):
            break
    return solution, beta


def _least_squares(basis: Tensor, matrix: Tensor, beta: Tensor) -> Tensor:
    """V y with y the minimiser of ‖βe₁ − Ā y‖; a direction in which Ā is singular, or never filled by an exhausted sample, left out."""
    q, r = torch.linalg.qr(matrix)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    diagonal.masked_fill_(diagonal.abs() <= torch.finfo(r.dtype).eps * r.abs().amax((-2, -1)).unsqueeze(-1), torch.inf)
    y = torch.linalg.solve_triangular(r, (q[:, 0] * beta.unsqueeze(-1)).unsqueeze(-1), upper=True)
    return torch.bmm(y.mT, basis).squeeze(1)
