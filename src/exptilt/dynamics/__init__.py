r"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria.

    η ← RN(η + step · Σ_n softmax_n(β<x_n,η>) x_n)

`Flow` runs it, in steps or in continuous time, and `Trajectory` says what became of the points.
`fixed_point` finds where it, or any other map, stays, and differentiates there; `Equilibrium` makes that a
layer. The functions of `experiments` ask the questions of THEORY B, each with its theory beside it.
"""

import sys

from exptilt._support.intervals import Interval
from exptilt._support.solution import Solution, Status
from exptilt.dynamics.ascent import Slope
from exptilt.dynamics.experiments.circle import MetastableCounts, metastable_counts
from exptilt.dynamics.experiments.divergence import DivergenceRate, divergence_rate
from exptilt.dynamics.experiments.equal_cosine import EqualCosine, equal_cosine
from exptilt.dynamics.experiments.sweep import Setting, Sweep, equilibrium_sweep
from exptilt.dynamics.experiments.theorem_one import TheoremOne, TheoremOneRow, theorem_one
from exptilt.dynamics.fixed_points.equilibrium import Equilibrium
from exptilt.dynamics.fixed_points.solve import fixed_point
from exptilt.dynamics.fixed_points.stability import (
    MonotoneOperator,
    SpectralRadius,
    jacobian_penalty,
    monotone_operator,
    spectral_radius,
)
from exptilt.dynamics.flow import Flow, FlowInfo, FlowState, Kernel
from exptilt.dynamics.observe.clusters import Clusters, cluster_labels, clusters
from exptilt.dynamics.observe.gaussianity import Gaussianity, gaussianity
from exptilt.dynamics.observe.snapshot import Growth, Norms
from exptilt.dynamics.renormalizers import RMS, Batch, Layer, Sphere, Whiten
from exptilt.dynamics.trajectory import Trajectory

__all__ = [
    "RMS",
    "Batch",
    "Clusters",
    "DivergenceRate",
    "EqualCosine",
    "Equilibrium",
    "Flow",
    "FlowInfo",
    "FlowState",
    "Gaussianity",
    "Growth",
    "Interval",
    "Kernel",
    "Layer",
    "MetastableCounts",
    "MonotoneOperator",
    "Norms",
    "Setting",
    "Slope",
    "Solution",
    "SpectralRadius",
    "Sphere",
    "Status",
    "Sweep",
    "TheoremOne",
    "TheoremOneRow",
    "Trajectory",
    "Whiten",
    "cluster_labels",
    "clusters",
    "divergence_rate",
    "equal_cosine",
    "equilibrium_sweep",
    "fixed_point",
    "gaussianity",
    "jacobian_penalty",
    "metastable_counts",
    "monotone_operator",
    "spectral_radius",
    "theorem_one",
]

# Objects that were pickled when these modules lay directly in this folder name them so.
_MOVED = {
    "clusters": "observe.clusters",
    "diagnostics": "observe.snapshot",
    "equilibrium": "fixed_points.equilibrium",
    "gaussianity": "observe.gaussianity",
    "stability": "fixed_points.stability",
}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]
