"""Memories of binary units: classical Hopfield networks and restricted Boltzmann machines."""
