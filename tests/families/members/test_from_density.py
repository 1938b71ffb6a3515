"""What quadrature says of itself.

Where the integral diverges, where the grid misses the mass, on the sides of the box.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exptilt import families as f

F64 = torch.float64
ZERO = torch.zeros(1, dtype=F64)
quadrature = f.FromDensity.quadrature


def waiting() -> f.FromDensity:
    return quadrature(lambda x: -x[..., 0], lower=[0.0], upper=[math.inf])


def test_error_where_the_integral_diverges() -> None:
    eta = torch.tensor([[0.5], [1.0], [1.5]], dtype=F64)
    error = waiting().log_normalizer_error(eta)
    assert float(error[0]) < 1e-12
    assert error[1:].tolist() == [math.inf, math.inf]
    assert (
        float(quadrature(lambda x: -torch.log1p(x[..., 0] ** 2) / 2).log_normalizer_error(ZERO)) == math.inf
    )
    flat = quadrature(
        lambda x: -(x[..., 0] ** 2) - torch.log1p(x[..., 1] ** 2) / 2,
        lower=[-math.inf] * 2,
        upper=[math.inf] * 2,
        nodes=65,
    )
    assert float(flat.log_normalizer_error(torch.zeros(2, dtype=F64))) == math.inf


def test_error_where_the_grid_misses_the_mass() -> None:
    def density(x: torch.Tensor) -> torch.Tensor:
        return -((x[..., 0] - 1000) ** 2) / 2

    assert float(quadrature(density).log_normalizer_error(ZERO)) == math.inf
    found = quadrature(density, center=[1000.0])
    assert float(found.log_normalizer_error(ZERO)) < 1e-12
    assert float(found.log_normalizer(ZERO)) == pytest.approx(math.log(2 * math.pi) / 2, rel=1e-12)
    # Two nodes that hold half each: leaving one out changes nothing, and says nothing.
    step = math.sinh(math.pi / 2 * math.sinh(6.8 / 800))
    between = quadrature(lambda x: -((x[..., 0] - step / 2) ** 2) / (2 * (step / 5) ** 2))
    assert float(between.log_normalizer_error(ZERO)) == math.inf


@pytest.mark.parametrize("power", [2.0, 1.5, 1.2, 1.1])
def test_error_covers_a_heavy_tail(power: float) -> None:
    """∫ (1+x²)^(−k/2) = √π Γ((k−1)/2) / Γ(k/2).

    What lies beyond the last node is estimated, not overlooked.
    """
    h = quadrature(lambda x: -power / 2 * torch.log1p(x[..., 0] ** 2))
    truth = math.lgamma(0.5) + math.lgamma((power - 1) / 2) - math.lgamma(power / 2)
    off, error = abs(float(h.log_normalizer(ZERO)) - truth), float(h.log_normalizer_error(ZERO))
    assert off <= error <= 2 * off
    assert float(h.entropy().standard_error) == error


@pytest.mark.parametrize("place", [0.3, 1.2345, -2.7])
@pytest.mark.parametrize("width", [3e-3, 1e-3, 1e-4])
def test_a_peak_that_the_nodes_miss(place: float, width: float) -> None:
    """Half the mass in a peak far narrower than the distance of nodes.

    G is off, and the error does not say otherwise.
    """

    def density(x: torch.Tensor) -> torch.Tensor:
        peak = -((x[..., 0] - place) ** 2) / (2 * width**2) - math.log(width)
        return torch.logaddexp(-(x[..., 0] ** 2) / 2, peak)

    h = quadrature(density)
    off = abs(float(h.log_normalizer(ZERO)) - math.log(2 * math.sqrt(2 * math.pi)))
    assert off <= float(h.log_normalizer_error(ZERO)) + 1e-12
    assert off <= float(h.entropy().standard_error) + 1e-12
    closer = quadrature(density, center=[place], scale=[width])
    assert float(closer.log_normalizer_error(ZERO)) < 1e-6
    assert float(closer.log_normalizer(ZERO)) == pytest.approx(math.log(2 * math.sqrt(2 * math.pi)), abs=1e-6)


def test_sides_of_the_box() -> None:
    mean = torch.tensor([[0.0], [2.0], [-1.0]], dtype=F64)
    found = waiting().natural(mean)
    assert found.code.tolist() == [f.Status.BOUNDARY.code, f.Status.CONVERGED.code, f.Status.OUTSIDE.code]
    assert found.distance.tolist() == [0, 0, 1]
    assert waiting().conjugate(mean).tolist() == [math.inf, pytest.approx(2 - 1 - math.log(2)), math.inf]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 101.0}, r"nodes is 101.0. Pass an integer"),
        ({"lower": 0.0}, "lower must be a sequence of numbers, one per dimension; got 0.0"),
        ({"scale": 2.0}, "scale must be a sequence of numbers"),
        (
            {"log_density": lambda x: x[..., 0].log()},
            r"log_density must be a number below \+inf.*got nan at x = \[-8",
        ),
        ({"log_density": lambda x: -math.inf * x[..., 0] ** 0}, "log_density is −inf at all nodes"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    density: Callable[[torch.Tensor], torch.Tensor] = arguments.pop(
        "log_density", lambda x: -(x[..., 0] ** 2)
    )
    with pytest.raises(ValueError, match=message):
        quadrature(density, **arguments)
