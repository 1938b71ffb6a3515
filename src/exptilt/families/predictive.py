r"""The law of the next observation, and of all of them, when the parameter is integrated out.

With a conjugate prior π of the parameter ξ, and data x whose likelihood is c(x) e^{<u(ξ), e(x)>},

    log p(x) = A(θ + e(x)) − A(θ) + log c(x) = E_post[log p(x|ξ)] − KL(posterior ‖ prior).

The difference of log-partitions loses its digits where the prior is worth many observations; the form on
the right does not, so it is the one that is computed. Of one observation it is the predictive log-density.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import dot, factorize, inverse_from_cholesky
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import make
from exptilt.families.members.bernoulli import BernoulliProduct
from exptilt.families.members.beta import Beta
from exptilt.families.members.categorical import Categorical
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.members.dirichlet import Dirichlet
from exptilt.families.members.exponential import Exponential
from exptilt.families.members.gamma import Gamma
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.multinomial import Multinomial
from exptilt.families.members.negative_binomial import NegativeBinomial
from exptilt.families.members.normal_gamma import NormalGamma
from exptilt.families.members.normal_inverse_wishart import NormalInverseWishart
from exptilt.families.members.poisson import Poisson
from exptilt.families.members.wishart import Wishart
from exptilt.families.relations import Likelihood, about_the_data, evidence_of, posterior, supports

_GIVEN: dict[tuple[type, type], Callable[[Any, Any], ExponentialFamily]] = {
    (Beta, BernoulliProduct): lambda law, p: make(BernoulliProduct, logit=torch.logit(p)),
    (Beta, NegativeBinomial): lambda law, p: make(
        NegativeBinomial, failures=law.failures, logit=torch.logit(p)
    ),
    (Dirichlet, Categorical): lambda law, p: make(Categorical, logit=p.log()),
    (Dirichlet, Multinomial): lambda law, p: make(Multinomial, logit=p.log(), total=law.total),
    (Gamma, Poisson): lambda law, rate: make(Poisson, rate=rate),
    (Gamma, Exponential): lambda law, rate: make(Exponential, rate=rate),
    (NormalGamma, DiagonalGaussian): lambda law, xi: make(
        DiagonalGaussian, mean_vector=xi.mean, variance=1 / xi.precision
    ),
    (NormalInverseWishart, Gaussian): lambda law, xi: make(
        Gaussian, mean_vector=xi.mean, covariance_matrix=xi.covariance
    ),
    (Wishart, Gaussian): lambda law, precision: make(
        Gaussian,
        mean_vector=torch.zeros_like(precision[..., 0]),
        covariance_matrix=inverse_from_cholesky(factorize(precision)),
    ),
}
"""The likelihood where its parameter is known; `law` holds what else is."""

_CLOSED: dict[tuple[type, type], Callable[[Any, Any], ExponentialFamily]] = {
    (Beta, BernoulliProduct): lambda prior, law: make(
        BernoulliProduct, logit=prior.alpha.log() - prior.beta.log()
    ),
    (Dirichlet, Categorical): lambda prior, law: make(Categorical, logit=prior.concentration.log()),
    (Gamma, Poisson): lambda prior, law: make(
        NegativeBinomial, failures=prior.shape, logit=-prior.rate.log()
    ),
    (Gaussian, Gaussian): lambda prior, law: make(
        Gaussian,
        mean_vector=prior.mean_vector,
        covariance_matrix=prior.covariance_matrix + law.covariance_matrix,
    ),
}


@dataclass(frozen=True, eq=False)
class Predictive:
    """The law of an observation whose parameter is drawn from a prior.

    A Student t (of NormalGamma, NormalInverseWishart, Wishart), a Lomax (of Gamma with Exponential), a
    Dirichlet-multinomial or a beta negative binomial.

    Args:
        prior: of the parameter, batch ``(...)``.
        likelihood: the family of the observation given the parameter, or a member that holds what is known.
    """

    prior: ExponentialFamily
    likelihood: Likelihood

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density (or log-probability) of an observation, the parameter integrated out.

        Args:
            x: ``(..., D)``; leading axes broadcast with the batch of the prior.

        Returns:
            ``(...)``, −inf off the support.
        """
        x = x.unsqueeze(-2)
        inside = supports(self.likelihood, x)
        if inside is None:
            return _log_marginal(self.prior, self.likelihood, x)
        value = _log_marginal(self.prior, self.likelihood, torch.where(inside.unsqueeze(-1), x, 0.0))
        return torch.where(inside.squeeze(-1), value, -torch.inf)

    def sample(self, shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws: a parameter of the prior, then an observation given it.

        Args:
            shape: how many, as a shape.
            generator: the source of randomness; torch's own if not given.

        Returns:
            ``(..., D)``, the leading axes ``shape + batch``.
        """
        family = self.likelihood if isinstance(self.likelihood, type) else type(self.likelihood)
        parameter = self.prior.sample(shape, generator=generator)
        drawn: Tensor = _GIVEN[type(self.prior), family](self.likelihood, parameter).sample(
            generator=generator
        )
        return drawn


def predictive(
    prior: ExponentialFamily, likelihood: Likelihood, x: Tensor | None = None
) -> ExponentialFamily | Predictive:
    """The law of the next observation.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: as for `posterior`. A Multinomial has to be a member, whose total is the next one's.
        x: ``(..., n, D)``, what was observed before; default nothing.

    Returns:
        A family's member where there is one: BernoulliProduct, Categorical, NegativeBinomial (of Gamma with
        Poisson), Gaussian. Else a `Predictive` with its `log_prob` and `sample`.

    Example:
        >>> predictive(Gamma(torch.tensor([2.0]), torch.tensor([1.0])), Poisson).mean()
        tensor([2.])
    """
    evidence_of(prior, likelihood, "predictive")
    if likelihood is Multinomial:
        raise ArgumentError(
            "predictive: Multinomial needs its total; pass a member such as Multinomial(logit, total)."
        )
    updated = prior if x is None else posterior(prior, likelihood, x)
    family = likelihood if isinstance(likelihood, type) else type(likelihood)
    closed = _CLOSED.get((type(prior), family))
    return Predictive(updated, likelihood) if closed is None else closed(updated, likelihood)


def log_marginal_likelihood(prior: ExponentialFamily, likelihood: Likelihood, x: Tensor) -> Tensor:
    """Log-probability of all observations together, the parameter integrated out.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: as for `posterior`.
        x: ``(..., n, D)``, n observations.

    Returns:
        ``(...)``, the sum of the log predictive densities of one observation after the other.

    Example:
        >>> ones = torch.ones(3, 1)  # under a uniform prior: ½ · ⅔ · ¾
        >>> log_marginal_likelihood(Beta(torch.ones(1), torch.ones(1)), BernoulliProduct, ones).exp()
        tensor(0.2500)
    """
    evidence_of(prior, likelihood, "log_marginal_likelihood")
    posterior(prior, likelihood, x)  # for its checks of x
    return _log_marginal(prior, likelihood, x)


def _log_marginal(prior: ExponentialFamily, likelihood: Likelihood, x: Tensor) -> Tensor:
    """E_post[log p(x|ξ)] − KL(posterior ‖ prior) of observations ``(..., n, D)`` in the support."""
    prior, x, _ = about_the_data(prior, x)
    total = evidence_of(prior, likelihood)(x).sum(-2)
    after = prior._from_natural(prior.natural_parameter + total)
    return dot(after.mean_parameter, total) + _log_base(likelihood, x).sum(-1) - after._kl(prior)


def _log_base(likelihood: Likelihood, x: Tensor) -> Tensor:
    """Log c(x), ``(..., n)``."""
    family = likelihood if isinstance(likelihood, type) else type(likelihood)
    if family is Poisson:
        return -torch.lgamma(x + 1).sum(-1)
    if family is Multinomial:
        return torch.lgamma(x.sum(-1) + 1) - torch.lgamma(x + 1).sum(-1)
    if isinstance(likelihood, NegativeBinomial):
        return likelihood[..., None]._log_base(x)
    if isinstance(likelihood, Gaussian):
        covariance = likelihood[..., None].covariance_matrix
        return make(Gaussian, mean_vector=torch.zeros_like(x), covariance_matrix=covariance)._log_prob(x)
    constant = x.shape[-1] * math.log(2 * math.pi) / 2 if family in (Gaussian, DiagonalGaussian) else 0.0
    return torch.full_like(x[..., 0], -constant)
