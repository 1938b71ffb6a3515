"""Attention: the mean of the values under the tilted measure of the keys."""

from exptilt.attention.attend import attend
from exptilt.attention.module import MultiheadAttention

__all__ = ["MultiheadAttention", "attend"]
