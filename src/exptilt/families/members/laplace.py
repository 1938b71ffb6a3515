r"""Independent Laplace variables about a known location.

    p(x) = e^{−|x − μ|/b} / 2b

Sufficient statistic u(x) = |x − μ|, natural parameter θ = −1/b, A = Σ_d log 2b. The location μ is known: with
it unknown this is no exponential family. x is no part of u, so tilting acts on |x − μ| and changes b alone.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.numerics.deviance import deviance, log_excess
from exptilt.families.numerics.hull import box_excess


@dataclass(frozen=True, eq=False)
class Laplace(KnownParameter):
    """D independent Laplace variables, whose location is known.

    Args:
        location: ``(..., D)``, μ, known: mean and median.
        scale: ``(..., D)``, b, positive: the mean distance from μ.

    Example:
        >>> Laplace(torch.zeros(1), torch.tensor([3.0])).mean()  # E |x − μ|
        tensor([3.])
    """

    location: Tensor
    scale: Tensor
    event_dims: ClassVar = {"location": 1, "scale": 1}
    _mean_field = "scale"
    _reach = (-math.inf, math.inf, None)
    known_field = "location"
    _decay = 1.0
    identity_coordinate = False
    _differentiable_draws = True
    _positive = ("scale",)
    _twin = (distributions.Laplace, {"location": "loc", "scale": "scale"})

    @property
    def natural_parameter(self) -> Tensor:
        """−1/b, ``(..., D)``."""
        return (-1 / self.scale).expand(*self.batch_shape, -1)

    def _with_natural(self, theta: Tensor) -> Self:
        return self._with("scale", -1 / theta)

    def _outside(self, mean: Tensor) -> Tensor:
        return box_excess(mean, 0.0, math.inf)

    def _log_partition(self) -> Tensor:
        return (2 * self.scale).log().sum(-1).expand(self.batch_shape)

    def statistic(self, x: Any) -> Tensor:  # type: ignore[override]
        """|x − μ|, a method of members because μ belongs to a member.

        Args:
            x: ``(..., D)``.

        Returns:
            ``(..., D)``.
        """
        return self.coordinate(x)

    def _whole_statistic(self, x: Tensor) -> Tensor:
        return (x - self.location).abs()

    def _log_prob(self, x: Tensor) -> Tensor:
        return -((x - self.location).abs() / self.scale + (2 * self.scale).log()).sum(-1)

    def _entropy(self) -> Tensor:
        return (1 + (2 * self.scale).log()).sum(-1).expand(self.batch_shape)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.batch_shape, self.dimension)
        uniform = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        side = torch.where(uniform < 0.5, -1.0, 1.0)
        # For uniform u, 1 − |2u − 1| in (0, 1] is uniform, so minus its logarithm is exponential.
        return self.location - self.scale * side * torch.log1p(-(2 * uniform - 1).abs())

    def _kl(self, other: Self) -> Tensor:
        """Σ_d r − 1 − log r + (|δ| − b(1 − e^{−|δ|/b}))/b' with r = b/b' and δ = μ' − μ."""
        away = (self.location - other.location).abs() / self.scale
        apart = self.scale * deviance(torch.ones_like(away), torch.expm1(-away), -away)
        return (log_excess(self.scale, other.scale) + apart / other.scale).sum(-1)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        ratio = eta * self.scale
        inside = ((ratio < 1) | ratio.isnan()).all(-1, keepdim=True)
        value = -torch.log1p(-torch.where(inside, ratio, 0.0))
        return torch.where(inside, value, torch.inf).sum(-1)

    def _covariance(self, eta: Tensor) -> Tensor:
        return torch.diag_embed((1 / self.scale - eta) ** -2).expand(*eta.shape, self.dimension)

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        location, scale = torch.broadcast_tensors(self.location, self.scale)
        return location, 2 * scale**2

    def _mode(self) -> Tensor:
        return self.location.expand(*self.batch_shape, -1)

    def _cdf(self, x: Tensor) -> Tensor:
        z = (x - self.location) / self.scale
        tail = (-z.abs()).exp() / 2
        return torch.where(z < 0, tail, 1 - tail)

    def _icdf(self, q: Tensor) -> Tensor:
        tail = torch.minimum(q, 1 - q)
        return self.location + self.scale * torch.where(q < 0.5, 1.0, -1.0) * (2 * tail).log()
