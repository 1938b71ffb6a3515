"""What quadrature says of itself.

Where the integral diverges, where the grid misses the mass, on the sides of the box.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exptilt import families as f
from exptilt.families.estimate import EstimateKind

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


def test_quadrature_says_that_it_is_blind_to_narrow_peaks() -> None:
    """Half the mass in a peak narrower than `resolution`: the error cannot know, but the kind says so."""
    place, width = 0.3217, 1e-6

    def density(x: torch.Tensor) -> torch.Tensor:
        peak = -((x[..., 0] - place) ** 2) / (2 * width**2) - math.log(width)
        return torch.logaddexp(-(x[..., 0] ** 2) / 2, peak)

    h = quadrature(density)
    assert float(h.log_normalizer_error(ZERO)) < 1e-12  # wrong by log 2
    assert 1e-5 < float(h.resolution) < 1e-2
    found = h.entropy()
    assert found.kind is EstimateKind.QUADRATURE
    assert "peak" in str(found.kind)
    assert f"{found:.2f}".endswith("(quadrature)")
    assert f.kl(h, f.Gaussian(ZERO, torch.eye(1, dtype=F64))).kind is EstimateKind.QUADRATURE
    closer = quadrature(density, center=[place], scale=[width])
    assert float(closer.resolution) < width or float(closer.log_normalizer_error(ZERO)) < 1e-6
    draws = f.FromDensity.monte_carlo(density, f.Gaussian(ZERO, torch.eye(1, dtype=F64)), samples=16)
    assert draws.kind is EstimateKind.ESTIMATED
    assert bool(draws.resolution.isnan().all())


def test_resolution_finds_the_peaks_that_the_finer_nodes_see() -> None:
    """A peak twice as wide as `resolution` is noticed, wherever it is."""
    width = 2 * float(quadrature(lambda x: -(x[..., 0] ** 2) / 2).resolution)
    for place in torch.linspace(-3, 3, 23, dtype=F64).tolist():
        h = quadrature(
            lambda x, place=place: torch.logaddexp(
                -(x[..., 0] ** 2) / 2, -((x[..., 0] - place) ** 2) / (2 * width**2) - math.log(width)
            )
        )
        assert float(h.log_normalizer_error(ZERO)) > 0.1


def test_expectations_that_do_not_exist() -> None:
    """Cauchy's law has no variance: its KL from a Gaussian is infinite, and it has no projection onto one."""
    cauchy = quadrature(lambda x: -torch.log1p(x[..., 0] ** 2))
    normal = f.Gaussian(ZERO, torch.eye(1, dtype=F64))
    assert float(f.kl(cauchy, normal).standard_error) == math.inf
    with pytest.raises(ValueError, match=r"expected statistic.*converges"):
        f.project(cauchy, f.Gaussian)
    with pytest.raises(ValueError, match=r"expected statistic.*converges"):
        f.project(quadrature(lambda x: -1.5 * torch.log1p(x[..., 0]), lower=[0.0]), f.Gamma)
    light = quadrature(lambda x: -(x[..., 0] ** 2) / 4)
    assert float(f.project(light, f.Gaussian).covariance_matrix) == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize("power", [2.0, 1.5, 1.2, 1.1])
def test_error_of_an_expectation_covers_a_heavy_tail(power: float) -> None:
    """E (k/2) log(1+x²) = (k/2) (ψ(k/2) − ψ((k−1)/2)) under the density ∝ (1+x²)^(−k/2)."""
    h = quadrature(lambda x: -power / 2 * torch.log1p(x[..., 0] ** 2))
    half = torch.tensor(power / 2, dtype=F64)
    total = math.lgamma(0.5) + math.lgamma((power - 1) / 2) - math.lgamma(power / 2)
    truth = total + power / 2 * float(torch.digamma(half) - torch.digamma(half - 0.5))
    found = h.entropy()
    off = abs(float(found) - truth)
    assert off <= float(found.standard_error) + 1e-12
    assert float(found.standard_error) <= 100 * off + 1e-9


def test_resolution_in_the_plane_is_that_of_each_axis() -> None:
    """Far from the centre nodes are far apart: along the first axis here, along the second if exchanged."""
    line = quadrature(lambda x: -((x[..., 0] - 50) ** 2) / 2, nodes=257)
    near = quadrature(lambda x: -(x[..., 0] ** 2) / 2, nodes=257)
    both = {"lower": [-math.inf] * 2, "upper": [math.inf] * 2}
    plane = f.FromDensity.quadrature(lambda x: -((x[..., 0] - 50) ** 2 + x[..., 1] ** 2) / 2, **both)
    wanted = torch.cat([line.resolution, near.resolution]) * 16  # 64 finer nodes on the line, 4 in the plane
    torch.testing.assert_close(plane.resolution, wanted)
