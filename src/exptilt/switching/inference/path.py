"""The most likely sequence of modes: by Viterbi's recursion, or by weighing every path.

Viterbi's keeps for each mode j only the best way into it:

    score_j = max_i  score_i + log π_ij + log p_j(y_t | the Kalman filter along the path kept for i)

It is GPB2 with the collapse replaced by a choice, and so one of the methods of csrc/switching.hpp. With no
continuous state to remember (a hidden Markov model) that is Viterbi's algorithm and exact.
"""

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..parameters import ModelParameters
from ..series import SeriesLike, Values, arrange
from .exact import smooth_exact
from .problem import prepare
from .run import lead_in, run_filter


def most_likely_path(
    model: ModelParameters, y: SeriesLike, *, method: str = "viterbi", inputs: SeriesLike | None = None
) -> Values:
    """The most likely modes; arguments as for `SwitchingLinearGaussian.most_likely_path`."""
    if method not in ("viterbi", "exact"):
        raise ArgumentError(f'most_likely_path: method is {method!r}. Pass "viterbi" or "exact".')
    with torch.no_grad():
        problem = prepare(model, y, inputs, "most_likely_path")
        data, M = problem.data, problem.sizes[0]
        if method == "exact":
            pieces = [smooth_exact(problem, k, "most_likely_path").path for k in range(data.series)]
            return arrange(torch.cat(pieces).numpy(), data, None)
        lead = lead_in(problem, method)
        out = run_filter(problem.parameters, data.rows, data.starts, method, lead=lead).out
    chosen = out.mixing.reshape(-1, M, M).argmax(1)
    path = np.empty(len(data.rows), np.int64)
    for cut in data.cuts:
        mode, modes = int(out.log_mode[cut.stop - 1].argmax()), list[int]()
        for before in chosen[cut][::-1].tolist():
            modes.append(mode)
            mode = before[mode]
        path[cut] = modes[::-1]
    return arrange(path, data, None)
