"""Experiments on flows and memories: each a function whose result holds measurements, theory and a plot."""
