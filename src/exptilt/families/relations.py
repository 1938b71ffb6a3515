r"""How families go together: conjugate updating, and families that contain others.

If the likelihood of an observation x is e^{<u(ξ), e(x)>} in the parameter ξ, with u the sufficient statistic
of ξ's prior, then the posterior has natural parameter θ + Σ_n e(x_n). `posterior` knows e for the pairs
below; `ExponentialFamily.update` takes any such sum.

    Beta — BernoulliProduct,  Dirichlet — Categorical,  Gamma — Poisson,  Gamma — Exponential,
    NormalGamma — DiagonalGaussian,  NormalInverseWishart — Gaussian,  Wishart (precision) — Gaussian, mean 0
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from exptilt._support.checks import entries, finite
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import pack
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Measure, make
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
    return pack(x.unsqueeze(-1) * x.unsqueeze(-2)) / -2


def _half(x: Tensor) -> Tensor:
    return torch.full_like(x[..., :1], 0.5)


_EVIDENCE: dict[tuple[type[ExponentialFamily], type[ExponentialFamily]], Callable[[Tensor], list[Tensor]]] = {
    (Beta, BernoulliProduct): lambda x: [x, 1 - x],
    (Dirichlet, Categorical): lambda x: [x],
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
        got = f"an instance of {type(likelihood).__name__}"
        raise ArgumentError(f"posterior: likelihood must be a family, such as Poisson; got {got}.")
    evidence = _EVIDENCE.get((type(prior), likelihood))
    if evidence is None:
        known = ", ".join(f"{a.__name__} with {b.__name__}" for a, b in _EVIDENCE)
        pair = f"{type(prior).__name__} is not conjugate to {likelihood.__name__}"
        raise ArgumentError(f"posterior: {pair} here. Known: {known}.")
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
    each = torch.cat(evidence(x), -1)
    if each.shape[-1] != prior.natural_parameter.shape[-1]:
        wanted = f"its last axis does not fit the dimension of this {type(prior).__name__}"
        raise ArgumentError(f"posterior: x is {tuple(x.shape)}; {wanted}.")
    inside = in_support(likelihood, x)
    if inside is not None:
        valid = inside if weight is None else inside | (weight == 0)
        wide = x.expand(*valid.shape, x.shape[-1])
        entries("posterior", "x", wide, valid, f"in the support of {likelihood.__name__}")
    return prior.update((each if weight is None else each * weight.unsqueeze(-1)).sum(-2))
