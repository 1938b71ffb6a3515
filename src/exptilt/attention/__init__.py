"""Attention: the mean of the values under the tilted measure of the keys."""

from exptilt.attention.attend import attend

__all__ = ["attend"]
