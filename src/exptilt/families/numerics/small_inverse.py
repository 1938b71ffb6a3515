r"""Inverses of many small positive definite matrices.

    M = L L',     M⁻¹ = L'⁻¹ L⁻¹

torch makes three calls of a library for each matrix of a batch, which at D = 3 cost more than the arithmetic. Here one loop does it all, in
float64 and on all threads. Where derivatives are wanted, or the matrices are few or large, torch does it.
"""

from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from exptilt._support.kernels import kernel, run_chunks
from exptilt._support.linalg import factorize, indefiniteness, inverse_from_cholesky
from exptilt.families.numerics.gamma_functions import suits

Array = np.ndarray[Any, Any]
_LARGE = 8  # dimension from which a library's calls are worth their cost
_UNIT = 256  # matrices that one thread takes at least


@kernel("the kernel of small inverses")
def _sweep(matrices: Array, inverses: Array, pivots: Array) -> None:
    """Inverse and least L_ii² of each matrix; NaN and a number that is not positive where there is no L."""
    count, size, _ = matrices.shape
    low, half = np.zeros((size, size)), np.zeros((size, size))
    for b in range(count):
        m, inverse = matrices[b], inverses[b]
        least = np.inf
        for j in range(size):
            s = m[j, j]
            for k in range(j):
                s -= low[j, k] * low[j, k]
            if not s > 0.0 or s == np.inf:
                least = -1.0
                break
            least = min(least, s)
            root = np.sqrt(s)
            low[j, j] = root
            for i in range(j + 1, size):
                t = m[i, j]
                for k in range(j):
                    t -= low[i, k] * low[j, k]
                low[i, j] = t / root
        pivots[b] = least
        if least < 0.0:
            inverse[:] = np.nan
            continue
        for j in range(size):  # L⁻¹, column by column
            half[j, j] = 1.0 / low[j, j]
            for i in range(j + 1, size):
                t = 0.0
                for k in range(j, i):
                    t += low[i, k] * half[k, j]
                half[i, j] = -t / low[i, i]
        for i in range(size):
            for j in range(i + 1):
                t = 0.0
                for k in range(i, size):
                    t += half[k, i] * half[k, j]
                inverse[i, j] = t
                inverse[j, i] = t


def _swept(matrix: Tensor) -> tuple[Array, Array]:
    size = matrix.shape[-1]
    flat = matrix.detach().double().reshape(-1, size, size).contiguous().numpy()
    inverse, pivot = np.empty(flat.shape), np.empty(len(flat))

    def work(start: int, stop: int) -> None:
        piece = slice(start * _UNIT, stop * _UNIT)
        _sweep(flat[piece], inverse[piece], pivot[piece])

    work(0, 0)  # compiled or loaded before several threads ask for it
    run_chunks(work, -(-len(flat) // _UNIT))
    return inverse, pivot


def _many(matrix: Tensor) -> bool:
    return matrix.shape[-1] < _LARGE and suits(matrix)


def invert(matrix: Tensor) -> Tensor:
    """M⁻¹ of ``(..., D, D)``, symmetric to the last bit; NaN where a matrix is not positive definite.

    Example:
        >>> import torch
        >>> invert(torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
        tensor([[0.2500, 0.0000],
                [0.0000, 1.0000]])
    """
    if not _many(matrix):
        return inverse_from_cholesky(factorize(matrix))
    return from_numpy(_swept(matrix)[0]).to(matrix.dtype).reshape(matrix.shape)


def definite(matrix: Tensor) -> Tensor:
    """`indefiniteness` of ``(..., D, D)``: ``(...)``, negative where a matrix is positive definite."""
    if _many(matrix) and (pivot := _swept(matrix)[1]).min() > 0:
        return from_numpy(-pivot).to(matrix.dtype).reshape(matrix.shape[:-2])
    return indefiniteness(matrix)
