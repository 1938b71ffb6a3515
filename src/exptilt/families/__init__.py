"""Measures and exponential families: dual maps, divergences, projections, maximum entropy.

`measure.py` has the base class of all measures, `family.py` that of families with a finite statistic;
`members/` has one family per file. `inverse_mean.py` inverts the mean map, `numerics/` has the special
functions.
"""

import sys

from exptilt._support.former import former_names
from exptilt._support.solution import Solution, Status
from exptilt.families.divergence import kl
from exptilt.families.family import ExponentialFamily
from exptilt.families.maximum_entropy import maximum_entropy
from exptilt.families.measure import Measure
from exptilt.families.members.bernoulli import BernoulliProduct
from exptilt.families.members.beta import Beta
from exptilt.families.members.binomial import Binomial
from exptilt.families.members.categorical import Categorical
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.members.dirichlet import Dirichlet
from exptilt.families.members.empirical import Empirical
from exptilt.families.members.exponential import Exponential
from exptilt.families.members.from_density import FromDensity
from exptilt.families.members.gamma import Gamma
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.gaussian_mixture import GaussianMixture
from exptilt.families.members.geometric import Geometric
from exptilt.families.members.inverse_gamma import InverseGamma
from exptilt.families.members.inverse_wishart import InverseWishart
from exptilt.families.members.laplace import Laplace
from exptilt.families.members.log_normal import LogNormal
from exptilt.families.members.mixture import Mixture
from exptilt.families.members.multinomial import Multinomial
from exptilt.families.members.negative_binomial import NegativeBinomial
from exptilt.families.members.normal_gamma import NormalGamma
from exptilt.families.members.normal_inverse_wishart import NormalInverseWishart
from exptilt.families.members.poisson import Poisson
from exptilt.families.members.student_t import StudentT
from exptilt.families.members.von_mises_fisher import VonMisesFisher
from exptilt.families.members.wishart import Wishart
from exptilt.families.mixture_fit import fit_mixture
from exptilt.families.projection import project
from exptilt.families.relations import log_marginal_likelihood, posterior, predictive
from exptilt.families.theory.link import fit_linear_link

# Pickles of earlier releases refer to a class by its old module, such as exptilt.families.gamma.
for _name in [name for name in sys.modules if name.startswith(f"{__name__}.members.")]:
    sys.modules[_name.replace(".members.", ".")] = sys.modules[_name]
sys.modules[f"{__name__}.predictive"] = sys.modules[f"{__name__}.relations"]

__all__ = [
    "BernoulliProduct",
    "Beta",
    "Binomial",
    "Categorical",
    "DiagonalGaussian",
    "Dirichlet",
    "Empirical",
    "Exponential",
    "ExponentialFamily",
    "FromDensity",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Geometric",
    "InverseGamma",
    "InverseWishart",
    "Laplace",
    "LogNormal",
    "Measure",
    "Mixture",
    "Multinomial",
    "NegativeBinomial",
    "NormalGamma",
    "NormalInverseWishart",
    "Poisson",
    "Solution",
    "Status",
    "StudentT",
    "VonMisesFisher",
    "Wishart",
    "fit_linear_link",
    "fit_mixture",
    "kl",
    "log_marginal_likelihood",
    "maximum_entropy",
    "posterior",
    "predictive",
    "project",
]

__getattr__ = former_names(__name__)
