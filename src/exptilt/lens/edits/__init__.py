"""Changing attention while a model runs: ready-made edits, and what changing a head does to the output."""

from exptilt.lens.edits.ablation import ablate, patch
from exptilt.lens.edits.attribution import attribute
from exptilt.lens.edits.changes import freeze, knock_out, mean, resample, without, zero

__all__ = ["ablate", "attribute", "freeze", "knock_out", "mean", "patch", "resample", "without", "zero"]
