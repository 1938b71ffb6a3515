"""Measures and exponential families: dual maps, divergences, projections, maximum entropy.

One family a file. `measure.py` is the idea, `family.py` the families with a finite statistic, `duality.py` the inverse of the mean map.
"""

from exptilt._support.linalg import pack, repaired, unpack
from exptilt._support.solution import Solution, Status
from exptilt.families.bernoulli import BernoulliProduct
from exptilt.families.beta import Beta
from exptilt.families.categorical import Categorical
from exptilt.families.conjugacy import posterior
from exptilt.families.diagonal_gaussian import DiagonalGaussian
from exptilt.families.dirichlet import Dirichlet
from exptilt.families.divergence import kl
from exptilt.families.empirical import Empirical
from exptilt.families.estimate import Estimate, Kind
from exptilt.families.exponential import Exponential
from exptilt.families.family import ExponentialFamily
from exptilt.families.from_density import FromDensity
from exptilt.families.gamma import Gamma
from exptilt.families.gaussian import Gaussian
from exptilt.families.gaussian_mixture import GaussianMixture
from exptilt.families.maximum_entropy import MaximumEntropy, maximum_entropy
from exptilt.families.measure import Measure
from exptilt.families.mixture import Mixture
from exptilt.families.normal_gamma import MeanPrecision, NormalGamma
from exptilt.families.normal_inverse_wishart import MeanCovariance, NormalInverseWishart
from exptilt.families.poisson import Poisson
from exptilt.families.projection import expected_statistic, project
from exptilt.families.von_mises_fisher import VonMisesFisher
from exptilt.families.wishart import Wishart

__all__ = [
    "BernoulliProduct",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Dirichlet",
    "Empirical",
    "Estimate",
    "Exponential",
    "ExponentialFamily",
    "FromDensity",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Kind",
    "MaximumEntropy",
    "MeanCovariance",
    "MeanPrecision",
    "Measure",
    "Mixture",
    "NormalGamma",
    "NormalInverseWishart",
    "Poisson",
    "Solution",
    "Status",
    "VonMisesFisher",
    "Wishart",
    "expected_statistic",
    "kl",
    "maximum_entropy",
    "pack",
    "posterior",
    "project",
    "repaired",
    "unpack",
]
