"""Spectral radius and the monotone-operator condition, against dense eigenvalues, small and large."""

import pytest
import torch

from dynamics.fixed_points.problems import F64, attention, close, contraction, generator
from exptilt._support.errors import ArgumentError
from exptilt.dynamics import fixed_point, monotone_operator, spectral_radius


@pytest.mark.parametrize("n", [1, 5, 150])
def test_spectral_radius_of_linear_maps(n: int) -> None:
    matrices = torch.stack([contraction(n, 0.8, seed) for seed in range(3)])
    found = spectral_radius(
        lambda x: (matrices @ x.unsqueeze(-1)).squeeze(-1), torch.ones(3, n, dtype=F64), tolerance=1e-6
    )
    values = torch.linalg.eigvals(matrices)
    close(found.value, values.abs().amax(-1), 1e-4)
    assert (found.residual <= 1e-5).all()
    assert (found.eigenvalue.imag >= 0).all()
    assert found.stable.all()
    nearest = (values - found.eigenvalue[:, None]).abs().amin(-1)
    assert (nearest < 1e-4).all()


def test_complex_pairs_and_units() -> None:
    """Rotations by many angles, the strongest one scaled to 1.5: unstable, and its angle is found."""
    angles, sizes = torch.linspace(0.2, 2.8, 50, dtype=F64), torch.linspace(0.2, 0.9, 50, dtype=F64)
    sizes[17] = 1.5
    blocks = [
        s * torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])])
        for a, s in zip(angles, sizes, strict=True)
    ]
    matrix = torch.block_diag(*blocks)
    found = spectral_radius(lambda x: x @ matrix.mT, torch.zeros(100, dtype=F64))
    close(found.value, torch.tensor(1.5, dtype=F64), 1e-3)
    close(found.eigenvalue.angle(), angles[17], 1e-3)
    assert not found.stable


def test_radius_is_the_rate_of_picard() -> None:
    g = generator(1)
    function = attention(
        torch.randn(12, 5, dtype=F64, generator=g), 0.2 * torch.randn(1, 5, dtype=F64, generator=g), 0.5
    )
    found = fixed_point(function, torch.zeros(1, 5, dtype=F64), solver="picard", max_steps=3000)
    radius = spectral_radius(function, found.value)
    close(found.trace[-4] / found.trace[-5], radius.value, 5e-2)


@pytest.mark.parametrize("n", [1, 4, 120])
def test_monotone_operator_against_eigvalsh(n: int) -> None:
    g = generator(2)
    a = torch.randn(n, n, dtype=F64, generator=g) / n**0.5
    points = torch.randn(3, n, dtype=F64, generator=g)
    found = monotone_operator(lambda x: torch.tanh(x @ a.mT), points)
    slope = 1 - torch.tanh(points @ a.mT) ** 2
    jacobian = slope.unsqueeze(-1) * a
    largest = torch.linalg.eigvalsh((jacobian + jacobian.mT) / 2)[:, -1]
    close(found.largest, largest, 2e-4)
    assert ((found.largest + found.residual - largest) > -1e-9).all()
    close(found.margin, 1 - found.largest - found.residual)
    assert found.holds == bool((found.margin > 0).all())


def test_monotone_but_no_contraction_and_the_reverse() -> None:
    spin = torch.tensor([[0.0, -5.0], [5.0, 0.0]])

    def spun(x):
        return x @ spin.mT

    assert monotone_operator(spun, torch.zeros(2)).holds
    assert not spectral_radius(spun, torch.zeros(2)).stable
    shear = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
    assert not monotone_operator(lambda x: x @ shear.mT, torch.zeros(2)).holds
    assert spectral_radius(lambda x: x @ shear.mT, torch.zeros(2)).stable


@pytest.mark.parametrize("n", [3, 80])
def test_a_constant_has_no_slope(n: int) -> None:
    point = torch.ones(2, n, dtype=F64)
    check = monotone_operator(lambda x: torch.zeros_like(x) + 3, point)
    assert check.largest.tolist() == [0.0, 0.0]
    assert check.holds
    assert spectral_radius(lambda x: torch.zeros_like(x) + 3, point).value.tolist() == [0.0, 0.0]


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="floating point"):
        spectral_radius(lambda x: x, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"\(2,\).*\(1,\)"):
        spectral_radius(lambda x: x[:1], torch.zeros(2))
    with pytest.raises(ArgumentError, match="NaN"):
        monotone_operator(lambda x: x / 0, torch.zeros(2))
    for wrong in ({"event_dims": 1.0}, {"event_dims": 2}, {"tolerance": "a"}, {"max_restarts": 0}):
        with pytest.raises(ArgumentError, match=f"spectral_radius: .*{next(iter(wrong))}"):
            spectral_radius(lambda x: x, torch.zeros(2), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="transforms"):
        torch.func.vmap(lambda x: spectral_radius(torch.cos, x).value)(torch.zeros(2, 2))
