"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria."""

from exptilt._support.solution import Solution, Status
from exptilt.dynamics.equilibrium import Equilibrium
from exptilt.dynamics.fixed_point import fixed_point
from exptilt.dynamics.stability import MonotoneOperator, SpectralRadius, monotone_operator, spectral_radius

__all__ = ["Equilibrium", "MonotoneOperator", "Solution", "SpectralRadius", "Status", "fixed_point", "monotone_operator", "spectral_radius"]
