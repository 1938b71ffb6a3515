"""Every public measure with what the laws need of it.

Random members, valid tilts, extreme members, its integral, SciPy's twin.

A measure that `exptilt.families` exports and that is missing here fails `test_registry.py`.
"""

import math
from types import SimpleNamespace

import numpy as np
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from exptilt import families as f
from exptilt.families.members.normal_gamma import MeanPrecision
from exptilt.families.members.normal_inverse_wishart import MeanCovariance
from laws.case import F64, Case, Generator, quadrature, rand, randn, spd, t, toward_another


def log_normal_density(x: Tensor) -> Tensor:
    """A bimodal density in the plane, correlated: nothing the families know."""
    a, b = x[..., 0], x[..., 1]
    return torch.logaddexp(-((a - 1) ** 2) / 2 - (b - a) ** 2, -((a + 1.5) ** 2) - (b + 0.5) ** 2 / 2)


def quartic_density(x: Tensor) -> Tensor:
    return -(x[..., 0] ** 4) / 4 + x[..., 0]


def _gaussian(g: Generator, batch: tuple[int, ...] = ()) -> f.Gaussian:
    return f.Gaussian(randn(g, *batch, 3), spd(g, *batch, size=3))


def _diagonal(g: Generator, batch: tuple[int, ...] = ()) -> f.DiagonalGaussian:
    return f.DiagonalGaussian(randn(g, *batch, 3), rand(g, *batch, 3, low=0.2, high=2))


def _bernoulli(g: Generator, batch: tuple[int, ...] = ()) -> f.BernoulliProduct:
    return f.BernoulliProduct(randn(g, *batch, 4))


def _categorical(g: Generator, batch: tuple[int, ...] = ()) -> f.Categorical:
    return f.Categorical(randn(g, *batch, 5))


def _poisson(g: Generator, batch: tuple[int, ...] = ()) -> f.Poisson:
    return f.Poisson(rand(g, *batch, 2, low=0.3, high=9))


def _exponential(g: Generator, batch: tuple[int, ...] = ()) -> f.Exponential:
    return f.Exponential(rand(g, *batch, 2, low=0.3, high=3))


def _gamma(g: Generator, batch: tuple[int, ...] = ()) -> f.Gamma:
    return f.Gamma(rand(g, *batch, 2, low=0.5, high=5), rand(g, *batch, 2, low=0.5, high=3))


def _beta(g: Generator, batch: tuple[int, ...] = ()) -> f.Beta:
    return f.Beta(rand(g, *batch, 2, low=0.6, high=5), rand(g, *batch, 2, low=0.6, high=5))


def _dirichlet(g: Generator, batch: tuple[int, ...] = ()) -> f.Dirichlet:
    return f.Dirichlet(rand(g, *batch, 4, low=0.6, high=5))


def _vmf(g: Generator, batch: tuple[int, ...] = ()) -> f.VonMisesFisher:
    return f.VonMisesFisher(randn(g, *batch, 4) * 2)


def _wishart(g: Generator, batch: tuple[int, ...] = ()) -> f.Wishart:
    return f.Wishart(rand(g, *batch, low=4, high=9), spd(g, *batch, size=2))


def _normal_gamma(g: Generator, batch: tuple[int, ...] = ()) -> f.NormalGamma:
    return f.NormalGamma(randn(g, *batch, 2), *(rand(g, *batch, 2, low=1, high=4) for _ in range(3)))


def _niw(g: Generator, batch: tuple[int, ...] = ()) -> f.NormalInverseWishart:
    return f.NormalInverseWishart(
        randn(g, *batch, 2),
        rand(g, *batch, low=1, high=4),
        rand(g, *batch, low=6, high=9),
        spd(g, *batch, size=2),
    )


def _negative_binomial(g: Generator, batch: tuple[int, ...] = ()) -> f.NegativeBinomial:
    return f.NegativeBinomial(t(3.0, 0.7).expand(*batch, 2), randn(g, *batch, 2))


def _multinomial(g: Generator, batch: tuple[int, ...] = ()) -> f.Multinomial:
    return f.Multinomial(randn(g, *batch, 4), torch.full(batch, 6.0, dtype=F64))


def _inverse_gamma(g: Generator, batch: tuple[int, ...] = ()) -> f.InverseGamma:
    return f.InverseGamma(rand(g, *batch, 2, low=0.8, high=5), rand(g, *batch, 2, low=0.5, high=3))


def _log_normal(g: Generator, batch: tuple[int, ...] = ()) -> f.LogNormal:
    return f.LogNormal(randn(g, *batch, 2), rand(g, *batch, 2, low=0.2, high=2))


def _laplace(g: Generator, batch: tuple[int, ...] = ()) -> f.Laplace:
    return f.Laplace(t(0.5, -1.0).expand(*batch, 2), rand(g, *batch, 2, low=0.3, high=3))


def _binomial(g: Generator, batch: tuple[int, ...] = ()) -> f.Binomial:
    return f.Binomial(t(9.0, 1.0).expand(*batch, 2), randn(g, *batch, 2))


def _geometric(g: Generator, batch: tuple[int, ...] = ()) -> f.Geometric:
    return f.Geometric(randn(g, *batch, 2))


def _inverse_wishart(g: Generator, batch: tuple[int, ...] = ()) -> f.InverseWishart:
    return f.InverseWishart(rand(g, *batch, low=4, high=9), spd(g, *batch, size=2))


def _empirical(g: Generator, batch: tuple[int, ...] = ()) -> f.Empirical:
    return f.Empirical(randn(g, *batch, 40, 3), randn(g, *batch, 40))


def _mixture_each(g: Generator, batch: tuple[int, ...] = ()) -> f.GaussianMixture:
    return f.GaussianMixture(randn(g, *batch, 3), randn(g, *batch, 3, 2) * 2, spd(g, *batch, 3, size=2))


def _mixture_shared(g: Generator, batch: tuple[int, ...] = ()) -> f.GaussianMixture:
    return f.GaussianMixture(randn(g, *batch, 3), randn(g, *batch, 3, 2) * 2, spd(g, *batch, 1, size=2))


def _mixture(g: Generator, batch: tuple[int, ...] = ()) -> f.Mixture:
    return f.Mixture(randn(g, *batch, 3), _gamma(g, (*batch, 3)))


def _spread_out(h: f.Measure, batch: tuple[int, ...]) -> f.Measure:
    """A member with a batch: `FromDensity` gets one by tilting."""
    return h if not batch else h.tilt(torch.zeros(*batch, h.dimension, dtype=F64))


def _student_t(g: Generator, batch: tuple[int, ...] = ()) -> f.StudentT:
    return f.StudentT(rand(g, *batch, low=3, high=9), randn(g, *batch, 3), spd(g, *batch, size=3))


def _density_line(g: Generator, batch: tuple[int, ...] = ()) -> f.Measure:
    return _spread_out(f.FromDensity.quadrature(quartic_density), batch)


def _density_plane(g: Generator, batch: tuple[int, ...] = ()) -> f.Measure:
    return _spread_out(
        f.FromDensity.quadrature(log_normal_density, lower=[-math.inf] * 2, upper=[math.inf] * 2, nodes=97),
        batch,
    )


def _density_draws(g: Generator, batch: tuple[int, ...] = ()) -> f.Measure:
    proposal = f.Gaussian(torch.zeros(2, dtype=F64), 4 * torch.eye(2, dtype=F64))
    return _spread_out(
        f.FromDensity.monte_carlo(log_normal_density, proposal, samples=2000, generator=g), batch
    )


def _sphere_integral() -> float:
    """∫ over the circle, by the trapezoidal rule in the angle."""
    h = f.VonMisesFisher(t(1.5, -2.0))
    angle = torch.arange(2000, dtype=F64) * (2 * math.pi / 2000)
    return float(h.log_prob(torch.stack([angle.cos(), angle.sin()], -1)).exp().sum() * (2 * math.pi / 2000))


def _scipy_inverse_wishart(h: f.InverseWishart) -> SimpleNamespace:
    """SciPy's density; the entropy is that of the Wishart X⁻¹ plus (D + 1) E log|X|.

    SciPy's own is off from D = 2 on (1.17.1: by 3/2 log 2 at D = 2, against the mean of its own -logpdf).
    """
    nu, scale, size = float(h.degrees), h.scale.numpy(), h.size
    log_size = np.linalg.slogdet(scale / 2)[1] - scipy.special.psi((nu - np.arange(size)) / 2).sum()
    precision = scipy.stats.wishart(nu, np.linalg.inv(scale)).entropy()
    return SimpleNamespace(
        logpdf=scipy.stats.invwishart(nu, scale).logpdf, entropy=lambda: precision + (size + 1) * log_size
    )


def _corners() -> Tensor:
    return torch.cartesian_prod(*[t(0.0, 1.0)] * 4)


CASES = [
    Case(
        f.Gaussian,
        _gaussian,
        extreme=lambda: [
            f.Gaussian(t(1e3, -1e3), torch.diag(t(1e-3, 1e6))),
            f.Gaussian(t(0.0, 0.0), torch.tensor([[1.0, 0.999999], [0.999999, 1.0]], dtype=F64)),
        ],
        integral=lambda: quadrature(
            f.Gaussian(t(0.5, -1), torch.tensor([[1.0, 0.6], [0.6, 2]], dtype=F64)),
            [-math.inf] * 2,
            [math.inf] * 2,
        ),
        scipy=lambda h: scipy.stats.multivariate_normal(h.mean_vector.numpy(), h.covariance_matrix.numpy()),
    ),
    Case(
        f.DiagonalGaussian,
        _diagonal,
        extreme=lambda: [f.DiagonalGaussian(t(1e3, -1e-6), t(1e-3, 1e6))],
        integral=lambda: quadrature(f.DiagonalGaussian(t(0.5), t(2.0)), [-math.inf], [math.inf]),
        scipy=lambda h: scipy.stats.multivariate_normal(h.mean_vector.numpy(), h.variance.diag().numpy()),
    ),
    Case(
        f.BernoulliProduct,
        _bernoulli,
        boundary=lambda h: torch.cat([t(0.0, 1, 0.3).expand(*h.batch_shape, 3), h.mean()[..., 3:]], -1),
        extreme=lambda: [f.BernoulliProduct(t(-300.0, 0, 12, 1e-8))],
        integral=lambda: float(f.BernoulliProduct(t(0.3, -2, 1, 4)).log_prob(_corners()).exp().sum()),
        scipy=lambda h: scipy.stats.bernoulli(h.mean_parameter.numpy()),
    ),
    Case(
        f.Categorical,
        _categorical,
        boundary=lambda h: t(0.5, 0.0, 0.0, 0.25, 0.25).expand(*h.batch_shape, 5),
        extreme=lambda: [f.Categorical(t(0.0, -300, -20, 3))],
        integral=lambda: float(f.Categorical(t(0.3, -2, 1, 4)).log_prob(torch.eye(4, dtype=F64)).exp().sum()),
        scipy=lambda h: scipy.stats.multinomial(1, torch.softmax(h.logit, -1).numpy()),
    ),
    Case(
        f.Poisson,
        _poisson,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        extreme=lambda: [f.Poisson(t(1e-8, 1e8)), f.Poisson(t(63.9, 64.1))],
        integral=lambda: float(
            f.Poisson(t(7.0)).log_prob(torch.arange(200.0, dtype=F64)[:, None]).exp().sum()
        ),
        scipy=lambda h: scipy.stats.poisson(h.rate.numpy()),
    ),
    Case(
        f.Exponential,
        _exponential,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=toward_another(_exponential),
        extreme=lambda: [f.Exponential(t(1e-8, 1e8))],
        integral=lambda: quadrature(f.Exponential(t(2.0)), [0.0], [math.inf]),
        scipy=lambda h: scipy.stats.expon(scale=1 / h.rate.numpy()),
    ),
    Case(
        f.Gamma,
        _gamma,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=toward_another(_gamma),
        extreme=lambda: [f.Gamma(t(1e-3, 1e6), t(1e-6, 1e6)), f.Gamma(t(0.01, 16.0), t(1.0, 1.0))],
        integral=lambda: quadrature(f.Gamma(t(0.7), t(2.0)), [0.0], [math.inf]),
        scipy=lambda h: scipy.stats.gamma(h.shape.numpy(), scale=1 / h.rate.numpy()),
    ),
    Case(
        f.Beta,
        _beta,
        boundary=lambda h: t(0.5, 0.5, 0.5, 0.5).log().expand(*h.batch_shape, 4),
        tilt=toward_another(_beta),
        extreme=lambda: [f.Beta(t(0.05, 1e4), t(0.02, 3e3))],
        integral=lambda: quadrature(f.Beta(t(0.7), t(2.0)), [0.0], [1.0]),
        scipy=lambda h: scipy.stats.beta(h.alpha.numpy(), h.beta.numpy()),
    ),
    Case(
        f.Dirichlet,
        _dirichlet,
        boundary=lambda h: torch.full((*h.batch_shape, 4), 0.25, dtype=F64).log(),
        tilt=toward_another(_dirichlet),
        extreme=lambda: [f.Dirichlet(t(0.05, 1e3, 0.3)), f.Dirichlet(t(1e4, 3e3, 8e3))],
        integral=lambda: quadrature(
            f.Dirichlet(t(0.7, 2.0)), [0.0], [1.0], lambda x: torch.cat([x, 1 - x], -1).clamp_min(1e-300)
        ),
        scipy=lambda h: scipy.stats.dirichlet(h.concentration.numpy()),
        scipy_x=lambda x: (x.numpy() / x.numpy().sum(-1, keepdims=True)).T,
    ),
    Case(
        f.VonMisesFisher,
        _vmf,
        boundary=lambda h: t(0.0, 0, -1, 0).expand(*h.batch_shape, 4),
        extreme=lambda: [
            f.VonMisesFisher(t(0.0, 0, 0)),
            f.VonMisesFisher(t(1e4, 0, 1e4)),
            f.VonMisesFisher(torch.full((512,), 3.0, dtype=F64)),
        ],
        integral=_sphere_integral,
        scipy=lambda h: scipy.stats.vonmises_fisher(
            (h.vector / h.concentration).numpy(), float(h.concentration)
        ),
    ),
    Case(
        f.Wishart,
        _wishart,
        boundary=lambda h: t(1.0, 0, 0).expand(*h.batch_shape, 3),
        tilt=toward_another(_wishart),
        extreme=lambda: [
            f.Wishart(t(1e4)[0], torch.eye(3, dtype=F64)),
            f.Wishart(t(3.0)[0], torch.diag(t(1e-2, 1, 1e2))),
        ],
        integral=lambda: quadrature(
            f.Wishart(t(3.0)[0], t(2.0)[:, None]), [0.0], [math.inf], lambda x: x.unsqueeze(-1)
        ),
        scipy=lambda h: scipy.stats.wishart(float(h.degrees), h.scale.numpy()),
        scipy_x=lambda x: x.movedim(0, -1).numpy(),
    ),
    Case(
        f.NegativeBinomial,
        _negative_binomial,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=toward_another(_negative_binomial),
        extreme=lambda: [
            f.NegativeBinomial(t(1e-3, 1e8), t(-30.0, -20)),
            f.NegativeBinomial(t(0.5, 1e4), t(18.0, 3)),
        ],
        integral=lambda: float(
            f.NegativeBinomial(t(2.5), t(0.4)).log_prob(torch.arange(300.0, dtype=F64)[:, None]).exp().sum()
        ),
        scipy=lambda h: scipy.stats.nbinom(h.failures.numpy(), torch.sigmoid(-h.logit).numpy()),
        known=lambda h: {"known": h.failures},
    ),
    Case(
        f.Multinomial,
        _multinomial,
        boundary=lambda h: t(3.0, 0.0, 1.5, 1.5).expand(*h.batch_shape, 4),
        extreme=lambda: [
            f.Multinomial(t(0.0, -300, -20, 3), t(1.0)[0]),
            f.Multinomial(t(0.0, 1, 2), t(1e6)[0]),
        ],
        integral=lambda: float(
            f.Multinomial(t(0.0, 1, 2), t(7.0)[0])
            .log_prob(torch.cartesian_prod(*[torch.arange(8.0, dtype=F64)] * 3))
            .exp()
            .sum()
        ),
        scipy=lambda h: scipy.stats.multinomial(int(h.total), torch.softmax(h.logit, -1).numpy()),
        known=lambda h: {"known": h.total},
        whole=("total",),
    ),
    Case(
        f.InverseGamma,
        _inverse_gamma,
        boundary=lambda h: t(0.5, 0.5, -0.8, math.log(0.5)).expand(*h.batch_shape, 4),
        tilt=toward_another(_inverse_gamma),
        extreme=lambda: [
            f.InverseGamma(t(0.05, 1e4), t(1e-6, 1e6)),
            f.InverseGamma(t(0.5, 16.0), t(1e3, 1.0)),
        ],
        integral=lambda: quadrature(f.InverseGamma(t(1.7), t(2.0)), [0.0], [math.inf]),
        scipy=lambda h: scipy.stats.invgamma(h.shape.numpy(), scale=h.scale.numpy()),
    ),
    Case(
        f.LogNormal,
        _log_normal,
        boundary=lambda h: t(0.5, 0.5, 0.25, 2.0).expand(*h.batch_shape, 4),
        tilt=toward_another(_log_normal),
        extreme=lambda: [f.LogNormal(t(100.0, -1e-6), t(1e-3, 1e3))],
        integral=lambda: quadrature(f.LogNormal(t(0.5), t(0.8)), [0.0], [math.inf]),
        scipy=lambda h: scipy.stats.lognorm(h.log_variance.sqrt().numpy(), scale=h.log_mean.exp().numpy()),
    ),
    Case(
        f.Laplace,
        _laplace,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=toward_another(_laplace),
        extreme=lambda: [f.Laplace(t(1e3, -1e-6), t(1e-8, 1e8))],
        integral=lambda: sum(
            quadrature(f.Laplace(t(0.5), t(2.0)), *ends)
            for ends in (([-math.inf], [0.5]), ([0.5], [math.inf]))
        ),
        scipy=lambda h: scipy.stats.laplace(h.location.numpy(), h.scale.numpy()),
        known=lambda h: {"known": h.location},
    ),
    Case(
        f.Binomial,
        _binomial,
        boundary=lambda h: t(0.0, 0.3).expand(*h.batch_shape, 2),
        extreme=lambda: [f.Binomial(t(1.0, 1e6), t(-30.0, 3.0)), f.Binomial(t(1e3, 5.0), t(-9.0, 12.0))],
        integral=lambda: float(
            f.Binomial(t(9.0), t(0.4)).log_prob(torch.arange(-1.0, 11, dtype=F64)[:, None]).exp().sum()
        ),
        scipy=lambda h: scipy.stats.binom(h.total.numpy(), torch.sigmoid(h.logit).numpy()),
        known=lambda h: {"known": h.total},
        whole=("total",),
    ),
    Case(
        f.Geometric,
        _geometric,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=toward_another(_geometric),
        extreme=lambda: [f.Geometric(t(-18.0, 30.0))],
        integral=lambda: float(
            f.Geometric(t(-1.0)).log_prob(torch.arange(200.0, dtype=F64)[:, None]).exp().sum()
        ),
        scipy=lambda h: scipy.stats.geom(torch.sigmoid(h.logit).numpy(), loc=-1),
    ),
    Case(
        f.InverseWishart,
        _inverse_wishart,
        tilt=toward_another(_inverse_wishart),
        extreme=lambda: [f.InverseWishart(t(1e4)[0], torch.diag(t(1e-2, 1, 1e2)))],
        integral=lambda: quadrature(
            f.InverseWishart(t(3.0)[0], t(2.0)[:, None]), [0.0], [math.inf], lambda x: x.unsqueeze(-1)
        ),
        scipy=_scipy_inverse_wishart,
        scipy_x=lambda x: x.movedim(0, -1).numpy(),
    ),
    Case(
        f.NormalGamma,
        _normal_gamma,
        tilt=toward_another(_normal_gamma),
        extreme=lambda: [f.NormalGamma(t(100.0), t(1e-3), t(1e3), t(1e-3))],
        integral=lambda: quadrature(
            f.NormalGamma(t(0.5), t(2.0), t(3.0), t(1.5)),
            [-math.inf, 0],
            [math.inf] * 2,
            lambda x: MeanPrecision(x[..., :1], x[..., 1:]),
        ),
    ),
    Case(
        f.NormalInverseWishart,
        _niw,
        tilt=toward_another(_niw),
        extreme=lambda: [
            f.NormalInverseWishart(t(10.0, -10), t(1e-2)[0], t(1e3)[0], torch.diag(t(1e-2, 1e2)))
        ],
        integral=lambda: quadrature(
            f.NormalInverseWishart(t(0.5), t(2.0)[0], t(5.0)[0], t(3.0)[:, None]),
            [-math.inf, 0],
            [math.inf] * 2,
            lambda x: MeanCovariance(x[..., :1], x[..., 1:, None]),
        ),
    ),
    Case(
        f.Empirical,
        _empirical,
        boundary=lambda h: h.points.gather(
            -2, h.points[..., :1].argmax(-2, keepdim=True).expand(*h.batch_shape, 1, 3)
        ).squeeze(-2),
        extreme=lambda: [
            f.Empirical(t(0.0, 1e-4, 1e4)[:, None]),
            f.Empirical(torch.eye(3, dtype=F64), t(0.0, -500, -math.inf)),
        ],
        integral=lambda: float(
            f.Empirical(t(0.0, 1, 3)[:, None], t(0.0, 2, 1)).log_prob(t(0.0, 1, 3)[:, None]).exp().sum()
        ),
        tolerance=1e-7,
    ),
    Case(
        f.GaussianMixture,
        _mixture_each,
        extreme=lambda: [f.GaussianMixture(t(0.0, -400), t(1e3, -1e3)[:, None], t(1e-2, 1e2)[:, None, None])],
        integral=lambda: quadrature(
            f.GaussianMixture(t(0.0, 1), t(-1.0, 2)[:, None], t(0.5, 1.5)[:, None, None]),
            [-math.inf],
            [math.inf],
        ),
        tolerance=1e-7,
    ),
    Case(f.GaussianMixture, _mixture_shared, name="GaussianMixture-shared", tolerance=1e-7),
    Case(
        f.Mixture,
        _mixture,
        boundary=lambda h: t(0.0, 1.5).expand(*h.batch_shape, 2),
        tilt=lambda h, g: -rand(g, *h.batch_shape, h.dimension, low=-0.2, high=1),
        integral=lambda: quadrature(
            f.Mixture(t(0.0, 1), f.Gamma(t(1.0, 3)[:, None], t(1.0, 2)[:, None])), [0.0], [math.inf]
        ),
        tolerance=1e-7,
    ),
    Case(
        f.FromDensity,
        _density_line,
        integral=lambda: quadrature(_density_line(Generator()), [-math.inf], [math.inf]),
        tolerance=1e-7,
    ),
    Case(f.FromDensity, _density_plane, name="FromDensity-plane", tolerance=1e-7),
    Case(f.FromDensity, _density_draws, name="FromDensity-draws", tolerance=1e-7),
]

LAWS = [  # what has a density and draws, but need not be a measure that can be tilted
    *CASES,
    Case(
        f.StudentT,
        _student_t,
        integral=lambda: quadrature(f.StudentT(t(3.0)[0], t(0.5), t(2.0)[:, None]), [-math.inf], [math.inf]),
        scipy=lambda h: scipy.stats.multivariate_t(h.location.numpy(), h.scale.numpy(), float(h.degrees)),
    ),
]
FAMILIES = [case for case in CASES if issubclass(case.cls, f.ExponentialFamily)]
EXTREMES = [(case.name, member, case) for case in CASES for member in case.extreme()]
