"""Switching state-space models: filters, smoothers, learning and particles.

>>> import numpy as np
>>> from exptilt.switching import SwitchingLinearGaussian
>>> model = SwitchingLinearGaussian(
...     transition=[[0.95, 0.05], [0.10, 0.90]],
...     dynamics=[[1.0]],
...     process_noise=[[[0.01]], [[1.0]]],
...     observation=[[1.0]],
...     observation_noise=[[0.1]],
...     initial_mean=[0.0],
...     initial_covariance=[[1.0]],
...     initial_probability=[0.5, 0.5],
... )
>>> post = model.filter(np.array([0.1, 0.0, np.nan, 3.0, 4.5]))
>>> bool(post.mode_probability[-1, 1] > 0.9)
True
"""

import sys

from .as_attention import HeadFilter, MixingStep, as_filter, attention_as_imm
from .builders import fit_ready, join_modes
from .compare import Comparison, compare
from .families import (
    FamilyFiltered,
    FamilyFit,
    FamilySmoothed,
    SwitchingFamily,
    discounted,
    fit_counts,
    pushed,
)
from .inference.filter import Filtered, filter_series
from .inference.forecast import Forecast
from .inference.online import Innovations, OnlineState
from .inference.simulate import Draws, Sample
from .inference.smooth import Smoothed
from .learning.differences import fit_nonlinear
from .learning.fit import Fit
from .learning.maximum_likelihood import FitStatus, ParametricFit, fit_parameters
from .learning.summary import Summary
from .learning.walk_forward import WalkForward
from .markov import MarkovFit, markov_autoregression, markov_regression
from .model import SwitchingLinearGaussian
from .nonlinear import NonlinearFiltered, NonlinearSmoothed, SwitchingNonlinear
from .structural import dynamic_factor, local_level, local_linear_trend, unobserved_cycle

__all__ = [
    "Comparison",
    "Draws",
    "FamilyFiltered",
    "FamilyFit",
    "FamilySmoothed",
    "Filtered",
    "Fit",
    "FitStatus",
    "Forecast",
    "HeadFilter",
    "Innovations",
    "MarkovFit",
    "MixingStep",
    "NonlinearFiltered",
    "NonlinearSmoothed",
    "OnlineState",
    "ParametricFit",
    "Sample",
    "Smoothed",
    "Summary",
    "SwitchingFamily",
    "SwitchingLinearGaussian",
    "SwitchingNonlinear",
    "WalkForward",
    "as_filter",
    "attention_as_imm",
    "compare",
    "discounted",
    "dynamic_factor",
    "filter_series",
    "fit_counts",
    "fit_nonlinear",
    "fit_parameters",
    "fit_ready",
    "join_modes",
    "local_level",
    "local_linear_trend",
    "markov_autoregression",
    "markov_regression",
    "pushed",
    "unobserved_cycle",
]

# Objects that were pickled when these modules lay directly in this folder name them so.
_MOVED = {
    "climbing": "learning.maximum_likelihood",
    "filtering": "inference.filter",
    "fitting": "learning.fit",
    "forecasting": "inference.forecast",
    "simulation": "inference.simulate",
    "smoothing": "inference.smooth",
}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]
