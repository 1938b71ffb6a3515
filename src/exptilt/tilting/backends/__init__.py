"""The sweeps, for every kind of machine."""
