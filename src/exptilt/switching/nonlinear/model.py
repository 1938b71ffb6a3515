"""Models with nonlinear modes, and their filters, smoothers and forecasts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..._support import native
from ..._support.errors import ArgumentError
from ..arrays import METHODS, filled
from ..checks import Array, Checker, plain
from ..inference.forecast import Forecast, arranged, check_forecast
from ..inference.online import OnlineState
from ..inference.problem import input_rows, inputs_of
from ..inference.results import Filtered, Laws, Smoothed
from ..inference.run import check_failures, over_series
from ..inference.simulate import root
from ..series import Data, SeriesLike, read
from .laws import Core, FactorRows, check_linearize, collapse, sigma_points, triangles
from .plan import NonlinearPlan
from .programs import Tapes
from .recording import Function, called

_check = Checker("SwitchingNonlinear")
LEAST = 200  # least number of rows for each thread


class FunctionLaws(Laws):
    """Laws of modes that are functions: Gaussians with angles in their means."""

    def __init__(self, model: "SwitchingNonlinear", linearize: str, data: Data, out: FactorRows) -> None:
        (M, n), rows = model.initial_mean.shape, len(data.rows)
        L = out.factor.reshape(rows, M, n, n)
        super().__init__(
            out.log_mode, out.mean.reshape(rows, M, n), L @ L.mT, out.terms, data.totals(out.terms)
        )
        self.model, self.linearize, self.rows = model, linearize, out

    def mixture(self, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments over modes."""
        return collapse(weight, mean, cov, self.model.angles)

    def _end(self, data: Data) -> FactorRows:
        return FactorRows(*(value[data.starts[1:] - 1] for value in self.rows))

    def forecast(self, post: Any, steps: int, inputs: SeriesLike | None, level: float) -> Forecast:
        """Forecast from the law after the last step."""
        return self.model._forecast(post.data, self._end(post.data), steps, inputs, level, self.linearize)

    def online(self, post: Any) -> OnlineState:
        """The state after the last step."""
        data = post.data
        batch = None if data.layout == "single" else data.series
        plan = NonlinearPlan(self.model, post.method, self.linearize, batch)
        return plan.state(self._end(data), self.total, int(data.lengths.max()))


@dataclass(frozen=True, eq=False, kw_only=True)
class SwitchingNonlinear:
    """Modes with functions for dynamics and observation.

    Args:
        transition: ``(M, M)``, rows sum to 1.
        dynamics: one function a mode, from states ``(..., n)`` to states ``(..., n)``. Functions are written
            in torch or numpy, and recorded: arithmetic, sums, products of matrices, ``where`` and
            elementary functions.
        process_noise: ``(M, n, n)`` or ``(n, n)``.
        observation: one function a mode, or one for all, from states ``(..., n)`` to ``(..., m)``.
        observation_noise: ``(M, m, m)`` or ``(m, m)``.
        initial_mean: ``(n,)`` or ``(M, n)``.
        initial_covariance: ``(n, n)`` or ``(M, n, n)``.
        initial_probability: ``(M,)``.
        angles: which state components are angles.
        observation_angles: which observed components are.
        start: "before" or "first", as for `SwitchingLinearGaussian`.
        alpha, beta, kappa: of the unscented transform. The 2n + 1 points are the mean x and
            x ± α √(n + κ) L_k, L_k the columns of the covariance's factor. With λ = α² (n + κ) − n their
            weight is ½ / (n + λ), that of x itself λ / (n + λ) in the mean; in covariances it is larger by
            1 − α² + β, and may not be negative. By default κ = 3 − n, at least ½, which matches a Gaussian's
            fourth moment.
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
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float | None = None
    _core: Core = field(init=False, repr=False)
    _start: FactorRows = field(init=False, repr=False)

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
        tapes, number = Tapes(sizes["n"], self.inputs), dict[int, int]()
        for k, function in enumerate(every):
            if id(function) not in number:
                number[id(function)] = len(number)
                kind, size = ("dynamics", sizes["n"]) if k < M else ("observation", sizes["m"])
                name = f"SwitchingNonlinear: {kind} of mode {k % M}{called(function)}"
                tapes.record(function, name, plain(self.initial_mean[k % M]), size)
        flags = [np.zeros(size, np.int64) for size in (sizes["n"], sizes["m"])]
        for flag, which in zip(flags, (self.angles, self.observation_angles), strict=True):
            flag[list(which)] = 1
        with np.errstate(divide="ignore"):
            logarithms = [np.log(plain(value)) for value in (self.transition, self.initial_probability)]
        roots = [root(plain(value)) for value in (self.process_noise, self.observation_noise)]
        of_mode = np.array([number[id(function)] for function in every]).reshape(2, M).T
        factor = triangles(root(plain(self.initial_covariance)))
        start = [plain(self.initial_mean).copy(), factor, logarithms[1]]
        tables = [of_mode, logarithms[0], *roots, *flags]
        points = sigma_points(sizes["n"], self.alpha, self.beta, self.kappa)
        arrays = [np.ascontiguousarray(one) for one in tables]
        made = Core(tapes, (M, sizes["n"], sizes["m"]), arrays, points)
        object.__setattr__(self, "_core", made)
        object.__setattr__(self, "_start", FactorRows(*(value.reshape(1, -1) for value in start)))

    def filter(
        self,
        y: SeriesLike,
        *,
        method: str = "imm",
        linearize: str = "extended",
        inputs: SeriesLike | None = None,
    ) -> Filtered["SwitchingNonlinear"]:
        """Filter one series or a batch.

        Args:
            y: as for `SwitchingLinearGaussian.filter`.
            method: "imm", "gpb2" or "gpb1".
            linearize: "extended" or "unscented".
            inputs: ``(T, r)``, or one for each series, where the functions take inputs.
        """
        data, u = self._read(y, inputs, method, linearize, "filter")
        out = self._run(data, u, method, linearize)
        return Filtered(method, data, FunctionLaws(self, linearize, data, out), self)

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

    def _run(
        self,
        data: Data,
        u: np.ndarray,
        method: str,
        linearize: str,
        law: FactorRows | None = None,
        back: bool = False,
    ) -> FactorRows:
        """Laws after each row, from the initial law, or from `law` to continue a filter.

        With `back`, laws given the whole series.
        """
        (M, n), rows, start = self.initial_mean.shape, len(data.rows), law or self._start
        mean, factor, log_mode = (np.empty((rows, k)) for k in (M * n, M * n * n, M))
        out = FactorRows(mean, factor, log_mode, np.empty(rows))
        y, total, failure = (
            np.ascontiguousarray(data.rows),
            np.empty(data.series),
            np.full((data.series, 2), -1),
        )
        frame = filled(
            "NonlinearSeries",
            modes=M,
            method=METHODS[method],
            first=int(law is None and self.start == "first"),
            everything=1,
            series=data.series,
            starts=data.starts,
            log_likelihood=total,
            failure=failure,
            model=self._core.address(linearize),
            initial_varies=int(len(start.mean) > 1),
            initial_mean=start.mean,
            initial_factor=start.factor,
            initial_log_probability=start.log_mode,
            y=y,
            u=u,
            **out._asdict(),
        )
        if over_series("filter_nonlinear", frame, data.starts, LEAST):
            self._explain(failure, data, u, start, out)
            check_failures(failure, "filter", M)
        if back:
            frame.next = 0
            over_series("smooth_nonlinear", frame, data.starts, LEAST)
        return out

    def _explain(
        self, failure: np.ndarray, data: Data, u: np.ndarray, start: FactorRows, out: FactorRows
    ) -> None:
        """Raise an error that names the function if a number that is not finite stopped a series."""
        (M, n), series = self.initial_mean.shape, int(np.flatnonzero(failure[:, 0] >= 0)[0])
        t, mode = failure[series].tolist()
        row = int(data.starts[series]) + t
        before, at = (out, row - 1) if t else (start, series if len(start.mean) > 1 else 0)
        x, L = before.mean[at].reshape(M, 1, n), before.factor[at].reshape(M, n, n)
        far = self._core.points.spread * L.mT
        points = np.concatenate([x, x + far, x - far], 1).reshape(-1, n)
        inputs = u[row] if len(u) > 1 else u.reshape(-1)[: self.inputs]
        for j in range(M) if mode == M else [mode]:
            where = points
            for kind, number in zip(("dynamics", "observation"), self._core.tables[0][j], strict=True):
                if kind == "dynamics" and t == 0 and self.start == "first":
                    continue
                image = self._core.tapes.values(2 * int(number), where, inputs)
                bad = np.flatnonzero(~np.isfinite(image).all(-1))
                if len(bad):
                    raise ArgumentError(
                        f"filter: at step {t} of series {series} {kind} of mode {j} gives "
                        f"{image[bad[0]].tolist()} for the state {where[bad[0]].tolist()}. Write it so that "
                        "it is finite wherever the state may be, for instance with where or a clamp."
                    )
                where = image

    def smooth(
        self,
        y: SeriesLike,
        *,
        method: str = "imm",
        linearize: str = "extended",
        inputs: SeriesLike | None = None,
    ) -> Smoothed:
        """Moments and mode probabilities given the whole series: Kim's pass, with the filter's linearisation.

        Args:
            y: as for `filter`.
            method: "imm", "gpb2" or "gpb1", the filter underneath.
            linearize: "extended" or "unscented".
            inputs: as for `filter`.
        """
        data, u = self._read(y, inputs, method, linearize, "smooth")
        out = self._run(data, u, method, linearize, back=True)
        return Smoothed(method, data, FunctionLaws(self, linearize, data, out))

    def online(
        self, *, method: str = "imm", linearize: str = "extended", batch: int | None = None
    ) -> OnlineState:
        """A filter to be fed one observation at a time; see `OnlineState`.

        Args:
            method: "imm", "gpb2" or "gpb1".
            linearize: "extended" or "unscented".
            batch: how many members share this model; None for one, whose results have no batch axis.
        """
        return NonlinearPlan(self, method, linearize, batch).state(self._start, np.zeros(1), 0)

    def _restored(self, kept: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> NonlinearPlan:
        """The plan of a saved state."""
        plan = NonlinearPlan(self, about["method"], about["linearize"], about["batch"])
        for name, value in plan.stored()[0].items():
            if value.shape != kept[name].shape or (value != kept[name]).any():
                raise ArgumentError(f"OnlineState.load: the state was saved with another {name}.")
        return plan

    def _forecast(
        self, data: Data, law: FactorRows, steps: int, inputs: SeriesLike | None, level: float, linearize: str
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
        """Mean and covariance of the observation by mode, from laws by row."""
        (M, n), m, rows = self.initial_mean.shape, self.observation_noise.shape[-1], len(mean)
        laws = np.concatenate([mean.reshape(rows, M, n), factor.reshape(rows, M, n * n)], -1)
        center, S = np.empty((rows, M, m)), np.empty((rows, M, m, m))
        core, step = self._core.address(linearize), self.inputs if len(u) > 1 else 0
        where = {"laws": laws, "u": u, "mean": center, "covariance": S}
        native.call("see_nonlinear", filled("NonlinearSight", model=core, count=rows, u_step=step, **where))
        return center, S
