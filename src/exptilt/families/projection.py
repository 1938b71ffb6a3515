r"""M-projection: the member of a family nearest to a measure.

    argmin_θ KL(p ‖ p_θ)   is the member with   E_θ[u] = E_p[u]

so it is found by matching expected sufficient statistics (THEORY E2, E3), exactly. For a mixture these are
weighted averages of the components' mean parameters; for points the projection is the maximum-likelihood fit.
Gaussian targets match mean and covariance, the latter computed about the mean. A measure with mass where the
family has none is at infinite distance from every member, and has no projection.
"""

from typing import TypeVar

import torch
from torch import Tensor

from exptilt._support.checks import entries
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Measure
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.members.dirichlet import Dirichlet
from exptilt.families.members.empirical import Empirical
from exptilt.families.members.exponential import Exponential
from exptilt.families.members.from_density import FromDensity
from exptilt.families.members.gamma import Gamma
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.members.mixture import AnyMixture
from exptilt.families.members.student_t import StudentT

Family = TypeVar("Family", bound=ExponentialFamily)


def project(
    measure: Measure | StudentT | Tensor, family: type[Family], *, known: Tensor | None = None
) -> Family:
    """The member of `family` with the least KL(measure ‖ member).

    Args:
        measure: a mixture of members of the family, points, a `FromDensity`, or (onto Gaussians) anything
            whose E[x] and Cov[x] are known. A tensor is data: points ``(..., N, D)``, or numbers ``(N,)``.
        family: a class, such as `Gaussian` or `Gamma`.
        known: ``(...)`` or ``(..., D)`` as the constructor takes it: the parameter that a family such as
            `Binomial` does not learn from points.

    Returns:
        A member with the batch of the measure. If there is none, an `ArgumentError` says why (a point off the
        support; points on a line, whose covariance is singular), or a `ConvergenceError` (equal points, to
        which no Gamma is nearest).

    Example:
        >>> from exptilt.families import GaussianMixture
        >>> g = project(
        ...     GaussianMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.tensor([[2.0]])),
        ...     Gaussian,
        ... )
        >>> g.mean_vector, g.covariance_matrix
        (tensor([0.]), tensor([[3.]]))
    """
    if isinstance(measure, Tensor):
        measure = Empirical(measure.unsqueeze(-1) if measure.ndim == 1 else measure)
    _check("project", measure, family)
    if isinstance(measure, AnyMixture) and measure.dtype != torch.float64:  # float32 may not hold its E[u]
        parameter = known if known is None else known.to(torch.float64)
        return project(measure.to(torch.float64), family, known=parameter).to(measure.dtype)
    moments = _about_the_mean(measure, family)
    if moments is not None:
        return moments
    known = _known(measure, family) if known is None else known
    if known is None and issubclass(family, KnownParameter) and not family._mean_says_known:
        field = family.known_field
        raise ArgumentError(
            f"project: {type(measure).__name__} does not say the {field} of a {family.__name__}: "
            f"pass known={field}."
        )
    if known is not None and isinstance(measure, Empirical | FromDensity):
        mean = _statistic_of_points(measure, family, known)
    else:
        mean = expected_statistic(measure, family)
    solution = family.from_mean(mean, known=known)
    return solution.or_raise() if is_concrete(solution.code) else solution.value


def _known(measure: Measure | StudentT, family: type[ExponentialFamily]) -> Tensor | None:
    """The known parameter shared by all components of a measure; None if the family has none."""
    parts = measure._own_components() if isinstance(measure, AnyMixture) else measure
    if not isinstance(parts, KnownParameter) or not isinstance(parts, family):
        return None
    known: Tensor = getattr(parts, parts.known_field)
    if not isinstance(measure, AnyMixture):
        return known
    axis = -1 - parts.event_dims[parts.known_field]
    first = known.narrow(axis, 0, 1)
    valid = known == first
    name = f"{parts.known_field} of the components"
    entries("project", name, known, valid, "the same for all: members of different ones are no family")
    return first.squeeze(axis)


def expected_statistic(measure: Measure | StudentT, family: type[ExponentialFamily]) -> Tensor:
    """E[u(x)] under the normalised measure.

    Args:
        measure: as for `project`.
        family: the family with the statistic u.

    Returns:
        ``(..., K)``.
    """
    _check("expected_statistic", measure, family)
    if isinstance(measure, Empirical | FromDensity):
        return _statistic_of_points(measure, family)
    mean = _mean_parameter(measure.components if isinstance(measure, AnyMixture) else measure, family)
    if mean is not None and isinstance(measure, AnyMixture):
        weight = measure.log_probability.exp().unsqueeze(-1)
        return (weight * torch.where(weight > 0, mean, 0.0)).sum(-2)
    if mean is not None:
        return mean
    kind = type(measure).__name__
    if isinstance(measure, AnyMixture):
        kind = f"{type(measure.components).__name__} mixture"
    known = f"the expected {family.__name__} statistic of a {kind} is not known"
    raise ArgumentError(f"project: {known}. Sample it and project Empirical(draws).")


def _mean_parameter(member: object, family: type[ExponentialFamily]) -> Tensor | None:
    """E[u] under a member of the family, or of Exponential for Gamma and vice versa; otherwise None."""
    if isinstance(member, family):
        return member.mean_parameter
    if isinstance(member, Exponential) and family is Gamma:
        return member._as_gamma().mean_parameter
    if isinstance(member, Gamma) and family is Exponential:
        return member.mean()
    return None


def _statistic_of_points(
    measure: Empirical | FromDensity, family: type[ExponentialFamily], known: Tensor | None = None
) -> Tensor:
    """Σ_n p_n u(x_n); an error if a point with weight is off the support."""
    points, weight = measure.points, torch.softmax(measure.log_weight, -1)
    if family._event_ranks != (1,):
        kind = type(measure).__name__
        raise ArgumentError(
            f"project: {family.__name__} is no family of vectors, but the points of {kind} are vectors."
        )
    like = points[..., 0, :]
    if not issubclass(family, KnownParameter):
        like = family._statistic(like)
    member = family._some(known, like, "project")[..., None]
    inside = member._support(points)
    if inside is not None:
        # Quadrature may round a node onto the edge of the support; the weight of such a node is negligible.
        share = weight > torch.finfo(weight.dtype).eps
        alive = measure.log_weight > -torch.inf if isinstance(measure, Empirical) else share
        valid = inside | ~alive
        wanted = (
            f"in the support of {family.__name__}, or else KL is infinite (log_weight −inf leaves it out)"
        )
        entries("project", "points", points.expand(*valid.shape, points.shape[-1]), valid, wanted)
        points, weight = torch.where(inside.unsqueeze(-1), points, 0.5), torch.where(inside, weight, 0.0)
    statistic = member._whole_statistic(points)
    _check_tails(measure, statistic)
    return (weight.unsqueeze(-1) * statistic).sum(-2)


def _check_tails(measure: Measure | StudentT, values: Tensor) -> None:
    """Raise where the mean of ``values (N, K)`` at the nodes of a quadrature may not exist."""
    if isinstance(measure, FromDensity):
        beyond = torch.stack([measure._beyond(column) for column in values.unbind(-1)], -1)
        wanted = "one that converges: its terms do not fall towards the last nodes"
        entries("project", "expected statistic", beyond, beyond.isfinite(), wanted)


def _check(name: str, measure: object, family: type[ExponentialFamily]) -> None:
    if not (isinstance(family, type) and issubclass(family, ExponentialFamily)):
        raise ArgumentError(f"{name}: family must be an exponential family such as Gaussian; got {family!r}.")
    if not isinstance(measure, Measure | StudentT):
        wanted = "a measure such as GaussianMixture or Empirical"
        raise ArgumentError(f"{name}: measure must be {wanted}; got {type(measure).__name__}.")


def _about_the_mean(measure: Measure | StudentT, family: type[Family]) -> Family | None:
    """The Gaussian with the E[x] and Cov[x] of any measure that has them; None for other families."""
    if not issubclass(family, Gaussian | DiagonalGaussian):
        return None
    parts = measure._own_components() if isinstance(measure, AnyMixture) else measure
    if isinstance(parts, Dirichlet) and issubclass(family, Gaussian):
        raise ArgumentError(
            "project: draws of a Dirichlet sum to 1, and no Gaussian has their singular covariance. "
            "Project onto DiagonalGaussian."
        )
    if isinstance(parts, ExponentialFamily) and parts._event_ranks != (1,):
        return None
    if isinstance(parts, Measure) and parts.identity_coordinate:
        mean, covariance = measure.mean(), measure.covariance()  # type: ignore[union-attr]
        _check_tails(measure, getattr(measure, "points", mean) ** 2)
    else:
        mean, covariance = measure._event_moments()[0], measure._event_covariance()
        kind = type(parts).__name__
        valid = covariance.diagonal(dim1=-2, dim2=-1).isfinite()
        entries("project", f"variance of this {kind}", measure.event_variance, valid, "finite")
    if issubclass(family, DiagonalGaussian):
        return family(mean, covariance.diagonal(dim1=-2, dim2=-1))
    return family(mean, covariance)
