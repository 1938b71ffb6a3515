r"""Modes that are not linear: extended and unscented filters behind the same three recursions.

    x_t = f_{s_t}(x_{t−1}, u_t) + w_t,   y_t = h_{s_t}(x_t, u_t) + v_t

A Gaussian goes through a function g either by its tangent at the mean ("extended": mean g(x), covariance G P
G' with G the Jacobian) or by 2n + 1 points that carry mean and covariance ("unscented", Julier and Uhlmann).
Functions are written in torch, with the state (and the inputs) along the last axis; they are traced once and
compiled with their Jacobians (`kernels/traced.py`), and the filter keeps factors of covariances in place of
covariances (`kernels/nonlinear.py`), so these stay positive. All else, mixing, weights in logarithms,
collapse, missing components, is as for linear modes.

Angles: differences of components that are named as angles are taken around the circle, and their means are
circular, in collapse, sigma points and innovations alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError
from .checks import Array, Checker, plain
from .inference.forecast import Forecast, arranged, check_forecast
from .inference.online import OnlineState, Plan
from .inference.online.state import _state
from .inference.problem import input_rows, inputs_of
from .inference.run import METHODS, check_failures, over_series
from .inference.simulate import root
from .kernels.kalman import LOG_TWO_PI
from .kernels.nonlinear import Followed, Modes, follow, follow_rows, sight
from .kernels.nonlinear_smoother import follow_back
from .kernels.traced import Compiled, Function
from .series import Data, SeriesLike, Values, arrange, arrange_total, read

_check = Checker("SwitchingNonlinear")


def wrap(difference: np.ndarray, angles: Sequence[int]) -> np.ndarray:
    """The difference with the components named in `angles` brought to (−π, π]."""
    out = difference.copy()
    for a in angles:
        out[..., a] = np.arctan2(np.sin(difference[..., a]), np.cos(difference[..., a]))
    return out


def collapse(
    weight: np.ndarray, mean: np.ndarray, cov: np.ndarray, angles: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Moments of mixtures: weight ``(..., K)``, mean ``(..., K, n)``, cov ``(..., K, n, n)``."""
    out = np.einsum("...k,...ki->...i", weight, mean)
    for a in angles:
        parts = (np.einsum("...k,...k->...", weight, f(mean[..., a])) for f in (np.sin, np.cos))
        out[..., a] = np.arctan2(*parts)
    delta = wrap(mean - out[..., None, :], angles)
    return out, np.einsum("...k,...kij->...ij", weight, cov + delta[..., None] * delta[..., None, :])


@dataclass(frozen=True, eq=False)
class NonlinearFiltered:
    """What a filter with nonlinear modes knows after each step; leading axes as in the data.

    Attributes:
        log_likelihood: a number, or one per series.
        log_likelihood_terms: ``(T,)``.
        mode_probability: ``(T, M)``.
        mean, covariance: of the state over modes, ``(T, n)`` and ``(T, n, n)``.
        mode_mean, mode_covariance: of the state in each mode, ``(T, M, n)`` and ``(T, M, n, n)``.
    """

    log_likelihood: Values
    log_likelihood_terms: Values
    mode_probability: Values
    mean: Values
    covariance: Values
    mode_mean: Values
    mode_covariance: Values
    _source: Any = field(repr=False, default=None)

    def forecast(self, steps: int, *, inputs: SeriesLike | None = None, level: float = 0.9) -> Forecast:
        """Means, covariances, intervals and mode probabilities of the steps after the data.

        Args:
            steps: how many.
            inputs: ``(h, r)``, or one for each series, where the functions take inputs.
            level: of the intervals, between 0 and 1.
        """
        model, _, linearize, data, law, _ = self._source
        return model._forecast(data, law, steps, inputs, level, linearize)  # type: ignore[no-any-return]

    def _online(self) -> OnlineState:
        """The state after the last step."""
        model, method, linearize, data, law, total = self._source
        plan = NonlinearPlan(model, method, linearize, None if data.layout == "single" else data.series)
        return plan.state(law, total, int(data.lengths.max()))


@dataclass(frozen=True, eq=False)
class NonlinearSmoothed:
    """The law of modes and states given the whole series; leading axes as in the data.

    Attributes:
        log_likelihood: of the filter underneath.
        mode_probability: ``(T, M)``.
        mean, covariance: of the state over modes, ``(T, n)`` and ``(T, n, n)``.
        mode_mean, mode_covariance: of the state in each mode, ``(T, M, n)`` and ``(T, M, n, n)``.
    """

    log_likelihood: Values
    mode_probability: Values
    mean: Values
    covariance: Values
    mode_mean: Values
    mode_covariance: Values


@dataclass(frozen=True, eq=False, kw_only=True)
class SwitchingNonlinear:
    """Modes with functions for dynamics and observation.

    Args:
        transition: ``(M, M)``, rows sum to 1.
        dynamics: one function a mode, from states ``(..., n)`` to states ``(..., n)``. Functions are written
            with torch, and compiled: arithmetic, sums, products of matrices, ``torch.where`` and elementary
            functions.
        process_noise: ``(M, n, n)`` or ``(n, n)``.
        observation: one function a mode, or one for all, from states ``(..., n)`` to ``(..., m)``.
        observation_noise: ``(M, m, m)`` or ``(m, m)``.
        initial_mean: ``(n,)`` or ``(M, n)``.
        initial_covariance: ``(n, n)`` or ``(M, n, n)``.
        initial_probability: ``(M,)``.
        angles: which state components are angles.
        observation_angles: which observed components are.
        start: "before" or "first", as for `SwitchingLinearGaussian`.
        inputs: r; if it is not 0 all functions take inputs ``(..., r)`` of the step as a second argument. The
            time, or the time since the step before, is one of them where a function depends on it.
    """

    transition: Array
    dynamics: Sequence[Function]
    process_noise: Array
    observation: Function | Sequence[Function]
    observation_noise: Array
    initial_mean: Array
    initial_covariance: Array
    initial_probability: Array
    angles: tuple[int, ...] = ()
    observation_angles: tuple[int, ...] = ()
    start: str = "before"
    inputs: int = 0

    def __post_init__(self) -> None:
        if self.start not in ("before", "first"):
            raise _check.refuse(f'start is {self.start!r}. Pass "before" or "first".')
        cores = {
            "process_noise": "nn",
            "observation_noise": "mm",
            "initial_mean": "n",
            "initial_covariance": "nn",
        }
        for name in ("transition", "initial_probability", *cores):
            value = _check.convert(name, getattr(self, name), True).detach().double()
            _check.finite(name, value)
            object.__setattr__(self, name, value)
        for name, core in cores.items():
            shape = tuple(getattr(self, name).shape)
            if len(shape) not in (len(core), len(core) + 1):
                raise _check.refuse(
                    f"{name} has shape {shape}. Pass ({', '.join(core)}) or (M, {', '.join(core)})."
                )
        M = self.transition.shape[-1] if self.transition.ndim else 0
        shapes = tuple(self.transition.shape), tuple(self.initial_probability.shape)
        if shapes != ((M, M), (M,)):
            raise _check.refuse(
                f"transition is {shapes[0]}, initial_probability {shapes[1]}. Pass (M, M) and (M,)."
            )
        _check.stochastic("transition", self.transition)
        _check.stochastic("initial_probability", self.initial_probability)
        sizes = {"n": self.process_noise.shape[-1], "m": self.observation_noise.shape[-1]}
        for name, core in cores.items():
            full = tuple(sizes[letter] for letter in core)
            value = _check.with_modes(name, getattr(self, name), full, M, f"{(M, *full)}")
            object.__setattr__(self, name, value)
            if name != "initial_mean":
                _check.covariance(name, value)
        for name, size in (("angles", sizes["n"]), ("observation_angles", sizes["m"])):
            if not all(isinstance(k, int) and 0 <= k < size for k in getattr(self, name)):
                raise _check.refuse(
                    f"{name} is {getattr(self, name)}. Pass numbers of components, from 0 to {size - 1}."
                )
        functions = [self.observation] * M if callable(self.observation) else list(self.observation)
        every = (*self.dynamics, *functions)
        if len(self.dynamics) != M or len(functions) != M or not all(callable(f) for f in every):
            raise _check.refuse(f"pass {M} functions for dynamics, and one or {M} for observation.")
        object.__setattr__(self, "observation", functions)
        if not isinstance(self.inputs, int) or self.inputs < 0:
            raise _check.refuse(f"inputs is {self.inputs!r}. Pass how many inputs the functions take.")
        for j in range(M):
            self._check_function("dynamics", j, self.dynamics[j], sizes["n"])
            self._check_function("observation", j, functions[j], sizes["m"])
        kinds = ("dynamics", "observation")
        names = [f"SwitchingNonlinear: {kind} of mode {j}" for kind in kinds for j in range(M)]
        different = {id(function): k for k, function in reversed(list(enumerate(every)))}
        kept = sorted(different.values())
        compiled = Compiled([every[k] for k in kept], [names[k] for k in kept], sizes["n"], self.inputs)
        number = np.array([kept.index(different[id(function)]) for function in every]).reshape(2, M).T
        flags = [np.zeros(size, np.int64) for size in (sizes["n"], sizes["m"])]
        for flag, which in zip(flags, (self.angles, self.observation_angles), strict=True):
            flag[list(which)] = 1
        with np.errstate(divide="ignore"):
            logarithms = [np.log(plain(value)) for value in (self.transition, self.initial_probability)]
        roots = [root(plain(value)) for value in (self.process_noise, self.observation_noise)]
        start: list[Any] = [plain(self.initial_mean), _triangles(root(plain(self.initial_covariance)))]
        start = [value.reshape(1, -1) for value in (*start, logarithms[1])]
        noises = [logarithms[0].reshape(-1), *(value.reshape(M, -1) for value in roots)]
        tables = [compiled.constants, np.ascontiguousarray(number), *noises, *start, *flags]
        modes = Modes._make([compiled.address, *tables, int(self.start == "first"), 0])
        object.__setattr__(self, "_modes", modes)

    def _check_function(self, name: str, j: int, function: Function, size: int) -> None:
        """Refuse a function that does not map one state and several to ``size`` numbers each."""
        mean = self.initial_mean[j]
        for points in (mean, mean.expand(2, -1)):
            given = [points, points.new_zeros(*points.shape[:-1], self.inputs)][: 2 if self.inputs else 1]
            try:
                image = function(*given)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise _check.refuse(
                    f"{name} of mode {j} fails for states of shape {tuple(points.shape)} ({error}). "
                    "The last axis is the state: use x[..., k], and torch functions."
                ) from error
            wanted = (*points.shape[:-1], size)
            if not isinstance(image, torch.Tensor) or tuple(image.shape) != wanted:
                got = tuple(image.shape) if isinstance(image, torch.Tensor) else type(image).__name__
                raise _check.refuse(
                    f"{name} of mode {j} gives {got} for states of shape {tuple(points.shape)}. "
                    f"Return a tensor of shape {wanted}."
                )

    def filter(
        self,
        y: SeriesLike,
        *,
        method: str = "imm",
        linearize: str = "extended",
        inputs: SeriesLike | None = None,
    ) -> NonlinearFiltered:
        """Filter one series or a batch.

        Args:
            y: as for `SwitchingLinearGaussian.filter`.
            method: "imm", "gpb2" or "gpb1".
            linearize: "extended" or "unscented".
            inputs: ``(T, r)``, or one for each series, where the functions take inputs.
        """
        data, u = self._read(y, inputs, method, linearize, "filter")
        out = self._run(data, u, method, linearize)
        last = data.starts[1:] - 1
        totals = data.totals(out.terms)
        source = (self, method, linearize, data, [value[last] for value in out[1:4]], totals)
        total = arrange_total(totals, data)
        shown = total, arrange(out.terms, data, None), *self._arranged(data, out), source
        return NonlinearFiltered(*shown)

    def _arranged(self, data: Data, out: Followed) -> list[Any]:
        """Mode probabilities, moments over modes and in each mode, as the data are."""
        (M, n), rows = self.initial_mean.shape, len(data.rows)
        weight, mean = np.exp(out.log_mode), out.mean.reshape(rows, M, n)
        L = out.factor.reshape(rows, M, n, n)
        cov = L @ L.mT
        values = (weight, *collapse(weight, mean, cov, self.angles), mean, cov)
        names = ("mode", "state", None, None, None)
        return [arrange(value, data, name) for value, name in zip(values, names, strict=True)]

    def _read(
        self, y: SeriesLike, inputs: SeriesLike | None, method: str, linearize: str, what: str
    ) -> tuple[Data, np.ndarray]:
        """The data, and inputs by row."""
        if method not in METHODS:
            raise ArgumentError(
                f'{what}: method is {method!r}. With nonlinear modes pass "imm", "gpb2" or "gpb1".'
            )
        check_linearize(linearize, what)
        data = read(y, int(self.observation_noise.shape[-1]), what=what)
        if data.tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{what}: filters of nonlinear modes have no derivative, and the data require one. "
                "Call it under torch.no_grad()."
            )
        return data, self._inputs(data, inputs, what)

    def _inputs(self, data: Data, inputs: SeriesLike | None, what: str) -> np.ndarray:
        words = "the functions take none: inputs of the model is 0", "the functions take inputs"
        return input_rows(inputs_of(self.inputs, data, inputs, what, words), data)

    def _run(self, data: Data, u: np.ndarray, method: str, linearize: str, law: Any = None) -> Followed:
        """What is known after each row, from the initial law or from `law`, as it follows a filter."""
        modes = self._linearized(linearize)
        if law is not None:
            log_mode, mean, factor = law
            modes = modes._replace(mean=mean, factor=factor, log_probability=log_mode, first=0)
        (M, n), rows = self.initial_mean.shape, len(data.rows)
        sizes = ((rows,), (rows, M), (rows, M * n), (rows, M * n * n))
        out = Followed._make([*(np.empty(size) for size in sizes), np.full((data.series, 2), -1)])
        y = np.ascontiguousarray(data.rows)
        how = METHODS[method]
        over_series(data.starts, lambda a, b: follow(modes, y, u, data.starts, out, a, b, how), 200)
        check_failures(out.failure, "filter", M)
        return out

    def _linearized(self, linearize: str) -> Modes:
        modes: Modes = self._modes  # type: ignore[attr-defined]
        return modes._replace(unscented=int(linearize == "unscented"))

    def smooth(
        self,
        y: SeriesLike,
        *,
        method: str = "imm",
        linearize: str = "extended",
        inputs: SeriesLike | None = None,
    ) -> NonlinearSmoothed:
        """Moments and mode probabilities given the whole series: Kim's pass, with the filter's linearisation.

        Args:
            y: as for `filter`.
            method: "imm", "gpb2" or "gpb1", the filter underneath.
            linearize: "extended" or "unscented".
            inputs: as for `filter`.
        """
        data, u = self._read(y, inputs, method, linearize, "smooth")
        modes, out = self._linearized(linearize), self._run(data, u, method, linearize)
        over_series(data.starts, lambda a, b: follow_back(modes, u, data.starts, out, a, b), 200)
        total = arrange_total(data.totals(out.terms), data)
        return NonlinearSmoothed(total, *self._arranged(data, out))

    def online(
        self, *, method: str = "imm", linearize: str = "extended", batch: int | None = None
    ) -> OnlineState:
        """A filter to be fed one observation at a time; see `OnlineState`.

        Args:
            method: "imm", "gpb2" or "gpb1".
            linearize: "extended" or "unscented".
            batch: how many members share this model; None for one, whose results have no batch axis.
        """
        plan, modes = NonlinearPlan(self, method, linearize, batch), self._linearized(linearize)
        return plan.state((modes.log_probability, modes.mean, modes.factor), np.zeros(1), 0)

    def _restored(self, kept: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> "NonlinearPlan":
        """The plan of a state that was saved."""
        plan = NonlinearPlan(self, about["method"], about["linearize"], about["batch"])
        for name, value in plan.stored()[0].items():
            if value.shape != kept[name].shape or (value != kept[name]).any():
                raise ArgumentError(f"OnlineState.load: the state was saved with another {name}.")
        return plan

    def _forecast(
        self,
        data: Data,
        law: list[np.ndarray],
        steps: int,
        inputs: SeriesLike | None,
        level: float,
        linearize: str,
    ) -> Forecast:
        check_forecast(steps, level)
        B, (M, n), m = data.series, self.initial_mean.shape, self.observation_noise.shape[-1]
        empty = read(np.full((B, steps, m), np.nan), m)
        u = self._inputs(empty, inputs, "forecast")
        out = self._run(empty, u, "imm", linearize, law)
        weight, means = np.exp(out.log_mode), out.mean.reshape(-1, M, n)
        L = out.factor.reshape(-1, M, n, n)
        center, spread = self._sight(out.mean, out.factor, u, linearize)
        total = collapse(weight, center, spread, self.observation_angles)
        state = collapse(weight, means, L @ L.mT, self.angles)
        return arranged(data, steps, level, weight, center, spread, *total, *state)

    def _sight(
        self, mean: np.ndarray, factor: np.ndarray, u: np.ndarray, linearize: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of what each mode observes, from laws by row."""
        (M, n), m, rows = self.initial_mean.shape, self.observation_noise.shape[-1], len(mean)
        laws = np.concatenate([mean.reshape(rows, M, n), factor.reshape(rows, M, n * n)], -1)
        center, S = np.empty((rows, M, m)), np.empty((rows, M, m, m))
        sight(self._linearized(linearize), laws.reshape(rows, -1), u, center, S)
        return center, S


def _triangles(roots: np.ndarray) -> np.ndarray:
    """Lower triangular factors of A A', for square A ``(..., n, n)``."""
    return np.ascontiguousarray(np.linalg.qr(roots.mT).R.mT)


class NonlinearPlan(Plan):
    """The plan of modes that are functions: laws hold factors, and in place of matrices there are inputs."""

    kind = "nonlinear"

    def __init__(self, model: SwitchingNonlinear, method: str, linearize: str, batch: int | None) -> None:
        check_linearize(linearize, "online")
        (M, n), m = model.initial_mean.shape, model.observation_noise.shape[-1]
        self._size(method, batch, M, n, m)
        self.model, self.linearize, self.torch = model, linearize, False
        self.first, self.modes = model.start == "first", model._linearized(linearize)
        self.r, self.constant = model.inputs, None if model.inputs else np.zeros((1, 0))

    def state(self, law: Sequence[np.ndarray], total: np.ndarray, t: int) -> OnlineState:
        """The state after `t` steps, from log probabilities, means and factors by mode."""
        log_mode, mean, factor = law
        shape = (len(mean), self.M, -1)
        rows = self.rows(log_mode, mean.reshape(shape), factor.reshape(*shape[:2], self.n, self.n), total)
        return _state(self, rows, t)

    def matrices(self, t: int, inputs: ArrayLike | None) -> np.ndarray:
        """The inputs of a step, ``(members or 1, r)``."""
        if not self.r:
            raise ArgumentError("online: the functions take no inputs. Make the model with inputs=r.")
        return np.ascontiguousarray(self.inputs(inputs))

    def run(self, matrices: Any, before: Any, y: Any, after: Any, begin: int, end: int, how: Any) -> int:
        """Take members a step on; see `follow_rows`."""
        found: int = follow_rows(self.modes, matrices, before, y, after, begin, end, how)
        return found

    def judge(self, state: Any, y: np.ndarray) -> tuple[int, tuple[np.ndarray, ...]]:
        """Where it failed or −1, and innovations, covariances, distances, densities of y ``(B, K, m)``."""
        _, mean, cov = state._laws(True)
        factor = _triangles(root(cov))
        center, S = self.model._sight(mean, factor, state._matrices, self.linearize)
        e = wrap(y[:, :, None] - center[:, None], self.model.observation_angles)
        seen = ~np.isnan(e)
        both = seen[..., None] & seen[..., None, :]
        part = np.where(both, S[:, None], np.eye(self.m))  # what is missing: independent, and no surprise
        try:
            L = np.linalg.cholesky(part)
        except np.linalg.LinAlgError:
            worst = np.unravel_index(np.linalg.eigvalsh(part)[..., 0].argmin(), part.shape[:3])
            return int(worst[0] * (self.M + 1) + worst[2]), (e, S, S, S)
        z = np.linalg.solve(L, np.where(seen, e, 0.0)[..., None])[..., 0]
        distance = (z * z).sum(-1)
        logs = np.log(np.diagonal(L, axis1=-2, axis2=-1)).sum(-1)
        return -1, (e, S, distance, -0.5 * (distance + seen.sum(-1) * LOG_TWO_PI) - logs)

    def covariance(self, laws: np.ndarray) -> np.ndarray:
        """Covariances of laws ``(..., law)``."""
        L = super().covariance(laws)
        return np.asarray(L @ L.mT)

    def mixture(self, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments over the axis of the weights."""
        return collapse(weight, mean, cov, self.model.angles)

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """What `save` writes of the model: its numbers, which `load` compares."""
        names = ("transition", "process_noise", "observation_noise")
        return {name: plain(getattr(self.model, name)) for name in names}, {"linearize": self.linearize}


def check_linearize(linearize: str, what: str) -> None:
    """Refuse what is no linearisation."""
    if linearize not in ("extended", "unscented"):
        raise ArgumentError(f'{what}: linearize is {linearize!r}. Pass "extended" or "unscented".')
