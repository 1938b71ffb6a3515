"""Filters fed one observation at a time: the state (`state.py`), and how it steps (`plan.py`)."""

from .plan import Plan
from .state import Innovations, OnlineState

__all__ = ["Innovations", "OnlineState", "Plan"]
