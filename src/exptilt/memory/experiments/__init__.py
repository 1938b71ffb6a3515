"""Experiments on random patterns: how many a memory stores, where a classical one collapses."""
