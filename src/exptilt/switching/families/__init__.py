"""Switching models whose state is a conjugate exponential family: filter, smoother, learning, forecasts."""

from ..inference.results import Filtered, Smoothed
from .counts import fit_counts
from .dynamics import DiscountedDynamics, LinearDynamics
from .model import SwitchingFamily

__all__ = ["DiscountedDynamics", "LinearDynamics", "SwitchingFamily", "fit_counts"]

FamilyFiltered, FamilySmoothed = Filtered, Smoothed  # the names in older pickles
