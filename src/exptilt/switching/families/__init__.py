"""Switching models whose state is a conjugate exponential family: filter, smoother, learning, forecasts."""

from .counts import fit_counts
from .dynamics import DiscountedDynamics, LinearDynamics
from .model import FamilyFiltered, FamilySmoothed, SwitchingFamily

__all__ = [
    "DiscountedDynamics",
    "FamilyFiltered",
    "FamilySmoothed",
    "LinearDynamics",
    "SwitchingFamily",
    "fit_counts",
]
