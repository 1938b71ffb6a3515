r"""Krylov spaces of many small problems at once.

**GMRES** solves A u = b, A = I − J, by the u in span{b, Jb, J²b, ...} with the least ‖b − A u‖. It keeps
directions p_i whose images q_i = A p_i are orthonormal; then each step is a projection, and the residual r
is at hand at any time:

    u ← u + p ⟨q, r⟩,       r ← r − q ⟨q, r⟩.

The next direction is r itself, which is orthogonal to all q, unless r has hardly fallen: then it is q,
which always leads out of the space (Jiránek and Rozložník, "Adaptive version of simpler GMRES", 2010;
without this rule the method is GCR).

**Arnoldi's process** builds an orthonormal basis V of the same space, and the Hessenberg matrix H̄ with

    J V_j = V_{j+1} H̄_j,       H̄ of size (j+1) × j.

The eigenvalues of the square H, the Ritz values, are those of J to within |h_{j+1,j}| times the last entry
of their vector.

A space of 30 vectors serves where f contracts. Slow rotations need more: the residual falls little before
the space has a direction for each rotation, and a restart forgets these directions. A space that has not
halved all residuals is therefore continued, not restarted.

The operator works on all samples in one call, so the cost is that of the hardest one; a sample whose space
is exhausted adds zero vectors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]

_RESTART, _MAX_RESTARTS = 30, 20  # dimension at which a space ends or grows; most spaces
# Most bytes of the two bases of one GMRES space.
_MEMORY = 2**28
# Up to this dimension a space grows even if residuals do not fall: with rotations they fall all at once.
_PATIENCE = 120


def arnoldi(operator: Operator, start: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """Basis ``(S, j+1, n)`` and matrix H̄ ``(S, j+1, j)`` of the Krylov space of ``start (S, n)``."""
    samples, n = start.shape
    basis = start.new_empty(samples, dimension + 1, n)
    hessenberg = start.new_zeros(samples, dimension + 1, dimension)
    basis[:, 0] = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
    for j in range(dimension):
        known, image = basis[:, : j + 1], operator(basis[:, j]).unsqueeze(1)
        before = torch.linalg.vector_norm(image, dim=-1)
        for _ in range(2):  # the second pass removes what rounding left of a large projection
            part = torch.bmm(image, known.mT)
            image = torch.baddbmm(image, part, known, alpha=-1)
            hessenberg[:, : j + 1, j] += part.squeeze(1)
            size = torch.linalg.vector_norm(image, dim=-1)
            if not bool((size < 0.1 * before).any()):
                break
        exhausted = ~(size > 8 * torch.finfo(basis.dtype).eps * before)
        size = size.masked_fill(exhausted, 0.0)
        hessenberg[:, j + 1 : j + 2, j] = size
        torch.mul(image.squeeze(1), torch.where(exhausted, 0.0, 1 / size), out=basis[:, j + 1])
        if bool(exhausted.all()):
            return basis[:, : j + 2], hessenberg[:, : j + 2, : j + 1]
    return basis, hessenberg


def gmres(
    operator: Operator, right: Tensor, tolerance: float, *, verify: bool = True
) -> tuple[Tensor, Tensor]:
    """Solve u = b + J u to ‖b − (I − J) u‖ ≤ tolerance ‖b‖, sample by sample, or as near as it gets.

    Args:
        operator: J, on ``(S, n)``; samples do not interact.
        right: b, ``(S, n)``.
        tolerance: relative.
        verify: compute the residual from u, for one product more, also where the recurrence says it is small.

    Returns:
        u ``(S, n)`` and ‖b − (I − J) u‖ ``(S,)``.
    """
    solution, residual = torch.zeros_like(right), right
    beta = torch.linalg.vector_norm(right, dim=-1)
    goal, n = tolerance * beta, right.shape[1]
    dimension = min(_RESTART, n)
    largest = max(dimension, min(n, _MEMORY // max(1, 2 * right.numel() * right.element_size())))
    enough = 0.9 if largest < n else 0.5  # where memory forbids a larger space, small gains count
    for _ in range(_MAX_RESTARTS):
        wanting = beta > goal
        if not bool(wanting.any()):
            break
        update, left, sound = _space(operator, residual, beta, goal, dimension, largest)
        solution = solution + update
        if sound and not verify:
            return solution, left
        residual = right - solution + operator(solution)
        before, beta = beta, torch.linalg.vector_norm(residual, dim=-1)
        if not bool((wanting & (beta < enough * before)).any()):
            break
    return solution, beta


def _space(
    operator: Operator, residual: Tensor, left: Tensor, goal: Tensor, dimension: int, largest: int
) -> tuple[Tensor, Tensor, bool]:
    """One space from residuals of norms `left`: u, the new norms, and whether all reached the goal."""
    samples, n = residual.shape
    images, origins = residual.new_empty(samples, dimension, n), residual.new_empty(samples, dimension, n)
    solution, direction = torch.zeros_like(residual), residual
    exhausted = torch.zeros_like(left, dtype=torch.bool)
    begun = mark = left
    far = left > goal
    for j in range(largest):
        if j == dimension:
            open_ends = far & ~exhausted
            # A space that has grown is not thrown away.
            swift = mark is begun and bool((left < 0.5 * begun)[open_ends].all())
            if swift or not (j < _PATIENCE or bool((left < 0.9 * mark)[open_ends].any())):
                break
            dimension, mark = min(2 * dimension, largest), left
            images, origins = (
                torch.cat([old, old.new_empty(samples, dimension - j, n)], 1) for old in (images, origins)
            )
        image = direction - operator(direction)
        before = size = torch.linalg.vector_norm(image, dim=-1)
        doubtful = False
        for _ in range(2):  # the second pass removes what rounding left of a large projection
            if j:
                part = torch.bmm(image.unsqueeze(1), images[:, :j].mT)
                image = torch.baddbmm(image.unsqueeze(1), part, images[:, :j], alpha=-1).squeeze(1)
                direction = torch.baddbmm(direction.unsqueeze(1), part, origins[:, :j], alpha=-1).squeeze(1)
                size = torch.linalg.vector_norm(image, dim=-1)
            doubtful = doubtful or not bool((size > 0.1 * before).all())
            if not doubtful:
                break
        inverse = 1 / size
        if doubtful:  # without a new direction a sample is solved, or cannot be in this space
            exhausted = ~(size > 8 * torch.finfo(size.dtype).eps * before)
            inverse = inverse.masked_fill(exhausted, 0.0)
        p = torch.mul(direction, inverse.unsqueeze(-1), out=origins[:, j])
        q = torch.mul(image, inverse.unsqueeze(-1), out=images[:, j])
        along = (q * residual).sum(-1, keepdim=True)
        solution, residual = torch.addcmul(solution, p, along), torch.addcmul(residual, q, along, value=-1)
        last, left = left, torch.linalg.vector_norm(residual, dim=-1)
        far = left > goal
        if not bool((far & ~exhausted if doubtful else far).any()):
            break
        falls = left <= 0.9 * last
        direction = residual if bool(falls.all()) else torch.where(falls.unsqueeze(-1), residual, q)
    return solution, left, not bool(far.any())
