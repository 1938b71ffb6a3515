"""Bessel functions and digamma inversions against SciPy, recurrences and closed forms."""

import math

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from exptilt.families import Beta, Dirichlet, Gamma, Poisson, kl
from exptilt.families.numerics.gamma_functions import (
    digamma_gap,
    digamma_rise,
    inverse_digamma,
    invert_digamma_gap,
    invert_dirichlet,
    invert_multivariate_gap,
    multivariate_gap,
    trigamma,
    trigamma_fall,
)

F64 = torch.float64


def test_digamma_gap() -> None:
    a = torch.logspace(-6, 12, 200, dtype=F64)
    torch.testing.assert_close(
        digamma_gap(a)[a < 1e3], (a.log() - torch.digamma(a))[a < 1e3], rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        digamma_gap(a)[a > 1e9], (0.5 / a + 1 / (12 * a**2))[a > 1e9], rtol=1e-14, atol=0
    )
    torch.testing.assert_close(invert_digamma_gap(digamma_gap(a)), a, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dimension", [1, 2, 5, 20])
def test_multivariate_gap(dimension: int) -> None:
    degrees = dimension - 1 + torch.logspace(-4, 5, 60, dtype=F64)
    torch.testing.assert_close(
        invert_multivariate_gap(multivariate_gap(degrees, dimension), dimension),
        degrees,
        rtol=1e-8,
        atol=1e-10,
    )


def test_inverse_digamma() -> None:
    a = torch.logspace(-5, 8, 100, dtype=F64)
    torch.testing.assert_close(inverse_digamma(torch.digamma(a)), a, rtol=1e-9, atol=0)


@pytest.mark.parametrize("count", [2, 3, 10, 50])
@pytest.mark.parametrize(("low", "high"), [(-3, 3), (-5, -2), (1, 4), (-2, 4)])
def test_dirichlet(count: int, low: float, high: float) -> None:
    g = torch.Generator().manual_seed(count)
    alpha = 10 ** (low + (high - low) * torch.rand(200, count, dtype=F64, generator=g))
    mean = torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))
    found = invert_dirichlet(mean)
    torch.testing.assert_close(
        torch.digamma(found) - torch.digamma(found.sum(-1, keepdim=True)), mean, rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(found, alpha, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rate", [1e-3, 0.5, 20.0, 63.9, 64.1, 300.0, 5000.0])
def test_poisson_entropy_on_both_sides_of_its_series(rate: float) -> None:
    """E[log x!] by a sum to λ = 64 and by an asymptotic series beyond.

    Against the sum over all counts that matter.
    """
    count = np.arange(int(rate + 40 * rate**0.5 + 60))
    log_p = scipy.stats.poisson(rate).logpmf(count)
    assert float(Poisson(torch.tensor([rate], dtype=F64)).entropy()) == pytest.approx(
        -(np.exp(log_p) * log_p).sum(), rel=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dirichlet_inversion_from_one_end_to_the_other(dtype: torch.dtype) -> None:
    """Entries that differ by sixteen (eight) orders of magnitude: Newton alone goes astray there.

    The means are tried as they are and a few units in the last place beside that, as another processor may
    round them. In float32 what is left is the rounding of α and of the two digammas; in float64 also that of
    the last steps, 3e-11 in up to 120,000 trials.
    """
    reach, allowed = (8, 1e-9) if dtype == F64 else (4, 16 * torch.finfo(dtype).eps)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        power = torch.rand(1000, 2, dtype=dtype, generator=g) * 2 * reach - reach
        mean = Dirichlet(10**power).mean_parameter
        units = torch.randint(-4, 5, mean.shape, generator=g) * (seed > 0)
        mean = mean * (1 + torch.finfo(dtype).eps * units)
        mean = mean[torch.logsumexp(mean, -1) < 0]  # rounding puts a few on the boundary
        found = Dirichlet(invert_dirichlet(mean))
        error = (found.mean_parameter - mean).abs().amax(-1)
        assert bool((error <= allowed * (1 + mean.abs().amax(-1))).all())


def test_dirichlet_inversion_does_not_depend_on_the_batch() -> None:
    """A total that was found left its bracket again while others were sought: 1.68 came back for 35.7."""
    mean = torch.tensor([-335580.63354262715, -8.471280832367256e-08], dtype=F64)
    power = torch.rand(200, 2, dtype=F64, generator=torch.Generator().manual_seed(1)) * 16 - 8
    others = Dirichlet(10**power).mean_parameter
    others = others[torch.logsumexp(others, -1) < 0]
    alone, together = invert_dirichlet(mean), invert_dirichlet(torch.cat([others, mean[None]]))[-1]
    true = torch.tensor([2.979946486134e-06, 35.674677], dtype=F64)
    torch.testing.assert_close(alone, true, rtol=1e-6, atol=0)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_dirichlet_means_are_reached(size: int) -> None:
    """To all digits at parameters of any size; where the mean determines them the parameters come back."""
    generator = np.random.default_rng(0)
    powers = [generator.uniform(*ends, (100, size)) for ends in ((-1, 1), (-8, 8), (-30, 3))]
    alpha = torch.as_tensor(10 ** np.concatenate(powers))
    mean = Dirichlet(alpha).mean_parameter
    found = invert_dirichlet(mean)
    torch.testing.assert_close(Dirichlet(found).mean_parameter, mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(found[:100], alpha[:100], rtol=1e-11, atol=0)
    assert invert_dirichlet(mean[:100].float()).dtype == torch.float32
    batched = torch.func.vmap(invert_dirichlet)(mean[:100])
    torch.testing.assert_close(batched, alpha[:100], rtol=1e-9, atol=0)


def many_digits(alpha: list[float]) -> list[float]:
    with mpmath.workdps(60):
        total = mpmath.fsum(alpha)
        return [float(mpmath.digamma(mpmath.mpf(a)) - mpmath.digamma(total)) for a in alpha]


EXTREME = [
    [1.0, 1e-8],
    [9e6, 3e-8],
    [1e-8, 1e-16],
    [5.0, 2.0, 1e-9, 3.0],
    [1e8, 1e-8, 1.0],
    [1e15, 1.0],
    [1e-3, 1e-3],
]


@pytest.mark.parametrize("alpha", EXTREME, ids=str)
def test_extreme_dirichlets_come_back_from_their_mean(alpha: list[float]) -> None:
    """The mean to all digits, and from it the parameters as far as it determines them."""
    member = Dirichlet(torch.tensor(alpha, dtype=F64))
    exact = torch.tensor(many_digits(alpha), dtype=F64)
    torch.testing.assert_close(member.mean_parameter, exact, rtol=1e-15, atol=0)
    found = Dirichlet.from_mean(exact)
    assert found.converged
    torch.testing.assert_close(found.value.concentration, member.concentration, rtol=1e-7, atol=0)
    if len(alpha) == 2:
        pair = Beta.from_mean(exact)
        assert pair.converged
        torch.testing.assert_close(
            torch.cat([pair.value.alpha, pair.value.beta]), member.concentration, rtol=1e-7, atol=0
        )
    tilted = Dirichlet(torch.ones(len(alpha), dtype=F64)).natural(exact)
    back = 1 + tilted.value  # which holds a tiny α to the rounding of 1
    assert not tilted.converged or bool(
        ((back - member.concentration).abs() < 1e-6 * member.concentration).all()
    )


def test_a_float32_beta_comes_back() -> None:
    member = Beta(torch.tensor([100.0]), torch.tensor([0.01]))
    found = Beta.from_mean(member.mean_parameter)
    assert found.converged
    assert float(found.value.alpha) == pytest.approx(100, rel=1e-5)
    assert float(found.value.beta) == pytest.approx(0.01, rel=1e-5)


def test_a_mean_that_does_not_determine_its_member_is_not_called_solved() -> None:
    """At α = 10¹⁵ twice the mean is −log 2 but for its last bit, so that any large α has it."""
    mean = Dirichlet(torch.full((2,), 1e15, dtype=F64)).mean_parameter
    assert not Dirichlet.from_mean(mean).converged
    near = Dirichlet.from_mean(Dirichlet(torch.full((2,), 1e8, dtype=F64)).mean_parameter)
    assert near.converged
    torch.testing.assert_close(near.value.concentration, torch.full((2,), 1e8, dtype=F64), rtol=1e-6, atol=0)


def test_differences_of_digamma_and_trigamma() -> None:
    """Against many digits, also where one addend is lost in the sum."""
    with mpmath.workdps(60):
        for a in (1e-9, 0.3, 7.9, 8.1, 1e6):
            for b in (1e-25, 1e-9, 0.5, 40.0, 1e9):
                x, y = mpmath.mpf(a), mpmath.mpf(a) + mpmath.mpf(b)
                first, second = torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64)
                rise, fall = (
                    mpmath.digamma(y) - mpmath.digamma(x),
                    mpmath.polygamma(1, x) - mpmath.polygamma(1, y),
                )
                assert float(digamma_rise(first, second)) == pytest.approx(float(rise), rel=4e-15)
                assert float(trigamma_fall(first, second)) == pytest.approx(float(fall), rel=4e-15)
            assert float(trigamma(first)) == pytest.approx(float(mpmath.polygamma(1, x)), rel=1e-15)
    tiny = torch.tensor(1e-300, dtype=F64)
    assert float(digamma_rise(tiny, tiny)) == math.inf  # said in its docstring; the true value is 5e299


def test_gamma_divergence_to_all_digits() -> None:
    """At tiny, common and large shapes, near and far, in the shape and in the rate."""
    worst = 0.0
    with mpmath.workdps(60):
        for a in (1e-12, 1e-8, 1e-3, 0.7, 7.99, 30.0, 1e8):
            for ratio in (1 + 1e-9, 1 + 1e-4, 1 - 1e-3, 1.15, 0.75, 1.3, 50.0):
                for rate in (1.0, 1 + 1e-7, 3.0):
                    b = a * ratio
                    x, y, rho = mpmath.mpf(a), mpmath.mpf(b), mpmath.mpf(rate)
                    exact = mpmath.loggamma(y) - mpmath.loggamma(x) - (y - x) * mpmath.digamma(x)
                    exact += x * (rho - 1) - y * mpmath.log(rho)
                    p = Gamma(torch.tensor([a], dtype=F64), torch.ones(1, dtype=F64))
                    q = Gamma(torch.tensor([b], dtype=F64), torch.tensor([rate], dtype=F64))
                    worst = max(worst, abs(float(mpmath.mpf(float(kl(p, q).value)) / exact - 1)))
    assert worst < 1e-11
