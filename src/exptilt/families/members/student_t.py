r"""The multivariate Student t: a Gaussian whose precision is multiplied by a Gamma variable of mean 1.

    x | w ~ N(μ, S/w),   w ~ Gamma(ν/2, ν/2)     gives     p(x) ∝ (1 + (x−μ)'S⁻¹(x−μ)/ν)^{−(ν+D)/2}

With known degrees of freedom ν it is no exponential family, and it cannot be tilted: E e^{⟨x,η⟩} is infinite
for every η but 0. So it is a law with a density, draws, moments and entropy, but no `Measure`. `project`
gives the nearest Gaussian, which has the same first two moments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from exptilt._support.checks import finite, positive
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import check_covariance, dot, factorize, log_determinant, matvec
from exptilt.families.batch import Fields
from exptilt.families.checks import check_tensors, sizes, with_axes
from exptilt.families.members.gaussian import whiten
from exptilt.families.numerics.distribution_functions import by_scipy
from exptilt.families.numerics.draws import standard_gamma, standard_normal
from exptilt.families.numerics.gamma_functions import digamma_rise, remainder


@dataclass(frozen=True, eq=False)
class StudentT(Fields):
    """Student's t in D dimensions.

    Args:
        degrees: ``(...)``, ν, positive.
        location: ``(..., D)``, μ.
        scale: ``(..., D, D)``, S, symmetric positive definite; the covariance is S ν/(ν − 2).

    Example:
        >>> StudentT(4.0, 1.0, 2.0).event_variance  # numbers are one coordinate
        tensor([4.])
    """

    degrees: Tensor
    location: Tensor
    scale: Tensor
    event_dims: ClassVar = {"degrees": 0, "location": 1, "scale": 2}

    def __post_init__(self) -> None:
        fields = {name: (getattr(self, name), event) for name, event in self.event_dims.items()}
        for name, x in with_axes(fields).items():
            object.__setattr__(self, name, x)
        check_tensors("StudentT", {name: (getattr(self, name), e) for name, e in self.event_dims.items()})
        if tuple(self.scale.shape[-2:]) != (self.dimension,) * 2:
            got = f"{tuple(self.location.shape)} and {tuple(self.scale.shape)}"
            raise ArgumentError(f"StudentT: location must be (..., D) and scale (..., D, D); got {got}.")
        check_covariance(self.scale, "StudentT: scale")
        positive("StudentT", degrees=self.degrees)
        finite("StudentT", location=self.location)

    @property
    def dimension(self) -> int:
        """D."""
        return self.location.shape[-1]

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of x, ``((D,),)``."""
        return ((self.dimension,),)

    @property
    def scale_tril(self) -> Tensor:
        """The lower triangular L with S = LL', ``(..., D, D)``."""
        return factorize(self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density at x.

        Args:
            x: ``(..., D)``; leading axes broadcast with the batch.

        Returns:
            ``(...)``.
        """
        factor, nu, d = self.scale_tril, self.degrees, self.dimension
        white = whiten(factor, self._event(x) - self.location)
        away = (nu + d) / 2 * torch.log1p(dot(white, white) / nu)
        return self._log_peak() - log_determinant(factor) / 2 - away

    def _log_peak(self) -> Tensor:
        """Log-density at the location for |S| = 1: log Γ((ν+D)/2)/Γ(ν/2) − D/2 log νπ, stable at large ν."""
        a, c = self.degrees / 2, self.dimension / 2
        rise = (a + c - 0.5) * torch.log1p(c / a) - c
        return rise + remainder(a + c) - remainder(a) - c * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        """Entropy: (ν+D)/2 [ψ((ν+D)/2) − ψ(ν/2)] + ½ log|S| less the log-density at the peak for |S| = 1.

        Returns:
            ``(...)``, in nats.
        """
        a, c = self.degrees / 2, self.dimension / 2
        rise = (a + c) * digamma_rise(a, torch.full_like(a, c))
        return (rise + log_determinant(self.scale_tril) / 2 - self._log_peak()).expand(self.batch_shape)

    def sample(self, shape: int | Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws, differentiable in all parameters.

        Args:
            shape: how many, as a number or a shape.
            generator: the source of randomness; torch's own if not given.

        Returns:
            ``(..., D)``, the leading axes ``shape + batch``.
        """
        size = (*sizes("StudentT", shape), *self.batch_shape, self.dimension)
        noise = standard_normal(self.location, size, generator)
        half = self.degrees.expand(size[:-1]) / 2
        weight = (standard_gamma(half, generator) / half).unsqueeze(-1)
        return self.location + matvec(self.scale_tril, noise) / weight.sqrt()

    def covariance(self) -> Tensor:
        """S ν/(ν − 2).

        Returns:
            ``(..., D, D)``, infinite for ν up to 2, NaN for ν up to 1.
        """
        nu = self.degrees.expand(self.batch_shape)[..., None, None]
        value = torch.where(nu > 2, self.scale * (nu / (nu - 2)), torch.inf)
        return torch.where(nu > 1, value, torch.nan)

    def _event_covariance(self) -> Tensor:
        return self.covariance()

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        known = (self.degrees > 1).expand(self.batch_shape).unsqueeze(-1)
        mean = torch.where(known, self.location, torch.nan)
        return mean, self.covariance().diagonal(dim1=-2, dim2=-1)

    def _mode(self) -> Tensor:
        return self.location.expand(*self.batch_shape, -1)

    def _deviation(self) -> Tensor:
        return self.scale.diagonal(dim1=-2, dim2=-1).sqrt()

    def _cdf(self, x: Tensor) -> Tensor:
        z = (x - self.location) / self._deviation()
        return by_scipy("stdtr", self.degrees.unsqueeze(-1), z)

    def _icdf(self, q: Tensor) -> Tensor:
        return self.location + self._deviation() * by_scipy("stdtrit", self.degrees.unsqueeze(-1), q)
