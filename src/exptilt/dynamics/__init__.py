r"""Ascent on the log-normalizer: renormalised flows, fixed points, equilibria.

    η ← RN(η + step · Σ_n softmax_n(β⟨x_n,η⟩) x_n)

`Flow` runs this update, in steps or in continuous time; `Trajectory` holds its states and measurements.
`fixed_point` finds and differentiates the fixed points of this or any other map; `Equilibrium` is a layer
that outputs one. The experiments of THEORY B are in `exptilt.claims.experiments`.
"""

import sys

from exptilt._support.former import former_names
from exptilt._support.solution import Solution, Status
from exptilt.dynamics.fixed_points.equilibrium import Equilibrium
from exptilt.dynamics.fixed_points.solve import fixed_point
from exptilt.dynamics.fixed_points.stability import jacobian_penalty, monotone_operator, spectral_radius
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.observe.clusters import clusters
from exptilt.dynamics.observe.gaussianity import gaussianity
from exptilt.dynamics.renormalizers import RMS, Batch, Layer, Sphere, Whiten

__all__ = [
    "RMS",
    "Batch",
    "Equilibrium",
    "Flow",
    "Layer",
    "Solution",
    "Sphere",
    "Status",
    "Whiten",
    "clusters",
    "fixed_point",
    "gaussianity",
    "jacobian_penalty",
    "monotone_operator",
    "spectral_radius",
]

# Old module paths, for objects pickled before these modules moved into subfolders.
_MOVED = {
    "clusters": "observe.clusters",
    "diagnostics": "observe.snapshot",
    "equilibrium": "fixed_points.equilibrium",
    "gaussianity": "observe.gaussianity",
    "stability": "fixed_points.stability",
}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]

__getattr__ = former_names(__name__)
