"""Experiments on flows: each a function that returns its numbers, with theory beside them and a picture."""
