r"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria.

    η ← RN(η + step · Σ_n softmax_n(β<x_n,η>) x_n)

`Flow` runs it, in steps or in continuous time, and `Trajectory` says what became of the points. The functions of `experiments` ask it the
questions of THEORY B, each with its theory beside it.
"""

from exptilt.dynamics.ascent import Slope
from exptilt.dynamics.clusters import Clusters, cluster_labels, clusters
from exptilt.dynamics.diagnostics import Growth, Norms
from exptilt.dynamics.flow import Flow, FlowInfo, FlowState, Kernel
from exptilt.dynamics.gaussianity import Gaussianity, gaussianity
from exptilt.dynamics.renormalizers import RMS, Batch, Layer, Sphere, Whiten
from exptilt.dynamics.trajectory import Trajectory

# Fixed points (equilibrium.py, fixed_point.py): Equilibrium, fixed_point, spectral_radius and the monotone check are added here.

__all__ = [
    "RMS",
    "Batch",
    "Clusters",
    "Flow",
    "FlowInfo",
    "FlowState",
    "Gaussianity",
    "Growth",
    "Kernel",
    "Layer",
    "Norms",
    "Slope",
    "Sphere",
    "Trajectory",
    "Whiten",
    "cluster_labels",
    "clusters",
    "gaussianity",
]
