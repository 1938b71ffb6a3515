r"""Regressions and autoregressions whose coefficients switch with a Markov chain (Hamilton 1989).

    y_t = a_{s_t} + x_t'b_{s_t} + Σ_k φ_{k,s_t} (y_{t−k} − a_{s_{t−k}} − x_{t−k}'b_{s_{t−k}}) + σ_{s_t} e_t

Given the regimes of the last `order` steps this is a regression on known numbers, so the chain of those
regimes, M^{order + 1} modes of a `SwitchingLinearGaussian` without a state, gives the exact likelihood. The
initial law is the stationary one of the chain, tied to its transition probabilities while they are learned.
The first `order` observations are given, as elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import scipy.special
import torch
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError
from .checks import plain
from .kernels.chain import chain_backward, chain_forward
from .kernels.kalman import LOG_TWO_PI
from .learning.maximum_likelihood import FitStatus, Objective, climb, curvature, delta_method, starts_around
from .model import SwitchingLinearGaussian
from .series import SeriesLike, Values, read

PARTS = ("intercept", "coefficients", "autoregression", "deviation")
MOST = 256  # modes: regimes to the power of order + 1


@dataclass(frozen=True, eq=False)
class MarkovFit:
    """A fitted Markov regression; regimes are numbered by intercept, or deviation, from low to high.

    Attributes:
        model: modes are the regimes of the last order + 1 steps, the latest first and slowest to change.
        estimates: "transition" ``(M, M)``, "intercept" and "deviation" ``(M,)``, "coefficients" ``(M, k)``,
            "autoregression" ``(M, order)``; rows are equal where a part does not switch.
        standard_errors: of the same shapes, NaN where the curvature does not tell.
        log_likelihood: given the first `order` observations.
        status: why the fit stopped; ``status.value`` says it in words.
        free_parameters, observations: how many were learned, and from how many.
        restarts: the final log-likelihood of every start that ran.
        regimes, order: M, and how many lags there are.
        y, inputs: what `model` filters: the series without its first `order` values, and ``(T, r)`` inputs.
    """

    model: SwitchingLinearGaussian
    estimates: dict[str, np.ndarray]
    standard_errors: dict[str, np.ndarray] = field(repr=False)
    log_likelihood: float
    status: FitStatus
    free_parameters: int
    observations: int
    restarts: tuple[float, ...]
    regimes: int
    order: int
    y: Values = field(repr=False)
    inputs: np.ndarray | None = field(repr=False)

    @property
    def aic(self) -> float:
        """Akaike's criterion, 2k − 2 log L."""
        return 2 * self.free_parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion, k log N − 2 log L."""
        return self.free_parameters * float(np.log(self.observations)) - 2 * self.log_likelihood

    @property
    def duration(self) -> np.ndarray:
        """``(M,)``, how many steps each regime is expected to last."""
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / (1.0 - self.estimates["transition"].diagonal()))

    def regime_probability(self, *, smoothed: bool = True) -> Values:
        """P(regime_t | y), ``(T − order, M)``, a table if y was one.

        Args:
            smoothed: given the whole series; else given the data up to each step.
        """
        run = self.model.smooth if smoothed else self.model.filter
        found = run(self.y, method="imm", inputs=self.inputs).mode_probability
        summed = plain(found).reshape(len(found), self.regimes, -1).sum(-1)
        if not hasattr(found, "index"):
            return summed
        names = [f"regime {k}" for k in range(self.regimes)]
        return type(found)(summed, index=found.index, columns=names)

    def summary(self) -> str:
        """Estimates, standard errors, z, p and 95 % intervals as lines of text."""
        lines = [
            f"{self.regimes} regimes, order {self.order}, {self.observations} observations",
            f"log-likelihood {self.log_likelihood:.4f}   AIC {self.aic:.3f}   BIC {self.bic:.3f}",
            self.status.value,
            "",
            f"{'':28}{'estimate':>11}{'s.e.':>11}{'z':>9}{'p':>8}{'low':>11}{'high':>11}",
        ]
        for name, values in self.estimates.items():
            for where in np.ndindex(values.shape):
                value, error = float(values[where]), float(self.standard_errors[name][where])
                z = value / error if error > 0 else np.nan
                p = 2 * scipy.special.ndtr(-abs(z))
                label = f"{name}[{', '.join(map(str, where))}]"
                ends = f"{value - 1.96 * error:>11.4f}{value + 1.96 * error:>11.4f}"
                lines.append(f"{label:28}{value:>11.4f}{error:>11.4f}{z:>9.2f}{p:>8.3f}{ends}")
        lasts = "   ".join(f"{k}: {steps:.1f}" for k, steps in enumerate(self.duration))
        return "\n".join([*lines, "", f"expected durations, in steps: {lasts}"])


def markov_regression(
    y: SeriesLike,
    x: ArrayLike | None = None,
    *,
    regimes: int = 2,
    switching: str | Sequence[str] = ("intercept", "coefficients"),
    starts: int = 5,
    seed: int = 0,
) -> MarkovFit:
    """Fit a regression whose coefficients switch with a Markov chain.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``; numpy, torch or pandas. NaN is missing.
        x: regressors besides the constant, ``(T, k)`` or ``(T,)``.
        regimes: how many, at least 2.
        switching: what switches: some of "intercept", "coefficients", "deviation".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
    """
    return _fit("markov_regression", y, x, regimes, 0, switching, starts, seed)


def markov_autoregression(
    y: SeriesLike,
    x: ArrayLike | None = None,
    *,
    order: int,
    regimes: int = 2,
    switching: str | Sequence[str] = ("intercept", "coefficients"),
    starts: int = 5,
    seed: int = 0,
) -> MarkovFit:
    """Fit Hamilton's autoregression: deviations from a level that switches with a Markov chain.

    Args:
        y: one series, ``(T,)`` or ``(T, 1)``, without missing values; numpy, torch or pandas.
        x: regressors besides the constant, ``(T, k)`` or ``(T,)``.
        order: how many lags.
        regimes: how many, at least 2.
        switching: what switches: some of "intercept", "coefficients", "autoregression", "deviation".
        starts: how many starts; the best end is returned.
        seed: of the starts after the first.
    """
    if order < 1:
        raise ArgumentError(
            f"markov_autoregression: order is {order}. Pass at least 1, or markov_regression."
        )
    return _fit("markov_autoregression", y, x, regimes, order, switching, starts, seed)


def stationary(transition: torch.Tensor) -> torch.Tensor:
    """The stationary probabilities ``(M,)`` of a chain."""
    one = torch.ones(len(transition), dtype=transition.dtype)
    found: torch.Tensor = torch.linalg.solve(torch.eye(len(one), dtype=one.dtype) - transition.mT + 1.0, one)
    return found


@dataclass(frozen=True)
class Shape:
    """Sizes of a Markov regression, what switches, and the regimes of the modes ``(modes, order + 1)``."""

    regimes: int
    order: int
    regressors: int
    switching: frozenset[str]
    paths: np.ndarray

    def natural(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named parameters for unconstrained numbers."""
        M, out, rest = self.regimes, dict[str, torch.Tensor](), theta[self.regimes * (self.regimes - 1) :]
        logits = theta[: M * (M - 1)].reshape(M, M - 1)
        zero = logits.new_zeros(1)
        rows = [torch.cat([row[:k], zero, row[k:]]) for k, row in enumerate(logits)]
        out["transition"] = torch.softmax(torch.stack(rows), 1)
        for name, width in zip(PARTS, (1, self.regressors, self.order, 1), strict=True):
            count = M if name in self.switching else 1
            value, rest = rest[: count * width].reshape(count, width), rest[count * width :]
            out[name] = value.expand(M, width)
        out["intercept"], out["deviation"] = out["intercept"][:, 0], out["deviation"][:, 0].exp()
        return {name: value for name, value in out.items() if value.numel()}

    def chain(self, natural: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Transition, initial law, offset, input matrix and deviation of the expanded chain, mode by mode."""
        P, a, paths = natural["transition"], natural["intercept"], torch.from_numpy(self.paths)
        now, K = paths[:, 0], len(paths)
        follows = (paths[:, None, :-1] == paths[None, :, 1:]).all(-1)
        transition = torch.where(follows, P[now[:, None], now[None, :]], 0.0)
        initial = stationary(P)[paths[:, -1]]
        for k in range(self.order):
            initial = initial * P[paths[:, k + 1], paths[:, k]]
        offset, inputs = a[now], list[torch.Tensor]()
        b = natural.get("coefficients")
        if b is not None:
            inputs.append(b[now])
        if self.order:
            phi = natural["autoregression"][now]
            offset = offset - (phi * a[paths[:, 1:]]).sum(1)
            inputs.append(phi)
            if b is not None:
                inputs.append(-(phi[:, :, None] * b[paths[:, 1:]]).reshape(K, -1))
        matrix = torch.cat([P.new_zeros(K, 0), *inputs], 1)
        return transition, initial, offset, matrix, natural["deviation"][now]

    def build(self, natural: Mapping[str, torch.Tensor]) -> SwitchingLinearGaussian:
        """The model of the expanded chain."""
        transition, initial, offset, matrix, deviation = map(plain, self.chain(natural))
        zero = np.zeros((1, 1))
        return SwitchingLinearGaussian(
            transition=transition,
            dynamics=zero,
            process_noise=zero,
            observation=zero,
            observation_noise=(deviation**2)[:, None, None],
            observation_offset=offset[:, None],
            observation_input=matrix[:, None] if matrix.size else None,
            initial_mean=zero[0],
            initial_covariance=zero,
            initial_probability=initial / initial.sum(),
            start="first",
        )


class ChainLikelihood(torch.autograd.Function):
    """log p(y) of a hidden Markov chain from log-densities ``(T, K)``, transition and initial law.

    Its derivatives are the smoothed probabilities: in a log-density that of its mode, in a transition the
    expected number of times it was made, divided by its probability.
    """

    @staticmethod
    def forward(
        ctx: Any, log_density: torch.Tensor, transition: torch.Tensor, initial: torch.Tensor
    ) -> torch.Tensor:
        """The forward recursion, scaled."""
        logs, P = log_density.detach().numpy(), transition.detach().numpy()
        top = logs.max(1)
        density, T = np.exp(logs - top[:, None]), len(logs)
        filtered, scale = np.empty_like(density), np.empty(T)
        P = np.ascontiguousarray(P)
        chain_forward(density, P, np.ascontiguousarray(initial.detach().numpy()), filtered, scale)
        ctx.kept = density, filtered, scale, P
        with np.errstate(divide="ignore"):
            return log_density.new_tensor(float(np.log(scale).sum() + top.sum()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, bar: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The backward recursion."""
        density, filtered, scale, P = ctx.kept
        later, ahead = np.ones_like(density), density / scale[:, None]
        chain_backward(ahead, P, later)
        pairs = filtered[:-1].T @ (ahead * later)[1:]
        bars = filtered * later, np.where(P > 0, pairs, 0.0), (ahead * later)[0]
        return tuple(bar * torch.from_numpy(value) for value in bars)


def _objective(shape: Shape, y: np.ndarray, inputs: np.ndarray) -> Objective:
    """Minus the log-likelihood and its gradient in unconstrained numbers."""
    seen = torch.from_numpy(~np.isnan(y))
    values, u = torch.from_numpy(np.nan_to_num(y)), torch.from_numpy(inputs)
    likelihood: Any = ChainLikelihood.apply

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(theta, requires_grad=True)
        transition, initial, offset, matrix, deviation = shape.chain(shape.natural(point))
        z = (values[:, None] - offset - u @ matrix.mT) / deviation
        density = torch.where(seen[:, None], -0.5 * (z * z + LOG_TWO_PI) - deviation.log(), 0.0)
        value = likelihood(density, transition, initial / initial.sum())
        (slope,) = torch.autograd.grad(value, point)
        finite = bool(torch.isfinite(value)) and bool(torch.isfinite(slope).all())
        return (-float(value.detach()), -slope.numpy()) if finite else (np.inf, np.zeros_like(theta))

    return evaluate


def _fit(
    what: str,
    y: SeriesLike,
    x: ArrayLike | None,
    regimes: int,
    order: int,
    switching: str | Sequence[str],
    starts: int,
    seed: int,
) -> MarkovFit:
    names = frozenset([switching] if isinstance(switching, str) else switching)
    known = [name for name in PARTS if order or name != "autoregression"]
    if not names or not names <= set(known):
        raise ArgumentError(f"{what}: switching is {sorted(names)}. Pass some of {known}.")
    if regimes < 2 or starts < 1:
        raise ArgumentError(f"{what}: regimes={regimes}, starts={starts}. Pass at least 2, and at least 1.")
    if regimes ** (order + 1) > MOST:
        raise ArgumentError(
            f"{what}: {regimes} regimes over {order + 1} steps are {regimes ** (order + 1)} modes, more than "
            f"{MOST}. Pass fewer regimes or a lower order."
        )
    data = read(y, 1, what=what)
    if data.series != 1:
        raise ArgumentError(f"{what}: there are {data.series} series. Pass one, (T,) or (T, 1).")
    values = data.rows[:, 0]
    if order and np.isnan(values).any():
        raise ArgumentError(f"{what}: y holds NaN, which cannot be a lag. Fill it, or use markov_regression.")
    given = np.zeros((len(values), 0))
    if x is not None:
        given = read(x, _width(x), what=f"{what}: x", missing=False).rows
    if len(given) != len(values):
        raise ArgumentError(f"{what}: y has {len(values)} rows, x has {len(given)}. Pass as many of both.")
    lags = [np.arange(order, len(values)) - k for k in range(1, order + 1)]
    inputs = np.concatenate(
        [given[order:], *(values[at][:, None] for at in lags), *(given[at] for at in lags)], 1
    )
    T, k = len(values) - order, given.shape[1]
    paths = np.array(list(product(range(regimes), repeat=order + 1)))
    shape = Shape(regimes, order, k, names, paths)
    start = _start(shape, values[order:], given[order:], inputs[:, k : k + order])
    if len(start) >= T:
        raise ArgumentError(f"{what}: {len(start)} parameters from {T} observations. Pass a longer series.")
    seen = values[order:][~np.isnan(values[order:])]
    if len(seen) < 2 or np.ptp(seen) == 0:
        raise ArgumentError(f"{what}: y has no two different values. Pass a series that varies.")
    evaluate = _objective(shape, values[order:], inputs)
    generator, ends = torch.Generator().manual_seed(seed), list[tuple[float, np.ndarray, FitStatus]]()
    for point in starts_around(start, starts - 1, 0.3, generator):
        try:
            end, status, _ = climb(evaluate, point, 500, 1e-9, False)
        except ArgumentError:
            if not ends:
                raise
            continue
        ends.append((-evaluate(end)[0], end, status))
    value, end, status = max(ends, key=lambda found: found[0])
    errors = delta_method(shape.natural, end, curvature(evaluate, end))
    natural = shape.natural(torch.from_numpy(end))
    order_by = natural["intercept" if "intercept" in names else "deviation"].numpy()
    ranked = np.argsort(order_by, kind="stable")

    def arranged(table: Mapping[str, Any]) -> dict[str, np.ndarray]:
        out = {name: np.asarray(array)[ranked] for name, array in table.items()}
        return out | {"transition": out["transition"][:, ranked]}

    estimates = arranged(natural)
    model = shape.build({name: torch.from_numpy(array) for name, array in estimates.items()})
    kept = y.iloc[order:] if hasattr(y, "iloc") else values[order:, None]
    return MarkovFit(
        model=model,
        estimates=estimates,
        standard_errors=arranged(errors),
        log_likelihood=value,
        status=status,
        free_parameters=len(start),
        observations=int((~np.isnan(values[order:])).sum()),
        restarts=tuple(found[0] for found in ends),
        regimes=regimes,
        order=order,
        y=kept,
        inputs=inputs if inputs.shape[1] else None,
    )


def _width(x: ArrayLike) -> int:
    """How many columns x has."""
    shape = np.shape(x)
    return int(shape[-1]) if len(shape) > 1 else 1


def _start(shape: Shape, y: np.ndarray, x: np.ndarray, lags: np.ndarray) -> np.ndarray:
    """Numbers to start from: least squares, its residuals split by size among the regimes."""
    M, seen = shape.regimes, ~np.isnan(y)
    design = np.concatenate([np.ones((len(y), 1)), x, lags], 1)[seen]
    solution = np.linalg.lstsq(design, y[seen], rcond=None)[0]
    left = y[seen] - design @ solution
    phi = solution[1 + x.shape[1] :]
    shrink = 1 - phi.sum() if abs(1 - phi.sum()) > 0.1 else 1.0
    middle = [np.mean(part) for part in np.array_split(np.sort(left), M)]
    apart = np.linspace(-0.5, 0.5, M) if "deviation" in shape.switching else np.zeros(M)
    spread = np.log(max(left.std(), 1e-300)) + apart
    parts = {
        "intercept": (solution[0] + np.array(middle)) / shrink,
        "coefficients": np.tile(solution[1 : 1 + x.shape[1]], (M, 1)),
        "autoregression": np.tile(phi, (M, 1)),
        "deviation": spread,
    }
    out = [np.full(M * (M - 1), -2.0)]
    for name, value in parts.items():
        value = value if name in shape.switching else value.mean(0, keepdims=True)
        out.append(np.asarray(value, dtype=np.float64).reshape(-1))
    return np.concatenate(out)
