"""Attention: the mean of the values under the tilted measure of the keys, and its uncertainty."""

from exptilt._support.former import former_names
from exptilt.attention.compaction import compact
from exptilt.attention.module import MultiheadAttention
from exptilt.attention.moments import Moments
from exptilt.attention.propagate import propagate

__all__ = ["Moments", "MultiheadAttention", "compact", "propagate"]

__getattr__ = former_names(__name__)
