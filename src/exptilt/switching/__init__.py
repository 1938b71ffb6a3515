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
from typing import TYPE_CHECKING

from .._support.former import former_names
from .builders import fit_named_model
from .compare import compare
from .inference.online import OnlineState
from .learning.climb import FitStatus
from .learning.maximum_likelihood import fit_parameters
from .model import SwitchingLinearGaussian
from .nonlinear import SwitchingNonlinear
from .regression.markov import markov_autoregression, markov_regression
from .regression.vector import markov_var
from .structural import (
    dynamic_factor,
    local_level,
    local_linear_trend,
    time_varying_regression,
    unobserved_cycle,
)

if TYPE_CHECKING:
    from .as_attention import as_filter, attention_as_imm
    from .families import DiscountedDynamics, LinearDynamics, SwitchingFamily

__all__ = [
    "DiscountedDynamics",
    "FitStatus",
    "LinearDynamics",
    "OnlineState",
    "SwitchingFamily",
    "SwitchingLinearGaussian",
    "SwitchingNonlinear",
    "as_filter",
    "attention_as_imm",
    "compare",
    "dynamic_factor",
    "fit_named_model",
    "fit_parameters",
    "local_level",
    "local_linear_trend",
    "markov_autoregression",
    "markov_regression",
    "markov_var",
    "time_varying_regression",
    "unobserved_cycle",
]

# Older pickles name these modules by the places they had directly in this folder.
_MOVED = {
    "climbing": "learning.maximum_likelihood",
    "filtering": "inference.filter",
    "fitting": "learning.fit",
    "forecasting": "inference.forecast",
    "simulation": "inference.simulate",
    "markov": "regression.markov",
    "smoothing": "inference.smooth",
}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]

# Loaded on first use: attention and families are the slowest imports, and no filter or fit needs them.
__getattr__ = former_names(
    __name__,
    {
        "as_attention": ("as_filter", "attention_as_imm"),
        "families": ("DiscountedDynamics", "LinearDynamics", "SwitchingFamily"),
    },
)
