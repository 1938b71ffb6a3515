"""The most likely sequence of modes: by Viterbi's recursion, or by weighing every path."""

from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..kernels.viterbi import viterbi
from ..model import SwitchingLinearGaussian
from ..series import arrange, diffuse, flatten, parameters, read
from .exact import smooth_exact
from .run import check_failures


def most_likely_path(
    model: SwitchingLinearGaussian, y: Any, *, method: str = "viterbi", inputs: Any = None
) -> Any:
    """The most likely modes, integers ``(T,)``, ``(B, T)`` or a list.

    Args:
        model: the model.
        y: as for `filter`.
        method: "viterbi", or "exact" (all mode paths, small T; the initial mode, if before the data, is part of the path maximised over).
        inputs: as for `filter`.
    """
    if method not in ("viterbi", "exact"):
        raise ArgumentError(f'most_likely_path: method is {method!r}. Pass "viterbi" or "exact".')
    data = read(
        y, model.outputs, what="most_likely_path", model_is_torch=isinstance(model.transition, torch.Tensor)
    )
    with torch.no_grad():
        wide, _ = diffuse(model, data)
        flat = [value.detach() for value in flatten(wide, data, inputs, "most_likely_path")]
    sizes = (model.modes, model.states, model.outputs)
    first = int(model.start == "first")
    if method == "exact":
        y_all = data.tensor.detach()
        cuts = zip(data.starts[:-1], data.starts[1:], strict=True)
        path = torch.cat(
            [smooth_exact(flat, first, y_all[a:b], sizes, k)["path"] for k, (a, b) in enumerate(cuts)]
        ).numpy()
    else:
        path, failure = np.empty(len(data.rows), np.int64), np.full((data.series, 2), -1, dtype=np.int64)
        viterbi(parameters(flat, first), data.rows, data.starts, path, failure, sizes)
        check_failures(failure, model.modes, "most_likely_path")
    if data.kind == "torch":
        out = [torch.from_numpy(path[a:b]) for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
        return torch.stack(out) if data.layout == "batch" else out if data.layout == "list" else out[0]
    return arrange(path, data, None, last=False)
