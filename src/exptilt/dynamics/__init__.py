"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria."""

__all__: list[str] = []
