"""Filters fed one observation at a time: what is known (`state.py`), and how to step (`plan.py`)."""

from .plan import Plan
from .state import Innovations, OnlineState

__all__ = ["Innovations", "OnlineState", "Plan"]
