"""Answers that would look right and are not: supports, brackets, rounding, and statuses that hold."""

import math

import mpmath
import pytest
import torch

from exptilt.families import (
    BernoulliProduct,
    Beta,
    Binomial,
    DiagonalGaussian,
    Dirichlet,
    Empirical,
    ExponentialFamily,
    Gamma,
    Gaussian,
    GaussianMixture,
    InverseGamma,
    InverseWishart,
    LogNormal,
    Mixture,
    NormalGamma,
    NormalInverseWishart,
    Poisson,
    VonMisesFisher,
    Wishart,
    fit_mixture,
    kl,
)
from exptilt.families.numerics.deviance import coin_gap, softplus

F32, F64 = torch.float32, torch.float64
BOTH = pytest.mark.parametrize("dtype", [F64, F32])


def vector(*numbers: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3])
def test_inverse_wishart_draws_stay_on_their_support_with_hardly_any_degrees(dtype, size) -> None:
    law = InverseWishart(torch.tensor(size - 1 + 0.01, dtype=dtype), torch.eye(size, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    assert bool(law.log_prob(law.sample(200, generator=generator)).isfinite().all())
    both = Mixture(torch.zeros(2, dtype=dtype), law.expand(2))
    found = both.entropy(400, generator=generator)
    torch.testing.assert_close(found.value, law.entropy(), rtol=1e-3, atol=8 * float(found.standard_error))


def test_the_matrix_of_a_normal_inverse_wishart_is_inverse_wishart() -> None:
    root = torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    degrees, scale = torch.tensor(5.5, dtype=F64), root @ root.mT + torch.eye(3, dtype=F64)
    law = NormalInverseWishart(vector(1, 2, 3), torch.tensor(2.0, dtype=F64), degrees, scale)
    x = law.sample(4, generator=torch.Generator().manual_seed(2))
    given = torch.distributions.MultivariateNormal(vector(1, 2, 3), x.covariance / 2)
    expected = InverseWishart(degrees, scale).log_prob(x.covariance) + given.log_prob(x.mean)
    torch.testing.assert_close(law.log_prob(x), expected, rtol=1e-10, atol=1e-10)


@BOTH
def test_inverse_wishart_against_wishart_in_one_dimension(dtype) -> None:
    """Both are laws of positive 1×1 matrices: InverseGamma(ν/2, ψ/2) and Gamma(ν/2, 1/2v)."""
    inverse = InverseWishart(torch.tensor(9.0, dtype=dtype), torch.eye(1, dtype=dtype))
    plain = Wishart(torch.tensor(3.0, dtype=dtype), torch.eye(1, dtype=dtype))
    found = kl(inverse, plain, samples=4000, generator=torch.Generator().manual_seed(0))
    a, b = 4.5, 0.5
    log_b = math.lgamma(a) - a * math.log(b)
    mean, log_mean = b / (a - 1), math.log(b) - float(mpmath.digamma(a))
    own = -log_b - (a + 1) * log_mean - b * (a / b)
    other = 1.5 * math.log(0.5) - math.lgamma(1.5) + 0.5 * log_mean - 0.5 * mean
    assert abs(float(found.value) - (own - other)) < 5 * float(found.standard_error)


@BOTH
@pytest.mark.parametrize("degrees", [1e4, 1e8])
def test_the_bracket_of_an_entropy_holds_at_many_degrees(dtype, degrees) -> None:
    """A(θ + θ') − A(θ) − A(θ') is all rounding there: −0 was a certain lower bound, the entropy −26."""
    for law in (
        InverseWishart(torch.tensor(degrees, dtype=dtype), torch.eye(1, dtype=dtype)),
        Gamma(vector(degrees, dtype=dtype), vector(degrees, dtype=dtype)),
    ):
        exact = law.to(F64).entropy()
        found = Mixture(torch.zeros(2, dtype=dtype), law.expand(2)).entropy(0)
        assert found.lower <= exact + 1e-3
        assert found.upper >= exact - 1e-3


def test_softplus_and_the_gap_of_coins_are_right_to_the_last_digits() -> None:
    with mpmath.workdps(40):
        for x in (-50.0, -20.5, 0.0, 1e-9, 19.9, 20.5, 36.0, 45.0, 800.0):
            exact = float(mpmath.log1p(mpmath.exp(mpmath.mpf(x))))
            assert float(softplus(torch.tensor(x, dtype=F64))) == pytest.approx(exact, rel=1e-15)
        for a, b in ((20.0, 21.0), (-30.0, -29.0), (0.5, 0.5 + 1e-9), (17.0, -20.5), (800.0, -800.0)):
            p, q = (1 / (1 + mpmath.exp(-mpmath.mpf(y))) for y in (a, b))
            found = coin_gap(torch.tensor(a, dtype=F64), torch.tensor(b, dtype=F64))
            assert float(found) == pytest.approx(float(q - p), rel=1e-14)


@pytest.mark.parametrize(("dtype", "error"), [(F64, 1e-12), (F32, 1e-5)])
@pytest.mark.parametrize(("a", "b"), [(20, 21), (80, 81), (30, 20), (17, -20.5), (-20, -20.25)])
def test_kl_of_coins_and_binomials_near_certainty(dtype, error, a, b) -> None:
    with mpmath.workdps(60):
        (p, r), (q, s) = (
            (1 / (1 + mpmath.exp(-mpmath.mpf(x))), 1 / (1 + mpmath.exp(mpmath.mpf(x)))) for x in (a, b)
        )
        exact = float(p * mpmath.log(p / q) + r * mpmath.log(r / s))
    one, two = vector(a, dtype=dtype), vector(b, dtype=dtype)
    n = vector(7, dtype=dtype)
    coin, count = kl(BernoulliProduct(one), BernoulliProduct(two)), kl(Binomial(n, one), Binomial(n, two))
    assert float(coin.value) == pytest.approx(exact, rel=error)
    assert float(count.value) == pytest.approx(7 * exact, rel=error)


def test_supports_are_compared_coordinate_by_coordinate() -> None:
    logit = torch.zeros(2, dtype=F64)
    small, large = Binomial(vector(3, 5), logit), Binomial(vector(3, 4), logit)
    poisson = Poisson(torch.ones(2, dtype=F64))
    assert float(kl(poisson, small).value) == math.inf
    assert float(kl(BernoulliProduct(logit), small).value) < math.inf
    assert float(kl(Mixture(torch.zeros(1, dtype=F64), small.expand(1)), large).value) == math.inf
    found = kl(small, poisson, samples=4000, generator=torch.Generator().manual_seed(0))
    count = torch.cartesian_prod(torch.arange(6, dtype=F64), torch.arange(6, dtype=F64))
    log_p = small.log_prob(count)
    each = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - poisson.log_prob(count)), 0.0)
    assert abs(float(found.value) - float(each.sum())) < 5 * float(found.standard_error)


@BOTH
@pytest.mark.parametrize(("apart", "width", "wanted"), [(100, 1, 500), (1e3, 0.1, 970), (1e5, 1, 4e5)])
def test_far_means_of_separated_mixtures_are_found(dtype, apart, width, wanted) -> None:
    means = vector(-apart, apart, dtype=dtype).unsqueeze(-1)
    variance = vector(width**2, dtype=dtype).reshape(1, 1)
    mixture = GaussianMixture(torch.zeros(2, dtype=dtype), means, variance)
    found = mixture.natural(vector(wanted, dtype=dtype))
    assert found.converged, found.status
    assert int(found.steps) < 50
    reached = mixture.to(F64).mean(found.value.double())
    assert abs(float(reached) - wanted) <= 2 * float(found.residual) + 1e-5 * wanted


def test_a_rounded_parameter_has_the_residual_of_the_rounded_one() -> None:
    """In float32 the η of a mean close to a corner moves the mean by more than the float64 η would."""
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(3))
    corner = points[points[:, 0].argmax()]
    wanted = 0.999 * corner + 0.001 * points.mean(0)
    found = Empirical(points).natural(wanted)
    reached = Empirical(points.double()).mean(found.value.double())
    error = (reached - wanted.double()).abs().amax()
    assert float(found.residual) == pytest.approx(float(error), rel=0.2, abs=1e-9)


@pytest.mark.parametrize(("shape", "status"), [(1e4, "CONVERGED"), (1e9, "STALLED")])
def test_a_fit_says_where_rounding_decides(shape, status) -> None:
    """log E x − E log x = 1/2a is 5e-10 for a = 1e9, of logarithms of 20: the shape is off by 1e-5."""
    x = Gamma(vector(shape), vector(1.0)).sample(100, generator=torch.Generator().manual_seed(0))
    found = fit_mixture(x, Gamma, 1)
    assert found.status.name == status
    with mpmath.workdps(40):
        logs = [mpmath.log(mpmath.mpf(float(v))) for v in x[:, 0]]
        gap = mpmath.log(sum(mpmath.mpf(float(v)) for v in x[:, 0]) / len(logs)) - sum(logs) / len(logs)
        exact = float((3 - gap + mpmath.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap))
    error = abs(float(found.value.components.shape) / exact - 1)
    assert error < max(1e-4, 3 * float(found.residual))


def hidden_members() -> list[ExponentialFamily]:
    """Members whose mean, once rounded, says nothing of one of their parameters."""
    members: list[ExponentialFamily] = []
    for kind, far in ((torch.float64, 1e14), (torch.float32, 1e6)):
        a, one = torch.tensor([far], dtype=kind), torch.ones(1, dtype=kind)
        members += [
            Gamma(a, one),
            InverseGamma(a, one),
            LogNormal(a.log(), one / a),
            DiagonalGaussian(one, one / a),
            Gaussian(torch.ones(2, dtype=kind), torch.eye(2, dtype=kind) / a),
            Wishart(a[0], torch.eye(2, dtype=kind)),
            InverseWishart(a[0], torch.eye(2, dtype=kind)),
            NormalGamma(one, one, a, one),
            Beta(a, a),
            Dirichlet(torch.cat([a, a, a])),
            VonMisesFisher(torch.cat([10 * a, a, a])),
        ]
    return members


@pytest.mark.parametrize("member", hidden_members(), ids=lambda m: f"{type(m).__name__}-{m.dtype}")
def test_a_mean_that_hides_its_member_is_never_called_solved(member: ExponentialFamily) -> None:
    """CONVERGED means that the member is known to a few hundredths; else the status says that it is not."""
    found = type(member).from_mean(member.mean_parameter)
    if found.converged:
        assert float(member._kl(found.value)) < 0.03**2 / 2


def test_ordinary_means_are_solved_as_before() -> None:
    for size in (1e-3, 1.0, 1e3, 1e6):
        x = torch.tensor([size], dtype=torch.float64)
        for member in (Gamma(x, 1 / x), DiagonalGaussian(x, x), Beta(x, 2 * x), NormalGamma(x**0, x, x, x)):
            assert type(member).from_mean(member.mean_parameter).converged, member


@pytest.mark.parametrize("degrees", [0.5, 1.5, 2.0, 2.5, 4.0, 4.5, 10.0])
def test_moments_of_an_inverse_wishart_are_those_of_an_inverse_gamma(degrees: float) -> None:
    nu = torch.tensor(degrees, dtype=torch.float64)
    matrix = InverseWishart(nu, torch.tensor([[3.0]], dtype=torch.float64))
    number = InverseGamma(nu[None] / 2, torch.tensor([1.5], dtype=torch.float64))
    torch.testing.assert_close(matrix.event_mean[0], number.event_mean, equal_nan=True)
    torch.testing.assert_close(matrix.event_variance[0], number.event_variance, equal_nan=True)
    wide = InverseWishart(torch.tensor(2.5), torch.eye(2)).event_mean
    assert wide[0, 0] == math.inf
    assert bool(wide[0, 1].isnan())
