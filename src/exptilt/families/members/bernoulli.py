r"""Independent coins: the uniform measure on the hypercube {0,1}^D, tilted.

    G(η) = Σ_d [softplus(ℓ_d + η_d) − softplus(ℓ_d)],     ∇G(η) = sigmoid(ℓ + η)

Sufficient statistic u(x) = x, natural parameter θ = ℓ, the logits.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import dot
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.numerics.deviance import coin_conjugate, coin_gap, coin_kl, softplus


@dataclass(frozen=True, eq=False)
class BernoulliProduct(ExponentialFamily):
    """D independent coins on {0,1}^D.

    Args:
        logit: ``(..., D)``, log-odds of a 1.

    Example:
        >>> BernoulliProduct(torch.zeros(3)).mean()
        tensor([0.5000, 0.5000, 0.5000])
    """

    logit: Tensor
    event_dims: ClassVar = {"logit": 1}
    _natural_field = "logit"
    _reach = (0.0, 1.0, None)
    base = Base.COUNTING
    _tilts_everywhere = True
    _twin = (distributions.Bernoulli, {"logit": "logits"})

    @property
    def mean_parameter(self) -> Tensor:
        """Probability of a 1, ``(..., D)``."""
        return torch.sigmoid(self.logit)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        return make(cls, logit=mean.log() - torch.log1p(-mean))

    def _log_partition(self) -> Tensor:
        return softplus(self.logit).sum(-1)

    def _entropy(self) -> Tensor:
        p, q = torch.sigmoid(self.logit), torch.sigmoid(-self.logit)
        return (p * softplus(-self.logit) + q * softplus(self.logit)).sum(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        return -dot(softplus(-self.logit), x) - dot(softplus(self.logit), 1 - x)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.logit.shape)
        uniform = torch.rand(size, dtype=self.dtype, device=self.device, generator=generator)
        return (uniform < torch.sigmoid(self.logit)).to(self.dtype)

    def _kl(self, other: Self) -> Tensor:
        return coin_kl(self.logit, other.logit, coin_gap(self.logit, other.logit)).sum(-1)

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        return coin_conjugate(self.logit, mean).sum(-1)

    def _covariance(self, eta: Tensor) -> Tensor:
        logit = self.logit + eta
        return torch.diag_embed(torch.sigmoid(logit) * torch.sigmoid(-logit))

    def _mode(self) -> Tensor:
        return (self.logit > 0).to(self.dtype)

    def _cdf(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, torch.where(x < 1, torch.sigmoid(-self.logit), 1.0))

    def _icdf(self, q: Tensor) -> Tensor:
        return torch.where(q.isnan(), q, (q > torch.sigmoid(-self.logit)).to(q))
