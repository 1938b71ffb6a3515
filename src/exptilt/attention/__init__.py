"""Attention: the mean of the values under the tilted measure of the keys."""

from exptilt.attention.module import MultiheadAttention
from exptilt.tilting import attend

__all__ = ["MultiheadAttention", "attend"]
