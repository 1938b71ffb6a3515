"""Names that were public once: for one release they still work, and a warning says what to write instead.

`FORMER` is the whole table; docs/stability.md shows it. A folder uses it with one line at its end:

    __getattr__ = former_names(__name__)

The same line may name modules that are loaded on first use, with the public names that they have.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

# folder: {where the objects are now: their names, old=new where the name has changed}
_MOVED = {
    "attention": {"": "attend"},
    "claims": {"claims.evidence": "Check Evidence Line Picture"},
    "dynamics": {
        "_support.intervals": "Interval",
        "claims.experiments.circle": "MetastableCounts metastable_counts",
        "claims.experiments.divergence": "DivergenceRate divergence_rate",
        "claims.experiments.equal_cosine": "EqualCosine equal_cosine",
        "claims.experiments.sweep": "Setting equilibrium_sweep",
        "claims.experiments.theorem_one": "TheoremOne TheoremOneRow theorem_one",
        "dynamics.ascent": "Slope",
        "dynamics.fixed_points.stability": "MonotoneOperator SpectralRadius",
        "dynamics.observe.clusters": "Clusters cluster_labels",
        "dynamics.observe.gaussianity": "Gaussianity",
        "dynamics.observe.snapshot": "Growth Norms",
        "dynamics.trajectory": "Trajectory",
    },
    "families": {
        "_support.linalg": "pack repaired unpack",
        "families.estimate": "Estimate Kind=EstimateKind",
        "families.maximum_entropy": "MaximumEntropy",
        "families.members.normal_gamma": "MeanPrecision",
        "families.members.normal_inverse_wishart": "MeanCovariance",
        "families.projection": "expected_statistic",
        "families.relations": "Predictive",
        "families.theory.link": "LinearLink",
    },
    "lens": {
        "lens": "Kind=HeadKind",
        "lens.studying.compare": "Difference",
        "lens.studying.results": "HeadDetail HeadMeasure Histogram LayerMeasure TokenMass Training",
        "lens.training.clip": "ClippedHead",
        "lens.training.readings": "HeadReading",
        "lens.watching.call": "AttentionCall",
        "lens.watching.record": "CallRecord",
    },
    "losses": {"losses.cross_entropy": "CrossEntropy", "losses.diagnose": "Diagnosis"},
    "memory": {
        "claims.experiments.capacity": "storage_capacity",
        "claims.experiments.cliff": "classical_cliff",
        "claims.experiments.equivalence": "boltzmann_check linear_attention linear_attention_check",
        "memory": "associate=hopfield_attention learn=train_boltzmann",
        "memory.nearest": "Nearest",
    },
    "sampling": {"sampling.resampling": "effective_size systematic", "sampling.smc": "Population"},
    "switching": {
        "switching": "discounted=DiscountedDynamics fit_ready=fit_named_model pushed=LinearDynamics",
        "switching.as_attention": "HeadFilter MixingStep",
        "switching.builders": "join_modes",
        "switching.families": "fit_counts",
        "switching.inference.filter": "filter_series",
        "switching.inference.forecast": "Forecast",
        "switching.inference.online": "Innovations",
        "switching.inference.results": "Filtered FamilyFiltered=Filtered NonlinearFiltered=Filtered Smoothed"
        " FamilySmoothed=Smoothed",
        "switching.inference.simulate": "Draws Sample",
        "switching.learning.summary": "Fit FamilyFit=Fit MarkovFit=Fit ParametricFit=Fit",
        "switching.nonlinear": "fit_nonlinear",
    },
}

# folder: {old name: where the object is now}
FORMER = {
    folder: {
        name.partition("=")[0]: ".".join(filter(None, ("exptilt", home, name.rpartition("=")[2])))
        for home, names in homes.items()
        for name in names.split()
    }
    for folder, homes in _MOVED.items()
}


def former_names(module: str, later: Mapping[str, tuple[str, ...]] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a folder: finds its former names, and warns; loads the modules of `later`.

    Example:
        >>> import exptilt.dynamics, warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     _ = exptilt.dynamics.Trajectory
        >>> print(str(seen[0].message)[:60])
        exptilt.dynamics.Trajectory goes in the next release: write
    """
    table = FORMER[module.removeprefix("exptilt.")]

    def find(name: str) -> Any:
        for home, names in (later or {}).items():
            if name == home or name in names:
                loaded = import_module(f"{module}.{home}")
                return loaded if name == home else getattr(loaded, name)
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        text = f"{module}.{name} goes in the next release: write {table[name]} instead."
        warnings.warn(text, FutureWarning, stacklevel=2)
        home, _, current = table[name].rpartition(".")
        return getattr(import_module(home), current)

    return find
