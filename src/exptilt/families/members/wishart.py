r"""The Wishart distribution of positive definite matrices.

    p(X) ∝ |X|^{(ν−D−1)/2} e^{−½ tr(V⁻¹X)},     E[X] = νV,     E[log|X|] = ψ_D(ν/2) + D log 2 + log|V|

Sufficient statistic u(X) = (pack(X), log|X|), natural parameter θ = (−½ pack(V⁻¹), (ν−D−1)/2). Tilting acts
on X, so it changes the scale V alone. Densities are with respect to Lebesgue measure of the lower triangle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
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
from exptilt.families.family import ExponentialFamily, joined
from exptilt.families.measure import make
from exptilt.families.numerics.deviance import deviance, gamma_kl, gamma_log_density
from exptilt.families.numerics.draws import log_standard_gamma, standard_normal
from exptilt.families.numerics.gamma_functions import gamma_entropy, invert_multivariate_gap


def bartlett(
    degrees: Tensor, dimension: int, shape: Sequence[int], generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Lower triangular A with A A' ~ Wishart(ν, I), and the log of its diagonal, which never underflows.

    Their shapes are ``shape + degrees.shape + (D, D)`` and ``shape + degrees.shape + (D,)``.
    """
    size = (*shape, *degrees.shape, dimension)
    index = torch.arange(dimension, dtype=degrees.dtype, device=degrees.device)
    half = ((degrees.unsqueeze(-1) - index) / 2).expand(size)
    log_diagonal = (math.log(2) + log_standard_gamma(half, generator)) / 2
    noise = standard_normal(degrees, (*size, dimension), generator)
    return noise.tril(-1) + torch.diag_embed(log_diagonal.exp()), log_diagonal


def lifted(x: Tensor) -> Tensor:
    """Draws ``(..., D, D)`` with slightly larger diagonals where rounding left no Cholesky factor.

    Eigenvalues may be too far apart for the dtype; a few units in the last place on the diagonal suffice.
    """
    limits = torch.finfo(x.dtype)
    lift = (4 * x.shape[-1] * limits.eps * x.diagonal(dim1=-2, dim2=-1)).clamp_min(limits.tiny)
    return torch.where(positive_definite(x)[..., None, None], x, x + torch.diag_embed(lift))


def wishart_kl(degrees: Tensor, factor: Tensor, other_degrees: Tensor, other_factor: Tensor) -> Tensor:
    r"""KL of Wishart(ν, LL') from Wishart(ν', L'L'') by Bartlett's decomposition.

    With W = L'⁻¹L, s_i = W_ii² and a_i = (ν − i)/2, every term at least 0:

        Σ_i [KL(Gamma(a_i, 1) ‖ Gamma(a'_i, s_i)) + i/2 (s_i − 1 − log s_i)] + ν/2 Σ_{i>j} W_ij²
    """
    white = torch.linalg.solve_triangular(other_factor, factor, upper=False)
    diagonal = white.diagonal(dim1=-2, dim2=-1)
    gap, log_ratio = (diagonal - 1) * (diagonal + 1), 2 * diagonal.log()
    index = torch.arange(diagonal.shape[-1], dtype=degrees.dtype, device=degrees.device)
    a, b = ((nu.unsqueeze(-1) - index) / 2 for nu in (degrees, other_degrees))
    each = gamma_kl(a, b, gap, log_ratio) + index / 2 * deviance(torch.ones_like(gap), gap, log_ratio)
    value: Tensor = each.sum(-1) + degrees / 2 * (white.tril(-1) ** 2).sum((-2, -1))
    return value


def wishart_entropy(degrees: Tensor, factor: Tensor) -> Tensor:
    r"""Entropy of Wishart(ν, LL').

    With a_i = (ν − i)/2 and H the entropy of Gamma(a_i, 1):

        (D+1)/2 log|V| + D(D+1)/2 log 2 + D(D−1)/4 log πe + Σ_i [H(a_i) + (D−1−i)/2 ψ(a_i)]
    """
    size = factor.shape[-1]
    index = torch.arange(size, dtype=degrees.dtype, device=degrees.device)
    a = (degrees.unsqueeze(-1) - index) / 2
    each = gamma_entropy(a) + (size - 1 - index) / 2 * torch.digamma(a)
    constant = size * (size + 1) / 2 * math.log(2) + size * (size - 1) / 4 * math.log(math.pi * math.e)
    return (size + 1) / 2 * log_determinant(factor) + each.sum(-1) + constant


def bartlett_log_density(degrees: Tensor, triangle: Tensor, log_diagonal: Tensor) -> Tensor:
    r"""Log-density of Wishart(ν, I) at AA', from the lower triangular A and the logarithm of its diagonal.

    With a_i = (ν − i)/2 and γ the log-density of Gamma(a_i, 1), so that no multiple of ν cancels:

        Σ_i [γ(A_ii²/2) + (i + 1 − D) log A_ii] − ½ Σ_{i>j} A_ij² − D log 2 − D(D−1)/4 log 2π
    """
    size = triangle.shape[-1]
    index = torch.arange(size, dtype=degrees.dtype, device=degrees.device)
    a, x = (degrees.unsqueeze(-1) - index) / 2, triangle.diagonal(dim1=-2, dim2=-1) ** 2 / 2
    each = gamma_log_density(a, x, 2 * log_diagonal - math.log(2)) + (index - 1 - size) * log_diagonal
    constant = size * (size - 1) / 4 * math.log(2 * math.pi)
    value: Tensor = each.sum(-1) - (triangle.tril(-1) ** 2).sum((-2, -1)) / 2 - constant
    return value


class WithDegrees(ExponentialFamily):
    """Base of the families with ``degrees (...)`` of freedom and a ``scale (..., D, D)``."""

    degrees: Tensor
    scale: Tensor
    _differentiable_draws = True
    identity_coordinate = False

    def _check(self) -> None:
        """Raise unless every ν is finite and above D − 1."""
        least = self.size - 1
        valid = (self.degrees > least) & self.degrees.isfinite()
        entries(type(self).__name__, "degrees", self.degrees, valid, f"finite and above D − 1 = {least}")

    @property
    def size(self) -> int:
        """D, the size of the matrices."""
        return self.scale.shape[-1]

    @property
    def scale_tril(self) -> Tensor:
        """The Cholesky factor of the scale: lower triangular, ``(..., D, D)``."""
        return factorize(self.scale)

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        zero = unpack(torch.zeros_like(like[..., :-1]))
        scale = zero + torch.eye(zero.shape[-1]).to(like)
        return make(cls, degrees=torch.full_like(like[..., 0], scale.shape[-1]), scale=scale)

    def _in_domain(self) -> Tensor:
        return (self.degrees > self.size - 1) & positive_definite(self.scale)


@dataclass(frozen=True, eq=False)
class Wishart(WithDegrees):
    """Distribution of a positive definite D×D matrix.

    Args:
        degrees: ``(...)``, ν > D − 1.
        scale: ``(..., D, D)``, V, symmetric positive definite.

    Example:
        >>> from exptilt._support.linalg import unpack
        >>> unpack(Wishart(torch.tensor(4.0), torch.eye(2)).mean())
        tensor([[4., 0.],
                [0., 4.]])
    """

    degrees: Tensor
    scale: Tensor
    event_dims: ClassVar = {"degrees": 0, "scale": 2}
    _twin = (distributions.Wishart, {"degrees": "df", "scale": "covariance_matrix"})
    _statistic_size = staticmethod(lambda d: packed_size(d) + 1)
    _event_ranks = (2,)
    _inner_form = ("Cholesky factor of X, log of its diagonal", (2, 1))
    _decay = 1.0

    @property
    def dimension(self) -> int:
        """D(D+1)/2, the free entries of X."""
        return packed_size(self.size)

    @property
    def natural_parameter(self) -> Tensor:
        """(−½ pack(V⁻¹), (ν−D−1)/2), ``(..., D(D+1)/2 + 1)``."""
        first = pack(inverse_from_cholesky(factorize(self.scale))) / -2
        return joined(first, ((self.degrees - self.size - 1) / 2).unsqueeze(-1))

    @property
    def mean_parameter(self) -> Tensor:
        """(pack(νV), E log|X|)."""
        log_scale = self.size * math.log(2) + log_determinant(factorize(self.scale))
        second = multivariate_digamma(self.degrees / 2, self.size) + log_scale
        return joined(pack(self.degrees[..., None, None] * self.scale), second.unsqueeze(-1))

    @classmethod
    def _from_natural(cls, theta: Tensor) -> Self:
        scale = inverse_from_cholesky(factorize(-2 * unpack(theta[..., :-1])))
        return make(cls, degrees=2 * theta[..., -1] + scale.shape[-1] + 1, scale=scale)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        x = unpack(mean[..., :-1])
        size = x.shape[-1]
        degrees = invert_multivariate_gap(log_determinant(factorize(x)) - mean[..., -1], size)
        return make(cls, degrees=degrees, scale=x / degrees[..., None, None])

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Largest violation of E X ≻ 0 (its smallest eigenvalue) and of E log|X| < log|E X|."""
        x = unpack(mean[..., :-1])
        definite = indefiniteness(x)
        jensen = mean[..., -1] - log_determinant(factorize(x))
        return torch.where(definite >= 0, definite, torch.maximum(definite, jensen))

    def _log_partition(self) -> Tensor:
        half, log_scale = self.degrees / 2, self.size * math.log(2) + log_determinant(factorize(self.scale))
        return half * log_scale + multivariate_log_gamma(half, self.size)

    @classmethod
    def _statistic(cls, x: Tensor) -> Tensor:
        return torch.cat([pack(x), log_determinant(factorize(x)).unsqueeze(-1)], -1)

    def _support(self, x: Tensor) -> Tensor:
        return symmetric(x) & positive_definite(x)

    def _coordinate(self, x: Tensor) -> Tensor:
        return pack(x)

    def _sample_inner(
        self, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        scale = factorize(self.scale)
        degrees = self.degrees.expand(self.batch_shape)
        triangle, log_diagonal = bartlett(degrees, self.size, shape, generator)
        return scale @ triangle, log_diagonal + scale.diagonal(dim1=-2, dim2=-1).log()

    def _from_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        return lifted(y[0] @ y[0].mT)

    def _log_prob(self, x: Tensor) -> Tensor:
        factor = factorize(x)
        return self._log_prob_inner((factor, factor.diagonal(dim1=-2, dim2=-1).log()))

    def _log_prob_inner(self, y: tuple[Tensor, Tensor]) -> Tensor:
        factor, log_diagonal = y
        scale = factorize(self.scale)
        white = torch.linalg.solve_triangular(scale, factor, upper=False)
        log_white = log_diagonal - scale.diagonal(dim1=-2, dim2=-1).log()
        volume = (self.size + 1) / 2 * log_determinant(scale)
        return bartlett_log_density(self.degrees, white, log_white) - volume

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        """νV and, for each entry, ν (V_ij² + V_ii V_jj)."""
        degrees, diagonal = self.degrees[..., None, None], self.scale.diagonal(dim1=-2, dim2=-1)
        products = diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2)
        return degrees * self.scale, degrees * (self.scale**2 + products)

    def _entropy(self) -> Tensor:
        return wishart_entropy(self.degrees, factorize(self.scale))

    def _kl(self, other: Self) -> Tensor:
        return wishart_kl(self.degrees, factorize(self.scale), other.degrees, factorize(other.scale))

    def _dual(self, mean: Tensor) -> Tensor:
        wanted = unpack(mean) / self.degrees[..., None, None]
        now, then = (inverse_from_cholesky(factorize(x)) for x in (self.scale, wanted))
        return pack(now - then) / 2

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        return indefiniteness(unpack(mean))

    @property
    def _moments(self) -> tuple[float, Tensor]:
        return -1.0, (self.degrees - self.size + 1).unsqueeze(-1) / 2

    def _mode(self) -> Tensor:
        """(ν − D − 1) V; NaN for ν below D + 1."""
        extra = (self.degrees - self.size - 1)[..., None, None]
        return torch.where(extra >= 0, extra * self.scale, torch.nan)
