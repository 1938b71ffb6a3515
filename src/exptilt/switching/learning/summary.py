"""`Fit`, and its summary: estimates, regimes, criteria and tests of the residuals.

The residuals are Φ⁻¹(F_t(y_t)), F_t the law of y_t given the past: a mixture of one Gaussian a mode. If the
model is right they are independent standard normal numbers, however many regimes there are; innovations over
their standard deviation are not.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.checks import whole
from ..._support.errors import ArgumentError
from ..._support.plotting import html_curves
from ..checks import plain
from ..inference.filter import Filtered, filter_series
from ..inference.smooth import smooth_series
from ..parameters import ModelParameters
from ..series import Values, arrange
from .chain import stationary
from .climb import End, FitStatus
from .free_parameters import COVARIANCES, Bounds, interval
from .profile import reach_at

TextTable = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
Fitted = TypeVar("Fitted")
PROBABILITIES = dict.fromkeys(("transition", "initial_probability"), (0.0, 1.0))
HEADER = ("estimate", "standard error", "z", "p", "low", "high")


def write_number(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, and an exponent only if it is huge or tiny."""
    if not np.isfinite(value):
        return {np.inf: "∞", -np.inf: "−∞"}.get(value, "–")
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        places = max(0, digits - 1 - int(np.floor(np.log10(abs(value))))) if value else 0
        return f"{value:,.{min(places, 6)}f}".replace("-", "−").replace(",", "\u202f")
    return f"{value:.{digits - 1}e}".replace("-", "−")


def write_p(value: float) -> str:
    """A p-value with three decimals, or "<0.001"."""
    return "–" if np.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"


class Summary(str):
    """The summary as text; `to_frame` has the estimates as a table, `to_html` all of it for a notebook."""

    __slots__ = ("_facts", "_rows", "_tables")
    _facts: list[str]
    _rows: list[tuple[str, tuple[float, ...]]]
    _tables: list[TextTable]

    def to_frame(self) -> Any:
        """Estimates, standard errors, z, p and intervals as a pandas table, one row a parameter."""
        import pandas as pd

        names, numbers = [row[0] for row in self._rows], [row[1] for row in self._rows]
        return pd.DataFrame(numbers, index=names, columns=list(HEADER))

    def to_html(self) -> str:
        """The summary as HTML."""
        parts = [f"<p>{html.escape(fact)}</p>" for fact in self._facts]
        for header, rows in self._tables:
            cells = [f"<tr>{''.join(f'<th>{html.escape(c)}</th>' for c in header)}</tr>"]
            for row in rows:
                rest = "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
                cells.append(f"<tr><th>{html.escape(row[0])}</th>{rest}</tr>")
            parts.append(f"<table>{''.join(cells)}</table>")
        return "".join(parts)

    _repr_html_ = to_html

    def __repr__(self) -> str:
        return str(self)


def quantile_residuals(post: Filtered[Any]) -> np.ndarray:
    """Φ⁻¹(F_t(y_t)), F_t the law of y_t given the past, ``(rows, m)``; NaN where y is missing."""
    weight = post._ahead[0]
    means, covs, _, _ = post._output
    deviation = np.sqrt(np.diagonal(covs, axis1=-2, axis2=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        z = (post.data.rows[:, None] - means) / deviation
        log_weight = np.log(weight)[..., None]
    from scipy import special

    tails = [special.logsumexp(log_weight + special.log_ndtr(s * z), axis=1) for s in (1.0, -1.0)]
    # the smaller tail keeps its digits; log Φ⁻¹ of it is exact far out
    low = tails[0] < tails[1]
    found = np.where(low, 1.0, -1.0) * special.ndtri_exp(np.where(low, *tails))
    found[~np.isfinite(deviation).all(1)] = np.nan  # while something is diffuse
    return np.asarray(found)


def residual_tests(residuals: np.ndarray, lags: int | None = None) -> dict[str, tuple[float, float]]:
    """Statistics and p-values of Ljung–Box (also of the squares) and of Jarque–Bera, of ``(T,)`` numbers.

    NaN is left out: `lags` (10, or a fifth of the series) then count observed values only.
    """
    r = residuals[~np.isnan(residuals)]
    T = len(r)
    k = min(10, T // 5) if lags is None else lags
    if T < 8 or k < 1 or np.ptp(r) == 0:
        return {}

    def ljung_box(x: np.ndarray) -> tuple[float, float]:
        x = x - x.mean()
        rho = np.array([x[lag:] @ x[:-lag] for lag in range(1, k + 1)]) / (x @ x)
        q = float(T * (T + 2) * (rho**2 / (T - np.arange(1, k + 1))).sum())
        from scipy.special import chdtrc

        return q, float(chdtrc(k, q))

    z = (r - r.mean()) / r.std()
    bera = T / 6 * (float((z**3).mean()) ** 2 + (float((z**4).mean()) - 3) ** 2 / 4)  # χ² of two degrees
    return {
        f"Ljung–Box, {k} lags": ljung_box(r),
        f"Ljung–Box of squares, {k} lags": ljung_box(r**2),
        "Jarque–Bera": (bera, float(np.exp(-bera / 2))),
    }


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Fit(Generic[Fitted]):
    """A fitted model, with its likelihood, its status and its standard errors.

    Attributes:
        model: the fitted model. Of a regression with lags the modes are the regimes of the last order + 1
            steps, the latest first and slowest to change; with durations regimes and their ages.
        log_likelihood: at the end, over all series, without the terms skipped.
        status: why it stopped; ``status.value`` says it in words, and `reason` says more where it can.
        reason: why this is not a proper maximum; empty if it is one.
        standard_errors: for each learned parameter an array of its shape, NaN where an entry was fixed or the
            curvature does not determine it; None if not asked for. Of `fit_parameters` the ``(k,)`` numbers
            alone.
        estimates: for each learned parameter an array of its shape, NaN where an entry was fixed. With
            covariates and durations "transition" is the base law, and "transition_input" ``(M, M, k)`` and
            "transition_age" ``(M,)`` say what moves it.
        free_parameters: how many real numbers were learned.
        observations: how many observed components there were.
        restarts: the final log-likelihood of every start that ran.
        same_end: how many of them reached this end.
        gradient_norm: estimated distance to the maximum in standard errors, from gradient and Hessian; NaN if
            the Hessian is not definite.
        eigenvalues: of the Hessian of minus the log-likelihood in the free numbers, scaled to a diagonal of
            1; all are positive at a proper maximum, and one near 0 is a direction that the data hardly
            determine.
        trace: the log-likelihood at every step.
        decreases: how often a step of EM lowered it.
        regimes, order: how many regimes and lags there are; the model has more modes where ages or lags are
            told apart.
        y, inputs: the data and inputs that `model` filters.
        filter: the filter whose likelihood was maximised.
        bounds: lowest and highest value of parameters that have one; their intervals are taken in logarithms
            or logits, and stay within.
        profile_errors: of regressions, ``(..., 2)`` errors below and above each estimate by profile
            likelihood at 95 %; a summary uses them in place of the standard error.
        freedom: degrees of freedom of Student's law, whose quantiles scale `profile_errors` to other levels.
    """

    model: Fitted
    log_likelihood: float
    status: FitStatus
    reason: str = ""
    standard_errors: Any = None
    estimates: dict[str, np.ndarray] = field(default_factory=dict)
    free_parameters: int
    observations: int
    restarts: tuple[float, ...] = ()
    same_end: int = 1
    gradient_norm: float = np.nan
    eigenvalues: np.ndarray = field(default_factory=lambda: np.zeros(0))
    trace: np.ndarray = field(default_factory=lambda: np.zeros(1))
    decreases: int = 0
    regimes: int = 0
    order: int = 0
    y: Any = None
    inputs: Any = None
    filter: str = "gpb2"
    bounds: Bounds = field(default_factory=dict)
    profile_errors: dict[str, np.ndarray] = field(default_factory=dict)
    freedom: float = np.inf

    @classmethod
    def _of(
        cls, ends: Sequence[End], end: End, same: int, name: Callable[[int], str], **fields: Any
    ) -> "Fit[Any]":
        """The fit of `end`, which `same` of all `ends` agree with; `name` names a number of the vector."""
        said: dict[str, Any] = {
            "log_likelihood": end.value,
            "status": end.status,
            "reason": end.reason.format(name(end.which)) if end.which >= 0 else end.reason,
            "restarts": tuple(other.value for other in ends),
            "same_end": same,
            "gradient_norm": end.gradient_norm,
            "eigenvalues": end.eigenvalues,
            "trace": np.array(end.trace),
        }
        return cls(**(said | fields))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickled fit; those of older releases lack some fields."""
        if "parameters" in state:
            numbers = state["parameters"]
            state = state | {"estimates": {"parameters": numbers}, "free_parameters": len(numbers)}
        before = {"eigenvalues": np.zeros(0), "estimates": {}, "trace": np.zeros(1), "observations": 0}
        before |= {"bounds": {}, "profile_errors": {}, "freedom": np.inf}
        self.__dict__.update(before | state)

    def __repr__(self) -> str:
        numbers = f"{self.free_parameters} free parameters, {self.observations} observed values"
        fitted = f"<Fit of {type(self.model).__name__}: log-likelihood {self.log_likelihood:.6g}, {numbers};"
        return f"{fitted}\n {self.status.value}>"

    @property
    def _any(self) -> Any:
        """The model, typed as any class."""
        return self.model

    @property
    def value(self) -> Fitted:
        """The fitted model."""
        return self.model

    @property
    def parameters(self) -> np.ndarray:
        """``(k,)``, the numbers that `fit_parameters` found."""
        return self.estimates["parameters"]

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(self.trace) - 1

    @property
    def residual(self) -> float:
        """The last rise of the log-likelihood."""
        return float(self.trace[-1] - self.trace[-2]) if len(self.trace) > 1 else 0.0

    @property
    def aic(self) -> float:
        """Akaike's criterion, 2k − 2 log L."""
        return 2 * self.free_parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion, k log N − 2 log L, N the number of observed components."""
        return self.free_parameters * float(np.log(self.observations)) - 2 * self.log_likelihood

    def _repr_html_(self) -> str:
        """The fit in a notebook: its summary, and the probability of each regime along the first series."""
        said = self.summary().to_html()
        if self.y is None or self.regimes < 2:
            return said
        with torch.no_grad():
            found = self.regime_probability()
        first = plain(found[0] if isinstance(found, list) else found)
        first = first[0] if first.ndim == 3 else first
        return said + html_curves(first, "probability of each regime, a colour each")

    @property
    def duration(self) -> np.ndarray:
        """``(regimes,)``, how many steps each regime is expected to last, under the mean transitions."""
        P = _mean_transition(self._any)
        size = len(P) // self.regimes
        out = np.full(self.regimes, np.inf)
        for k in range(self.regimes):
            inside = np.arange(k * size, (k + 1) * size)
            outside = np.setdiff1d(np.arange(len(P)), inside)
            enter = P[np.ix_(outside, inside)].sum(0)
            stay = np.eye(size) - P[np.ix_(inside, inside)]
            if enter.sum() > 0 and np.linalg.cond(stay) < 1e14:
                out[k] = enter @ np.linalg.solve(stay, np.ones(size)) / enter.sum()
        return out

    @property
    def ergodic(self) -> np.ndarray:
        """``(regimes,)``, the share of time each regime has in the long run, under the mean transitions."""
        P = torch.from_numpy(_mean_transition(self._any))
        return np.asarray(stationary(P).numpy().reshape(self.regimes, -1).sum(1))

    def regime_probability(self, *, smoothed: bool = True) -> Values:
        """P(regime_t | y), ``(T, regimes)``, a table if y was one.

        Args:
            smoothed: given the whole series; else given the data up to each step.
        """
        run = smooth_series if smoothed else filter_series
        found = run(self._any, self.y, method=self.filter, inputs=self.inputs).mode_probability
        return sum_modes(found, self.regimes)

    def residuals(self) -> Values:
        """Φ⁻¹(P(y_t or less | the past)), ``(T, m)``: independent N(0, 1) if the model is right."""
        with torch.no_grad():
            post = filter_series(self._any, self.y, method=self.filter, inputs=self.inputs)
        return arrange(quantile_residuals(post), post.data, "output")

    def impulse_response(
        self, steps: int, *, stay: bool = False, shock: str | ArrayLike = "cholesky"
    ) -> np.ndarray:
        r"""Mean response to a shock, ``(regimes, steps + 1, m, k)``, by the regime in which it occurs.

        Given the regimes an autoregression is linear, so the response averaged over all regimes to come is a
        product of matrices, summed over the chain exactly: no paths are drawn.

        Args:
            steps: number of steps after that of the shock.
            stay: True if the regime lasts for ever; else the response is averaged over later regimes (by the
                base law of the chain, where covariates or ages move it).
            shock: "cholesky" for shocks of one deviation, each orthogonal to the earlier components;
                "generalised" for one deviation of a component, the others at their mean given it (Pesaran
                and Shin); or ``(m, k)`` shocks as columns.
        """
        A = self.estimates.get("autoregression")
        if A is None or A.ndim not in (2, 4) or whole("impulse_response", "steps", steps) < 1:
            raise ArgumentError("impulse_response: the fit has no lags. Pass one of markov_var.")
        A = A[:, :, None, None] if A.ndim == 2 else A
        M, order, m, _ = A.shape
        noise = self.estimates.get("covariance")
        noise = (self.estimates["deviation"] ** 2)[:, None, None] if noise is None else noise
        if isinstance(shock, str):
            if shock not in ("cholesky", "generalised"):
                raise ArgumentError(
                    f'impulse_response: shock is {shock!r}. Pass "cholesky", "generalised" or a matrix.'
                )
            deviation = np.sqrt(np.diagonal(noise, axis1=1, axis2=2))[:, None]
            hits = np.linalg.cholesky(noise) if shock == "cholesky" else noise / deviation
        else:
            hits = np.broadcast_to(np.asarray(shock, dtype=np.float64), (M, m, np.shape(shock)[-1]))
        F = np.zeros((M, order * m, order * m))
        F[:, :m] = A.transpose(0, 2, 1, 3).reshape(M, m, -1)
        F[:, range(m, order * m), range(order * m - m)] = 1.0
        P = np.eye(M) if stay else self.estimates["transition"]
        # law[r, s]: mean of the response in regime s times its chance, of a shock that fell into regime r
        law = np.zeros((M, M, order * m, hits.shape[-1]))
        law[range(M), range(M), :m] = hits
        out = [law.sum(1)[:, :m]]
        for _ in range(steps):
            law = F @ np.einsum("st,rsak->rtak", P, law)
            out.append(law.sum(1)[:, :m])
        return np.stack(out, 1)

    def future_paths(self, steps: int, *, draws: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Drawn futures of an autoregression: regimes ``(draws, steps)`` and values ``(draws, steps, m)``.

        Args:
            steps: how many.
            draws: how many futures.
            seed: of the draws.
        """
        model, rng, y = self._any, np.random.default_rng(seed), plain(self.y)
        m, order = model.outputs, self.order
        if not order or self.inputs is None or self.inputs.shape[1] != order * m or model.transition.ndim > 2:
            raise ArgumentError(
                "future_paths: the fit has other inputs than lags, or none. Use `fit.model.filter(...)"
                ".forecast(steps, inputs=...)`."
            )
        rows = np.concatenate([self.inputs[0].reshape(order, m)[::-1], y.reshape(-1, m)])
        weight = plain(model.filter(self.y, method=self.filter, inputs=self.inputs).mode_probability)[-1]
        mode = rng.choice(len(weight), draws, p=weight / weight.sum())
        past = np.repeat(rows[: -order - 1 : -1].reshape(1, -1), draws, 0)  # the latest first, as the inputs
        chance, root = model.transition.cumsum(1), np.linalg.cholesky(model.observation_noise)
        regimes, values = np.zeros((draws, steps), dtype=np.int64), np.zeros((draws, steps, m))
        for k in range(steps):
            mode = np.minimum((chance[mode] < rng.random((draws, 1))).sum(1), len(weight) - 1)
            mean = model.observation_offset[mode] + np.einsum(
                "dmr,dr->dm", model.observation_input[mode], past
            )
            values[:, k] = mean + np.einsum("dab,db->da", root[mode], rng.normal(size=(draws, m)))
            past = np.concatenate([values[:, k], past], 1)[:, : order * m]
            regimes[:, k] = mode // (len(weight) // self.regimes)
        return regimes, values

    def summary(self, *, level: float = 0.95) -> Summary:
        """Estimates with intervals, regimes, criteria and residual tests; text that is also table and HTML.

        Args:
            level: of the intervals.
        """
        errors = self.standard_errors
        errors = {"parameters": errors} if isinstance(errors, np.ndarray) else errors
        sides = self.profile_errors
        if sides and np.isfinite(self.freedom):  # of the normal quantiles that they will be multiplied by
            ratio = reach_at(level, self.freedom) / reach_at(level, 1e9)
            sides = {name: ratio * x for name, x in sides.items()}
        rows = _estimate_rows(self.estimates, errors, self.regimes, level, self.bounds, sides)
        facts = [
            f"{self.regimes} regimes, {self.observations} observations, {self.free_parameters} parameters",
            f"log-likelihood {self.log_likelihood:.4f}   AIC {self.aic:.3f}   BIC {self.bic:.3f}",
            self.status.value + (f" ({self.reason})" if self.reason else ""),
            f"{self.same_end} of {max(len(self.restarts), 1)} starts ended here",
        ]
        shown = [
            (name, *map(write_number, n[:2]), write_number(n[2], 3), write_p(n[3]), *map(write_number, n[4:]))
            for name, n in rows
        ]
        tables: list[TextTable] = [
            (("", *HEADER[:4], f"low {100 * level:g} %", f"high {100 * level:g} %"), shown)
        ]
        if self.regimes > 1:
            pairs = zip(self.duration, self.ergodic, strict=True)
            chain = [(str(k), write_number(d), write_number(e)) for k, (d, e) in enumerate(pairs)]
            tables.append((("regime", "expected duration", "ergodic probability"), chain))
        tests = self._tests()
        if tests:
            tables.append((("residuals", "statistic", "p"), tests))
        text = Summary("\n".join([*facts, *(f"\n{_aligned(*table)}" for table in tables)]))
        text._facts, text._rows, text._tables = facts, rows, tables
        return text

    def _tests(self) -> list[tuple[str, ...]]:
        if self.y is None:
            return []
        with torch.no_grad():
            post = filter_series(self._any, self.y, method=self.filter, inputs=self.inputs)
        found, out = quantile_residuals(post), list[tuple[str, ...]]()
        if post.data.series > 1:
            return []
        for a, column in enumerate(found.T):
            name = "" if found.shape[1] == 1 else f"component {a}: "
            for test, (statistic, p) in residual_tests(column).items():
                out.append((name + test, write_number(statistic), write_p(p)))
        return out


def sum_modes(probability: Values, regimes: int) -> Values:
    """Probabilities of regimes from those of modes ``(T, K)``; modes of one regime are adjacent."""
    if isinstance(probability, list):
        return [sum_modes(one, regimes) for one in probability]
    if probability.shape[-1] == regimes:
        return probability
    shape = (*probability.shape[:-1], regimes, -1)
    if isinstance(probability, torch.Tensor):
        return probability.reshape(shape).sum(-1)
    summed = plain(probability).reshape(shape).sum(-1)
    if not hasattr(probability, "index"):
        return summed
    names = [f"regime {k}" for k in range(regimes)]
    return type(probability)(summed, index=probability.index, columns=names)


def _mean_transition(model: ModelParameters) -> np.ndarray:
    P = plain(model.transition)
    return P if P.ndim == 2 else P.mean(0)


def _estimate_rows(
    estimates: dict[str, np.ndarray],
    errors: dict[str, np.ndarray] | None,
    regimes: int,
    level: float,
    bounds: Bounds,
    sides: dict[str, np.ndarray],
) -> list[tuple[str, tuple[float, ...]]]:
    """One row for each learned number, and one for a number that all regimes share."""
    from scipy.special import ndtr, ndtri

    reach, rows = float(ndtri((1 + level) / 2)), list[tuple[str, tuple[float, ...]]]()
    for name, values in estimates.items():
        own = np.full(values.shape, np.nan) if errors is None else errors[name]
        alike = len(values) == regimes > 1 and name != "transition"
        once = alike and bool(
            np.array_equal(values, np.broadcast_to(values[:1], values.shape), equal_nan=True)
            and np.array_equal(own, np.broadcast_to(own[:1], own.shape), equal_nan=True)
        )
        for where in np.ndindex(values.shape):
            twice = name in COVARIANCES and where[-1] > where[-2]
            if np.isnan(values[where]) or twice or (once and where[0]):
                continue
            value, error = float(values[where]), float(own[where])
            index = where[1:] if once or regimes == 1 == len(values) else where
            z = value / error if error > 0 else np.nan
            label = name + (f"[{', '.join(map(str, index))}]" if index else "")
            variance = name in COVARIANCES and where[-1] == where[-2]
            limits = (
                (0.0, np.inf) if variance else bounds.get(name, PROBABILITIES.get(name, (-np.inf, np.inf)))
            )
            found = sides[name][where] if name in sides else np.array([np.nan, np.nan])
            below, above = reach * np.where(np.isnan(found), error, found)
            ends = interval(value, float(below), float(above), *limits)
            rows.append((label, (value, error, z, float(2 * ndtr(-abs(z))), *ends)))
    return rows


def _aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table as text: the first column to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
