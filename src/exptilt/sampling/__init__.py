"""Sampling joint exponential families: exact Gibbs sweeps, and sequential Monte Carlo with its evidence."""

from exptilt._support.former import former_names
from exptilt.sampling.gibbs import gibbs
from exptilt.sampling.joint import Joint
from exptilt.sampling.smc import smc

__all__ = ["Joint", "gibbs", "smc"]

__getattr__ = former_names(__name__)
