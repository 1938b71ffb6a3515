r"""How families go together: conjugate updating, predictive laws, and families that contain others.

If the likelihood of an observation x is c(x) e^{⟨u(ξ), e(x)⟩} in the parameter ξ, with u the sufficient
statistic of ξ's prior, then the posterior has natural parameter θ + Σ_n e(x_n). `posterior` knows e for the
pairs below; `ExponentialFamily.update` takes any such sum.

    Beta — BernoulliProduct,  Dirichlet — Categorical,  Gamma — Poisson,  Gamma — Exponential,
    Dirichlet — Multinomial,  NormalGamma — DiagonalGaussian,  NormalInverseWishart — Gaussian,
    Wishart (of the precision) — Gaussian with mean zero,
    Gaussian — a Gaussian with known covariance,  Beta — a NegativeBinomial with known failures

With the parameter integrated out, observations have the log-probability

    log p(x) = A(θ + e(x)) − A(θ) + log c(x) = E_post[log p(x|ξ)] − KL(posterior ‖ prior).

The difference of log-partitions loses its digits if the prior is worth many observations; the form on the
right does not, so that form is computed. For one observation it is the predictive log-density.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from exptilt._support.checks import entries, finite
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import dot, factorize, inverse_from_cholesky, pack, solve_cholesky
from exptilt.families.family import ExponentialFamily, joined
from exptilt.families.measure import Measure, make
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
from exptilt.families.members.student_t import StudentT
from exptilt.families.members.wishart import Wishart

Prior = TypeVar("Prior", bound=ExponentialFamily)
Likelihood = type[ExponentialFamily] | ExponentialFamily


class Pair(NamedTuple):
    """Formulas for a prior and a likelihood; `law` is a member that holds the likelihood's known parts.

    Args:
        evidence: the parts of e(x), from law and x.
        given: the likelihood at a parameter, from law and the parameter.
        closed: the predictive law, from prior and law, if it is a law of this folder.
        moments: E[x] and Var[x] of the predictive law, from prior and law, if it is no such law.
        told: the likelihood is given as its family, as a member, or as either.
    """

    evidence: Callable[[Any, Tensor], list[Tensor]]
    given: Callable[[Any, Any], ExponentialFamily]
    closed: Callable[[Any, Any], ExponentialFamily | StudentT] | None = None
    moments: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None
    told: Literal["family", "member", "either"] = "family"


def _outer(x: Tensor) -> Tensor:
    return pack(x.unsqueeze(-1) * x.unsqueeze(-2)) / -2


def _half(x: Tensor) -> Tensor:
    return torch.full_like(x[..., :1], 0.5)


def _counts(law: Any, p: Tensor) -> Multinomial:
    return make(Multinomial, logit=p.log(), total=law.total)


def _gaussian(mean: Tensor, covariance: Tensor) -> Gaussian:
    return make(Gaussian, mean_vector=mean, covariance_matrix=covariance)


def _where(exists: Tensor, finite: Tensor, value: Tensor) -> Tensor:
    """The value where `finite`, infinity where it only `exists`, NaN elsewhere."""
    return torch.where(exists, torch.where(finite, value, torch.inf), torch.nan)


def _counts_moments(prior: Dirichlet, law: Multinomial) -> tuple[Tensor, Tensor]:
    """E[x] and Var[x] of a Dirichlet-multinomial."""
    share, variance = prior._event_moments()
    n = law.total.unsqueeze(-1)
    return n * share, n * (n + prior.concentration.sum(-1, keepdim=True)) * variance


def _times_moments(prior: Gamma, _: Any) -> tuple[Tensor, Tensor]:
    """E[x] = b/(a − 1) and Var[x] = ab²/((a − 1)²(a − 2)) of a Lomax law."""
    a, b = torch.broadcast_tensors(prior.shape, prior.rate)
    always, mean = torch.ones_like(a, dtype=torch.bool), b / (a - 1)
    return _where(always, a > 1, mean), _where(a > 1, a > 2, mean**2 * a / (a - 2))


def _diagonal_moments(prior: NormalGamma, _: Any) -> tuple[Tensor, Tensor]:
    """E[x] and Var[x] of Student's t with 2a degrees of freedom and scale² b(κ + 1)/(aκ)."""
    a, square = torch.broadcast_tensors(prior.shape, prior.rate * (1 + 1 / prior.count))
    mean = torch.where(a > 0.5, prior.location, torch.nan)
    return mean, _where(a > 0.5, a > 1, square / (a - 1))


def _student(degrees: Tensor, location: Tensor, scale: Tensor) -> StudentT:
    """Student's t with k = ν + 1 − D degrees of freedom; `scale` is k times its scale."""
    free = degrees + 1 - location.shape[-1]
    return make(StudentT, degrees=free, location=location, scale=scale / free[..., None, None])


def _failures_moments(prior: Beta, law: NegativeBinomial) -> tuple[Tensor, Tensor]:
    """r E[o] and r E[o + o²] + r² Var[o] for odds o with E o = α/(β−1), E o² = α(α+1)/((β−1)(β−2))."""
    a, b, r = torch.broadcast_tensors(prior.alpha, prior.beta, law.failures)
    first, second = a / (b - 1), a * (a + 1) / ((b - 1) * (b - 2))
    spread = a * (a + b - 1) / ((b - 1) ** 2 * (b - 2))
    always = torch.ones_like(a, dtype=torch.bool)
    return _where(always, b > 1, r * first), _where(b > 1, b > 2, r * (first + second) + r**2 * spread)


_PAIRS: dict[tuple[type[ExponentialFamily], type[ExponentialFamily]], Pair] = {
    (Beta, BernoulliProduct): Pair(
        lambda _, x: [x, 1 - x],
        lambda _, p: make(BernoulliProduct, logit=torch.logit(p)),
        lambda prior, _: make(BernoulliProduct, logit=prior.alpha.log() - prior.beta.log()),
    ),
    (Dirichlet, Categorical): Pair(
        lambda _, x: [x],
        lambda _, p: make(Categorical, logit=p.log()),
        lambda prior, _: make(Categorical, logit=prior.concentration.log()),
    ),
    (Dirichlet, Multinomial): Pair(lambda _, x: [x], _counts, moments=_counts_moments, told="either"),
    (Gamma, Poisson): Pair(
        lambda _, x: [-torch.ones_like(x), x],
        lambda _, rate: make(Poisson, rate=rate),
        lambda prior, _: make(NegativeBinomial, failures=prior.shape, logit=-prior.rate.log()),
    ),
    (Gamma, Exponential): Pair(
        lambda _, x: [-x, torch.ones_like(x)],
        lambda _, rate: make(Exponential, rate=rate),
        moments=_times_moments,
    ),
    (NormalGamma, DiagonalGaussian): Pair(
        lambda _, x: [x, -(x**2) / 2, torch.full_like(x, -0.5), torch.full_like(x, 0.5)],
        lambda _, xi: make(DiagonalGaussian, mean_vector=xi.mean, variance=1 / xi.precision),
        moments=_diagonal_moments,
    ),
    (NormalInverseWishart, Gaussian): Pair(
        lambda _, x: [x, _outer(x), -_half(x), -_half(x)],
        lambda _, xi: _gaussian(xi.mean, xi.covariance),
        lambda p, _: _student(p.degrees, p.location, p.scale * (1 + 1 / p.count)[..., None, None]),
    ),
    (Wishart, Gaussian): Pair(
        lambda _, x: [_outer(x), _half(x)],
        lambda _, x: _gaussian(torch.zeros_like(x[..., 0]), inverse_from_cholesky(factorize(x))),
        lambda p, _: _student(
            p.degrees, torch.zeros_like(p.scale[..., 0]), inverse_from_cholesky(factorize(p.scale))
        ),
    ),
    (Beta, NegativeBinomial): Pair(
        lambda law, x: [*torch.broadcast_tensors(x, law.failures)],
        lambda law, p: make(NegativeBinomial, failures=law.failures, logit=torch.logit(p)),
        moments=_failures_moments,
        told="member",
    ),
    (Gaussian, Gaussian): Pair(
        lambda law, x: [solve_cholesky(law._factor(), x), pack(inverse_from_cholesky(law._factor())) / -2],
        lambda law, mean: _gaussian(mean, law.covariance_matrix),
        lambda prior, law: _gaussian(prior.mean_vector, prior.covariance_matrix + law.covariance_matrix),
        told="member",
    ),
}

_LOCATION = {NormalGamma: "location", NormalInverseWishart: "location", Gaussian: "mean_vector"}
"""The location field of priors of a location; shifting it and the data together changes nothing."""


def _family(likelihood: Likelihood) -> type[ExponentialFamily]:
    return likelihood if isinstance(likelihood, type) else type(likelihood)


def pair_of(prior: ExponentialFamily, likelihood: Likelihood, name: str = "posterior") -> Pair:
    """The formulas for a prior and a likelihood; an error that names the caller if there are none."""
    family, given = _family(likelihood), "family" if isinstance(likelihood, type) else "member"
    pair = _PAIRS.get((type(prior), family))
    if pair is not None and pair.told in (given, "either"):
        return pair
    kind = family.__name__
    if pair is not None and given == "member":
        raise ArgumentError(
            f"{name}: likelihood must be a family, such as {kind}; got an instance of {kind}."
        )
    named = [(f"{a.__name__} with", b.__name__, pair.told) for (a, b), pair in _PAIRS.items()]
    known = ", ".join(f"{a} {b}" for a, b, told in named if told != "member")
    members = ", ".join(f"{a} a {b}" for a, b, told in named if told != "family")
    raise ArgumentError(
        f"{name}: prior {type(prior).__name__} is not conjugate to likelihood {kind} here. Known: {known}; "
        f"with a member that holds what is known: {members}."
    )


def evidence_of(prior: ExponentialFamily, likelihood: Likelihood) -> Callable[[Tensor], Tensor]:
    """A function from observations ``(..., n, D)`` to their additions to the prior's θ, ``(..., n, K)``."""
    pair = pair_of(prior, likelihood)
    law = None if isinstance(likelihood, type) else likelihood[..., None]
    return lambda x: joined(*pair.evidence(law, x))


def supports(likelihood: Likelihood, x: Tensor) -> Tensor | None:
    """``(..., n)``: which ``x (..., n, D)`` are in the likelihood's support; None if all are."""
    if not isinstance(likelihood, type):
        return likelihood[..., None]._support(x)
    if likelihood is Multinomial:
        return ((x >= 0) & (x == x.floor())).all(-1)  # each observation has a total of its own
    return likelihood._typical(likelihood._statistic(x[..., :1, :]))._support(x)


def moved(prior: Prior, amount: Tensor) -> Prior:
    """The prior of a location, shifted by ``amount (..., D)``."""
    others = {field.name: getattr(prior, field.name) for field in fields(prior)}  # type: ignore[arg-type]
    name = _LOCATION[type(prior)]
    return make(type(prior), **{**others, name: others[name] + amount})


def about_the_data(prior: Prior, x: Tensor) -> tuple[Prior, Tensor, Tensor | None]:
    """Prior and data less the data's mean, and that mean, for a prior of a location; else unchanged and None.

    Squares about the mean lose fewer digits.
    """
    if type(prior) not in _LOCATION or not x.shape[-2]:
        return prior, x, None
    middle = x.detach().mean(-2)
    return moved(prior, -middle), x - middle.unsqueeze(-2), middle


def common_family(p: Measure, q: Measure) -> tuple[Measure, Measure]:
    """p and q, both in the larger family if one family contains the other; otherwise unchanged."""
    kinds = {type(p), type(q)}
    if kinds in ({DiagonalGaussian, Gaussian}, {Exponential, Gamma}):
        return _widened(p), _widened(q)
    return p, q


def _widened(p: Measure) -> Measure:
    if isinstance(p, Exponential):
        return p._as_gamma()
    if isinstance(p, DiagonalGaussian):
        return _gaussian(p.mean_vector, torch.diag_embed(p.variance))
    return p


def posterior(prior: Prior, likelihood: Likelihood, x: Tensor, *, weight: Tensor | None = None) -> Prior:
    """The prior updated by observations of a likelihood that it is conjugate to.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: the family of the observations; or a member of it that holds a known part: a Gaussian
            with its covariance (the prior is of the mean), a NegativeBinomial with its failures.
        x: ``(..., n, D)``, n observations, in the support of the likelihood.
        weight: ``(..., n)``, how often each counts, at least 0; default once.

    Example:
        >>> posterior(
        ...     Beta(torch.ones(1), torch.ones(1)), BernoulliProduct, torch.tensor([[1.0], [1.0], [0.0]])
        ... )
        Beta(alpha=tensor([3.]), beta=tensor([2.]))
    """
    evidence = evidence_of(prior, likelihood)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(
            f"posterior: x must be a floating-point tensor (..., n, D), n observations; got {got}."
        )
    count = x.shape[-2]
    if weight is not None and (not isinstance(weight, Tensor) or weight.shape[-1:] not in ((1,), (count,))):
        got = str(tuple(weight.shape)) if isinstance(weight, Tensor) else type(weight).__name__
        raise ArgumentError(f"posterior: weight must be (..., {count}), one for each observation; got {got}.")
    finite("posterior", x=x)
    if weight is not None:
        valid = (weight >= 0) & weight.isfinite()
        entries("posterior", "weight", weight, valid, "finite and at least 0")
    each = evidence(x)
    if each.shape[-1] != prior.natural_parameter.shape[-1]:
        wanted = f"its last axis does not fit the dimension of this {type(prior).__name__}"
        raise ArgumentError(f"posterior: x is {tuple(x.shape)}; {wanted}.")
    inside = supports(likelihood, x)
    if inside is not None:
        valid = inside if weight is None else inside | (weight == 0)
        wide = x.expand(*valid.shape, x.shape[-1])
        entries("posterior", "x", wide, valid, f"in the support of {_family(likelihood).__name__}")
    prior, x, middle = about_the_data(prior, x)
    each = each if middle is None else evidence(x)
    updated = prior.update((each if weight is None else each * weight.unsqueeze(-1)).sum(-2))
    return updated if middle is None else moved(updated, middle)


@dataclass(frozen=True, eq=False)
class Predictive:
    """The law of an observation whose parameter is drawn from a prior.

    Student's t coordinate by coordinate (of NormalGamma), a Lomax (of Gamma with Exponential), a
    Dirichlet-multinomial or a beta negative binomial.

    Args:
        prior: of the parameter, batch ``(...)``.
        likelihood: the family of the observation given the parameter, or a member that holds a known part.
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

    @property
    def event_mean(self) -> Tensor:
        """E[x], ``(..., D)``: infinite where the integral is infinite, NaN where no mean exists."""
        return self._event_moments()[0]

    @property
    def event_variance(self) -> Tensor:
        """Var[x], ``(..., D)``: infinite or NaN as for `event_mean`."""
        return self._event_moments()[1]

    def _event_moments(self) -> tuple[Tensor, Tensor]:
        pair = pair_of(self.prior, self.likelihood, "predictive")
        if pair.moments is not None:
            return pair.moments(self.prior, self.likelihood)
        closed: Any = pair.closed and pair.closed(self.prior, self.likelihood)
        moments: tuple[Tensor, Tensor] = closed._event_moments()
        return moments

    def sample(self, shape: int | Sequence[int] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws: a parameter of the prior, then an observation given it.

        Args:
            shape: how many, as a number or a shape.
            generator: the source of randomness; torch's own if not given.

        Returns:
            ``(..., D)``, the leading axes ``shape + batch``.
        """
        parameter = self.prior.sample(shape, generator=generator)
        law = pair_of(self.prior, self.likelihood, "predictive").given(self.likelihood, parameter)
        drawn: Tensor = law.sample(generator=generator)
        return drawn


def predictive(
    prior: ExponentialFamily, likelihood: Likelihood, x: Tensor | None = None
) -> ExponentialFamily | StudentT | Predictive:
    """The law of the next observation.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: as for `posterior`. A Multinomial must be a member with the total of the next observation.
        x: ``(..., n, D)``, earlier observations; default none.

    Returns:
        A law of its own class if there is one: BernoulliProduct, Categorical, NegativeBinomial (of Gamma with
        Poisson), Gaussian, StudentT (of NormalInverseWishart and Wishart). Else a `Predictive` with its
        `log_prob`, `sample` and moments.

    Example:
        >>> predictive(Gamma(torch.tensor([2.0]), torch.tensor([1.0])), Poisson).mean()
        tensor([2.])
    """
    closed = pair_of(prior, likelihood, "predictive").closed
    if likelihood is Multinomial:
        raise ArgumentError(
            "predictive: Multinomial needs its total; pass a member such as Multinomial(logit, total)."
        )
    updated = prior if x is None else posterior(prior, likelihood, x)
    return Predictive(updated, likelihood) if closed is None else closed(updated, likelihood)


def log_marginal_likelihood(prior: ExponentialFamily, likelihood: Likelihood, x: Tensor) -> Tensor:
    """Log-probability of all observations together, the parameter integrated out.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: as for `posterior`.
        x: ``(..., n, D)``, n observations.

    Returns:
        ``(...)``, the sum of the log predictive density of each observation given those before it.

    Example:
        >>> ones = torch.ones(3, 1)  # under a uniform prior: ½ · ⅔ · ¾
        >>> log_marginal_likelihood(Beta(torch.ones(1), torch.ones(1)), BernoulliProduct, ones).exp()
        tensor(0.2500)
    """
    pair_of(prior, likelihood, "log_marginal_likelihood")
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
    family = _family(likelihood)
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
