"""Attention: the mean of the values under the tilted measure of the keys, and its uncertainty."""

from exptilt.attention.module import MultiheadAttention
from exptilt.attention.moments import Moments
from exptilt.attention.propagate import propagate
from exptilt.tilting import attend

__all__ = ["Moments", "MultiheadAttention", "attend", "propagate"]
