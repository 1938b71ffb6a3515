"""Texts and pictures, cut into the chunks that a model reads at once."""
