"""Regressions and autoregressions, of one series or several, that switch with a Markov chain."""
