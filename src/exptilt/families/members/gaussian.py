r"""The Gaussian N(μ, Σ).

    G(η) = ⟨μ,η⟩ + ½ η'Ση,     ∇G(η) = μ + Ση          (THEORY A4)

Sufficient statistic u(x) = (x, pack(x x')), natural parameter θ = (Σ⁻¹μ, −½ pack(Σ⁻¹)).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import (
    dot,
    factorize,
    indefiniteness,
    inverse_from_cholesky,
    log_determinant,
    matvec,
    pack,
    packed_size,
    positive_definite,
    solve_cholesky,
    unpack,
)
from exptilt.families.family import ExponentialFamily, joined
from exptilt.families.measure import make
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.numerics.deviance import deviance
from exptilt.families.numerics.draws import standard_normal


def whiten(factor: Tensor, vector: Tensor) -> Tensor:
    """L⁻¹ v for a lower triangular L ``(..., D, D)`` and v ``(..., D)``."""
    white: Tensor = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False).squeeze(-1)
    return white


def _inverse(matrix: Tensor) -> Tensor:
    """M⁻¹ of ``(..., D, D)``, symmetric; NaN where a matrix is not positive definite."""
    return inverse_from_cholesky(factorize(matrix))


@dataclass(frozen=True, eq=False)
class Gaussian(ExponentialFamily):
    """Normal distribution with a full covariance.

    Args:
        mean_vector: ``(..., D)``.
        covariance_matrix: ``(..., D, D)``, symmetric positive definite.

    Example:
        >>> h = Gaussian(torch.zeros(2), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> h.mean(torch.tensor([1.0, 1.0]))
        tensor([2., 1.])
    """

    mean_vector: Tensor
    covariance_matrix: Tensor
    event_dims: ClassVar = {"mean_vector": 1, "covariance_matrix": 2}
    _reach = (-math.inf, math.inf, None)
    _decay = 2.0
    _differentiable_draws = True
    _tilts_everywhere = True
    _twin = (
        distributions.MultivariateNormal,
        {"mean_vector": "loc", "covariance_matrix": "covariance_matrix"},
    )
    _statistic_size = staticmethod(lambda d: d + packed_size(d))

    @property
    def natural_parameter(self) -> Tensor:
        """(Σ⁻¹μ, −½ pack(Σ⁻¹)), ``(..., D + D(D+1)/2)``."""
        precision = _inverse(self.covariance_matrix)
        return joined(matvec(precision, self.mean_vector), pack(precision) / -2)

    @property
    def mean_parameter(self) -> Tensor:
        """(μ, pack(Σ + μμ'))."""
        m = self.mean_vector
        return joined(m, pack(self.covariance_matrix + m.unsqueeze(-1) * m.unsqueeze(-2)))

    @classmethod
    def _split(cls, vector: Tensor) -> tuple[Tensor, Tensor]:
        # K = D + D(D+1)/2, so D = (√(9 + 8K) − 3) / 2.
        dimension = (math.isqrt(9 + 8 * vector.shape[-1]) - 3) // 2
        return vector[..., :dimension], unpack(vector[..., dimension:])

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second = cls._split(theta)
        covariance = _inverse(-2 * second)
        return make(cls, mean_vector=matvec(covariance, first), covariance_matrix=covariance)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        m, second = cls._split(mean)
        return make(cls, mean_vector=m, covariance_matrix=second - m.unsqueeze(-1) * m.unsqueeze(-2))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        m, second = cls._split(mean)
        return indefiniteness(second - m.unsqueeze(-1) * m.unsqueeze(-2))

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        m, second = cls._split(torch.zeros_like(like))
        return make(cls, mean_vector=m, covariance_matrix=second + torch.eye(m.shape[-1]).to(like))

    def _factor(self) -> Tensor:
        return factorize(self.covariance_matrix)

    def _in_domain(self) -> Tensor:
        return positive_definite(self.covariance_matrix) & self.mean_vector.isfinite().all(-1)

    def _log_partition(self) -> Tensor:
        factor = self._factor()
        white = whiten(factor, self.mean_vector)
        return (dot(white, white) + log_determinant(factor) + self.dimension * math.log(2 * math.pi)) / 2

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return torch.cat([x, pack(x.unsqueeze(-1) * x.unsqueeze(-2))], -1)

    def _log_prob(self, x: Tensor) -> Tensor:
        factor = self._factor()
        white = whiten(factor, x - self.mean_vector)
        return -(dot(white, white) + log_determinant(factor) + self.dimension * math.log(2 * math.pi)) / 2

    def _entropy(self) -> Tensor:
        value = (log_determinant(self._factor()) + self.dimension * (1 + math.log(2 * math.pi))) / 2
        return value.expand(self.batch_shape)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.batch_shape, self.dimension)
        noise = standard_normal(self.mean_vector, size, generator)
        return self.mean_vector + matvec(self._factor(), noise)

    def _kl(self, other: Self) -> Tensor:
        """½ (tr(Σ'⁻¹Σ) − D − log|Σ|/|Σ'| + δ'Σ'⁻¹δ), from the Cholesky factors."""
        factor = other._factor()
        white = torch.linalg.solve_triangular(factor, self._factor(), upper=False)
        diagonal = white.diagonal(dim1=-2, dim2=-1)
        gap = (diagonal - 1) * (diagonal + 1)
        excess = deviance(torch.ones_like(diagonal), gap, 2 * diagonal.log()).sum(-1)
        offset = whiten(factor, other.mean_vector - self.mean_vector)
        value: Tensor = (excess + (white.tril(-1) ** 2).sum((-2, -1)) + dot(offset, offset)) / 2
        return value

    def _overlap(self, other: Self) -> Tensor:
        """log N(μ | μ', Σ + Σ')."""
        both = self.covariance_matrix + other.covariance_matrix
        total = make(type(self), mean_vector=other.mean_vector, covariance_matrix=both)
        return total._log_prob(self.mean_vector)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return dot(self.mean_vector, eta) + dot(eta, matvec(self.covariance_matrix, eta)) / 2

    def _mean(self, eta: Tensor) -> Tensor:
        return self.mean_vector + matvec(self.covariance_matrix, eta)

    def _fisher(self) -> Tensor:
        """Cov[(x, pack(x x'))] by Isserlis, with s = ½c + μμ' for the covariance c.

        Cov[x_i, x_j x_k] = c_ij μ_k + c_ik μ_j
        Cov[x_i x_j, x_k x_l] = c_ik s_jl + c_il s_jk + c_jk s_il + c_jl s_ik
        """
        m, c = self.mean_vector, self.covariance_matrix
        m, c = m.expand(*self.batch_shape, -1), c.expand(*self.batch_shape, -1, -1)
        s = c / 2 + m.unsqueeze(-1) * m.unsqueeze(-2)
        rows, columns = torch.tril_indices(m.shape[-1], m.shape[-1], device=m.device)
        scale = pack(torch.ones_like(c))[..., None, :]
        mixed = (
            c[..., rows] * m[..., columns].unsqueeze(-2) + c[..., columns] * m[..., rows].unsqueeze(-2)
        ) * scale
        pairs = [(i[:, None], k) for i in (rows, columns) for k in (rows, columns)]
        square = sum(
            c[..., i, k] * s[..., j, l] for (i, k), (j, l) in zip(pairs, reversed(pairs), strict=True)
        )
        square = square * scale.mT * scale
        return torch.cat([torch.cat([c, mixed], -1), torch.cat([mixed.mT, square], -1)], -2)

    def _covariance(self, eta: Tensor) -> Tensor:
        return self.covariance_matrix.expand(*eta.shape, self.dimension)

    def _tilt(self, eta: Tensor) -> Self:
        return make(type(self), mean_vector=self._mean(eta), covariance_matrix=self.covariance_matrix)

    def _dual(self, mean: Tensor) -> Tensor:
        return solve_cholesky(self._factor(), mean - self.mean_vector)

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return None

    @property
    def scale_tril(self) -> Tensor:
        """The lower triangular L with Σ = LL', ``(..., D, D)``."""
        return self._factor()

    def _mode(self) -> Tensor:
        return self.mean_vector.expand(*self.batch_shape, -1)

    def _normal(self) -> DiagonalGaussian:
        """The marginal laws of the coordinates."""
        variance = self.covariance_matrix.diagonal(dim1=-2, dim2=-1)
        return make(DiagonalGaussian, mean_vector=self.mean_vector, variance=variance)

    def _cdf(self, x: Tensor) -> Tensor:
        return self._normal()._cdf(x)

    def _icdf(self, q: Tensor) -> Tensor:
        return self._normal()._icdf(q)
