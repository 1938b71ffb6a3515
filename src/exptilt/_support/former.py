"""Names that were public once: for one release they still work, and a warning says what to write instead.

`FORMER` is the whole table; docs/stability.md shows it. A folder uses it with one line at its end:

    __getattr__ = former_names(__name__)
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

# folder: {old name: where the object is now}
FORMER: dict[str, dict[str, str]] = {
    "attention": {"attend": "exptilt.attend", "attend_packed": "exptilt.tilting.attend_packed"},
    "dynamics": {
        "Clusters": "exptilt.dynamics.observe.clusters.Clusters",
        "FlowState": "exptilt.dynamics.flow.FlowState",
        "Kernel": "exptilt.dynamics.flow.Kernel",
        "Trajectory": "exptilt.dynamics.trajectory.Trajectory",
        "Gaussianity": "exptilt.dynamics.observe.gaussianity.Gaussianity",
        "MonotoneOperator": "exptilt.dynamics.fixed_points.stability.MonotoneOperator",
        "SpectralRadius": "exptilt.dynamics.fixed_points.stability.SpectralRadius",
        "DivergenceRate": "exptilt.claims.experiments.divergence.DivergenceRate",
        "EqualCosine": "exptilt.claims.experiments.equal_cosine.EqualCosine",
        "FlowInfo": "exptilt.dynamics.flow.FlowInfo",
        "Growth": "exptilt.dynamics.observe.snapshot.Growth",
        "Interval": "exptilt._support.intervals.Interval",
        "MetastableCounts": "exptilt.claims.experiments.circle.MetastableCounts",
        "Norms": "exptilt.dynamics.observe.snapshot.Norms",
        "Setting": "exptilt.claims.experiments.sweep.Setting",
        "Slope": "exptilt.dynamics.ascent.Slope",
        "Sweep": "exptilt.claims.experiments.sweep.Sweep",
        "TheoremOne": "exptilt.claims.experiments.theorem_one.TheoremOne",
        "TheoremOneRow": "exptilt.claims.experiments.theorem_one.TheoremOneRow",
        "divergence_rate": "exptilt.claims.experiments.divergence.divergence_rate",
        "equal_cosine": "exptilt.claims.experiments.equal_cosine.equal_cosine",
        "equilibrium_sweep": "exptilt.claims.experiments.sweep.equilibrium_sweep",
        "metastable_counts": "exptilt.claims.experiments.circle.metastable_counts",
        "theorem_one": "exptilt.claims.experiments.theorem_one.theorem_one",
    },
    "lens": {
        "AttentionCall": "exptilt.lens.watching.call.AttentionCall",
        "CallRecord": "exptilt.lens.watching.record.CallRecord",
        "ClippedHead": "exptilt.lens.training.clip.ClippedHead",
        "Difference": "exptilt.lens.studying.compare.Difference",
        "HeadDetail": "exptilt.lens.studying.results.HeadDetail",
        "HeadMeasure": "exptilt.lens.studying.results.HeadMeasure",
        "HeadReading": "exptilt.lens.training.readings.HeadReading",
        "Histogram": "exptilt.lens.studying.results.Histogram",
        "Kind": "exptilt.lens.HeadKind",
        "LayerMeasure": "exptilt.lens.studying.results.LayerMeasure",
        "TokenMass": "exptilt.lens.studying.results.TokenMass",
        "Training": "exptilt.lens.studying.results.Training",
    },
    "claims": {
        "Check": "exptilt.claims.evidence.Check",
        "Evidence": "exptilt.claims.evidence.Evidence",
        "Line": "exptilt.claims.evidence.Line",
        "Picture": "exptilt.claims.evidence.Picture",
        "boltzmann_check": "exptilt.claims.experiments.equivalence.boltzmann_check",
        "classical_cliff": "exptilt.claims.experiments.cliff.classical_cliff",
        "divergence_rate": "exptilt.claims.experiments.divergence.divergence_rate",
        "equal_cosine": "exptilt.claims.experiments.equal_cosine.equal_cosine",
        "equilibrium_sweep": "exptilt.claims.experiments.sweep.equilibrium_sweep",
        "linear_attention_check": "exptilt.claims.experiments.equivalence.linear_attention_check",
        "metastable_counts": "exptilt.claims.experiments.circle.metastable_counts",
        "storage_capacity": "exptilt.claims.experiments.capacity.storage_capacity",
        "theorem_one": "exptilt.claims.experiments.theorem_one.theorem_one",
    },
    "families": {
        "Estimate": "exptilt.families.estimate.Estimate",
        "Kind": "exptilt.families.estimate.EstimateKind",
        "LinearLink": "exptilt.families.theory.link.LinearLink",
        "MaximumEntropy": "exptilt.families.maximum_entropy.MaximumEntropy",
        "MeanCovariance": "exptilt.families.members.normal_inverse_wishart.MeanCovariance",
        "MeanPrecision": "exptilt.families.members.normal_gamma.MeanPrecision",
        "Predictive": "exptilt.families.relations.Predictive",
        "expected_statistic": "exptilt.families.projection.expected_statistic",
        "repaired": "exptilt._support.linalg.repaired",
    },
    "losses": {
        "CrossEntropy": "exptilt.losses.cross_entropy.CrossEntropy",
        "Diagnosis": "exptilt.losses.diagnose.Diagnosis",
    },
    "memory": {
        "Nearest": "exptilt.memory.nearest.Nearest",
        "SearchIndex": "exptilt.memory.nearest.SearchIndex",
        "associate": "exptilt.memory.hopfield_attention",
        "boltzmann_check": "exptilt.claims.experiments.equivalence.boltzmann_check",
        "classical_cliff": "exptilt.claims.experiments.cliff.classical_cliff",
        "learn": "exptilt.memory.train_boltzmann",
        "linear_attention": "exptilt.claims.experiments.equivalence.linear_attention",
        "linear_attention_check": "exptilt.claims.experiments.equivalence.linear_attention_check",
        "storage_capacity": "exptilt.claims.experiments.capacity.storage_capacity",
    },
    "sampling": {
        "LinkChain": "exptilt.sampling.gibbs.LinkChain",
        "Population": "exptilt.sampling.smc.Population",
    },
    "switching": {
        "Comparison": "exptilt.switching.compare.Comparison",
        "Draws": "exptilt.switching.inference.simulate.Draws",
        "FamilyFiltered": "exptilt.switching.inference.results.Filtered",
        "FamilyFit": "exptilt.switching.learning.summary.Fit",
        "FamilySmoothed": "exptilt.switching.inference.results.Smoothed",
        "Filtered": "exptilt.switching.inference.results.Filtered",
        "Fit": "exptilt.switching.learning.summary.Fit",
        "Forecast": "exptilt.switching.inference.forecast.Forecast",
        "HeadFilter": "exptilt.switching.as_attention.HeadFilter",
        "Innovations": "exptilt.switching.inference.online.Innovations",
        "MarkovFit": "exptilt.switching.learning.summary.Fit",
        "MixingStep": "exptilt.switching.as_attention.MixingStep",
        "NonlinearFiltered": "exptilt.switching.inference.results.Filtered",
        "NonlinearSmoothed": "exptilt.switching.inference.results.Smoothed",
        "ParametricFit": "exptilt.switching.learning.summary.Fit",
        "Sample": "exptilt.switching.inference.simulate.Sample",
        "Smoothed": "exptilt.switching.inference.results.Smoothed",
        "Summary": "exptilt.switching.learning.summary.Summary",
        "WalkForward": "exptilt.switching.learning.walk_forward.WalkForward",
        "discounted": "exptilt.switching.DiscountedDynamics",
        "filter_series": "exptilt.switching.inference.filter.filter_series",
        "fit_nonlinear": "exptilt.switching.nonlinear.fit_nonlinear",
        "fit_counts": "exptilt.switching.families.fit_counts",
        "fit_ready": "exptilt.switching.fit_named_model",
        "join_modes": "exptilt.switching.builders.join_modes",
        "pushed": "exptilt.switching.LinearDynamics",
    },
}


def former_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a folder: finds its former names, and warns.

    Example:
        >>> import exptilt.dynamics, warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     _ = exptilt.dynamics.theorem_one
        >>> print(str(seen[0].message)[:61])
        exptilt.dynamics.theorem_one goes in the next release: write
    """
    table = FORMER[module.removeprefix("exptilt.")]

    def find(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        text = f"{module}.{name} goes in the next release: write {table[name]} instead."
        warnings.warn(text, FutureWarning, stacklevel=2)
        home, _, current = table[name].rpartition(".")
        return getattr(import_module(home), current)

    return find
