r"""Conjugate updating by adding statistics.

If the likelihood of an observation x is e^{<u(ξ), e(x)>} in the parameter ξ, with u the sufficient statistic of ξ's prior, then the
posterior has natural parameter θ + Σ_n e(x_n). `posterior` knows e for the pairs below; `ExponentialFamily.update` takes any such sum.

    Beta — BernoulliProduct,  Dirichlet — Categorical,  Gamma — Poisson,  Gamma — Exponential,
    NormalGamma — DiagonalGaussian,  NormalInverseWishart — Gaussian,  Wishart (of the precision) — Gaussian with mean zero
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import pack
from exptilt.families.checks import check_finite, check_values
from exptilt.families.family import ExponentialFamily
from exptilt.families.members.bernoulli import BernoulliProduct
from exptilt.families.members.beta import Beta
from exptilt.families.members.categorical import Categorical
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.members.dirichlet import Dirichlet
from exptilt.families.members.exponential import Exponential
from exptilt.families.members.gamma import Gamma
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.normal_gamma import NormalGamma
from exptilt.families.members.normal_inverse_wishart import NormalInverseWishart
from exptilt.families.members.poisson import Poisson
from exptilt.families.members.wishart import Wishart

Prior = TypeVar("Prior", bound=ExponentialFamily)


def _outer(x: Tensor) -> Tensor:
    return pack(x.unsqueeze(-1) * x.unsqueeze(-2))


def _one(x: Tensor) -> Tensor:
    return torch.ones_like(x[..., :1])


_EVIDENCE: dict[tuple[type[ExponentialFamily], type[ExponentialFamily]], Callable[[Tensor], Tensor]] = {
    (Beta, BernoulliProduct): lambda x: torch.cat([x, 1 - x], -1),
    (Dirichlet, Categorical): lambda x: x,
    (Gamma, Poisson): lambda x: torch.cat([-torch.ones_like(x), x], -1),
    (Gamma, Exponential): lambda x: torch.cat([-x, torch.ones_like(x)], -1),
    (NormalGamma, DiagonalGaussian): lambda x: torch.cat(
        [x, -(x**2) / 2, torch.full_like(x, -0.5), torch.full_like(x, 0.5)], -1
    ),
    (NormalInverseWishart, Gaussian): lambda x: torch.cat(
        [x, _outer(x) / -2, -_one(x) / 2, -_one(x) / 2], -1
    ),
    (Wishart, Gaussian): lambda x: torch.cat([_outer(x) / -2, _one(x) / 2], -1),
}


def in_support(family: type[ExponentialFamily], x: Tensor) -> Tensor | None:
    """``(...)``: which ``x (..., D)`` are where members of the family have mass, the same for all of them. None says all."""
    some = family._from_mean(family._typical_mean(family._statistic(x[..., :1, :])))
    return some._support(x)


def posterior(
    prior: Prior, likelihood: type[ExponentialFamily], x: Tensor, *, weight: Tensor | None = None
) -> Prior:
    """The prior updated by observations of a likelihood that it is conjugate to.

    Args:
        prior: over the parameter of the likelihood, batch ``(...)``.
        likelihood: the family that the observations come from.
        x: ``(..., n, D)``, n observations, in the support of the likelihood.
        weight: ``(..., n)``, how often each counts, at least 0; default once.

    Example:
        >>> posterior(
        ...     Beta(torch.ones(1), torch.ones(1)), BernoulliProduct, torch.tensor([[1.0], [1.0], [0.0]])
        ... )
        Beta(alpha=tensor([3.]), beta=tensor([2.]))
    """
    if not isinstance(likelihood, type):
        raise ArgumentError(
            f"posterior: likelihood must be a family, such as Poisson; got an instance of {type(likelihood).__name__}."
        )
    evidence = _EVIDENCE.get((type(prior), likelihood))
    if evidence is None:
        known = ", ".join(f"{a.__name__} with {b.__name__}" for a, b in _EVIDENCE)
        raise ArgumentError(
            f"posterior: {type(prior).__name__} is not conjugate to {likelihood.__name__} here. Known: {known}."
        )
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(
            f"posterior: x must be a floating-point tensor (..., n, D), n observations; got {got}."
        )
    if weight is not None and (
        not isinstance(weight, Tensor) or weight.ndim < 1 or weight.shape[-1] not in (1, x.shape[-2])
    ):
        got = str(tuple(weight.shape)) if isinstance(weight, Tensor) else type(weight).__name__
        raise ArgumentError(
            f"posterior: weight must be (..., {x.shape[-2]}), one for each observation; got {got}."
        )
    check_finite("posterior", x=x)
    if weight is not None:
        check_values(
            "posterior", "weight", weight, (weight >= 0) & weight.isfinite(), "finite and at least 0"
        )
    each = evidence(x)
    if each.shape[-1] != prior.natural_parameter.shape[-1]:
        raise ArgumentError(
            f"posterior: x is {tuple(x.shape)}; its last axis does not fit the dimension of this {type(prior).__name__}."
        )
    inside = in_support(likelihood, x)
    if inside is not None:
        valid = inside if weight is None else inside | (weight == 0)
        check_values(
            "posterior",
            "x",
            x.expand(*valid.shape, x.shape[-1]),
            valid,
            f"in the support of {likelihood.__name__}",
        )
    if weight is not None:
        each = each * weight.unsqueeze(-1)
    return prior.update(each.sum(-2))
