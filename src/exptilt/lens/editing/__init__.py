"""Changing attention while a model runs: ready-made edits, and what changing a head does to the output."""
