"""The most likely sequence of modes: by Viterbi's recursion, or by weighing every path."""

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..kernels.viterbi import viterbi
from ..parameters import ModelParameters
from ..series import SeriesLike, Values, arrange
from .exact import smooth_exact
from .problem import prepare
from .run import check_failures, new_run


def most_likely_path(
    model: ModelParameters, y: SeriesLike, *, method: str = "viterbi", inputs: SeriesLike | None = None
) -> Values:
    """The most likely modes; arguments as for `SwitchingLinearGaussian.most_likely_path`."""
    if method not in ("viterbi", "exact"):
        raise ArgumentError(f'most_likely_path: method is {method!r}. Pass "viterbi" or "exact".')
    with torch.no_grad():
        problem = prepare(model, y, inputs, "most_likely_path", wide=True)
        data = problem.data
        if method == "exact":
            pieces = [smooth_exact(problem, k, "most_likely_path").path for k in range(data.series)]
            path = torch.cat(pieces).numpy()
        else:
            run = new_run(problem.parameters, data.rows, data.starts)
            path = np.empty(len(data.rows), np.int64)
            viterbi(run, path, problem.sizes)
            check_failures(run, "most_likely_path")
    return arrange(path, data, None)
