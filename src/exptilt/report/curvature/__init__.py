"""Spectra of a model's curvature over training, and its most influential examples, as a page."""
