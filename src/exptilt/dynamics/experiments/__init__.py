"""Experiments on flows: each a function that returns its numbers, with the theory beside them and a picture."""
