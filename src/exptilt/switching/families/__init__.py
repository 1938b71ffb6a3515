"""Switching models whose state is a conjugate exponential family: filter, smoother, learning, forecasts."""

from .counts import fit_counts
from .dynamics import Discounted, Pushed, discounted, pushed
from .learning import FamilyFit
from .model import FamilyFiltered, FamilySmoothed, SwitchingFamily

__all__ = [
    "Discounted",
    "FamilyFiltered",
    "FamilyFit",
    "FamilySmoothed",
    "Pushed",
    "SwitchingFamily",
    "discounted",
    "fit_counts",
    "pushed",
]
