r"""One of K outcomes, x a one-hot vector: softmax is its mean map.

    G(η) = log Σ_k e^{ℓ_k + η_k} − log Σ_k e^{ℓ_k},     ∇G(η) = softmax(ℓ + η)

Sufficient statistic u(x) = x. Its entries sum to one, so natural parameters are known up to a shared
constant; those found from a mean sum to zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.linalg import dot
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.numerics.deviance import deviance
from exptilt.families.numerics.draws import categories


@dataclass(frozen=True, eq=False)
class Categorical(ExponentialFamily):
    """Distribution of a one-hot vector.

    Args:
        logit: ``(..., K)``, log-probabilities up to a constant.

    Example:
        >>> Categorical(torch.tensor([0.0, 0.0, 0.0, 0.0])).entropy().exp().round()
        tensor(4.)
    """

    logit: Tensor
    event_dims: ClassVar = {"logit": 1}
    _natural_field = "logit"
    _reach = (0.0, 1.0, 1.0)
    base = Base.COUNTING
    minimal = False
    _tilts_everywhere = True
    _twin = (distributions.OneHotCategorical, {"logit": "logits"})

    @property
    def mean_parameter(self) -> Tensor:
        """The probabilities, ``(..., K)``."""
        return torch.softmax(self.logit, -1)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        logit = mean.log()
        return make(cls, logit=logit - logit.mean(-1, keepdim=True))

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        # Distance to the simplex {x >= 0, sum x = 1}, by sorting. Rounding errors of the sum are tolerated.
        count = mean.shape[-1]
        ordered = mean.sort(-1, descending=True).values
        index = torch.arange(1, count + 1, dtype=mean.dtype, device=mean.device)
        shift = (ordered.cumsum(-1) - 1) / index
        support = (ordered > shift).sum(-1, keepdim=True).clamp_min(1)
        nearest = (mean - shift.gather(-1, support - 1)).clamp_min(0)
        distance = torch.linalg.vector_norm(mean - nearest, dim=-1)
        on = distance <= 4 * count * torch.finfo(mean.dtype).eps
        return torch.where(on, -mean.amin(-1).clamp_min(0), distance)

    def _log_partition(self) -> Tensor:
        return torch.logsumexp(self.logit, -1)

    def _entropy(self) -> Tensor:
        log_probability = torch.log_softmax(self.logit, -1)
        return -dot(log_probability.exp(), log_probability)

    def _log_prob(self, x: Tensor) -> Tensor:
        return dot(torch.log_softmax(self.logit, -1), x)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.batch_shape, 1)
        uniform = torch.rand(size, dtype=torch.float64, device=self.device, generator=generator)
        index = categories(self.logit, uniform).squeeze(-1)
        return torch.nn.functional.one_hot(index, self.dimension).to(self.dtype)

    def _kl(self, other: Self) -> Tensor:
        """Σ_k D(p_k, p'_k)."""
        log_p, log_q = torch.log_softmax(self.logit, -1), torch.log_softmax(other.logit, -1)
        p = log_p.exp()
        return deviance(p, log_q.exp() - p, log_q - log_p).sum(-1)

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """KL(m ‖ p) = Σ_k m log m − m log p of the mean m as probabilities, 0 log 0 = 0."""
        p = mean.clamp(0, 1)
        value: Tensor = -(torch.special.entr(p) + p * torch.log_softmax(self.logit, -1)).sum(-1)
        return value

    def _covariance(self, eta: Tensor) -> Tensor:
        p = torch.softmax(self.logit + eta, -1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def _dual(self, mean: Tensor) -> Tensor:
        eta = mean.log() - self.logit
        return eta - eta.mean(-1, keepdim=True)

    def _mode(self) -> Tensor:
        return torch.nn.functional.one_hot(self.logit.argmax(-1), self.logit.shape[-1]).to(self.dtype)
