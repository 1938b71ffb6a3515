"""Measurements of a memory: margins between patterns, basins of attraction, recall, fixed points."""
