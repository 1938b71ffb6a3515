"""The primitive: the log-normalizer G of the keys' measure, its gradient and Hessian, streamed over keys."""

import sys

from exptilt.tilting import result
from exptilt.tilting.attend import attend, fisher_vector_product, log_normalizer
from exptilt.tilting.counterfactual import leave_one_out
from exptilt.tilting.divergences import divergence
from exptilt.tilting.packed import attend_packed
from exptilt.tilting.result import AttentionResult, Tilted, merge, unmerge

__all__ = [
    "AttentionResult",
    "Tilted",
    "attend",
    "attend_packed",
    "divergence",
    "fisher_vector_product",
    "leave_one_out",
    "log_normalizer",
    "merge",
    "unmerge",
]

sys.modules[f"{__name__}.tilted"] = result  # where results that were pickled earlier look for their class
