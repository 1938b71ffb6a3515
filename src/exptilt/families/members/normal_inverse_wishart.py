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
    multivariate_digamma,
    multivariate_log_gamma,
    pack,
    packed_size,
    positive_definite,
    solve_cholesky,
    symmetric,
    unpack,
)
from exptilt.families.family import joined
from exptilt.families.measure import make
from exptilt.families.members.gaussian import whiten
from exptilt.families.members.wishart import (
    WithDegrees,
    bartlett_in_logs,
    lifted,
    wishart_entropy,
    wishart_kl,
)
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
        return joined(weighted, pack(precision), square.unsqueeze(-1), self._log_size(factor).unsqueeze(-1))

    def _log_size(self, factor: Tensor) -> Tensor:
        """E log|Σ|, from the Cholesky factor of Ψ."""
        shift = self.size * math.log(2) + multivariate_digamma(self.degrees / 2, self.size)
        return log_determinant(factor) - shift

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
        half, size = self.degrees / 2, self.size
        log_scale = size * math.log(2) - log_determinant(factorize(self.scale))
        wishart = half * log_scale + multivariate_log_gamma(half, size)
        return (wishart - size / 2 * (self.count / (2 * math.pi)).log()).expand(self.batch_shape)

    @classmethod
    def _statistic(cls, x: MeanCovariance) -> Tensor:
        mean, covariance = x
        factor = factorize(covariance)
        precision = inverse_from_cholesky(factor)
        weighted = matvec(precision, mean)
        last = torch.stack(torch.broadcast_tensors(dot(mean, weighted), log_determinant(factor)), -1)
        return joined(weighted, pack(precision), last)

    def _log_prob(self, x: MeanCovariance) -> Tensor:
        mean, covariance = x
        factor = factorize(covariance)
        white = whiten(factor, mean - self.location)
        half = torch.linalg.solve_triangular(factor, factorize(self.scale), upper=False)
        trace = (half**2).sum((-2, -1)) + self.count * dot(white, white)
        value: Tensor = (
            -(trace + (self.degrees + self.size + 2) * log_determinant(factor)) / 2 - self._log_partition()
        )
        return value

    def _precision_factor(self) -> Tensor:
        """Cholesky factor of Ψ⁻¹, the scale of the Wishart law of Σ⁻¹."""
        return factorize(inverse_from_cholesky(factorize(self.scale)))

    def _entropy(self) -> Tensor:
        """Entropy of Σ⁻¹ plus (D+1) E log|Σ|, plus that of μ given Σ, ½ (D log 2πe/κ + E log|Σ|)."""
        size, log_size = self.size, self._log_size(factorize(self.scale))
        precision = wishart_entropy(self.degrees, self._precision_factor())
        spread = size * (math.log(2 * math.pi * math.e) - self.count.log())
        return (precision + (size + 1.5) * log_size + spread / 2).expand(self.batch_shape)

    def _kl(self, other: Self) -> Tensor:
        """KL of Σ⁻¹ plus that of μ given Σ, ½ D (r − 1 − log r) + ½ κ' ν (m − m')'Ψ⁻¹(m − m'), r = κ'/κ."""
        first, second = self._precision_factor(), other._precision_factor()
        white = whiten(factorize(self.scale), self.location - other.location)
        counts = self.size * log_excess(other.count, self.count)
        offset = other.count * self.degrees * dot(white, white)
        return wishart_kl(self.degrees, first, other.degrees, second) + (counts + offset) / 2

    def _event_moments(self) -> tuple[MeanCovariance, MeanCovariance]:
        """E and Var of (μ, Σ). With k = ν − D: E μ if k > 0, E Σ = Ψ/(k − 1) if k > 1, Var Σ if k > 3."""
        k = (self.degrees - self.size).expand(self.batch_shape)[..., None, None]
        scale, diagonal = self.scale, self.scale.diagonal(dim1=-2, dim2=-1)
        products = diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2)
        mean = torch.where(k > 1, scale / (k - 1), torch.nan)
        spread = ((k + 1) * scale**2 + (k - 1) * products) / (k * (k - 1) ** 2 * (k - 3))
        spread = torch.where(k > 3, spread, torch.where(k > 1, torch.inf, torch.nan))
        around = torch.where(k > 1, scale / (k - 1), torch.inf).diagonal(dim1=-2, dim2=-1)
        exists = k.squeeze(-1) > 0
        location = torch.where(exists, self.location, torch.nan)
        around = torch.where(exists, around / self.count.unsqueeze(-1), torch.nan)
        return MeanCovariance(location, mean), MeanCovariance(around, spread)

    def _support(self, x: MeanCovariance) -> Tensor:
        mean, covariance = x
        return mean.isfinite().all(-1) & symmetric(covariance) & positive_definite(covariance)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> MeanCovariance:
        # Σ⁻¹ = (L⁻ᵀA)(L⁻ᵀA)' with Ψ = LL' and A A' ~ Wishart(ν, I), so Σ = B B' with B = L A⁻ᵀ.
        triangle, _ = bartlett_in_logs(self.degrees.expand(self.batch_shape), self.size, shape, generator)
        limits = torch.finfo(self.dtype)
        diagonal = triangle.diagonal(dim1=-2, dim2=-1).clamp_min(limits.tiny**0.5)
        triangle = triangle.tril(-1) + torch.diag_embed(diagonal)
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device).expand(triangle.shape)
        inverse = torch.linalg.solve_triangular(triangle, eye, upper=False)
        half = factorize(self.scale) @ inverse.mT
        largest = half.detach().abs().amax(-2, keepdim=True)  # to keep Σ finite in this dtype
        half = half * (limits.max**0.5 / (8 * self.size) / largest).clamp_max(1)
        noise = standard_normal(self.location, half.shape[:-1], generator)
        mean = self.location + matvec(half, noise) / self.count.sqrt().unsqueeze(-1)
        return MeanCovariance(mean, lifted(half @ half.mT))

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        degrees, factor = self.degrees.expand(self.batch_shape), factorize(self.scale)
        triangle, log_diagonal = bartlett_in_logs(degrees, self.size, shape, generator)
        root = torch.linalg.solve_triangular(factor.mT, triangle, upper=True)
        noise = standard_normal(self.location, root.shape[:-1], generator)
        weighted = matvec(root.mT, self.location) + noise / self.count.sqrt().unsqueeze(-1)
        return weighted, root, log_determinant(factor) - 2 * log_diagonal.sum(-1)

    def _log_prob_inner(self, y: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        weighted, root, log_size = y
        white = weighted - matvec(root.mT, self.location)
        trace = ((factorize(self.scale).mT @ root) ** 2).sum((-2, -1)) + self.count * dot(white, white)
        value: Tensor = -(trace + (self.degrees + self.size + 2) * log_size) / 2 - self._log_partition()
        return value
