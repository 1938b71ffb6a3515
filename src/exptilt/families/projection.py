r"""M-projection: the member of a family nearest to a measure.

    argmin_θ KL(p ‖ p_θ)   is the member with   E_θ[u] = E_p[u]

so it is found by matching expected sufficient statistics (THEORY E2, E3), exactly. For a mixture those are weighted averages of the
components' mean parameters; for points it is the maximum-likelihood fit. Gaussian targets take mean and covariance, computed about the
mean.
"""

from typing import TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import is_concrete
from exptilt.families.diagonal_gaussian import DiagonalGaussian
from exptilt.families.empirical import Empirical
from exptilt.families.family import ExponentialFamily
from exptilt.families.from_density import FromDensity
from exptilt.families.gaussian import Gaussian
from exptilt.families.measure import Measure, make
from exptilt.families.mixture import AnyMixture

Family = TypeVar("Family", bound=ExponentialFamily)


def project(measure: Measure, family: type[Family]) -> Family:
    """The member of `family` with the least KL(measure ‖ member).

    Args:
        measure: a mixture of members of the family, points, a `FromDensity`, or (onto Gaussians) anything whose mean is that of x.
        family: a class, such as `Gaussian` or `Gamma`.

    Returns:
        A member with the batch of the measure. A `ConvergenceError` says if there is none (points on a line have no full Gaussian).

    Example:
        >>> from exptilt.families import GaussianMixture
        >>> g = project(GaussianMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.tensor([[2.0]])), Gaussian)
        >>> g.mean_vector, g.covariance_matrix
        (tensor([0.]), tensor([[3.]]))
    """
    if not (isinstance(family, type) and issubclass(family, ExponentialFamily)):
        raise ArgumentError(f"project: family must be an exponential family such as Gaussian; got {family!r}.")
    if not isinstance(measure, Measure):
        raise ArgumentError(f"project: measure must be a measure such as GaussianMixture or Empirical; got {type(measure).__name__}.")
    moments = _about_the_mean(measure, family)
    if moments is not None:
        return moments
    solution = family.from_mean(expected_statistic(measure, family))
    return solution.or_raise() if is_concrete(solution.code) else solution.value


def expected_statistic(measure: Measure, family: type[ExponentialFamily]) -> Tensor:
    """E[u(x)] under the normalised measure.

    Args:
        measure: as for `project`.
        family: whose statistic u is meant.

    Returns:
        ``(..., K)``.
    """
    if isinstance(measure, family):
        return measure.mean_parameter
    if isinstance(measure, AnyMixture) and isinstance(measure.components, family):
        weight = measure.log_probability.exp().unsqueeze(-1)
        return torch.where(weight > 0, weight * measure.components.mean_parameter, 0.0).sum(-2)
    if isinstance(measure, Empirical | FromDensity):
        weight = torch.softmax(measure.log_weight, -1).unsqueeze(-1)
        return torch.where(weight > 0, weight * family._statistic(measure.points), 0.0).sum(-2)
    kind = type(measure.components).__name__ + " mixture" if isinstance(measure, AnyMixture) else type(measure).__name__
    raise ArgumentError(
        f"project: the expected {family.__name__} statistic of a {kind} is not known. Sample it and project Empirical(draws)."
    )


def _about_the_mean(measure: Measure, family: type[Family]) -> Family | None:
    """Gaussian targets, where the measure's t(x) is x."""
    if not issubclass(family, Gaussian | DiagonalGaussian) or not _tilts_x(measure):
        return None
    mean, covariance = measure.mean(), measure.covariance()
    if issubclass(family, DiagonalGaussian):
        return _valid(make(family, mean_vector=mean, variance=covariance.diagonal(dim1=-2, dim2=-1)))
    return _valid(make(family, mean_vector=mean, covariance_matrix=covariance))


def _tilts_x(measure: Measure) -> bool:
    parts = measure.components if isinstance(measure, AnyMixture) else measure
    return parts.identity_coordinate


def _valid(member: Family) -> Family:
    member.__post_init__()  # type: ignore[attr-defined]
    return member
