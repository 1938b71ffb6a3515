"""Members of NegativeBinomial, Multinomial, Binomial, Laplace, ... at extreme parameters, against mpmath."""

import mpmath as mp
import pytest
import torch

from exptilt import families as f

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def log_negative_binomial(x: int, r: float, logit: float) -> mp.mpf:
    odds = mp.exp(mp.mpf(logit))
    p, q = odds / (1 + odds), 1 / (1 + odds)
    return mp.loggamma(x + mp.mpf(r)) - mp.loggamma(r) - mp.loggamma(x + 1) + x * mp.log(p) + r * mp.log(q)


@pytest.mark.parametrize(
    ("r", "logit", "x"),
    [(1e-3, -30.0, 0), (1e-3, 20.0, 10**9), (2.5, 40.0, 10**15), (1e8, -20.0, 1), (1e9, 0.0, 10**9 + 5)],
)
def test_log_probability_of_negative_binomial(r: float, logit: float, x: int) -> None:
    with mp.workdps(60):
        exact = float(log_negative_binomial(x, r, logit))
    got = float(f.NegativeBinomial(t(r), t(logit)).log_prob(t(float(x))))
    assert got == pytest.approx(exact, rel=1e-12, abs=1e-13)


def entropy_by_sum(r: float, logit: float, count: int) -> float:
    with mp.workdps(30):
        terms = [log_negative_binomial(x, r, logit) for x in range(count)]
        return float(-mp.fsum(mp.exp(a) * a for a in terms))


@pytest.mark.parametrize(
    ("r", "logit", "count"), [(1e-3, 1.0, 400), (0.5, 2.0, 1500), (300.0, -3.0, 300), (1e6, -11.0, 200)]
)
def test_entropy_of_negative_binomial(r: float, logit: float, count: int) -> None:
    got = float(f.NegativeBinomial(t(r), t(logit)).entropy())
    assert got == pytest.approx(entropy_by_sum(r, logit, count), rel=1e-11, abs=1e-12)
    single = f.NegativeBinomial(t(r).float(), t(logit).float()).entropy()
    assert float(single) == pytest.approx(got, rel=1e-5)


@pytest.mark.parametrize(("r", "logit", "s", "other"), [(3.0, 0.5, 0.7, -1.0), (0.2, -2.0, 5.0, 1.0)])
def test_divergence_between_different_numbers_of_failures(
    r: float, logit: float, s: float, other: float
) -> None:
    with mp.workdps(30):
        pairs = [(log_negative_binomial(x, r, logit), log_negative_binomial(x, s, other)) for x in range(250)]
        exact = float(mp.fsum(mp.exp(a) * (a - b) for a, b in pairs))
    p, q = f.NegativeBinomial(t(r), t(logit)), f.NegativeBinomial(t(s), t(other))
    assert float(f.kl(p, q).value) == pytest.approx(exact, rel=1e-11)


def test_divergence_of_close_negative_binomials() -> None:
    """Near p = 1, where p itself has no digits left: ½ δ² times the Fisher information, r p."""
    for logit in (-30.0, 0.0, 25.0):
        p, q = f.NegativeBinomial(t(5.0), t(logit)), f.NegativeBinomial(t(5.0), t(logit + 2**-20))
        expected = 0.5 * 2.0**-40 * 5.0 * float(torch.sigmoid(t(logit)))
        assert float(f.kl(p, q).value) == pytest.approx(expected, rel=1e-5)


def test_the_number_of_failures_has_to_be_given() -> None:
    mean = t(4.0)
    for method in ("from_mean", "from_natural", "log_partition"):
        with pytest.raises(ValueError, match=rf"NegativeBinomial.{method}.*known=failures"):
            getattr(f.NegativeBinomial, method)(-mean)
    found = f.NegativeBinomial.from_mean(torch.stack([mean, 0 * mean, -mean]), known=t(2.0))
    assert [list(f.Status)[code].name for code in found.code] == ["CONVERGED", "BOUNDARY", "OUTSIDE"]
    assert float(found.value.logit[0]) == pytest.approx(float(t(2.0).log()))


def log_multinomial(x: list[int], p: list[mp.mpf]) -> mp.mpf:
    orders = mp.loggamma(sum(x) + 1) - mp.fsum(mp.loggamma(k + 1) for k in x)
    return orders + mp.fsum(k * mp.log(q) for k, q in zip(x, p, strict=True))


def softmax(logit: list[float]) -> list[mp.mpf]:
    weight = [mp.exp(mp.mpf(a)) for a in logit]
    return [w / mp.fsum(weight) for w in weight]


@pytest.mark.parametrize(
    ("logit", "x"),
    [([0.0, -40.0], [10**12, 3]), ([0.0, 1.0, 2.0], [90030, 244728, 665242]), ([0.0, 5], [0, 1])],
)
def test_log_probability_of_multinomial(logit: list[float], x: list[int]) -> None:
    with mp.workdps(60):
        exact = float(log_multinomial(x, softmax(logit)))
    h = f.Multinomial(t(*logit), t(float(sum(x)))[0])
    assert float(h.log_prob(t(*map(float, x)))) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("n", "logit"), [(1, [0.0, 3.0]), (40, [0.0, -30.0, 1.0]), (2000, [0.0, 1.0])])
def test_entropy_of_multinomial(n: int, logit: list[float]) -> None:
    """n H(p) − log n! + Σ_k E log x_k!, each x_k binomial."""
    with mp.workdps(30):
        probability = softmax(logit)
        total = -n * mp.fsum(p * mp.log(p) for p in probability) - mp.loggamma(n + 1)
        for p in probability:
            law = [log_multinomial([k, n - k], [p, 1 - p]) for k in range(n + 1)]
            total += mp.fsum(mp.exp(a) * mp.loggamma(k + 1) for k, a in enumerate(law))
    got = f.Multinomial(t(*logit), t(float(n))[0]).entropy()
    assert float(got) == pytest.approx(float(total), rel=1e-11, abs=1e-13)


def test_totals_may_differ_within_a_batch() -> None:
    h = f.Multinomial(t(0.0, 1.0, 2.0), t(3.0, 50.0))
    alone = [f.Multinomial(h.logit, total) for total in h.total]
    x = h.sample((2000,), generator=torch.Generator().manual_seed(0))
    assert bool((x.sum(-1) == h.total).all())
    for i, member in enumerate(alone):
        torch.testing.assert_close(h.log_prob(x)[:, i], member.log_prob(x[:, i]))
        torch.testing.assert_close(h.entropy()[i], member.entropy())
        torch.testing.assert_close(h.covariance()[i], member.covariance())
    assert f.kl(alone[0], alone[1]).value == torch.inf
    with pytest.raises(ValueError, match=r"one total for all of a batch; got \[3.0, 50.0\]"):
        h.to_torch()


def test_multinomial_is_fitted_to_counts() -> None:
    counts = t(3.0, 1, 2, 5, 0, 1).reshape(2, 3)
    fitted = f.project(f.Empirical(counts), f.Multinomial)
    torch.testing.assert_close(fitted.mean(), counts.mean(0))
    assert float(fitted.total) == 6
    mixture = f.Mixture(t(0.0, 0.0), f.Multinomial(torch.zeros(2, 3, dtype=F64), t(3.0, 5.0)))
    with pytest.raises(ValueError, match=r"total of the components\[1\] must be the same for all"):
        f.project(mixture, f.Multinomial)  # and not one of total 4
    with pytest.raises(ValueError, match=r"total must be a whole number"):
        f.Multinomial(t(0.0, 1.0), t(2.5)[0])


@pytest.mark.parametrize(("a", "b", "x"), [(0.05, 1e-6, 1e30), (1e6, 1e6, 1.001), (3.0, 1e-300, 1e-299)])
def test_log_density_of_inverse_gamma(a: float, b: float, x: float) -> None:
    with mp.workdps(60):
        y = mp.mpf(x)
        exact = float(a * mp.log(b) - mp.loggamma(a) - (a + mp.mpf(1)) * mp.log(y) - b / y)
    assert float(f.InverseGamma(t(a), t(b)).log_prob(t(x))) == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_densities_off_their_support() -> None:
    edge = t(0.0, -1.0, 5e-324, float("inf"))[:, None]
    for h in (f.InverseGamma(t(1.0), t(1.0)), f.LogNormal(t(0.0), t(1.0))):
        value = h.log_prob(edge)
        assert value[0] == value[1] == value[3] == -torch.inf
        assert not bool(value.isnan().any())


@pytest.mark.parametrize(("m", "v", "x"), [(700.0, 1e-4, 1e304), (-3.0, 1e4, 1e-200), (0.0, 1e-8, 1.0001)])
def test_log_density_of_log_normal(m: float, v: float, x: float) -> None:
    with mp.workdps(60):
        y = mp.log(mp.mpf(x))
        exact = float(-((y - m) ** 2) / (2 * mp.mpf(v)) - mp.log(2 * mp.pi * mp.mpf(v)) / 2 - y)
    assert float(f.LogNormal(t(m), t(v)).log_prob(t(x))) == pytest.approx(exact, rel=1e-9)


def log_binomial(x: int, n: int, logit: float) -> mp.mpf:
    p = 1 / (1 + mp.exp(-mp.mpf(logit)))
    return mp.log(mp.binomial(n, x)) + x * mp.log(p) + (n - x) * mp.log(1 - p)


@pytest.mark.parametrize(("n", "logit", "x"), [(1, -30.0, 1), (10**9, -20.0, 3), (10**12, 0.5, 6 * 10**11)])
def test_log_probability_of_binomial(n: int, logit: float, x: int) -> None:
    with mp.workdps(60):
        orders = mp.loggamma(n + 1) - mp.loggamma(x + 1) - mp.loggamma(n - x + 1)
        p = 1 / (1 + mp.exp(-mp.mpf(logit)))
        exact = float(orders + x * mp.log(p) + (n - x) * mp.log(1 - p))
    assert float(f.Binomial(t(float(n)), t(logit)).log_prob(t(float(x)))) == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize(("n", "m"), [(7, 7), (7, 9), (40, 400)])
def test_entropy_and_divergence_of_binomials(n: int, m: int) -> None:
    logit, other = 0.4, -1.3
    with mp.workdps(30):
        law = [(log_binomial(x, n, logit), log_binomial(x, m, other)) for x in range(n + 1)]
        entropy = float(-mp.fsum(mp.exp(a) * a for a, _ in law))
        exact = float(mp.fsum(mp.exp(a) * (a - b) for a, b in law))
    p, q = f.Binomial(t(float(n)), t(logit)), f.Binomial(t(float(m)), t(other))
    assert float(p.entropy()) == pytest.approx(entropy, rel=1e-11)
    assert float(f.kl(p, q)) == pytest.approx(exact, rel=1e-11)
    assert n == m or float(f.kl(q, p)) == float("inf")


@pytest.mark.parametrize(("logit", "x"), [(-30.0, 10**13), (40.0, 1), (2.0, 0)])
def test_geometric(logit: float, x: int) -> None:
    with mp.workdps(60):
        p = 1 / (1 + mp.exp(-mp.mpf(logit)))
        exact = float(x * mp.log(1 - p) + mp.log(p))
        entropy = float(-mp.log(p) - (1 - p) / p * mp.log(1 - p))
    h = f.Geometric(t(logit))
    assert float(h.log_prob(t(float(x)))) == pytest.approx(exact, rel=1e-12)
    assert float(h.entropy()) == pytest.approx(entropy, rel=1e-12)


@pytest.mark.parametrize(
    ("b", "c", "away"), [(1.0, 2.0, 0.0), (0.3, 5.0, 7.0), (1.0, 1.0, 1e-7), (1.0, 1 + 2**-30, 0.0)]
)
def test_divergence_of_laplaces(b: float, c: float, away: float) -> None:
    with mp.workdps(60):
        B, C, d = mp.mpf(b), mp.mpf(c), mp.mpf(away)
        exact = float(mp.log(C / B) + (B * mp.exp(-d / B) + d) / C - 1)
    p, q = f.Laplace(t(0.0), t(b)), f.Laplace(t(away), t(c))
    assert float(f.kl(p, q)) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("degrees", [2.5, 30.0, 1e5])
def test_inverse_wishart(degrees: float) -> None:
    """Against the formula, and the entropy and the divergence of its inverse, which a bijection keeps."""
    scale, x = [[2.0, 0.5], [0.5, 1.0]], [[0.4, -0.1], [-0.1, 0.3]]
    with mp.workdps(50):
        nu, D = mp.mpf(degrees), 2
        P, X = mp.matrix(scale), mp.matrix(x)
        multi = mp.log(mp.pi) / 2 + mp.loggamma(nu / 2) + mp.loggamma((nu - 1) / 2)
        exact = (
            nu / 2 * mp.log(mp.det(P)) - nu * D / 2 * mp.log(2) - multi - (nu + D + 1) / 2 * mp.log(mp.det(X))
        )
        trace = P * X**-1
        exact = float(exact - (trace[0, 0] + trace[1, 1]) / 2)
    h = f.InverseWishart(t(degrees)[0], torch.tensor(scale, dtype=F64))
    assert float(h.log_prob(torch.tensor(x, dtype=F64))) == pytest.approx(exact, rel=1e-11)
    other = f.InverseWishart(t(4.0)[0], torch.eye(2, dtype=F64))
    mine, theirs = (f.Wishart(m.degrees, torch.linalg.inv(m.scale)) for m in (h, other))
    assert float(f.kl(h, other)) == pytest.approx(float(f.kl(mine, theirs)), rel=1e-10)
