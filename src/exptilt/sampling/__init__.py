"""Sampling joint exponential families: exact Gibbs sweeps, and sequential Monte Carlo with its evidence."""

from exptilt.sampling.gibbs import LinkChain, gibbs, link_chain
from exptilt.sampling.joint import Joint
from exptilt.sampling.resampling import effective_size, systematic
from exptilt.sampling.smc import Population, smc

__all__ = ["Joint", "LinkChain", "Population", "effective_size", "gibbs", "link_chain", "smc", "systematic"]
