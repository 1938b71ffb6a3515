r"""Counts of K outcomes in a known number of trials.

    p(x) = n!/Πx_k! Π p_k^{x_k},     ∇G(η) = n softmax(ℓ + η)
    G(η) = n [log Σ_k e^{ℓ_k + η_k} − log Σ_k e^{ℓ_k}]

Sufficient statistic u(x) = x, natural parameter θ = ℓ, known up to a shared constant since the counts sum
to n. Each trial is a `Categorical`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.families.measure import Base, make
from exptilt.families.members.categorical import Categorical
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.numerics.deviance import deviance
from exptilt.families.numerics.gamma_functions import HALF_LOG_2PI, remainder
from exptilt.families.numerics.log_factorial import expected_log_coefficient


@dataclass(frozen=True, eq=False)
class Multinomial(KnownParameter):
    """Distribution of the counts of K outcomes in n trials.

    Args:
        logit: ``(..., K)``, log-probabilities up to a constant.
        total: ``(...)``, n, known, a whole number of at least 1.

    Example:
        >>> Multinomial(torch.zeros(2), torch.tensor(8.0)).mean()
        tensor([4., 4.])
    """

    logit: Tensor
    total: Tensor
    event_dims: ClassVar = {"logit": 1, "total": 0}
    _natural_field = "logit"
    known_field = "total"
    _mean_says_known = True
    base = Base.COUNTING
    minimal = False

    def _check(self) -> None:
        whole = (self.total >= 1) & (self.total == self.total.floor()) & self.total.isfinite()
        entries("Multinomial", "total", self.total, whole, "a whole number of at least 1")

    @property
    def _reach(self) -> tuple[Any, Any, Any]:  # type: ignore[override]
        return 0.0, self._n, self._n

    @property
    def mean_parameter(self) -> Tensor:
        """n p, ``(..., K)``."""
        return self._n * torch.softmax(self.logit, -1)

    @property
    def _n(self) -> Tensor:
        return self.total.unsqueeze(-1)

    def _trial(self) -> Categorical:
        """The law of one trial."""
        return make(Categorical, logit=self.logit)

    @classmethod
    def _some(cls, known: Tensor | None, vector: Tensor, asked: str) -> Self:
        if known is None and asked != "from_natural" and asked != "log_partition":
            known = vector.sum(-1).round().clamp_min(1)
        return super()._some(known, vector, asked)

    def _with_mean(self, mean: Tensor) -> Self:
        return self._with("logit", Categorical._from_mean(mean).logit)

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        return cls._some(None, like, "from_mean")

    def _outside(self, mean: Tensor) -> Tensor:
        return self.total * Categorical._mean_excess(mean / self._n)

    def _in_domain(self) -> Tensor:
        return self.logit.isfinite().all(-1) & (self.total > 0)

    def _log_partition(self) -> Tensor:
        return self.total * torch.logsumexp(self.logit, -1)

    def _log_base(self, x: Tensor) -> Tensor:
        return torch.lgamma(self.total + 1) - torch.lgamma(x + 1).sum(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-probability as −Σ_k D(x_k, np_k) plus Stirling's factors: no large terms cancel."""
        some, log_mean = x.clamp_min(1.0), self._n.log() + torch.log_softmax(self.logit, -1)
        away = deviance(x, log_mean.exp() - x, log_mean - some.log())
        factor = torch.where(x > 0, some.log() / 2 + HALF_LOG_2PI + remainder(some), 0.0)
        return self.total.log() / 2 + HALF_LOG_2PI + remainder(self.total) - (away + factor).sum(-1)

    def _entropy(self) -> Tensor:
        """n times the entropy of a trial, less E log n!/Πx_k! by quadrature; the error is some ε times n."""
        trials = self.total.double() * self._trial().to(torch.float64)._entropy()
        return (trials - expected_log_coefficient(self.total, torch.log_softmax(self.logit, -1))).to(
            self.dtype
        )

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Counts ``shape + batch + (K,)``: each is binomial given the counts before it."""
        p = torch.softmax(self.logit.detach().double(), -1).expand(*shape, *self.batch_shape, -1)
        rest = p.flip(-1).cumsum(-1).flip(-1)  # probability of this outcome or a later one
        left, drawn = self.total.detach().double().expand(p.shape[:-1]), []
        for k in range(p.shape[-1] - 1):
            drawn.append(torch.binomial(left, (p[..., k] / rest[..., k]).clamp(0, 1), generator=generator))
            left = left - drawn[-1]
        return torch.stack([*drawn, left], -1).to(self.dtype)

    def _to_torch(self) -> distributions.Multinomial:
        """The same law in `torch.distributions`; an error unless the whole batch has one total."""
        if not is_concrete(self.total) or bool((self.total != self.total.flatten()[0]).any()):
            got = self.total.tolist() if is_concrete(self.total) else "a total whose value cannot be read"
            raise ArgumentError(
                f"torch.distributions.Multinomial has one total for all of a batch; got {got}."
            )
        logit = self.logit.expand(*self.batch_shape, -1)
        return distributions.Multinomial(int(self.total.flatten()[0]), logits=logit)

    def _kl(self, other: Self) -> Tensor:
        """n Σ_k D(p_k, p'_k); infinite if the totals differ, because the supports are then disjoint."""
        return torch.where(
            self.total == other.total, self.total * self._trial()._kl(other._trial()), torch.inf
        )

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        return self.total * self._trial()._boundary_conjugate(mean / self._n, reached)

    def _covariance(self, eta: Tensor) -> Tensor:
        return self.total[..., None, None] * self._trial()._covariance(eta)
