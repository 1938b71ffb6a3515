"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria."""

from exptilt._support.solution import Solution, Status
from exptilt.dynamics.fixed_point import fixed_point

__all__ = ["Solution", "Status", "fixed_point"]
