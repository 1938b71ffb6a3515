"""Student's t against SciPy and mpmath; its fit against the gradient of the likelihood."""

import math
import pickle

import mpmath as mp
import numpy as np
import pytest
import scipy.stats
import torch

from exptilt import families as f

F64 = torch.float64
SCALE = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("degrees", [0.3, 1.0, 2.5, 40.0])
def test_scipy(degrees: float) -> None:
    h = f.StudentT(t(degrees)[0], t(1.0, -2.0), SCALE)
    twin = scipy.stats.multivariate_t([1, -2], SCALE.numpy(), df=degrees)
    x = h.sample(50, generator=generator())
    np.testing.assert_allclose(h.log_prob(x).numpy(), twin.logpdf(x.numpy()), rtol=1e-11)
    assert float(h.entropy()) == pytest.approx(float(twin.entropy()), rel=1e-11)


@pytest.mark.parametrize("degrees", [1e-3, 7.0, 1e6, 1e12])
def test_density_and_entropy_to_all_digits(degrees: float) -> None:
    with mp.workdps(50):
        a, c = mp.mpf(degrees) / 2, mp.mpf(1)
        peak = mp.loggamma(a + c) - mp.loggamma(a) - c * mp.log(2 * a * mp.pi)
        density = peak - (a + c) * mp.log1p(mp.mpf(13) / (2 * a))
        entropy = (a + c) * (mp.digamma(a + c) - mp.digamma(a)) - peak
        exact = float(density), float(entropy)
    h = f.StudentT(t(degrees)[0], t(0.0, 0.0), torch.eye(2, dtype=F64))
    assert float(h.log_prob(t(2.0, 3.0))) == pytest.approx(exact[0], rel=1e-13)
    assert float(h.entropy()) == pytest.approx(exact[1], rel=1e-13)


def test_moments() -> None:
    h = f.StudentT(t(0.8, 1.5, 9.0), t(1.0, -2.0), SCALE)
    torch.testing.assert_close(h.event_mean[:, 0], t(math.nan, 1.0, 1.0), equal_nan=True)
    torch.testing.assert_close(h.event_variance[:, 0], t(math.nan, math.inf, 2 * 9 / 7), equal_nan=True)
    x = h[2].sample(40_000, generator=generator())
    np.testing.assert_allclose(np.cov(x.T.numpy()), h[2].covariance().numpy(), atol=0.15)
    nearest = f.project(h[2], f.Gaussian)
    torch.testing.assert_close(nearest.mean_vector, t(1.0, -2.0))
    torch.testing.assert_close(nearest.covariance_matrix, SCALE * 9 / 7)
    with pytest.raises(ValueError, match=r"variance of this StudentT\[0\] must be finite; got inf"):
        f.project(h[1], f.Gaussian)
    assert len(h) == 3
    assert f.StudentT.stack(list(h)).degrees.tolist() == h.degrees.tolist()


def test_draws_carry_derivatives() -> None:
    degrees = t(3.0)[0].requires_grad_()
    (slope,) = torch.autograd.grad(
        f.StudentT(degrees, t(0.0), t(1.0)[:, None]).sample(20_000, generator=generator()).abs().mean(),
        degrees,
    )
    # E|x| = 2 √ν / ((ν − 1) B(ν/2, ½)), differentiated by mpmath
    exact = mp.diff(lambda v: 2 * mp.sqrt(v) / ((v - 1) * mp.beta(v / 2, 0.5)), 3)
    assert float(slope) == pytest.approx(float(exact), rel=0.1)


def test_refused() -> None:
    for arguments, words in (
        ((-1.0, 0.0, 1.0), "degrees"),
        ((1.0, t(0.0, 1.0), t(1.0)[:, None]), r"scale \(..., D, D\)"),
        ((1.0, 0.0, -1.0), "scale"),
    ):
        with pytest.raises(ValueError, match=words):
            f.StudentT(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"StudentT: x must be \(..., 2\); got \(3,\)"):
        f.StudentT(t(3.0)[0], t(0.0, 0.0), SCALE).log_prob(t(1.0, 2.0, 3.0))


@pytest.mark.parametrize("degrees", [0.7, 1.5, 2.5, 4.5, 30.0])
def test_laws_by_quadrature(degrees: float) -> None:
    """Mass 1, entropy −E log p, moments, and a distribution function whose slope is the density."""
    law = f.StudentT(*(torch.tensor(x, dtype=F64) for x in (degrees, 1.5, 0.7)))
    u = torch.linspace(-4.5, 4.5, 4001, dtype=F64)  # x = sinh sinh u falls off in u whatever the tail
    x = 1.5 + torch.sinh(torch.sinh(u))
    step = (u[1] - u[0]) * torch.cosh(u) * torch.cosh(torch.sinh(u))
    log_p = law.log_prob(x.unsqueeze(-1))
    mass = log_p.exp() * step
    assert float(mass.sum()) == pytest.approx(1, abs=1e-10)
    assert float(-(mass * log_p).sum()) == pytest.approx(float(law.entropy()), rel=1e-8)
    mean, variance = float(law.event_mean), float(law.event_variance)
    if degrees > 1:
        assert float((mass * x).sum()) == pytest.approx(mean, rel=1e-8)
    if degrees > 3:
        assert float((mass * (x - mean) ** 2).sum()) == pytest.approx(variance, rel=1e-8)
    assert (degrees > 1) == (variance == variance)
    inner = x[(x - 1.5).abs() < 5].unsqueeze(-1)
    slope = (law.cdf(inner + 1e-5) - law.cdf(inner - 1e-5)) / 2e-5
    torch.testing.assert_close(slope[..., 0], law.log_prob(inner).exp(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(law.icdf(law.cdf(inner)), inner, rtol=1e-8, atol=1e-8)


def test_batches_dtypes_and_transforms_as_for_measures() -> None:
    laws = f.StudentT(torch.tensor([3.0, 5.0]), torch.zeros(2, 3), torch.eye(3))
    assert laws.to(F64).dtype == F64
    assert f.StudentT.stack([laws[0], laws[1]]).batch_shape == (2,)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    each = torch.func.vmap(lambda nu, y: f.StudentT(nu, torch.zeros(3), torch.eye(3)).log_prob(y))
    torch.testing.assert_close(each(laws.degrees, x), laws.log_prob(x))
    copy = pickle.loads(pickle.dumps(laws))
    assert torch.equal(copy.log_prob(x), laws.log_prob(x))
