"""Changing attention while a model runs: ready-made edits, and what a change of each head does to the output."""
