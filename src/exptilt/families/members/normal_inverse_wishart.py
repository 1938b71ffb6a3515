r"""The normal-inverse-Wishart distribution of a mean and a covariance: the conjugate prior of `Gaussian`.

    Σ ~ InverseWishart(Ψ, ν),     μ | Σ ~ N(m, Σ/κ)

Sufficient statistic u(μ, Σ) = (Σ⁻¹μ, pack(Σ⁻¹), μ'Σ⁻¹μ, log|Σ|), natural parameter θ = (κm, −½ pack(Ψ +
κmm'), −½κ, −½(ν + D + 2)). Tilting acts on all of u. Densities are with respect to Lebesgue measure of μ and
of the lower triangle of Σ.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from exptilt._support.linalg import (
    dot,
    factorize,
    inverse_from_cholesky,
    log_determinant,
    matvec,
    pack,
    packed_size,
    positive_definite,
    solve_cholesky,
    unpack,
)
from exptilt.families.family import joined
from exptilt.families.measure import make
from exptilt.families.members.gaussian import whiten
from exptilt.families.members.inverse_wishart import InverseWishart
from exptilt.families.members.wishart import WithDegrees, lifted
from exptilt.families.numerics.deviance import log_excess
from exptilt.families.numerics.draws import standard_normal
from exptilt.families.numerics.gamma_functions import invert_multivariate_gap


class MeanCovariance(NamedTuple):
    """An event of a `NormalInverseWishart`: ``mean (..., D)`` and ``covariance (..., D, D)``."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class NormalInverseWishart(WithDegrees):
    """Distribution of a Gaussian's mean and covariance.

    Args:
        location: ``(..., D)``, m.
        count: ``(...)``, κ, how many observations the location is worth, positive.
        degrees: ``(...)``, ν > D − 1.
        scale: ``(..., D, D)``, Ψ, symmetric positive definite.
    """

    location: Tensor
    count: Tensor
    degrees: Tensor
    scale: Tensor
    event_dims: ClassVar = {"location": 1, "count": 0, "degrees": 0, "scale": 2}
    _positive = ("count",)
    _statistic_size = staticmethod(lambda d: d + packed_size(d) + 2)
    _event_ranks = (1, 2)
    _inner_form = ("C'μ, C with CC' = Σ⁻¹, log|Σ|", (1, 2, 0))

    @property
    def natural_parameter(self) -> Tensor:
        """(κm, −½ pack(Ψ + κmm'), −½κ, −½(ν+D+2))."""
        m, k, last = self.location, self.count.unsqueeze(-1), self.degrees.unsqueeze(-1) + self.size + 2
        second = pack(self.scale + k.unsqueeze(-1) * m.unsqueeze(-1) * m.unsqueeze(-2)) / -2
        return joined(k * m, second, -k / 2, -last / 2)

    @property
    def mean_parameter(self) -> Tensor:
        """(E Σ⁻¹μ, pack(E Σ⁻¹), E μ'Σ⁻¹μ, E log|Σ|)."""
        factor = factorize(self.scale)
        precision = self.degrees[..., None, None] * inverse_from_cholesky(factor)
        weighted = matvec(precision, self.location)
        square = self.size / self.count + dot(self.location, weighted)
        log_size = self._matrix()._log_size(factor).unsqueeze(-1)
        return joined(weighted, pack(precision), square.unsqueeze(-1), log_size)

    def _matrix(self) -> InverseWishart:
        """The law of Σ."""
        return make(InverseWishart, degrees=self.degrees, scale=self.scale)

    @classmethod
    def _split(cls, vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # K = D + D(D+1)/2 + 2, so D = (√(8K − 7) − 3) / 2.
        size = (math.isqrt(8 * vector.shape[-1] - 7) - 3) // 2
        return vector[..., :size], unpack(vector[..., size:-2]), vector[..., -2], vector[..., -1]

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        first, second, third, fourth = cls._split(theta)
        count = -2 * third
        m = first / count.unsqueeze(-1)
        scale = -2 * second - first.unsqueeze(-1) * m.unsqueeze(-2)
        degrees = -2 * fourth - m.shape[-1] - 2
        return make(cls, location=m, count=count, degrees=degrees, scale=(scale + scale.mT) / 2)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        weighted, precision, square, log_size = cls._split(mean)
        factor = factorize(precision)
        size = weighted.shape[-1]
        m = solve_cholesky(factor, weighted)
        degrees = invert_multivariate_gap(log_size + log_determinant(factor), size)
        scale = degrees[..., None, None] * inverse_from_cholesky(factor)
        return make(cls, location=m, count=size / (square - dot(m, weighted)), degrees=degrees, scale=scale)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest violation of E Σ⁻¹ ≻ 0, of the least E μ'Σ⁻¹μ, and of E log|Σ| > −log|E Σ⁻¹|."""
        weighted, precision, square, log_size = cls._split(mean.nan_to_num())
        eigenvalues, vectors = torch.linalg.eigh(precision)
        safe = eigenvalues.clamp_min(torch.finfo(mean.dtype).tiny)
        least = (matvec(vectors.mT, weighted) ** 2 / safe).sum(-1)
        rest = torch.maximum(least - square, -log_size - safe.log().sum(-1))
        definite = -eigenvalues[..., 0]
        return torch.where(definite >= 0, definite, torch.maximum(definite, rest))

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        m, matrix, zero, _ = cls._split(torch.zeros_like(like))
        scale = matrix + torch.eye(m.shape[-1]).to(like)
        return make(cls, location=m, count=zero + 1, degrees=zero + m.shape[-1], scale=scale)

    def _in_domain(self) -> Tensor:
        return (self.degrees > self.size - 1) & (self.count > 0) & positive_definite(self.scale)

    def _log_partition(self) -> Tensor:
        mean = self.size / 2 * (self.count / (2 * math.pi)).log()
        return (self._matrix()._log_partition() - mean).expand(self.batch_shape)

    @classmethod
    def _statistic(cls, x: MeanCovariance) -> Tensor:
        mean, covariance = x
        factor = factorize(covariance)
        precision = inverse_from_cholesky(factor)
        weighted = matvec(precision, mean)
        last = torch.stack(torch.broadcast_tensors(dot(mean, weighted), log_determinant(factor)), -1)
        return joined(weighted, pack(precision), last)

    def _log_mean(self, square: Tensor, log_size: Tensor) -> Tensor:
        """Log-density of μ given Σ, from (μ − m)'Σ⁻¹(μ − m) and log|Σ|."""
        each = self.size * (self.count / (2 * math.pi)).log()
        return (each - log_size - self.count * square) / 2

    def _log_prob(self, x: MeanCovariance) -> Tensor:
        mean, covariance = x
        factor = factorize(covariance)
        white = whiten(factor, mean - self.location)
        given = self._log_mean(dot(white, white), log_determinant(factor))
        return self._matrix()._log_density(factor) + given

    def _entropy(self) -> Tensor:
        """Entropy of Σ plus that of μ given Σ, ½ (D log 2πe/κ + E log|Σ|)."""
        spread = self._matrix()
        log_size = spread._log_size(factorize(self.scale))
        each = self.size * (math.log(2 * math.pi * math.e) - self.count.log())
        return (spread._entropy() + (each + log_size) / 2).expand(self.batch_shape)

    def _kl(self, other: Self) -> Tensor:
        """KL of Σ plus that of μ given Σ, ½ D (r − 1 − log r) + ½ κ' ν (m − m')'Ψ⁻¹(m − m'), r = κ'/κ."""
        white = whiten(factorize(self.scale), self.location - other.location)
        counts = self.size * log_excess(other.count, self.count)
        offset = other.count * self.degrees * dot(white, white)
        return self._matrix()._kl(other._matrix()) + (counts + offset) / 2

    def _event_moments(self) -> tuple[MeanCovariance, MeanCovariance]:
        """E and Var of (μ, Σ); with k = ν − D, μ has a mean if k > 0 and a finite variance if k > 1."""
        k = (self.degrees - self.size).expand(self.batch_shape).unsqueeze(-1)
        mean, spread = self._matrix()._event_moments()
        around = mean.diagonal(dim1=-2, dim2=-1) / self.count.unsqueeze(-1)
        around = torch.where(k > 0, torch.where(k > 1, around, torch.inf), torch.nan)
        location = torch.where(k > 0, self.location, torch.nan)
        return MeanCovariance(location, mean), MeanCovariance(around, spread)

    def _support(self, x: MeanCovariance) -> Tensor:
        return x[0].isfinite().all(-1) & self._matrix()._support(x[1])

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> MeanCovariance:
        half = self._whole()._half(shape, generator)
        noise = standard_normal(self.location, half.shape[:-1], generator)
        mean = self.location + matvec(half, noise) / self.count.sqrt().unsqueeze(-1)
        return MeanCovariance(mean, lifted(half @ half.mT))

    def _whole(self) -> InverseWishart:
        """The law of Σ, expanded to the whole batch, so that no two members share a draw."""
        return self._matrix().expand(tuple(self.batch_shape))

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        root, log_size = self._whole()._sample_inner(shape, generator)
        noise = standard_normal(self.location, root.shape[:-1], generator)
        weighted = matvec(root.mT, self.location) + noise / self.count.sqrt().unsqueeze(-1)
        return weighted, root, log_size

    def _log_prob_inner(self, y: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weighted, root, log_size = y
        white = weighted - matvec(root.mT, self.location)
        return self._matrix()._log_prob_inner((root, log_size)) + self._log_mean(dot(white, white), log_size)
