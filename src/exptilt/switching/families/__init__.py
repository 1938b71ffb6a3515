"""Switching models whose state is a conjugate exponential family: filter, smoother, learning, forecasts."""

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
    "pushed",
]
