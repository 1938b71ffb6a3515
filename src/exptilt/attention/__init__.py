"""Attention: the mean of the values under the tilted measure of the keys, and its uncertainty."""

from exptilt.attention.module import MultiheadAttention
from exptilt.attention.moments import Moments
from exptilt.attention.propagate import propagate
from exptilt.tilting import attend, attend_packed

__all__ = ["Moments", "MultiheadAttention", "attend", "attend_packed", "propagate"]
