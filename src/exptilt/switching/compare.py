"""How many regimes: the same model with different numbers of them, by BIC and by what it foresees.

BIC counts parameters, and its penalty is not made for a number of regimes. The log score is the mean of
log p(y_t | the past) over stretches at the end of the series, each with parameters fitted to what came before
it: it needs no penalty, and asks what one wants to know.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError, ConvergenceError
from .._support.progress import track
from .builders import fit_named_model
from .checks import plain
from .learning.walk_forward import folds

Fitter = Callable[[Any, int], Any]
HEADER = ("log_likelihood", "parameters", "aic", "bic", "log_score")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Fits with different numbers of regimes.

    Attributes:
        modes: the numbers of regimes that could be fitted.
        log_likelihood, aic, bic: of each, from the whole series.
        parameters: how many each learned.
        log_score: of each, the mean of log p(y_t | the past) over the steps held out, NaN if `folds` was 0.
        failed: the numbers that could not be fitted, and why.
        fits: the fits, by number of regimes.
    """

    modes: tuple[int, ...]
    log_likelihood: np.ndarray
    aic: np.ndarray
    bic: np.ndarray
    parameters: np.ndarray
    log_score: np.ndarray
    failed: dict[int, str]
    fits: dict[int, Any] = field(repr=False)

    @property
    def best(self) -> dict[str, int]:
        """The number of regimes that each criterion prefers."""
        out = {name: self.modes[int(np.argmin(getattr(self, name)))] for name in ("aic", "bic")}
        if np.isfinite(self.log_score).any():
            out["log_score"] = self.modes[int(np.nanargmax(self.log_score))]
        return out

    def to_frame(self) -> Any:
        """The comparison as a pandas table, one row a number of regimes."""
        import pandas as pd

        columns = {name: getattr(self, name) for name in HEADER}
        return pd.DataFrame(columns, index=pd.Index(self.modes, name="modes"))

    def __str__(self) -> str:
        lines = [
            f"{'regimes':>7}{'log-likelihood':>16}{'parameters':>12}{'AIC':>11}{'BIC':>11}{'log score':>11}"
        ]
        rows = zip(*(getattr(self, name) for name in HEADER), strict=True)
        for count, (value, size, aic, bic, score) in zip(self.modes, rows, strict=True):
            lines.append(f"{count:>7}{value:>16.2f}{size:>12}{aic:>11.2f}{bic:>11.2f}{score:>11.4f}")
        lines += [f"{count:>7}  {why}" for count, why in self.failed.items()]
        named = {"aic": "AIC", "bic": "BIC", "log_score": "log score"}
        return "\n".join([*lines, "best: " + ", ".join(f"{k} by {named[n]}" for n, k in self.best.items())])


def compare(
    y: ArrayLike,
    *,
    modes: Iterable[int] = range(1, 5),
    kind: str | Fitter = "level",
    folds: int = 4,
    first: int | None = None,
    starts: int = 5,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Fit a model with different numbers of regimes, and hold them against each other.

    Args:
        y: one series, ``(T, m)`` or ``(T,)``; numpy, torch or pandas.
        modes: the numbers of regimes.
        kind: "level" or "local-level", as for `fit_named_model`; or a function of the series and a number of
            regimes that returns a fit whose model filters the series, such as
            ``lambda y, k: local_level(y, regimes=k)``.
        folds: how many stretches are held out, one after the other; 0 for no log score.
        first: the step at which they begin; None for six tenths of the series.
        starts: how many starts of each fit of the whole series; those of the folds have at most 2.
        seed: of the starts.
        progress: show a bar always, never, or (None) where somebody looks.
    """
    values = plain(y)
    values = values[:, None] if values.ndim == 1 else values
    T = len(values)
    first = int(0.6 * T) if first is None else first
    counts = list(modes)
    if values.ndim != 2 or not counts or min(counts) < 1 or folds < 0 or not 1 < first < T:
        raise ArgumentError(
            f"compare: y has shape {values.shape}, modes={counts}, folds={folds}, first={first}. Pass "
            "(T, m), numbers from 1, folds from 0, and a step inside the series."
        )

    def fit(part: np.ndarray, *, count: int, tries: int) -> Any:
        if callable(kind):
            return kind(part, count)
        return fit_named_model(part, kind=kind, modes=count, starts=tries, seed=seed, progress=False)

    found, failed, scores = dict[int, Any](), dict[int, str](), list[float]()
    for count in track(counts, "numbers of regimes", show=progress):
        try:
            whole = fit(values, count=count, tries=starts)
            scores.append(_score(values, partial(fit, count=count, tries=min(starts, 2)), first, folds))
            found[count] = whole
        except ConvergenceError as problem:
            failed[count] = str(problem)
    if not found:
        raise ConvergenceError(f"compare: no number of regimes could be fitted. {failed}")
    column = {
        name: np.array([getattr(fit, name) for fit in found.values()])
        for name in ("log_likelihood", "aic", "bic")
    }
    sizes = np.array([fit.free_parameters for fit in found.values()])
    return Comparison(
        tuple(found), **column, parameters=sizes, log_score=np.array(scores), failed=failed, fits=found
    )


def _score(values: np.ndarray, fit: Callable[[np.ndarray], Any], first: int, count: int) -> float:
    """The mean log score of the steps from `first` on that are observed."""
    terms = []
    for begin, end in folds(len(values), first, count) if count else ():
        found = fit(values[:begin])
        if getattr(found, "inputs", None) is not None:
            raise ArgumentError("compare: a fit with lags or inputs has no log score. Pass folds=0.")
        got = found.model.filter(values[:end]).log_likelihood_terms[begin:]
        terms.append(got[~np.isnan(values[begin:end]).all(1)])
    return float(np.concatenate(terms).mean()) if terms else np.nan
