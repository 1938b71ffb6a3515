r"""Independent binomial counts: successes in a known number of trials.

    p(x) = n!/(x!(n − x)!) p^x (1 − p)^{n−x},     G(η) = Σ_d n_d [softplus(ℓ_d + η_d) − softplus(ℓ_d)]

Sufficient statistic u(x) = x, natural parameter θ = ℓ, the log-odds of a success; n is known. A coordinate is
a `Multinomial` with two outcomes.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.checks import entries
from exptilt._support.transforms import is_concrete
from exptilt.families.measure import Base, make
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.members.multinomial import Multinomial
from exptilt.families.numerics.deviance import coin_conjugate, coin_gap, coin_kl, softplus
from exptilt.families.numerics.distribution_functions import by_scipy, least_count
from exptilt.families.numerics.log_factorial import expected_log_ratio


@dataclass(frozen=True, eq=False)
class Binomial(KnownParameter):
    """D independent counts of successes, each in a known number of trials.

    Args:
        total: ``(..., D)``, n, known, whole numbers of at least 1.
        logit: ``(..., D)``, log-odds of a success.

    Example:
        >>> Binomial(torch.tensor([8.0]), torch.zeros(1)).mean()
        tensor([4.])
    """

    total: Tensor
    logit: Tensor
    event_dims: ClassVar = {"total": 1, "logit": 1}
    _natural_field = "logit"
    known_field = "total"
    base = Base.COUNTING
    _tilts_everywhere = True
    _twin = (distributions.Binomial, {"total": "total_count", "logit": "logits"})

    def _check(self) -> None:
        whole = (self.total >= 1) & (self.total == self.total.floor()) & self.total.isfinite()
        entries("Binomial", "total", self.total, whole, "a whole number of at least 1")

    @property
    def mean_parameter(self) -> Tensor:
        """n p, ``(..., D)``."""
        return self.total * torch.sigmoid(self.logit)

    def _outcomes(self) -> Multinomial:
        """Each coordinate as a `Multinomial` of successes and failures, with batch ``(..., D)``."""
        total, logit = torch.broadcast_tensors(self.total, self.logit)
        return make(Multinomial, logit=torch.stack([logit, torch.zeros_like(logit)], -1), total=total)

    def _with_mean(self, mean: Tensor) -> Self:
        return self._with("logit", mean.log() - (self.total - mean).log())

    @classmethod
    def _typical(cls, like: Tensor) -> Self:
        """A member with so many trials that its support holds every exact count of this dtype."""
        most = torch.full_like(like, 2 / torch.finfo(like.dtype).eps)
        return make(cls, total=most, logit=torch.zeros_like(like))

    def _log_partition(self) -> Tensor:
        return (self.total * softplus(self.logit)).sum(-1)

    def _log_base(self, x: Tensor) -> Tensor:
        n = self.total
        return (torch.lgamma(n + 1) - torch.lgamma(x + 1) - torch.lgamma(n - x + 1)).sum(-1)

    @property
    def _reach(self) -> tuple[float, Tensor, None]:  # type: ignore[override]
        return 0.0, self.total, None

    def _log_prob(self, x: Tensor) -> Tensor:
        x = x.clamp(torch.zeros_like(self.total), self.total)
        return self._outcomes()._log_prob(torch.stack([x, self.total - x], -1)).sum(-1)

    def _entropy(self) -> Tensor:
        """Entropy by quadrature, as for `Multinomial`."""
        return self._outcomes()._entropy().sum(-1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        size = (*shape, *self.batch_shape, self.dimension)
        total, p = self.total.detach().double(), torch.sigmoid(self.logit.detach().double())
        drawn = torch.binomial(total.expand(size), p.expand(size), generator=generator)
        return drawn.to(self.dtype)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d n times the KL of the coins, if n = n'; infinite if n > n'.

        If n < n', b and A add log n!/n'! + E[log (n'−x)!/(n−x)!] + (n' − n) softplus(ℓ').
        """
        n, m, logit = self.total, other.total, self.logit
        same = (n * coin_kl(logit, other.logit, coin_gap(logit, other.logit))).sum(-1)
        if is_concrete(n, m) and bool((n == m).all()):
            return same
        more = (m - n).clamp_min(0)
        ratio = torch.lgamma(n + 1) + torch.lgamma(more + 1) - torch.lgamma(n + more + 1)
        # E[log Γ(y+a)/Γ(a) − log y!] of failures y, a = n' − n + 1, with M(t) = (1 − q (1 − e^{−t}))^n
        many, q = torch.broadcast_tensors(n.double(), torch.sigmoid(-logit.double()))
        wide, trials = q.unsqueeze(-1), many.unsqueeze(-1)
        rises = expected_log_ratio(
            more + 1,
            torch.ones_like(more),
            many * q,
            lambda one: -torch.expm1(trials * torch.log1p(-wide * one)),
        )
        extra = ratio + rises.to(n) + more * softplus(other.logit)
        return torch.where((n <= m).all(-1), same + extra.sum(-1), torch.inf)

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        return (self.total * coin_conjugate(self.logit, mean / self.total)).sum(-1)

    def _covariance(self, eta: Tensor) -> Tensor:
        logit = self.logit + eta
        return torch.diag_embed(self.total * torch.sigmoid(logit) * torch.sigmoid(-logit))

    def _mode(self) -> Tensor:
        return torch.minimum(((self.total + 1) * torch.sigmoid(self.logit)).floor(), self.total)

    def _cdf(self, x: Tensor) -> Tensor:
        count, q = x.floor(), torch.sigmoid(-self.logit)
        value = by_scipy("betainc", (self.total - count).clamp_min(1), count.clamp_min(0) + 1, q)
        return torch.where(count < 0, 0.0, torch.where(count < self.total, value, 1.0))

    def _icdf(self, q: Tensor) -> Tensor:
        guess = by_scipy("bdtrik", q, self.total, torch.sigmoid(self.logit)).ceil()
        return least_count(self._cdf, torch.minimum(guess, self.total), q)
