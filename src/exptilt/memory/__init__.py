"""Memories whose energy is a log-normalizer: modern and classical Hopfield networks, Boltzmann machines."""

__all__: list[str] = []
