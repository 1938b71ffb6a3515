"""Walk forward: filter every step with parameters that were learned from earlier steps alone.

Filtered probabilities use the past alone, but the parameters of a fit have seen the whole series. Here the
model is fitted again at intervals to all earlier steps, and only filters until the next fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import plain
from ..inference.filter import filter_series
from ..inference.forecast import interval
from ..inference.problem import read_inputs
from ..parameters import Model
from ..series import SeriesLike, Values, arrange, read
from .fit import fit_model

OPTIONS = ("method", "filter", "fixed", "shared", "max_steps", "tolerance", "constraints", "initial", "skip")


@dataclass(frozen=True, eq=False)
class WalkForward(Generic[Model]):
    """Results of a walk forward; all NaN before the first fit.

    Attributes:
        mode_probability: P(mode_t | y_1 … y_t), ``(T, M)``, parameters from before step t.
        predicted_mode_probability: P(mode_t | y_1 … y_{t−1}), ``(T, M)``, known before step t.
        mean, lower, upper: of y_t given y_1 … y_{t−1}, ``(T, m)``; the interval is at `level`.
        log_score: log p(y_t | y_1 … y_{t−1}), ``(T,)``.
        level: of the interval.
        fits: the steps before which the model was fitted.
        model: the last fitted model.
    """

    mode_probability: Values
    predicted_mode_probability: Values
    mean: Values
    lower: Values
    upper: Values
    log_score: Values
    level: float
    fits: tuple[int, ...]
    model: Model = field(repr=False)

    @property
    def mean_log_score(self) -> float:
        """The mean of the log scores, in nats a step."""
        return float(np.nanmean(np.asarray(self.log_score)))


def walk_forward(
    model: Model,
    y: SeriesLike,
    *,
    first: int | None = None,
    every: int | None = None,
    inputs: SeriesLike | None = None,
    level: float = 0.9,
    options: Mapping[str, Any] | None = None,
) -> WalkForward[Model]:
    """Fit, filter until the next fit, fit again; arguments as for `SwitchingLinearGaussian.walk_forward`."""
    data = read(y, model.outputs, what="walk_forward").detached()
    T = len(data.rows)
    first, options = T // 2 if first is None else first, dict(options or {})
    every = max(1, -(-(T - first) // 10)) if every is None else every
    if data.series != 1 or not 1 < first < T or every < 1 or not 0 < level < 1:
        raise ArgumentError(
            f"walk_forward: {data.series} series of {T} steps, first={first}, every={every}, level={level}. "
            "Pass one series, 2 <= first < its length, every of at least 1, and 0 < level < 1."
        )
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ArgumentError(f"walk_forward: options {unknown} are not known. Pass some of {list(OPTIONS)}.")
    known = None if inputs is None else read_inputs(model, data, inputs, "walk_forward")[0].numpy()
    M, m, method = model.modes, model.outputs, options.get("filter", "gpb2")
    out = [np.full((T, size), np.nan) for size in (M, M, m, m, m, 1)]
    fits = tuple(range(first, T, every))
    for begin in fits:
        end = min(begin + every, T)
        past, present = data.rows[:begin], data.rows[:end]
        u = [None if known is None else known[:cut] for cut in (begin, end)]
        model = fit_model(model, past, inputs=u[0], progress=False, **options).model
        with torch.no_grad():
            post = filter_series(model, present, method=method, inputs=u[1])
        means, covs, center, _ = post._output
        edges = interval(level, post._ahead[0], means, covs)
        terms = plain(post._terms)[:, None]
        found = (post._weight, post._ahead[0], center, *edges, terms)
        for whole, part in zip(out, found, strict=True):
            whole[begin:end] = part[begin:end]
    return WalkForward(
        mode_probability=arrange(out[0], data, "mode"),
        predicted_mode_probability=arrange(out[1], data, "mode"),
        mean=arrange(out[2], data, "output"),
        lower=arrange(out[3], data, "output"),
        upper=arrange(out[4], data, "output"),
        log_score=arrange(out[5][:, 0], data, None),
        level=level,
        fits=fits,
        model=model,
    )


def folds(T: int, first: int, count: int) -> Sequence[tuple[int, int]]:
    """`count` stretches of steps, from `first` to the end."""
    edges = np.unique(np.linspace(first, T, count + 1).astype(int))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
