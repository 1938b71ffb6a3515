"""Curvature of language models: Hessian, Gauss–Newton and Fisher matrices as linear operators."""

from exptilt.curvature.influence import influence
from exptilt.curvature.laplace import LaplacePosterior
from exptilt.curvature.operator import Curvature

__all__ = ["Curvature", "LaplacePosterior", "influence"]
