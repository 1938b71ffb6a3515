r"""M-projection: the member of a family nearest to a measure.

    argmin_θ KL(p ‖ p_θ)   is the member with   E_θ[u] = E_p[u]

so it is found by matching expected sufficient statistics (THEORY E2, E3), exactly. For a mixture those are
weighted averages of the components' mean parameters; for points it is the maximum-likelihood fit. Gaussian
targets take mean and covariance, computed about the mean. A measure with mass where the family has none is at
an infinite distance from every member, and has no projection.
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
from exptilt.families.members.empirical import Empirical
from exptilt.families.members.exponential import Exponential
from exptilt.families.members.from_density import FromDensity
from exptilt.families.members.gamma import Gamma
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.members.mixture import AnyMixture
from exptilt.families.relations import in_support

Family = TypeVar("Family", bound=ExponentialFamily)


def project(measure: Measure, family: type[Family]) -> Family:
    """The member of `family` with the least KL(measure ‖ member).

    Args:
        measure: a mixture of members of the family, points, a `FromDensity`, or (onto Gaussians) anything
            whose mean is that of x.
        family: a class, such as `Gaussian` or `Gamma`.

    Returns:
        A member with the batch of the measure. Where there is none, an `ArgumentError` says why (a point off
        the support; points on a line, whose covariance no Gaussian has), or a `ConvergenceError` (equal
        points, which no Gamma comes nearest to).

    Example:
        >>> from exptilt.families import GaussianMixture
        >>> g = project(
        ...     GaussianMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.tensor([[2.0]])),
        ...     Gaussian,
        ... )
        >>> g.mean_vector, g.covariance_matrix
        (tensor([0.]), tensor([[3.]]))
    """
    _check("project", measure, family)
    moments = _about_the_mean(measure, family)
    if moments is not None:
        return moments
    mean = expected_statistic(measure, family)
    known = _known(measure, family)
    options = {} if known is None else {"known": known}
    solution = family.from_mean(mean, **options)
    return solution.or_raise() if is_concrete(solution.code) else solution.value


def _known(measure: Measure, family: type[ExponentialFamily]) -> Tensor | None:
    """The known parameter that all components of a measure share, or None if the family has none."""
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


def expected_statistic(measure: Measure, family: type[ExponentialFamily]) -> Tensor:
    """E[u(x)] under the normalised measure.

    Args:
        measure: as for `project`.
        family: whose statistic u is meant.

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


def _mean_parameter(member: Measure, family: type[ExponentialFamily]) -> Tensor | None:
    """E[u] of a member of the family, or of one that contains it or is contained; None if not known."""
    if isinstance(member, family):
        return member.mean_parameter
    if isinstance(member, Exponential) and family is Gamma:
        return member._as_gamma().mean_parameter
    if isinstance(member, Gamma) and family is Exponential:
        return member.mean()
    return None


def _statistic_of_points(measure: Empirical | FromDensity, family: type[ExponentialFamily]) -> Tensor:
    """Σ_n p_n u(x_n); an error if a point that counts is off the support."""
    points, weight = measure.points, torch.softmax(measure.log_weight, -1)
    if family._event_ranks != (1,):
        kind = type(measure).__name__
        raise ArgumentError(
            f"project: {family.__name__} is no family of vectors, but the points of {kind} are vectors."
        )
    inside = in_support(family, points)
    if inside is not None:
        # Quadrature may round a node onto the edge of the support: there its share is below rounding.
        share = weight > torch.finfo(weight.dtype).eps
        alive = measure.log_weight > -torch.inf if isinstance(measure, Empirical) else share
        valid = inside | ~alive
        wanted = (
            f"in the support of {family.__name__}, or else KL is infinite (log_weight −inf leaves it out)"
        )
        entries("project", "points", points.expand(*valid.shape, points.shape[-1]), valid, wanted)
        points, weight = torch.where(inside.unsqueeze(-1), points, 0.5), torch.where(inside, weight, 0.0)
    return (weight.unsqueeze(-1) * family._statistic(points)).sum(-2)


def _check(name: str, measure: Measure, family: type[ExponentialFamily]) -> None:
    if not (isinstance(family, type) and issubclass(family, ExponentialFamily)):
        raise ArgumentError(f"{name}: family must be an exponential family such as Gaussian; got {family!r}.")
    if not isinstance(measure, Measure):
        wanted = "a measure such as GaussianMixture or Empirical"
        raise ArgumentError(f"{name}: measure must be {wanted}; got {type(measure).__name__}.")


def _about_the_mean(measure: Measure, family: type[Family]) -> Family | None:
    """Gaussian targets, where the measure's t(x) is x."""
    parts = measure.components if isinstance(measure, AnyMixture) else measure
    if not issubclass(family, Gaussian | DiagonalGaussian) or not parts.identity_coordinate:
        return None
    mean, covariance = measure.mean(), measure.covariance()
    if issubclass(family, DiagonalGaussian):
        return family(mean, covariance.diagonal(dim1=-2, dim2=-1))
    return family(mean, covariance)
