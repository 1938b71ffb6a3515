"""Smoothing: the law of modes and states given the whole series."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..kernels.buffers import Parameters, Stored
from ..kernels.smoother import Smoothing, smooth_back
from ..model import SwitchingLinearGaussian
from ..series import Data, arrange, diffuse, flatten, parameters, read
from .exact import filter_exact, smooth_exact
from .moments import mixture
from .run import METHODS, over_series, run_filter, size_arguments


@dataclass(frozen=True, eq=False)
class Smoothed:
    """The law of modes and states given all of y. Leading axes as in the data: ``(T, ...)``, ``(B, T, ...)`` or a list.

    Attributes:
        method: the filter underneath.
        data: the data, as the kernels take them.
        log_likelihood: of the filter underneath, a number or one per series.
    """

    method: str
    data: Data
    log_likelihood: Any
    _probability: np.ndarray = field(repr=False)
    _mode_mean: np.ndarray = field(repr=False)
    _mode_covariance: np.ndarray = field(repr=False)
    _pairs: np.ndarray = field(repr=False)

    def _out(self, value: np.ndarray, names: str | None = None) -> Any:
        return arrange(value, self.data, names, last=False)

    @property
    def mode_probability(self) -> Any:
        """P(mode_t | y), ``(T, M)``."""
        return self._out(self._probability, "mode")

    @property
    def pair_probability(self) -> Any:
        """[t, i, j] = P(mode_{t−1} = i, mode_t = j | y), ``(T, M, M)``. At t = 0 mode_{−1} is that of the initial law; with
        ``start="first"`` there is
        none, and the matrix is diagonal.
        """
        return self._out(self._pairs)

    @property
    def mode_mean(self) -> Any:
        """Mean of the state in each mode, ``(T, M, n)``."""
        return self._out(self._mode_mean)

    @property
    def mode_covariance(self) -> Any:
        """Covariance of the state in each mode, ``(T, M, n, n)``."""
        return self._out(self._mode_covariance)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        return mixture(self._probability, self._mode_mean, self._mode_covariance)

    @property
    def mean(self) -> Any:
        """Mean of the state over modes, ``(T, n)``."""
        return self._out(self._moments[0], "state")

    @property
    def covariance(self) -> Any:
        """Covariance of the state over modes, ``(T, n, n)``."""
        return self._out(self._moments[1])


def run_smoother(
    p: Parameters, y: np.ndarray, starts: np.ndarray, out: Stored, regressors: np.ndarray | None = None
) -> Smoothing:
    """The backward pass over all series, with EM's sums over `regressors` (rows, q)."""
    M, (rows, m), series = len(p.initial_log_probability), y.shape, len(starts) - 1
    n = len(p.initial_mean) // M
    regressors = np.empty((rows, 0)) if regressors is None else regressors
    size = n + regressors.shape[1]
    shared = [
        np.empty((rows, M)), np.empty((rows, M * n)), np.empty((rows, M * n * n)), np.empty((rows, M * M)), np.empty((series, M)),
        np.empty((series, M * n)), np.empty((series, M * n * n)),
    ]  # fmt: skip

    def fresh() -> Smoothing:
        return Smoothing._make(
            [*shared, np.zeros(M), np.zeros((M, size, size)), np.zeros((M, n, size)), np.zeros((M, n, n))]
        )

    parts: list[Smoothing] = []
    sizes = size_arguments(rows, M, n, m)

    def work(begin: int, end: int) -> None:
        mine = fresh()
        parts.append(mine)
        smooth_back(p, starts, begin, end, out, mine, regressors, sizes)

    work(0, 0)  # compiled or loaded before several threads ask for it
    over_series(starts, work)
    return Smoothing._make([*shared, *[np.sum([part[k] for part in parts], axis=0) for k in range(7, 11)]])


def smooth_series(
    model: SwitchingLinearGaussian, y: Any, *, method: str = "gpb2", inputs: Any = None
) -> Smoothed:
    """Smooth one series, a batch, or a list.

    Args:
        model: the model.
        y: as for `filter`.
        method: "gpb2" (Kim's smoother), "imm" or "gpb1" (the same backward pass on those filters' moments), or "exact" (all mode paths,
            small T).
        inputs: as for `filter`.
    """
    if method not in (*METHODS, "exact"):
        raise ArgumentError(f"smooth: method is {method!r}. Pass one of {[*METHODS, 'exact']}.")
    data = read(y, model.outputs, what="smooth", model_is_torch=isinstance(model.transition, torch.Tensor))
    with torch.no_grad():
        wide, shift = diffuse(model, data)
        flat = [value.detach() for value in flatten(wide, data, inputs, "smooth")]
        M, n, m = model.modes, model.states, model.outputs
        first = int(model.start == "first")
        if method == "exact":
            terms = filter_exact(flat, first, data.tensor.detach(), data.starts, (M, n, m))[0].numpy()
            totals = np.add.reduceat(terms, data.starts[:-1])
            pieces = [
                smooth_exact(flat, first, data.tensor[a:b].detach(), (M, n, m), k)
                for k, (a, b) in enumerate(zip(data.starts[:-1], data.starts[1:], strict=True))
            ]
            arrays = [
                torch.cat([piece[name] for piece in pieces]).numpy()
                for name in ("log_mode", "mean", "cov", "pairs")
            ]
            probability, mean, cov, pairs = np.exp(arrays[0]), *arrays[1:]
        else:
            p = parameters(flat, first)
            out = run_filter(p, data.rows, data.starts, method, True)
            totals = out.log_likelihood
            probability, mean, cov, pairs = run_smoother(p, data.rows, data.starts, out)[:4]
    rows = len(probability)
    total = totals + shift
    likelihood: Any = torch.from_numpy(total).to(data.dtype) if data.kind == "torch" else total
    if data.layout == "single":
        likelihood = likelihood[0] if data.kind == "torch" else float(likelihood[0])
    return Smoothed(
        method,
        data,
        likelihood,
        probability,
        mean.reshape(rows, M, n),
        cov.reshape(rows, M, n, n),
        pairs.reshape(rows, M, M),
    )
