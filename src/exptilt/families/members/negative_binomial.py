r"""Independent negative binomial counts: successes before the r-th failure, r known.

    p(x) = Γ(x + r)/(Γ(r) x!) p^x (1 − p)^r
    G(η) = Σ_d r_d [log(1 − p_d) − log(1 − p_d e^{η_d})]   for p e^η < 1

Sufficient statistic u(x) = x, natural parameter θ = log p, base measure b(x) = Γ(x + r)/(Γ(r) x!). A member
holds the log-odds ℓ = log p/(1 − p), which stay accurate near p = 1: E[x] = r e^ℓ, Var[x] = r e^ℓ (1 + e^ℓ).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.transforms import is_concrete
from exptilt.families.measure import Base
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.numerics.deviance import coin_gap, coin_kl, deviance, softplus
from exptilt.families.numerics.distribution_functions import by_scipy, least_count
from exptilt.families.numerics.draws import poisson, standard_gamma
from exptilt.families.numerics.gamma_functions import HALF_LOG_2PI, remainder
from exptilt.families.numerics.log_factorial import expected_log_ratio


@dataclass(frozen=True, eq=False)
class NegativeBinomial(KnownParameter):
    """D independent counts of successes before a known number of failures.

    Args:
        failures: ``(..., D)``, positive, known; need not be whole.
        logit: ``(..., D)``, log-odds of a success.

    Example:
        >>> NegativeBinomial(torch.tensor([3.0]), torch.tensor([2.0]).log()).mean()
        tensor([6.])
    """

    failures: Tensor
    logit: Tensor
    event_dims: ClassVar = {"failures": 1, "logit": 1}
    _reach = (0.0, math.inf, None)
    _positive = ("failures",)
    known_field = "failures"
    _twin = (distributions.NegativeBinomial, {"failures": "total_count", "logit": "logits"})
    base = Base.COUNTING

    @property
    def natural_parameter(self) -> Tensor:
        """Log p, ``(..., D)``."""
        return -softplus(-self.logit).expand(*self.batch_shape, -1)

    @property
    def mean_parameter(self) -> Tensor:
        """r p/(1 − p), ``(..., D)``."""
        return self.failures * self.logit.exp()

    def _with_natural(self, theta: Tensor) -> Self:
        return self._with("logit", theta - torch.log(-torch.expm1(theta)))

    def _with_mean(self, mean: Tensor) -> Self:
        return self._with("logit", mean.log() - self.failures.log())

    def _log_partition(self) -> Tensor:
        """−Σ_d r log(1 − p)."""
        return (self.failures * softplus(self.logit)).sum(-1)

    def _log_base(self, x: Tensor) -> Tensor:
        r = self.failures
        return (torch.lgamma(x + r) - torch.lgamma(r) - torch.lgamma(x + 1)).sum(-1)

    def _log_prob(self, x: Tensor) -> Tensor:
        """Log-probability as −D(x, np) − D(r, n(1−p)) with n = x + r, plus Stirling's factors."""
        r, log_p, log_q = self.failures, -softplus(-self.logit), -softplus(self.logit)
        some = x.clamp_min(1.0)
        n = some + r
        gap = r * torch.sigmoid(self.logit) - some * torch.sigmoid(-self.logit)
        away = deviance(some, gap, log_p + (n / some).log()) + deviance(r, -gap, log_q + (n / r).log())
        factor = (r.log() - n.log() - some.log()) / 2 - HALF_LOG_2PI
        stirling = remainder(n) - remainder(r) - remainder(some)
        return torch.where(x > 0, factor + stirling - away, r * log_q).sum(-1)

    def _entropy(self) -> Tensor:
        """A − θE[x] − E log b(x), the last term by quadrature; the error is some ε times min(r, E[x])."""
        r, logit = self.failures.double(), self.logit.double()
        plain = r * softplus(logit) + r * logit.exp() * softplus(-logit)
        base = self._expected_log_ratio(r, torch.ones_like(r))
        return (plain - base).sum(-1).to(self.dtype)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Counts, ``shape + batch + (D,)``: Poisson with a Gamma(r) rate."""
        size = (*shape, *self.batch_shape, self.dimension)
        rate = standard_gamma(self.failures.detach().expand(size), generator) * self.logit.detach().exp()
        return poisson(rate, generator)

    def _kl(self, other: Self) -> Tensor:
        """Σ_d r/(1−p) times the KL of the coins, if the failures are equal.

        If they differ, b and A add (r − r') log(1 − p') + E[log b(x) − log b'(x)].
        """
        r, gap = self.failures, coin_gap(self.logit, other.logit)
        same = (r * (1 + self.logit.exp()) * coin_kl(self.logit, other.logit, gap)).sum(-1)
        if is_concrete(r, other.failures) and bool((r == other.failures).all()):
            return same
        extra = self._expected_log_ratio(r, other.failures)
        extra = extra + (other.failures - r) * softplus(other.logit)
        return same + extra.sum(-1).to(self.dtype)

    def _expected_log_ratio(self, a: Tensor, b: Tensor) -> Tensor:
        """E[log Γ(x+a)/Γ(a) − log Γ(x+b)/Γ(b)] by quadrature, with M(t) = (1 + e^ℓ (1 − e^{−t}))^{−r}."""
        r, odds = torch.broadcast_tensors(self.failures.double(), self.logit.double().exp())
        wide, many = odds.unsqueeze(-1), r.unsqueeze(-1)
        return expected_log_ratio(a, b, r * odds, lambda one: -torch.expm1(-many * torch.log1p(wide * one)))

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        """Σ_d m log m − (m + r) log(m + r) + r log r − m log p − r log(1 − p), 0 log 0 = 0."""
        m, r = mean.clamp_min(0), self.failures
        entropies = torch.special.entr(m + r) - torch.special.entr(m) - torch.special.entr(r)
        value: Tensor = entropies + m * softplus(-self.logit) + r * softplus(self.logit)
        return value.sum(-1)

    def _covariance(self, eta: Tensor) -> Tensor:
        odds = self._with_natural(self._shifted(eta)).logit.exp()
        return torch.diag_embed(self.failures * odds * (1 + odds))

    def _mode(self) -> Tensor:
        return ((self.failures - 1).clamp_min(0) * self.logit.exp()).floor()

    def _cdf(self, x: Tensor) -> Tensor:
        count, odds_against = x.floor(), torch.sigmoid(-self.logit)
        value = by_scipy("betainc", self.failures, count.clamp_min(0) + 1, odds_against)
        return torch.where(count < 0, 0.0, value)

    def _icdf(self, q: Tensor) -> Tensor:
        guess = by_scipy("nbdtrik", q, self.failures, torch.sigmoid(-self.logit)).ceil()
        return least_count(self._cdf, guess, q)
