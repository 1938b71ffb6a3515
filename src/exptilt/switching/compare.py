"""Fits of one model with different numbers of regimes, compared by BIC and by log score.

BIC counts parameters; its penalty is not derived for numbers of regimes. The log score is the mean of
log p(y_t | the past) over stretches at the end of the series, each with parameters fitted to what came before
it. It needs no penalty, and measures prediction.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError, ConvergenceError
from .._support.progress import track
from .builders import fit_named_model
from .checks import plain
from .learning.walk_forward import folds as part_folds

Fitter = Callable[[Any, int], Any]
HEADER = ("log_likelihood", "parameters", "aic", "bic", "log_score")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Fits with different numbers of regimes.

    Attributes:
        modes: numbers of regimes for which a fit succeeded.
        log_likelihood, aic, bic: of each, from the whole series.
        parameters: how many parameters each fit learned.
        log_score: mean of log p(y_t | the past) over the held-out steps, for each fit; NaN if `folds` was 0.
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
    def said(self) -> str:
        """The number of regimes each criterion prefers, in words, with a note if it is the largest tried."""
        named = {"aic": "AIC", "bic": "BIC", "log_score": "log score"}
        best = {name: f"{k} by {named[name]}" for name, k in self.best.items()}
        text = "best: " + ", ".join(best.values())
        most = [named[name] for name, k in self.best.items() if k == max(self.modes) and len(self.modes) > 1]
        beyond = f" ({max(self.modes)} was the most tried: more may be better by {', '.join(most)})"
        return text + (beyond if most else "")

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
        return "\n".join([*lines, self.said])


def compare(
    y: ArrayLike,
    *,
    modes: Iterable[int] = range(1, 5),
    kind: str | Fitter = "level",
    order: int = 1,
    folds: int = 4,
    first: int | None = None,
    starts: int = 5,
    seed: int = 0,
    known: Mapping[int, Any] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Fits of a model with different numbers of regimes, compared by BIC and log score.

    Args:
        y: one series, ``(T, m)`` or ``(T,)``; numpy, torch or pandas.
        modes: the numbers of regimes.
        kind: "level", "local-level" or "autoregression", as for `fit_named_model`; or a function of the
            series and a number of regimes that returns a fit whose model filters the series, such as
            ``lambda y, k: local_level(y, regimes=k)``.
        order: how many lags an autoregression has.
        folds: number of consecutive stretches that are held out; 0 for no log score.
        first: the step at which held-out stretches begin; None for six tenths of the series.
        starts: how many starts of each fit of the whole series. Fits of the folds start from that fit. For
            one column, a fit starts from the one with a regime less, whose regimes are split.
        seed: of the starts.
        known: earlier fits of the whole series, by number of regimes.
        progress: show a bar: True, False, or None for only on a terminal.
    """
    values = plain(y)
    values = values[:, None] if values.ndim == 1 else values
    T = len(values)
    first = int(0.6 * T) if first is None else first
    counts = list(modes)
    if values.ndim != 2 or not counts or min(counts) < 1 or folds < 0 or not 1 < first < T:
        raise ArgumentError(
            f"compare: y has shape {values.shape}, modes={counts}, folds={folds}, first={first}. Pass "
            "(T, m), modes of at least 1, folds of at least 0, and 1 < first < T."
        )

    def fit(part: np.ndarray, count: int, start: Any) -> Any:
        if callable(kind):
            return kind(part, count)
        options: dict[str, Any] = {"modes": count, "order": order, "starts": starts, "seed": seed}
        return fit_named_model(part, kind=kind, **options, start=start, progress=False)

    cuts = part_folds(T, first, folds) if folds else ()
    found, failed, scores = dict[int, Any](known or {}), dict[int, str](), dict[int, list[np.ndarray]]()
    grows = kind in ("level", "autoregression") and values.shape[1] == 1
    jobs = [(count, cut) for count in sorted(counts) for cut in (None, *cuts)]
    for count, cut in track(jobs, f"{min(counts)} to {max(counts)} regimes", show=progress):
        if count in failed:
            continue
        try:
            if cut is None:
                if count not in found:
                    found[count] = fit(values, count, found.get(count - 1) if grows else None)
            else:
                part = fit(values[: cut[0]], count, found[count])
                scores.setdefault(count, []).append(_score(part, values, *cut))
        except (ConvergenceError, ArgumentError) as problem:
            if isinstance(problem, ArgumentError) and (callable(kind) or count == min(counts)):
                raise
            failed[count] = str(problem)
    modes_found = [count for count in counts if count in found and count not in failed]
    if not modes_found:
        raise ConvergenceError(f"compare: no number of regimes could be fitted. {failed}")
    fits = {count: found[count] for count in modes_found}
    column = {
        name: np.array([getattr(fit, name) for fit in fits.values()])
        for name in ("log_likelihood", "aic", "bic")
    }
    mean = [float(np.concatenate(scores[k]).mean()) if k in scores else np.nan for k in fits]
    sizes = np.array([fit.free_parameters for fit in fits.values()])
    return Comparison(
        tuple(fits), **column, parameters=sizes, log_score=np.array(mean), failed=failed, fits=fits
    )


def _score(found: Any, values: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The log scores of the observed steps from `begin` to `end`, under a fit to what comes before."""
    inputs, lags = getattr(found, "inputs", None), getattr(found, "order", 0)
    if inputs is not None:
        if not lags or inputs.shape[1] != lags:
            raise ArgumentError("compare: a fit with inputs has no log score. Pass folds=0.")
        rows = np.arange(lags, end)[:, None] - np.arange(1, lags + 1)
        inputs = values[rows, 0]
    got = found.model.filter(values[lags:end], method=found.filter, inputs=inputs)
    terms: np.ndarray = got.log_likelihood_terms[begin - lags :]
    return np.asarray(terms[~np.isnan(values[begin:end]).all(1)])
