"""Claims of the theory about measures and their tilts, as functions."""
