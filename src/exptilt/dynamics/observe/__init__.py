"""Measurements of a cloud of points: clusters, Gaussianity, lengths and spectrum."""
