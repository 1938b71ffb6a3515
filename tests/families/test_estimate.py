"""Arithmetic of estimates: the bracket against corners, the error against repeated sampling."""

import math

import numpy as np
import pytest
import torch

from exptilt import families as f
from exptilt.families.estimate import Estimate, EstimateKind

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def noisy(center: float, generator: torch.Generator, rounds: int = 4000) -> Estimate:
    """Many estimates of one number, each the mean of 25 draws with standard deviation 1."""
    draws = center + torch.randn(25, rounds, dtype=F64, generator=generator)
    infinite = torch.full((rounds,), math.inf, dtype=F64)
    return Estimate.sampled(draws, -infinite, infinite)


def test_standard_errors_are_those_of_repeated_sampling() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = noisy(5.0, g), noisy(-8.0, g)
    for result in (a + b, a - b, a * b, a / b, 3 * a - b / 2, 1 / b, 2 - a):
        assert result.kind is EstimateKind.ESTIMATED
        assert float(result.standard_error.mean()) == pytest.approx(float(result.value.std()), rel=0.06)


def test_brackets_hold() -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(200):
        low = 4 * torch.rand(2, dtype=F64, generator=g) - 2
        high = low + torch.rand(2, dtype=F64, generator=g)
        a, b = (Estimate.bounded(low[i], high[i]) for i in range(2))
        x, y = low + (high - low) * torch.rand(2, dtype=F64, generator=g)
        for got, value in ((a + b, x + y), (a - b, x - y), (a * b, x * y), (a / b, x / y), (2 - a, 2 - x)):
            assert got.kind is EstimateKind.BOUNDED
            assert bool(got.lower <= value + 1e-12)
            assert bool(value - 1e-12 <= got.upper)
            assert math.isnan(float(got.standard_error))


def test_exact_numbers_stay_exact() -> None:
    a, b = Estimate.exact(t(6.0, 1.0)), Estimate.exact(t(3.0, 2.0))
    for got, value in (
        (a + b, t(9.0, 3.0)),
        (a - b, t(3.0, -1.0)),
        (a * b, t(18.0, 2.0)),
        (a / b, t(2.0, 0.5)),
    ):
        assert got.kind is EstimateKind.EXACT
        for part in (got.value, got.lower, got.upper):
            torch.testing.assert_close(part, value)
        assert got.standard_error.tolist() == [0.0, 0.0]
    torch.testing.assert_close((t(1.0, 2.0) + a).value, t(7.0, 3.0))
    assert float((a / 2).value[0]) == 3.0


def test_infinite_ends() -> None:
    divergence = f.kl(
        f.Mixture(t(0.0, 0.0), f.Gamma(t(1.0, 3.0)[:, None], t(1.0, 2.0)[:, None])),
        f.Exponential(t(1.0)),
        generator=torch.Generator().manual_seed(0),
    )
    scaled = 0 * divergence
    assert (float(scaled), float(scaled.lower), float(scaled.upper)) == (0.0, 0.0, 0.0)
    over = 1 / Estimate.bounded(t(-1.0), t(2.0))
    assert (float(over.lower), float(over.upper)) == (-math.inf, math.inf)
    assert float(divergence) == float(divergence.value)
    with pytest.raises(TypeError):
        divergence + "1"  # type: ignore[operator]


def test_formats_compares_and_converts() -> None:
    exact, bounded = Estimate.exact(t(0.25)[0]), Estimate.bounded(t(1.0)[0], t(2.0)[0])
    sampled = Estimate.sampled(t(1.0, 2.0, 3.0, 4.0), t(0.0)[0], t(math.inf)[0])
    assert f"{exact:.3f}" == "0.250"
    assert f"{sampled:.2f}" == "2.50 ± 0.65"
    assert f"{bounded:>6.1f}" == "   1.5 in [   1.0,    2.0]"
    assert f"{exact}" == str(exact)
    with pytest.raises(ValueError, match="format code"):
        f"{exact:s}"
    assert bool(exact < 0.5)
    assert bool(exact <= bounded)
    assert bool(bounded > exact)
    assert bool(t(0.5)[0] >= exact)
    assert bool(exact == 0.25)
    assert bool(exact != bounded)
    assert max(exact, bounded, sampled) is sampled
    assert (exact == "a quarter") is False
    assert len({exact, bounded, exact}) == 2
    batch = Estimate.exact(t(1.0, 3.0))
    assert (batch < 2).tolist() == [True, False]
    np.testing.assert_array_equal(np.asarray(batch), [1.0, 3.0])
    assert float(exact) == 0.25
    assert (np.float64(2.0) * sampled).kind is EstimateKind.ESTIMATED
    with pytest.raises(TypeError):
        exact < "1"  # type: ignore[operator]  # noqa: B015
