"""Large, small and near-equal members, odd input.

Numbers against many digits, draws that stay in the support, honest answers elsewhere.
"""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from exptilt import families as f
from exptilt._support.errors import ArgumentError
from exptilt.families.members.normal_gamma import MeanPrecision
from exptilt.families.members.normal_inverse_wishart import MeanCovariance
from exptilt.families.numerics.deviance import deviance, log_excess

F32, F64 = torch.float32, torch.float64


def t(*values: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def normal_gamma(location: float, dtype: torch.dtype = F32) -> f.NormalGamma:
    return f.NormalGamma(*(t(v, dtype=dtype) for v in (location, 1.0, 2.0, 3.0)))


def normal_inverse_wishart(location: float, dtype: torch.dtype = F64) -> f.NormalInverseWishart:
    scale = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=dtype)
    return f.NormalInverseWishart(
        t(location, -location, dtype=dtype), t(2.0, dtype=dtype)[0], t(4.5, dtype=dtype)[0], scale
    )


def test_the_location_does_not_matter() -> None:
    """Entropy, density about the location and divergence at equal offsets are those at location 0."""
    for near, far, other, further in (
        (normal_gamma(0.0), normal_gamma(2.0**20), normal_gamma(1.0), normal_gamma(2.0**20 + 1)),
        (
            normal_inverse_wishart(0.0),
            normal_inverse_wishart(2.0**27),
            normal_inverse_wishart(1.0),
            normal_inverse_wishart(2.0**27 + 1),
        ),
    ):
        assert float(near.entropy()) == float(far.entropy())
        assert float(f.kl(near, other).value) == float(f.kl(far, further).value) > 0
    one = torch.ones(1)
    x, y = MeanPrecision(one, one), MeanPrecision(one + 2.0**20, one)
    assert (
        float(normal_gamma(0.0).log_prob(x))
        == float(normal_gamma(2.0**20).log_prob(y))
        == pytest.approx(-2.22171, abs=1e-5)
    )
    x, y = (MeanCovariance(t(m, 3.0), torch.eye(2, dtype=F64)) for m in (1.0, 1.0))
    y = MeanCovariance(x.mean + t(2.0**27, -(2.0**27)), x.covariance)
    assert float(normal_inverse_wishart(0.0).log_prob(x)) == float(
        normal_inverse_wishart(2.0**27).log_prob(y)
    )


def test_no_member_is_invented() -> None:
    """A mean that rounding has put on the boundary.

    STALLED or BOUNDARY with a finite member, and the others of the batch are solved.
    """
    for family, far in (
        (f.NormalGamma, normal_gamma(1e8).mean_parameter),
        (f.NormalGamma, normal_gamma(3e5, F64).mean_parameter.float()),
        (f.Gamma, t(1.0, -(2.0**-52))),
        (f.Beta, t(-1e-300, -700.0)),
    ):
        both = torch.stack([far, family._typical(far).mean_parameter])
        good = family.from_mean(both)
        assert all(bool(leaf.isfinite().all()) for leaf, _ in good.value._leaves())
        assert bool(good.value._in_domain().all())
        assert good.code[1] == f.Status.CONVERGED.code
        error = (good.value.mean_parameter - both).abs().amax(-1)
        torch.testing.assert_close(good.residual, error)
    lost = f.NormalGamma.from_mean(normal_gamma(1e8).mean_parameter)
    assert not lost.converged
    assert float(lost.value.count) == 1.0


def test_events_in_another_dtype() -> None:
    """An integer or a float32 does not decide in what precision a float64 density is computed."""
    poisson = f.Poisson(t(3e5)).log_prob(torch.tensor([300123]))
    assert poisson.dtype == F64
    assert float(poisson) == pytest.approx(scipy.stats.poisson(3e5).logpmf(300123), rel=1e-9)
    gamma = f.Gamma(t(3e5), t(1.0)).log_prob(torch.tensor([300123.0]))
    assert gamma.dtype == F64
    assert float(gamma) == pytest.approx(scipy.stats.gamma(3e5).logpdf(300123), rel=1e-9)
    x = MeanCovariance(torch.zeros(2), torch.eye(2))
    assert isinstance(normal_inverse_wishart(0.0)._event(x), MeanCovariance)
    assert normal_inverse_wishart(0.0).log_prob(x).dtype == F64


def test_draws_stay_in_the_support() -> None:
    g = torch.Generator().manual_seed(0)
    x = f.VonMisesFisher(t(3.0, 0.0, dtype=F32)).sample(
        (2_000_000,), generator=g
    )  # a float32 normal is 0 once in a million
    assert not bool(x.isnan().any())
    assert float(f.Gamma(t(1e-4, dtype=F32), t(1e8, dtype=F32)).sample((1000,), generator=g).min()) > 0
    pair = f.NormalGamma(*(t(v, dtype=F32) for v in (0.0, 1e-3, 1e-3, 1e8))).sample((1000,), generator=g)
    assert float(pair.precision.min()) > 0
    assert bool(pair.mean.isfinite().all())


def test_deviance() -> None:
    """Against 40 digits, on both sides of where the series ends; second derivatives at 0."""
    x = torch.logspace(-6, 12, 10, dtype=F64)[:, None]
    d = torch.cat(
        [
            torch.logspace(-9, 3, 40, dtype=F64),
            -torch.logspace(-9, -1e-3, 40, dtype=F64),
            t(-0.2, 0.2, 0.2001),
        ]
    )
    m = x * (1 + d)
    found = deviance(x, m - x, (m / x).log())
    many = deviance(*(a.expand(50, *found.shape) for a in (x, m - x, (m / x).log())))
    with mpmath.workdps(40):
        exact = [
            a * mpmath.log(a / b) - a + b
            for a, b in (
                (mpmath.mpf(float(a)), mpmath.mpf(float(b)))
                for row in range(10)
                for a, b in zip(x[row].expand(d.shape).tolist(), m[row].tolist(), strict=True)
            )
        ]
        wrong = max(float(abs(a / b - 1)) for a, b in zip(found.flatten().tolist(), exact, strict=True))
    assert wrong < 2e-14
    torch.testing.assert_close(many[7], found, rtol=1e-14, atol=0)
    r = t(1.0).requires_grad_()
    (first,) = torch.autograd.grad(log_excess(r, t(1.0)), r, create_graph=True)
    (second,) = torch.autograd.grad(first, r)
    assert (first.item(), second.item()) == (0.0, 1.0)


def test_entropies_at_large_parameters() -> None:
    """Against many digits, in float64 and in float32."""
    with mpmath.workdps(40):
        a = mpmath.mpf(10) ** 8
        gamma = a + mpmath.loggamma(a) + (1 - a) * mpmath.digamma(a)
        beta = (
            2 * mpmath.loggamma(a)
            - mpmath.loggamma(2 * a)
            - (a - 1) * 2 * mpmath.digamma(a)
            + (2 * a - 2) * mpmath.digamma(2 * a)
        )
        poisson = mpmath.log(2 * mpmath.pi * mpmath.e * a) / 2 - 1 / (12 * a)
        halves = [a / 2, (a - 1) / 2]
        wishart = (
            3 * mpmath.log(2)
            + mpmath.log(mpmath.pi) / 2
            + sum(mpmath.loggamma(h) - (a - 3) / 2 * mpmath.digamma(h) for h in halves)
            + a
        )
        direction = 1 + mpmath.log(2 * mpmath.pi) - mpmath.log(mpmath.mpf(10) ** 20)
        exact = [float(value) for value in (gamma, beta, beta, poisson, wishart, direction)]
    for dtype, tolerance in ((F64, 1e-14), (F32, 3e-7)):
        n = t(1e8, dtype=dtype)
        members = [
            f.Gamma(n, n / n),
            f.Beta(n, n),
            f.Dirichlet(torch.cat([n, n])),
            f.Poisson(n),
            f.Wishart(n[0], torch.eye(2, dtype=dtype)),
            f.VonMisesFisher(t(0.0, 1e20, 0.0, dtype=dtype)),
        ]
        for member, value in zip(members, exact, strict=True):
            assert float(member.entropy()) == pytest.approx(value, rel=tolerance)
    assert f.VonMisesFisher(t(0.0, 1e20, dtype=F32)).mean().tolist() == [0.0, 1.0]


def test_densities_at_large_parameters() -> None:
    """At the mean and three standard deviations off.

    In float32 where the terms are 10⁹ and their rounding is 100.
    """
    with mpmath.workdps(40):
        a = mpmath.mpf(10) ** 8
        for offset in (0, 30000):
            x = a + offset
            gamma = float((a - 1) * mpmath.log(x) - x - mpmath.loggamma(a))
            poisson = float(x * mpmath.log(a) - a - mpmath.loggamma(x + 1))
            for dtype, tolerance in ((F64, 1e-9), (F32, 2e-3)):
                n, at = t(1e8, dtype=dtype), t(1e8 + offset, dtype=dtype)
                assert float(f.Gamma(n, n / n).log_prob(at)) == pytest.approx(gamma, abs=tolerance)
                assert float(f.Poisson(n).log_prob(at)) == pytest.approx(poisson, abs=tolerance)
        beta = float(
            (a - 1) * 2 * mpmath.log(mpmath.mpf("0.5")) - 2 * mpmath.loggamma(a) + mpmath.loggamma(2 * a)
        )
    for dtype in (F64, F32):
        n = t(1e8, dtype=dtype)
        assert float(f.Beta(n, n).log_prob(t(0.5, dtype=dtype))) == pytest.approx(beta, rel=1e-6)
    tiny = t(1e-30)  # far from the mean: no ratio may round to 0
    assert float(f.Gamma(t(1.0), t(2.0)).log_prob(tiny)) == pytest.approx(math.log(2))
    assert float(f.Beta(t(1.0), t(2.0)).log_prob(tiny)) == pytest.approx(math.log(2))


EYE = torch.eye(2, dtype=F64)
NEAR: list[Callable[[torch.dtype, float], tuple[f.Measure, f.Measure]]] = [
    lambda d, e: (f.Poisson(t(1e8, dtype=d)), f.Poisson(t(1e8 * (1 + e), dtype=d))),
    lambda d, e: (
        f.Gamma(t(1e8, 1e-8, dtype=d), t(1.0, 1.0, dtype=d)),
        f.Gamma(t(1e8 * (1 + e), 1e-8, dtype=d), t(1.0, 1 + e, dtype=d)),
    ),
    lambda d, e: (f.Exponential(t(1e8, dtype=d)), f.Exponential(t(1e8 * (1 + e), dtype=d))),
    lambda d, e: (
        f.Beta(t(1e8, 0.3, dtype=d), t(1e8, 5.0, dtype=d)),
        f.Beta(t(1e8 * (1 + e), 0.3, dtype=d), t(1e8, 5 + e, dtype=d)),
    ),
    lambda d, e: (
        f.Dirichlet(t(1e6, 1.0, 1e-3, dtype=d)),
        f.Dirichlet(t(1e6 * (1 + e), 1 - e, 1e-3, dtype=d)),
    ),
    lambda d, e: (
        f.VonMisesFisher(t(1e8, 0, 1.0, dtype=d)),
        f.VonMisesFisher(t(1e8 * (1 + e), 0, 1.0, dtype=d)),
    ),
    lambda d, e: (
        f.Wishart(t(1.0001, dtype=d)[0], EYE.to(d)),
        f.Wishart(t(1 + 1e-4 * (1 + e), dtype=d)[0], (1 + e) * EYE.to(d)),
    ),
    lambda d, e: (normal_gamma(1e4, d), f.NormalGamma(*(t(v, dtype=d) for v in (1e4, 1 + e, 2 - e, 3.0)))),
    lambda d, e: (
        f.NormalGamma(*(t(v, dtype=d) for v in (0.0, 1.0, 1e-8, 1.0))),
        f.NormalGamma(*(t(v, dtype=d) for v in (0.0, 1.0, 1e-8 * (1 + e), 1.0))),
    ),
    lambda d, e: (
        f.NormalInverseWishart(t(9.0, 9.0, dtype=d), t(1.0, dtype=d)[0], t(1.0001, dtype=d)[0], EYE.to(d)),
        f.NormalInverseWishart(
            t(9.0, 9.0, dtype=d), t(1 + e, dtype=d)[0], t(1 + 1e-4 * (1 + e), dtype=d)[0], EYE.to(d)
        ),
    ),
    lambda d, e: (
        f.Gaussian(t(1e4, 0.0, dtype=d), EYE.to(d)),
        f.Gaussian(t(1e4, 0.0, dtype=d), (1 + e) * EYE.to(d)),
    ),
    lambda d, e: (
        f.DiagonalGaussian(t(0.0, dtype=d), t(1e-8, dtype=d)),
        f.DiagonalGaussian(t(0.0, dtype=d), t(1e-8 * (1 + e), dtype=d)),
    ),
    lambda d, e: (f.BernoulliProduct(t(-30.0, 12.0, dtype=d)), f.BernoulliProduct(t(-30.0, 12 + e, dtype=d))),
    lambda d, e: (f.Categorical(t(0.0, -30, 3, dtype=d)), f.Categorical(t(e, -30, 3, dtype=d))),
]


@pytest.mark.parametrize("pair", NEAR)
def test_divergence_of_near_equal_members(pair: Callable[[torch.dtype, float], tuple[Any, Any]]) -> None:
    """Never negative; of itself 0 with derivative 0.

    And a hundredth of it at a tenth of the distance, which rounding would hide.
    """
    for dtype in (F64, F32):
        for e in (0.0, 1e-12, 1e-9, -1e-7, 1e-5):
            p, q = pair(dtype, e)
            assert float(f.kl(p, q).value) >= 0
            assert float(f.kl(q, p).value) >= 0
        p, _ = pair(dtype, 0.0)
        assert float(f.kl(p, p).value) == 0.0
    far, near = (float(f.kl(*pair(F64, e)).value) for e in (1e-3, 1e-4))
    assert far / near == pytest.approx(100, rel=0.02)


def test_divergences_by_their_leading_term() -> None:
    assert float(f.kl(f.Poisson(t(1e8)), f.Poisson(t(1e8 + 1))).value) == pytest.approx(5e-9, rel=1e-7)
    # Of shapes: ½ (ψ'(a) − 1/a) δ² at equal means plus δ²/2a, together ½ ψ'(a) δ².
    assert float(f.kl(f.Gamma(t(1e8), t(1.0)), f.Gamma(t(1e8 + 1), t(1.0))).value) == pytest.approx(
        5e-9, rel=1e-6
    )
    p, q = f.Gamma(t(1e-300), t(1e300)), f.Gamma(t(1e-300), t(1e-300))
    assert float(f.kl(p, q).value) == pytest.approx(0, abs=1e-290)
    assert float(
        f.kl(f.DiagonalGaussian(t(0.0), t(1e-30)), f.DiagonalGaussian(t(0.0), t(1.0))).value
    ) == pytest.approx(34.04, abs=0.01)


def test_fisher_information_is_the_curvature_of_the_divergence() -> None:
    """The second derivative at 0, where a clamp would have none."""
    for member in (
        f.Gamma(t(1e6), t(2.0)),
        f.Beta(t(0.3), t(4.0)),
        f.Dirichlet(t(1.0, 20.0, 0.1)),
        f.VonMisesFisher(t(3.0, 0, 1)),
    ):
        theta = member.natural_parameter

        def divergence(other: Tensor, member: Any = member) -> Tensor:
            value: Tensor = member._kl(type(member)._from_natural(other))
            return value

        torch.testing.assert_close(
            torch.func.hessian(divergence)(theta), member.fisher_information(), rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize(
    "member",
    [
        f.Gaussian(torch.zeros(2), torch.eye(2)),
        f.Gamma(torch.ones(2), torch.ones(2)),
        f.Poisson(torch.ones(2) * 9),
        f.Beta(torch.ones(2), torch.ones(2)),
        f.Wishart(torch.tensor(3.0), torch.eye(2)),
        f.NormalGamma(*torch.ones(4, 2)),
        f.VonMisesFisher(torch.tensor([2.0, 1.0])),
        f.VonMisesFisher(torch.tensor([2.0, 1.0, 0.0, 4.0])),
        f.GaussianMixture(torch.zeros(2), torch.zeros(2, 1), torch.ones(2, 1, 1)),
    ],
    ids=lambda member: type(member).__name__,
)
def test_draws_under_vmap(member: Any) -> None:
    """Of a member from outside the transform, and of a batch of members.

    Different ones for each, of the same law.
    """
    first = lambda h: torch.utils._pytree.tree_leaves(h.sample((400,)))[0]  # noqa: E731
    outside = torch.func.vmap(lambda e: first(member) + e, randomness="different")(torch.zeros(3))
    if isinstance(member, f.GaussianMixture):
        both = (outside,)
    else:
        wide = member.map(lambda leaf, _: leaf.expand(3, *leaf.shape))
        both = (outside, torch.func.vmap(first, randomness="different")(wide))
    alone = first(member)
    for drawn in both:
        assert drawn.shape == (3, *alone.shape)
        assert not torch.equal(drawn[0], drawn[1])
        spread = (alone.var(0) + drawn.var(1).amax(0)) / 400
        if not isinstance(member, f.NormalGamma):  # whose means have no variance at shape 1
            assert bool(((drawn.mean(1) - alone.mean(0)).abs() <= 5 * spread.sqrt()).all())


def test_tilts_that_are_no_numbers() -> None:
    for member in (
        f.Gaussian(torch.zeros(1), torch.eye(1)),
        f.Poisson(torch.ones(1)),
        f.VonMisesFisher(torch.ones(2)),
    ):
        with pytest.raises(ArgumentError, match=r"eta\[0\] must be finite; got nan"):
            member.tilt(torch.full((member.dimension,), torch.nan))
    for eta in (-800.0, 800.0):
        with pytest.raises(
            ArgumentError,
            match=r"eta\[1\] must be such that the rate λe\^η is a positive number of torch.float64; got",
        ):
            f.Poisson(t(1.0, 1.0)).tilt(t(0.0, eta))
    for member in (f.Gamma(t(2.0, 1.0), t(1.0, 1.0)), f.Exponential(t(2.0, 1.0)), f.Dirichlet(t(2.0, 1.0))):
        assert bool(member.log_normalizer(t(0.0, math.nan)).isnan())
    assert bool(f.Beta(t(2.0), t(1.0)).log_normalizer(t(math.nan, 0.0)).isnan())
    assert bool(f.Gamma.log_partition(t(-1.0, math.nan)).isnan())
    tiny = f.Gamma(t(1e-20), t(1.0)).tilt(t(0.5))
    assert (float(tiny.shape), float(tiny.rate)) == (1e-20, 0.5)


def test_coins_near_certainty_keep_their_divergence_in_float32() -> None:
    p, q = (f.BernoulliProduct(torch.tensor([logit])) for logit in (20.0, 21.0))
    assert float(f.kl(p, q).value) == pytest.approx(7.582560e-10, rel=1e-5)  # e⁻²⁰ − (e⁻²⁰ − e⁻²¹)


def test_a_sharp_beta_in_float32() -> None:
    """Against mpmath at the very numbers that float32 holds."""
    a, b, x = (torch.tensor([value]) for value in (1e12, 1e6, 1 - 1e-6))
    with mpmath.workdps(60):
        A, B, X = (mpmath.mpf(float(value)) for value in (a, b, x))
        wanted = (A - 1) * mpmath.log(X) + (B - 1) * mpmath.log(1 - X) - mpmath.log(mpmath.beta(A, B))
    assert float(f.Beta(a, b).log_prob(x)) == pytest.approx(float(wanted), rel=1e-4)


def test_the_fisher_information_of_a_gaussian_is_the_covariance_of_its_statistic() -> None:
    """By a product rule of five nodes a dimension, which is exact for fourth powers."""
    g = torch.Generator().manual_seed(0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    half = torch.randn(3, 3, dtype=torch.float64, generator=g).tril()
    member = f.Gaussian(torch.randn(3, dtype=torch.float64, generator=g), half @ half.mT)
    z = torch.cartesian_prod(*[torch.as_tensor(nodes)] * 3)
    weight = torch.cartesian_prod(*[torch.as_tensor(weights / weights.sum())] * 3).prod(-1, keepdim=True)
    u = f.Gaussian.statistic(member.mean_vector + z @ torch.linalg.cholesky(member.covariance_matrix).mT)
    u = u - (weight * u).sum(0)
    torch.testing.assert_close(member.fisher_information(), (weight * u).mT @ u)
    wide = f.Gaussian(torch.zeros(60), torch.eye(60))  # 1890 statistics: no derivative is taken of each
    assert wide.fisher_information().shape == (1890, 1890)


@pytest.mark.parametrize("size", [30.0, 1e5, 1e8])
@pytest.mark.parametrize("family", [f.Wishart, f.InverseWishart, f.NormalInverseWishart, f.Dirichlet])
def test_densities_worth_many_observations_in_float32(family: Any, size: float) -> None:
    """Log-densities are off by about what the rounding of x does to them, not by a multiple of the size."""
    degrees, eye = torch.tensor(size), torch.eye(2)
    made = {
        f.Wishart: lambda: f.Wishart(degrees, eye / size),
        f.InverseWishart: lambda: f.InverseWishart(degrees, eye * size),
        f.NormalInverseWishart: lambda: f.NormalInverseWishart(
            torch.zeros(2), torch.tensor(1.0), degrees, eye * size
        ),
        f.Dirichlet: lambda: f.Dirichlet(degrees * torch.tensor([1.0, 2.0, 0.1])),
    }
    h = made[family]()
    x = h.sample((50,), generator=torch.Generator().manual_seed(0))
    double = torch.utils._pytree.tree_map(lambda leaf: leaf.double(), x)
    if family is f.Dirichlet:
        double = double / double.sum(-1, keepdim=True)
    off = (h.log_prob(x) - h.to(F64).log_prob(double)).abs()
    assert float(off.max()) <= 1e-5 * (1 + size**0.5)


def test_mixtures_worth_many_observations_in_float32() -> None:
    """Their sample means come from float64, as does E[u] of a projection."""
    degrees = torch.tensor([1e8, 1.5e8])
    scale = torch.eye(2).expand(2, 2, 2)
    for parts in (f.Wishart(degrees, scale / 1e8), f.InverseWishart(degrees, scale * 1e8)):
        mixture = f.Mixture(torch.zeros(2), parts)
        wanted = parts.entropy().mean() + math.log(2)  # the components do not overlap
        found = mixture.entropy(generator=torch.Generator().manual_seed(0))
        assert found.value.dtype == F32
        assert float(found.value) == pytest.approx(float(wanted), abs=6 * float(found.standard_error) + 1e-4)
        double = f.project(mixture.to(F64), type(parts)).degrees
        assert float(f.project(mixture, type(parts)).degrees) == pytest.approx(float(double), rel=1e-6)
