r"""The inverse Wishart distribution of positive definite matrices: X⁻¹ is Wishart(ν, Ψ⁻¹).

    p(X) ∝ |X|^{−(ν+D+1)/2} e^{−½ tr(ΨX⁻¹)},     E[X⁻¹] = νΨ⁻¹,     E[X] = Ψ/(ν − D − 1)

Sufficient statistic u(X) = (pack(X⁻¹), log|X|), natural parameter θ = (−½ pack(Ψ), −(ν+D+1)/2). X is no part
of u, so tilting acts on all of u. Densities are with respect to Lebesgue measure of the lower triangle.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.linalg import (
    factorize,
    indefiniteness,
    inverse_from_cholesky,
    log_determinant,
    multivariate_digamma,
    multivariate_log_gamma,
    pack,
    packed_size,
    positive_definite,
    symmetric,
    unpack,
)
from exptilt.families.family import joined
from exptilt.families.measure import make
from exptilt.families.members.wishart import (
    WithDegrees,
    bartlett,
    bartlett_log_density,
    lifted,
    wishart_entropy,
    wishart_kl,
)
from exptilt.families.numerics.gamma_functions import invert_multivariate_gap


@dataclass(frozen=True, eq=False)
class InverseWishart(WithDegrees):
    """Distribution of a positive definite D×D matrix whose inverse has a Wishart law.

    Args:
        degrees: ``(...)``, ν > D − 1.
        scale: ``(..., D, D)``, Ψ, symmetric positive definite.

    Example:
        >>> InverseWishart(torch.tensor(5.0), torch.eye(2)).event_mean
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """

    degrees: Tensor
    scale: Tensor
    event_dims: ClassVar = {"degrees": 0, "scale": 2}
    _statistic_size = staticmethod(lambda d: packed_size(d) + 1)
    _event_ranks = (2,)
    _inner_form = ("C with CC' = X⁻¹, log|X|", (2, 0))
    _decay = -1.0

    @property
    def natural_parameter(self) -> Tensor:
        """(−½ pack(Ψ), −(ν+D+1)/2), ``(..., D(D+1)/2 + 1)``."""
        return joined(pack(self.scale) / -2, (self.degrees + self.size + 1).unsqueeze(-1) / -2)

    @property
    def mean_parameter(self) -> Tensor:
        """(pack(νΨ⁻¹), E log|X|)."""
        factor = factorize(self.scale)
        precision = self.degrees[..., None, None] * inverse_from_cholesky(factor)
        return joined(pack(precision), self._log_size(factor).unsqueeze(-1))

    def _log_size(self, factor: Tensor) -> Tensor:
        """E log|X|, from the Cholesky factor of Ψ."""
        shift = self.size * math.log(2) + multivariate_digamma(self.degrees / 2, self.size)
        return log_determinant(factor) - shift

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return 1.0, (self.degrees - self.size + 1).unsqueeze(-1) / 2

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        scale = -2 * unpack(theta[..., :-1])
        return make(cls, degrees=-2 * theta[..., -1] - scale.shape[-1] - 1, scale=scale)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        factor = factorize(unpack(mean[..., :-1]))
        degrees = invert_multivariate_gap(mean[..., -1] + log_determinant(factor), factor.shape[-1])
        return make(cls, degrees=degrees, scale=degrees[..., None, None] * inverse_from_cholesky(factor))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest violation of E X⁻¹ ≻ 0 (its smallest eigenvalue) and of E log|X| > −log|E X⁻¹|."""
        precision = unpack(mean[..., :-1])
        definite = indefiniteness(precision)
        jensen = -mean[..., -1] - log_determinant(factorize(precision))
        return torch.where(definite >= 0, definite, torch.maximum(definite, jensen))

    def _log_partition(self) -> Tensor:
        half, log_scale = self.degrees / 2, log_determinant(factorize(self.scale))
        return half * (self.size * math.log(2) - log_scale) + multivariate_log_gamma(half, self.size)

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        factor = factorize(x)
        return torch.cat([pack(inverse_from_cholesky(factor)), log_determinant(factor).unsqueeze(-1)], -1)

    def _log_prob(self, x: Tensor) -> Tensor:
        return self._log_density(factorize(x))

    def _log_density(self, factor: Tensor) -> Tensor:
        """Log-density of X = FF': with Ψ = LL' and B = F⁻¹L, L'X⁻¹L = B'B ~ Wishart(ν, I)."""
        scale = factorize(self.scale)
        half = torch.linalg.solve_triangular(factor, scale, upper=False).mT.flip(-1, -2)
        log_half = half.diagonal(dim1=-2, dim2=-1).log()
        volume = (self.size + 1) * (log_determinant(scale) / 2 - log_determinant(factor))
        return bartlett_log_density(self.degrees, half, log_half) + volume

    def _support(self, x: Tensor) -> Tensor:
        return symmetric(x) & positive_definite(x)

    def _precision_factor(self) -> Tensor:
        """Cholesky factor of Ψ⁻¹, the scale of the Wishart law of X⁻¹."""
        return factorize(inverse_from_cholesky(factorize(self.scale)))

    def _half(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draws B with X = BB', such that X is finite in this dtype and has a Cholesky factor."""
        # X⁻¹ = (L⁻ᵀA)(L⁻ᵀA)' with Ψ = LL' and A A' ~ Wishart(ν, I), so B = L A⁻ᵀ.
        triangle, _ = bartlett(self.degrees.expand(self.batch_shape), self.size, shape, generator)
        limits = torch.finfo(self.dtype)
        diagonal = triangle.diagonal(dim1=-2, dim2=-1).clamp_min(limits.tiny**0.5)
        triangle = triangle.tril(-1) + torch.diag_embed(diagonal)
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device).expand(triangle.shape)
        half = factorize(self.scale) @ torch.linalg.solve_triangular(triangle, eye, upper=False).mT
        return self._within_limits(half)

    def _within_limits(self, half: Tensor) -> Tensor:
        largest = half.detach().abs().amax(-2, keepdim=True)
        most = torch.finfo(self.dtype).max ** 0.5 / (8 * self.size)
        limited: Tensor = half * (most / largest).clamp_max(1)
        return limited

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        half = self._half(shape, generator)
        return lifted(half @ half.mT)

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        factor = factorize(self.scale)
        triangle, log_diagonal = bartlett(self.degrees.expand(self.batch_shape), self.size, shape, generator)
        root = torch.linalg.solve_triangular(factor.mT, triangle, upper=True)
        return root, log_determinant(factor) - 2 * log_diagonal.sum(-1)

    def _from_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        limits = torch.finfo(self.dtype)
        half = torch.linalg.inv_ex(y[0])[0].mT.nan_to_num(0.0, limits.max, -limits.max)
        half = self._within_limits(half)
        return lifted(half @ half.mT)

    def _log_prob_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        root, log_size = y
        trace = ((factorize(self.scale).mT @ root) ** 2).sum((-2, -1))
        value: Tensor = -(trace + (self.degrees + self.size + 1) * log_size) / 2 - self._log_partition()
        return value

    def _entropy(self) -> Tensor:
        """Entropy of X⁻¹ plus (D + 1) E log|X|."""
        precision = wishart_entropy(self.degrees, self._precision_factor())
        return precision + (self.size + 1) * self._log_size(factorize(self.scale))

    def _kl(self, other: Self) -> Tensor:
        return wishart_kl(self.degrees, self._precision_factor(), other.degrees, other._precision_factor())

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        """E[X] = Ψ/(k − 1) with k = ν − D; for k ≤ 1 infinite on the diagonal. Var[X] is finite if k > 3."""
        k = (self.degrees - self.size).expand(self.batch_shape)[..., None, None]
        diagonal = self.scale.diagonal(dim1=-2, dim2=-1)
        products = diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2)
        none = torch.full_like(self.scale, torch.nan)
        none.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        mean = torch.where(k > 1, self.scale / (k - 1), none)
        spread = ((k + 1) * self.scale**2 + (k - 1) * products) / (k * (k - 1) ** 2 * (k - 3))
        return mean, torch.where(k > 3, spread, torch.where(k > 1, torch.inf, torch.nan))

    def _mode(self) -> Tensor:
        return self.scale / (self.degrees + self.size + 1)[..., None, None]
