"""Texts, pictures and sounds, cut into the chunks that a model reads at once."""
