r"""How families go together: conjugate updating, and families that contain others.

If the likelihood of an observation x is e^{<u(ξ), e(x)>} in the parameter ξ, with u the sufficient statistic
of ξ's prior, then the posterior has natural parameter θ + Σ_n e(x_n). `posterior` knows e for the pairs
below; `ExponentialFamily.update` takes any such sum.

    Beta — BernoulliProduct,  Dirichlet — Categorical,  Gamma — Poisson,  Gamma — Exponential,
    Dirichlet — Multinomial,  NormalGamma — DiagonalGaussian,  NormalInverseWishart — Gaussian,
    Wishart (of the precision) — Gaussian with mean zero,
    Gaussian — a Gaussian with known covariance,  Beta — a NegativeBinomial with known failures
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from exptilt._support.checks import entries, finite
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import inverse_from_cholesky, pack, solve_cholesky
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
from exptilt.families.members.wishart import Wishart

Prior = TypeVar("Prior", bound=ExponentialFamily)
Likelihood = type[ExponentialFamily] | ExponentialFamily


def _outer(x: Tensor) -> Tensor:
    return pack(x.unsqueeze(-1) * x.unsqueeze(-2)) / -2


def _half(x: Tensor) -> Tensor:
    return torch.full_like(x[..., :1], 0.5)


_EVIDENCE: dict[tuple[type[ExponentialFamily], type[ExponentialFamily]], Callable[[Tensor], list[Tensor]]] = {
    (Beta, BernoulliProduct): lambda x: [x, 1 - x],
    (Dirichlet, Categorical): lambda x: [x],
    (Dirichlet, Multinomial): lambda x: [x],
    (Gamma, Poisson): lambda x: [-torch.ones_like(x), x],
    (Gamma, Exponential): lambda x: [-x, torch.ones_like(x)],
    (NormalGamma, DiagonalGaussian): lambda x: [
        x,
        -(x**2) / 2,
        *(torch.full_like(x, h) for h in (-0.5, 0.5)),
    ],
    (NormalInverseWishart, Gaussian): lambda x: [x, _outer(x), -_half(x), -_half(x)],
    (Wishart, Gaussian): lambda x: [_outer(x), _half(x)],
}

_EVIDENCE_OF_MEMBER: dict[tuple[type, type], Callable[[Any, Tensor], Tensor]] = {
    (Beta, NegativeBinomial): lambda law, x: torch.cat(torch.broadcast_tensors(x, law.failures), -1),
    (Dirichlet, Multinomial): lambda law, x: x,
    (Gaussian, Gaussian): lambda law, x: joined(
        solve_cholesky(law._factor(), x), pack(inverse_from_cholesky(law._factor())) / -2
    ),
}
"""The same where a part of the likelihood is known: failures, the total, the covariance."""

_LOCATION = {NormalGamma: "location", NormalInverseWishart: "location", Gaussian: "mean_vector"}
"""Priors of a location, by the name of theirs: a shift of data and prior together changes nothing."""


def evidence_of(
    prior: ExponentialFamily, likelihood: Likelihood, name: str = "posterior"
) -> Callable[[Tensor], Tensor]:
    """What an observation ``(..., n, D)`` adds to the prior's natural parameter, or an error in this name."""
    if isinstance(likelihood, type):
        found = _EVIDENCE.get((type(prior), likelihood))
        if found is not None:
            return lambda x: torch.cat(found(x), -1)
    else:
        of_member = _EVIDENCE_OF_MEMBER.get((type(prior), type(likelihood)))
        if of_member is not None:
            return partial(of_member, likelihood[..., None])
        if (type(prior), type(likelihood)) in _EVIDENCE:
            kind = type(likelihood).__name__
            raise ArgumentError(
                f"{name}: likelihood must be a family, such as {kind}; got an instance of {kind}."
            )
    kind = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
    known = ", ".join(f"{a.__name__} with {b.__name__}" for a, b in _EVIDENCE)
    members = ", ".join(f"{a.__name__} with a {b.__name__}" for a, b in _EVIDENCE_OF_MEMBER)
    raise ArgumentError(
        f"{name}: {type(prior).__name__} is not conjugate to {kind} here. Known: {known}; "
        f"with a member that holds what is known: {members}."
    )


def supports(likelihood: Likelihood, x: Tensor) -> Tensor | None:
    """``(..., n)``: which ``x (..., n, D)`` the likelihood can give. None says all."""
    if not isinstance(likelihood, type):
        return likelihood[..., None]._support(x)
    if likelihood is Multinomial:
        return ((x >= 0) & (x == x.floor())).all(-1)  # each observation has a total of its own
    return in_support(likelihood, x)


def moved(prior: Prior, amount: Tensor) -> Prior:
    """The prior of a location, that location larger by ``amount (..., D)``."""
    others = {field.name: getattr(prior, field.name) for field in fields(prior)}  # type: ignore[arg-type]
    name = _LOCATION[type(prior)]
    return make(type(prior), **{**others, name: others[name] + amount})


def about_the_data(prior: Prior, x: Tensor) -> tuple[Prior, Tensor, Tensor | None]:
    """Prior and data less the mean of the data, where the prior is of a location: squares lose less."""
    if type(prior) not in _LOCATION or not x.shape[-2]:
        return prior, x, None
    middle = x.detach().mean(-2)
    return moved(prior, -middle), x - middle.unsqueeze(-2), middle


def common_family(p: Measure, q: Measure) -> tuple[Measure, Measure]:
    """Both in the larger family where one contains the other, else as they are."""
    for small, large in ((DiagonalGaussian, Gaussian), (Exponential, Gamma)):
        if isinstance(p, small) and isinstance(q, large):
            return _widened(p), q
        if isinstance(p, large) and isinstance(q, small):
            return p, _widened(q)
    return p, q


def _widened(p: DiagonalGaussian | Exponential) -> Measure:
    if isinstance(p, Exponential):
        return p._as_gamma()
    return make(Gaussian, mean_vector=p.mean_vector, covariance_matrix=torch.diag_embed(p.variance))


def in_support(family: type[ExponentialFamily], x: Tensor) -> Tensor | None:
    """``(...)``: which ``x (..., D)`` are where members of the family have mass. None says all."""
    return family._typical(family._statistic(x[..., :1, :]))._support(x)


def posterior(prior: Prior, likelihood: Likelihood, x: Tensor, *, weight: Tensor | None = None) -> Prior:
    """The prior updated by observations of a likelihood that it is conjugate to.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: the family that the observations come from; a member of it where a part is known: a
            Gaussian with its covariance (the prior is of the mean), a NegativeBinomial with its failures.
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
        kind = likelihood if isinstance(likelihood, type) else type(likelihood)
        valid = inside if weight is None else inside | (weight == 0)
        wide = x.expand(*valid.shape, x.shape[-1])
        entries("posterior", "x", wide, valid, f"in the support of {kind.__name__}")
    prior, x, middle = about_the_data(prior, x)
    each = each if middle is None else evidence(x)
    updated = prior.update((each if weight is None else each * weight.unsqueeze(-1)).sum(-2))
    return updated if middle is None else moved(updated, middle)
