"""Bad input to families: members, tilts, duals, projections, entropies."""

import torch

from exptilt import families as f
from exptilt._support.linalg import pack, unpack


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bad_covariances() -> torch.Tensor:
    matrices = torch.eye(2).repeat(2, 3, 1, 1)
    matrices[1, 2] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    return matrices


ROWS = [
    (
        lambda: f.Gaussian(torch.zeros(2, 3, 2), bad_covariances()),
        "covariance_matrix",
        r"Gaussian: covariance_matrix\[1, 2\] is not positive definite: its smallest eigenvalue is -1",
    ),
    (
        lambda: f.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.1, 1.0]])),
        "covariance_matrix",
        r"Gaussian: covariance_matrix is not symmetric: entries differ by up to 0.4",
    ),
    (
        lambda: f.Gaussian(torch.zeros(2), torch.full((2, 2), torch.nan)),
        "covariance_matrix",
        r"Gaussian: covariance_matrix holds NaN",
    ),
    (
        lambda: f.Gaussian(torch.zeros(3), torch.eye(2)),
        "mean_vector",
        r"mean_vector must be \(..., D\).*got mean_vector \(3,\), covariance_matrix \(2, 2\)",
    ),
    (
        lambda: f.Gaussian(torch.zeros(2, dtype=torch.float64), torch.eye(2)),
        "mean_vector",
        r"Pass the same dtype and device",
    ),
    (
        lambda: f.Gaussian(torch.zeros(2, dtype=torch.int64), torch.eye(2)),
        "mean_vector",
        r"must be a tensor of float32, float64; got torch.int64",
    ),
    (lambda: f.Gaussian([0.0], torch.eye(1)), "mean_vector", r"floating-point tensor; got list"),
    (lambda: f.Gaussian(torch.zeros(4, 2), torch.eye(2).repeat(3, 1, 1)), "mean_vector", r"do not broadcast"),
    (
        lambda: f.Gaussian(torch.tensor([0.0, torch.inf]), torch.eye(2)),
        "mean_vector",
        r"mean_vector\[1\] must be finite; got inf",
    ),
    (
        lambda: f.Poisson(torch.tensor([[1.0], [-1.0]])),
        "rate",
        r"rate\[1, 0\] must be positive and finite; got -1",
    ),
    (lambda: f.Poisson(torch.tensor([1.0, 0.0])), "rate", r"rate\[1\] must be positive and finite; got 0"),
    (
        lambda: f.Poisson(torch.tensor([1.0, torch.nan])),
        "rate",
        r"rate\[1\] must be positive and finite; got nan",
    ),
    (
        lambda: f.Gamma(torch.ones(2), torch.ones(3)),
        "shape",
        r"shape must be \(..., D\) and rate must be \(..., D\); got shape \(2,\), rate \(3,\)",
    ),
    (lambda: f.Dirichlet(torch.ones(1)), "concentration", r"at least 2 entries"),
    (lambda: f.VonMisesFisher(torch.ones(1)), "vector", r"at least 2 entries"),
    (
        lambda: f.Wishart(torch.tensor([3.0, 0.5]), torch.eye(2)),
        "degrees",
        r"degrees\[1\] must be finite and above D − 1 = 1; got 0.5",
    ),
    (
        lambda: f.Empirical(torch.zeros(3, 2), torch.zeros(4)),
        "points",
        r"same N; got points \(3, 2\), log_weight \(4,\)",
    ),
    (
        lambda: f.Empirical(torch.zeros(2, 3, 2), torch.tensor([[0.0] * 3, [-torch.inf] * 3])),
        "log_weight",
        r"log_weight\[1\] is all −inf",
    ),
    (
        lambda: f.Empirical(torch.zeros(0, 2)),
        "points",
        r"points has shape \(0, 2\). Pass .* none of the last 2 empty",
    ),
    (lambda: f.Empirical(torch.zeros(2)), "points", r"points has shape \(2,\). Pass \(..., N, D\)"),
    (
        lambda: f.Empirical(torch.zeros(2, 1), torch.tensor([0.0, torch.nan])),
        "log_weight",
        r"log_weight\[1\] must be a number",
    ),
    (
        lambda: f.GaussianMixture(torch.full((2,), -torch.inf), torch.zeros(2, 1), torch.eye(1)),
        "log_weight",
        r"all −inf",
    ),
    (
        lambda: f.GaussianMixture(torch.zeros(3), torch.zeros(2, 1), torch.eye(1)),
        "covariance_matrix",
        r"got log_weight \(3,\), mean_vector \(2, 1\)",
    ),
    (
        lambda: f.Mixture(torch.zeros(3), f.Poisson(torch.ones(2, 1))),
        "log_weight",
        r"log_weight must be \(..., K\)",
    ),
    (
        lambda: f.Mixture(torch.zeros(3), f.Empirical(torch.ones(3, 2, 1))),
        "family",
        r"must be an ExponentialFamily",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: x[..., 0], lower=[0.0] * 3, upper=[1.0] * 3),
        "lower",
        r"use monte_carlo",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: x),
        "log_density",
        r"log_density must map \(N, D\) to \(N,\)",
    ),
    (
        lambda: f.Poisson(torch.ones(2)).mean(torch.ones(3)),
        "eta",
        r"eta must be \(..., 2\) for this Poisson; got shape \(3,\)",
    ),
    (
        lambda: f.Poisson(torch.ones(2)).tilt(torch.ones(2, dtype=torch.float64)),
        "eta",
        r"eta is torch.float64, this Poisson is torch.float32",
    ),
    (lambda: f.Poisson(torch.ones(2)).natural(1.0), "mean", r"mean must be a tensor \(..., 2\); got float"),
    (
        lambda: f.Exponential(torch.ones(2)).tilt(torch.tensor([[0.0, 0.0], [0.0, 1.5]])),
        "eta",
        r"Exponential: eta\[1, 1\] must be below the rate; got 1.5",
    ),
    (
        lambda: f.Gamma(torch.tensor([2.0]), torch.ones(1)).mean(torch.tensor([[0.5], [3.0]])),
        "eta",
        r"Gamma: eta\[1\] must be inside the natural domain, where the integral converges; got \[3.0\]",
    ),
    (
        lambda: f.Exponential(torch.ones(1)).covariance(torch.tensor([1.0])),
        "eta",
        r"Exponential: eta must be inside the nat.*got \[1.0\]",
    ),
    (
        lambda: f.Beta(torch.ones(1), torch.ones(1)).mean(torch.tensor([0.0, -1.0])),
        "eta",
        r"Beta: eta must be inside the natural domain",
    ),
    (
        lambda: f.Dirichlet(torch.ones(2)).covariance(torch.tensor([0.0, -1.0])),
        "eta",
        r"Dirichlet: eta must be inside",
    ),
    (
        lambda: f.Wishart(torch.tensor(3.0), torch.eye(1)).mean(torch.tensor([0.5])),
        "eta",
        r"Wishart: eta must be inside",
    ),
    (
        lambda: f.Gamma(torch.ones(1), torch.ones(1)).bregman(torch.tensor([0.5]), torch.tensor([3.0])),
        "b",
        r"Gamma: b must be inside",
    ),
    (
        lambda: f.Mixture(torch.zeros(2), f.Gamma(torch.ones(2, 1), torch.tensor([[1.0], [4.0]]))).mean(
            torch.tensor([[0.5], [2.0]])
        ),
        "eta",
        r"Mixture: eta\[1\] must be inside",
    ),
    (lambda: f.Gaussian.from_natural(torch.tensor([0.0, 1.0])), "theta", r"inside the natural domain"),
    (lambda: f.Poisson(torch.ones(2)).log_prob(torch.ones(3)), "x", r"x must be \(..., 2\); got \(3,\)"),
    (
        lambda: f.Wishart(torch.tensor(3.0), torch.eye(2)).log_prob(torch.ones(3)),
        "x",
        r"x must be \(..., 2, 2\); got \(3,\)",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), center=(1.0, 2.0)),
        "center",
        r"one center and one positive scale",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), scale=(-1.0,)),
        "scale",
        r"one positive scale.*got.*\(-1.0,\)",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2), nodes=1),
        "nodes",
        r"nodes is 1. Pass an integer ≥ 3",
    ),
    (
        lambda: f.FromDensity.quadrature(lambda x: x[..., 0].log()),
        "log_density",
        r"log_density must be a number below \+inf",
    ),
    (
        lambda: f.FromDensity.monte_carlo(lambda x: x[..., 0], f.Poisson(torch.ones(2, 1))),
        "proposal",
        r"without batch; got batch \(2,\)",
    ),
    (
        lambda: f.FromDensity.monte_carlo(lambda x: x[..., 0], f.Poisson(torch.ones(1)), samples=1),
        "samples",
        r"samples is 1. Pass an integer ≥ 2",
    ),
    (
        lambda: f.Gamma.from_natural(torch.ones(3)),
        "theta",
        r"theta must be \(..., K\) with K one of 2, 4, 6, ...; got shape \(3,\)",
    ),
    (
        lambda: f.Gaussian.from_mean(torch.ones(3)),
        "mean",
        r"mean must be \(..., K\) with K one of 2, 5, 9, ...; got shape \(3,\)",
    ),
    (lambda: f.Wishart.from_mean(torch.ones(3)), "mean", r"with K one of 2, 4, 7, ..."),
    (lambda: f.NormalInverseWishart.from_mean(torch.ones(5)), "mean", r"with K one of 4, 7, 11, ..."),
    (lambda: f.NormalGamma.from_mean(torch.ones(5)), "mean", r"with K one of 4, 8, 12, ..."),
    (lambda: f.Dirichlet.from_mean(torch.ones(1)), "mean", r"with K one of 2, 3, 4, ..."),
    (
        lambda: f.Poisson.from_mean(torch.ones(2, dtype=torch.int64)),
        "mean",
        r"floating-point tensor \(..., K\); got torch.int64",
    ),
    (
        lambda: f.Poisson.from_mean(torch.tensor([1.0, torch.nan])),
        "mean",
        r"mean\[1\] must be finite; got nan",
    ),
    (
        lambda: f.Empirical(torch.ones(3, 1)).natural(torch.tensor([torch.inf])),
        "mean",
        r"mean\[0\] must be finite; got inf",
    ),
    (
        lambda: f.Poisson(torch.ones(2)).update(torch.ones(3)),
        "statistic",
        r"statistic must be \(..., 2\) for this Poisson; got shape \(3,\)",
    ),
    (
        lambda: f.Poisson(torch.ones(2)).sample(3.0),
        "shape",
        r"shape must be a number of draws such as 100, or a sequence of sizes .*; got 3.0",
    ),
    (lambda: f.Poisson(torch.ones(2)).sample((-1,)), "shape", r"sequence of sizes.*got \(-1,\)"),
    (
        lambda: f.GaussianMixture(torch.zeros(1), torch.zeros(1, 1), torch.eye(1)).entropy(1),
        "samples",
        r"samples must be 0 .* at least 2; got 1",
    ),
    (lambda: f.project(3, f.Gaussian), "measure", r"measure must be a measure.*got int"),
    (
        lambda: f.maximum_entropy(torch.ones(3, 0)),
        "A",
        r"A has shape \(3, 0\). Pass \(..., outcomes, constraints\), none of the last 2 empty",
    ),
    (
        lambda: f.posterior(f.Beta(torch.ones(1), torch.ones(1)), f.BernoulliProduct, torch.ones(3, 2)),
        "x",
        r"x is \(3, 2\); its last axis",
    ),
    (
        lambda: f.posterior(f.Beta(torch.ones(1), torch.ones(1)), f.BernoulliProduct, torch.ones(3)),
        "x",
        r"x must be .*n observations",
    ),
    (
        lambda: f.posterior(
            f.Beta(torch.ones(1), torch.ones(1)), f.BernoulliProduct, torch.ones(3, 1), weight=torch.ones(4)
        ),
        "weight",
        r"weight must be \(..., 3\).*got \(4,\)",
    ),
    (lambda: unpack(torch.ones(4)), "vector", r"vector has 4 entries. Pass D\(D\+1\)/2"),
    (
        lambda: f.Gamma(t(2.0, 2.0), t(1.0, 1.0)).tilt(t(0.0, 3.0)),
        "eta",
        r"Gamma: eta\[1\] must be below the rate; got 3.0",
    ),
    (
        lambda: f.Beta(t(1.0), t(1.0)).tilt(t(0.0, -2.0)),
        "eta",
        r"Beta: eta must be inside the natural domain.*got \[0.0, -2.0\]",
    ),
    (
        lambda: f.Beta(torch.ones(3, 1), torch.ones(3, 1)).tilt(-2 * torch.ones(2)),
        "eta",
        r"Beta: eta\[0\] must be inside.*got \[-2.0, -2.0\]",
    ),
    (
        lambda: f.Gamma.log_partition(t(-1.0, -2.0, 1.0)),
        "theta",
        r"Gamma: theta must be \(..., K\) with K one of 2, 4, 6",
    ),
    (
        lambda: f.Wishart.statistic(torch.ones(2, 3)),
        "x",
        r"Wishart.statistic: x must be \(..., D, D\); got \(2, 3\)",
    ),
    (lambda: f.NormalGamma.statistic(torch.ones(3)), "x", r"x must be \(..., D\) and \(..., D\); got \(3,\)"),
    (lambda: f.Gamma.statistic(2.0), "x", r"x must be \(..., D\); got float"),
    (
        lambda: f.Poisson(t(1.0)).natural(t(1.0), tolerance=-1.0),
        "tolerance",
        r"tolerance must be at least 0 and max_steps at least 1; got -1.0 and",
    ),
    (
        lambda: f.Empirical(torch.eye(2)).natural(torch.ones(2) / 2, max_steps=0),
        "tolerance",
        r"max_steps at least 1; got None and 0",
    ),
    (
        lambda: f.Gaussian(torch.zeros(2).bfloat16(), torch.eye(2).bfloat16()),
        "mean_vector",
        r"mean_vector must be a tensor of float32, float64; got torch.bfloat16",
    ),
    (
        lambda: f.Gaussian(torch.zeros(0), torch.eye(0)),
        "mean_vector",
        r"mean_vector has shape \(0,\). Pass .* none of the last 1 empty",
    ),
    (
        lambda: f.NegativeBinomial.from_mean(t(1.0)),
        "known",
        "the failures must be given; pass known=failures",
    ),
    (lambda: f.Poisson.from_mean(t(1.0), known=t(2.0)), "known", "no parameter is known here"),
    (lambda: f.fit_linear_link(torch.ones(3, 2)), "samples", "samples is a Tensor"),
    (lambda: f.fit_linear_link(f.Poisson(torch.ones(4, 2))), "samples", "one natural parameter"),
    (lambda: f.fit_linear_link((torch.ones(3, 2), torch.ones(3, 3))), "samples", "at least two"),
    (
        lambda: f.fit_linear_link((torch.ones(3, 2), torch.full((3, 2), torch.nan))),
        "samples",
        r"samples\[1\]\[0, 0\] must be finite",
    ),
    (lambda: f.Poisson.stack([]), "measures", "in one dtype; got nothing"),
    (
        lambda: f.Poisson.stack([f.Poisson(torch.ones(3, 2)), f.Exponential(torch.ones(3, 2))]),
        "measures",
        "one or more of Poisson, in one dtype; got Exponential torch.float32, Poisson torch.float32",
    ),
    (
        lambda: f.Poisson.stack([f.Poisson(torch.ones(3, 2)), f.Poisson(torch.ones(3, 4))]),
        "measures",
        r"measures have batches \(3,\), \(3,\), dim is 0",
    ),
    (lambda: f.Poisson.stack([f.Poisson(torch.ones(3, 2))] * 2, dim=3), "dim", "dim is 3"),
    (
        lambda: f.Binomial(t(1.5), t(0.0)),
        "total",
        r"total\[0\] must be a whole number of at least 1; got 1.5",
    ),
    (lambda: f.Categorical(t(0.0, torch.nan)), "logit", r"logit\[1\] must be finite; got nan"),
    (
        lambda: f.DiagonalGaussian(t(0.0, 0.0), t(1.0, -1.0)),
        "variance",
        r"variance\[1\] must be positive and finite; got -1",
    ),
    (lambda: f.Geometric(t(torch.inf)), "logit", r"logit\[0\] must be finite; got inf"),
    (lambda: f.InverseGamma(t(0.0), t(1.0)), "shape", r"shape\[0\] must be positive"),
    (
        lambda: f.InverseWishart(torch.tensor(0.5), torch.eye(2)),
        "degrees",
        "degrees must be finite and above D − 1 = 1; got 0.5",
    ),
    (lambda: f.Laplace(t(0.0), t(0.0)), "scale", r"scale\[0\] must be positive"),
    (lambda: f.LogNormal(t(0.0), t(-1.0)), "log_variance", r"log_variance\[0\] must be positive"),
    (
        lambda: f.Multinomial(torch.zeros(3), torch.tensor(1.5)),
        "total",
        "total must be a whole number of at least 1; got 1.5",
    ),
    (lambda: f.StudentT(t(-1.0), t(0.0), t(1.0)[None]), "degrees", r"degrees\[0\] must be positive"),
    (lambda: f.kl(3, f.Poisson(t(1.0))), "p", "p must be a measure; got int"),
    (lambda: f.kl(f.Poisson(t(1.0)), f.Poisson(t(1.0, 1.0))), "q", "p and q live in different spaces"),
    (
        lambda: f.fit_mixture(torch.ones(3, 1), f.Poisson, 0),
        "components",
        "components is 0. Pass an integer ≥ 1",
    ),
    (
        lambda: f.log_marginal_likelihood(
            f.Beta(t(1.0), t(1.0)), f.BernoulliProduct, torch.ones(3, 2).double()
        ),
        "x",
        r"x is \(3, 2\); its last axis",
    ),
    (
        lambda: f.predictive(f.Beta(t(1.0), t(1.0)), f.Poisson),
        "prior",
        "Beta is not conjugate to likelihood Poisson",
    ),
    (lambda: pack(torch.ones(2, 3)), "matrix", r"matrix has shape \(2, 3\). Pass \(..., D, D\)"),
]
