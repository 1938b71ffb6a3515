r"""Modes that are not linear: extended and unscented filters behind the same three recursions.

    x_t = f_{s_t}(x_{t−1}, u_t) + w_t,   y_t = h_{s_t}(x_t, u_t) + v_t

A Gaussian goes through a function g either by its tangent at the mean ("extended": mean g(x), covariance G P
G' with G the Jacobian) or by 2n + 1 points that carry mean and covariance ("unscented", Julier and Uhlmann).
Functions are written in torch, with the state (and the inputs) along the last axis; they are traced once and
compiled with their Jacobians (`kernels/traced.py`), and the filter keeps factors of covariances in place of
covariances (`kernels/nonlinear.py`), so these stay positive. All else, mixing, weights in logarithms,
collapse, missing components, is as for linear modes. What has no need of speed, smoothing and forecasts,
calls the functions themselves, for all steps at once.

Angles: differences of components that are named as angles are taken around the circle, and their means are
circular, in collapse, sigma points and innovations alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError
from .._support.kernels import run_chunks
from .checks import Array, Checker, plain
from .inference.forecast import Forecast, ahead_of, mixture_quantile
from .inference.run import METHODS, stopped
from .inference.simulate import root
from .kernels.nonlinear import Followed, Modes, follow
from .kernels.traced import Compiled, Function
from .series import Data, SeriesLike, Values, arrange, arrange_total, read

_check = Checker("SwitchingNonlinear")


def wrap(difference: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """The difference with the components named in `angles` brought to (−π, π]."""
    if not angles:
        return difference
    out = difference.clone()
    part = difference[..., list(angles)]
    out[..., list(angles)] = torch.atan2(torch.sin(part), torch.cos(part))
    return out


def average(weight: torch.Tensor, points: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """Σ weight · points over the axis before the last, on the circle for angles."""
    weight = weight[..., None]
    out = (weight * points).sum(-2)
    if angles:
        part = points[..., list(angles)]
        sine, cosine = (weight * torch.sin(part)).sum(-2), (weight * torch.cos(part)).sum(-2)
        out[..., list(angles)] = torch.atan2(sine, cosine)
    return out


def collapse(
    weight: torch.Tensor, mean: torch.Tensor, cov: torch.Tensor, angles: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of mixtures: weight ``(..., K)``, mean ``(..., K, n)``, cov ``(..., K, n, n)``."""
    out = average(weight, mean, angles)
    delta = wrap(mean - out[..., None, :], angles)
    return out, (weight[..., None, None] * (cov + delta[..., None] * delta[..., None, :])).sum(-3)


@dataclass(frozen=True)
class Image:
    """The law of g(x) for a Gaussian x: its mean, and deviations X (n, p) of x and Y (m, p) of g(x).

    The covariances of x and g(x) and their cross-covariance are X X', Y Y' and X Y'.
    """

    mean: torch.Tensor
    X: torch.Tensor
    Y: torch.Tensor


def through(
    function: Function, given: list[torch.Tensor], cov: torch.Tensor, angles: Sequence[int], unscented: bool
) -> Image:
    """The laws of function(x, ...) for x ~ N(mean, cov), ``(..., n)``; `given` is the mean (and inputs)."""
    mean, *rest = given
    n = mean.shape[-1]
    L = torch.linalg.qr(torch.from_numpy(root(cov.numpy())).mT).R.mT  # lower triangular, L L' = cov
    if not unscented:
        flat = [one.expand(*mean.shape[:-1], -1).reshape(-1, one.shape[-1]) for one in given]
        tangent = torch.func.vmap(torch.func.jacfwd(function))(*flat)
        return Image(function(*given), L, tangent.reshape(*mean.shape[:-1], -1, n) @ L)
    spread = n + max(3.0 - n, 0.5)
    shift = torch.cat([torch.zeros_like(mean)[..., None, :], L.mT, -L.mT], -2) * spread**0.5
    weight = torch.full((2 * n + 1,), 0.5 / spread, dtype=mean.dtype)
    weight[0] = 1 - n / spread
    image = function(mean[..., None, :] + shift, *(one[..., None, :] for one in rest))
    center = average(weight, image, angles)
    scale = torch.sqrt(weight)[:, None]
    return Image(center, (scale * shift).mT, (scale * wrap(image - center[..., None, :], angles)).mT)


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
        model, linearize, data, law = self._source
        return model._forecast(data, law, steps, inputs, level, linearize)  # type: ignore[no-any-return]


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
        names = [
            f"SwitchingNonlinear: {name} of mode {j}"
            for name in ("dynamics", "observation")
            for j in range(M)
        ]
        different = {id(function): k for k, function in reversed(list(enumerate(every)))}
        kept = sorted(different.values())
        compiled = Compiled([every[k] for k in kept], [names[k] for k in kept], sizes["n"], self.inputs)
        number = np.array([kept.index(different[id(function)]) for function in every]).reshape(2, M).T
        flags = [np.zeros(size, np.int64) for size in (sizes["n"], sizes["m"])]
        for flag, which in zip(flags, (self.angles, self.observation_angles), strict=True):
            flag[list(which)] = 1
        with np.errstate(divide="ignore"):
            logarithms = [np.log(plain(value)) for value in (self.transition, self.initial_probability)]
        roots = [
            root(plain(value)).reshape(M, -1)
            for value in (self.process_noise, self.observation_noise, self.initial_covariance)
        ]
        modes = Modes._make(
            [
                compiled.address,
                compiled.constants,
                np.ascontiguousarray(number),
                logarithms[0].reshape(-1),
                roots[0],
                roots[1],
                plain(self.initial_mean).reshape(1, -1),
                _triangles(roots[2].reshape(M, sizes["n"], sizes["n"])).reshape(1, -1),
                logarithms[1].reshape(1, -1),
                *flags,
                int(self.start == "first"),
                0,
            ]
        )
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
        total = arrange_total(data.totals(out[0]), data)
        laws = [torch.from_numpy(value) for value in out[1:]]
        shown: Any = self._arranged(data, laws[0].exp(), laws[1], laws[2])
        source = (self, linearize, data, tuple(value[last] for value in out[1:]))
        return NonlinearFiltered(*(total, arrange(out[0], data, None), *shown, source))

    def _arranged(
        self, data: Data, weight: torch.Tensor, mean: torch.Tensor, cov: torch.Tensor
    ) -> list[Values]:
        total, total_cov = collapse(weight, mean, cov, self.angles)
        names = ("mode", "state", None, None, None)
        return [
            arrange(value, data, name)
            for value, name in zip((weight, total, total_cov, mean, cov), names, strict=True)
        ]

    def _read(
        self, y: SeriesLike, inputs: SeriesLike | None, method: str, linearize: str, what: str
    ) -> tuple[Data, np.ndarray]:
        """The data, and inputs by row."""
        if method not in METHODS:
            raise ArgumentError(
                f'{what}: method is {method!r}. With nonlinear modes pass "imm", "gpb2" or "gpb1".'
            )
        if linearize not in ("extended", "unscented"):
            raise ArgumentError(f'{what}: linearize is {linearize!r}. Pass "extended" or "unscented".')
        data = read(y, int(self.observation_noise.shape[-1]), what=what)
        if data.tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{what}: filters of nonlinear modes have no derivative, and the data require one. "
                "Call it under torch.no_grad()."
            )
        return data, self._inputs(data, inputs, what)

    def _inputs(self, data: Data, inputs: SeriesLike | None, what: str) -> np.ndarray:
        if not self.inputs:
            if inputs is not None:
                raise ArgumentError(f"{what}: the functions take no inputs. Make the model with inputs=r.")
            return np.zeros((len(data.rows), 0))
        if inputs is None:
            raise ArgumentError(f"{what}: the functions take inputs. Pass inputs=(T, {self.inputs}).")
        given = read(inputs, self.inputs, what=f"{what}: inputs", missing=False)
        shared = given.series == 1 and data.series > 1
        if (given.series != data.series and not shared) or (given.lengths < data.lengths).any():
            raise ArgumentError(
                f"{what}: inputs have {given.series} series of lengths {given.lengths[:5].tolist()}, the "
                f"data {data.series} of {data.lengths[:5].tolist()}. Pass one row of inputs for every step."
            )
        pieces = [given.rows[given.cuts[0 if shared else b]][:k] for b, k in enumerate(data.lengths)]
        return np.concatenate(pieces)

    def _run(
        self, data: Data, u: np.ndarray, method: str, linearize: str, modes: Any = None
    ) -> list[np.ndarray]:
        """Terms, log mode probabilities, mode means and covariances of each row."""
        modes = (modes or self._modes)._replace(unscented=int(linearize == "unscented"))  # type: ignore[attr-defined]
        (M, n), rows = self.initial_mean.shape, len(data.rows)
        sizes = ((rows,), (rows, M), (rows, M * n), (rows, M * n * n))
        out = Followed._make([*(np.empty(size) for size in sizes), np.full((data.series, 2), -1)])
        y, u = np.ascontiguousarray(data.rows), np.ascontiguousarray(u)

        def work(begin: int, end: int) -> None:
            follow(modes, y, u, data.starts, out, begin, end, METHODS[method])

        work(0, 0)
        run_chunks(work, data.series, threads=min(data.series, torch.get_num_threads(), max(1, rows // 200)))
        for series in np.flatnonzero(out.failure[:, 0] >= 0)[:1]:
            t, mode = out.failure[series].tolist()
            raise stopped(f"filter: at step {t} of series {series}", mode, M)
        return [out.terms, out.log_mode, out.mean.reshape(rows, M, n), out.covariance.reshape(rows, M, n, n)]

    def _image(
        self, kind: str, k: int, mean: torch.Tensor, cov: torch.Tensor, u: torch.Tensor, unscented: bool
    ) -> Image:
        angles = self.angles if kind == "dynamics" else self.observation_angles
        given = [mean, u][: 2 if self.inputs else 1]
        return through(getattr(self, kind)[k], given, cov, angles, unscented)

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
        terms, *arrays = self._run(data, u, method, linearize)
        laws = [torch.from_numpy(value) for value in arrays]
        pieces = [
            self._back([value[cut] for value in laws], torch.from_numpy(u[cut]), linearize == "unscented")
            for cut in data.cuts
        ]
        weight, mean, cov = (torch.cat(column) for column in zip(*pieces, strict=True))
        return NonlinearSmoothed(
            arrange_total(data.totals(terms), data), *self._arranged(data, weight, mean, cov)
        )

    @torch.no_grad()
    def _back(
        self, law: list[torch.Tensor], u: torch.Tensor, unscented: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Kim's pass over one series; axes of pairs are (mode before j, mode after k)."""
        weight, mean, cov = law[0].exp(), law[1].clone(), law[2].clone()
        M, T = len(self.dynamics), len(mean)
        images = [self._image("dynamics", k, mean[:-1], cov[:-1], u[1:, None], unscented) for k in range(M)]
        center, X, Y = (torch.stack([getattr(one, name) for one in images], 2) for name in ("mean", "X", "Y"))
        Q = self.process_noise
        J = X @ Y.mT @ torch.linalg.pinv(Y @ Y.mT + Q, hermitian=True)
        left = X - J @ Y
        base = left @ left.mT + J @ Q @ J.mT
        joint = weight[:-1, :, None] * self.transition
        reach = joint.sum(1, keepdim=True)
        share = torch.where(reach > 0, joint / torch.where(reach > 0, reach, 1.0), 0.0)
        for t in range(T - 2, -1, -1):
            pair = weight[t + 1] * share[t]
            gap = wrap(mean[t + 1] - center[t], self.angles)
            means = mean[t][:, None] + (J[t] @ gap[..., None])[..., 0]
            covs = base[t] + J[t] @ cov[t + 1] @ J[t].mT
            mine = pair.sum(1, keepdim=True)
            new_mean, new_cov = collapse(pair / torch.where(mine > 0, mine, 1.0), means, covs, self.angles)
            there = mine > 0
            mean[t] = torch.where(there, new_mean, mean[t])
            cov[t] = torch.where(there[..., None], (new_cov + new_cov.mT) / 2, cov[t])
            weight[t] = mine[:, 0]
        return weight, mean, cov

    def _forecast(
        self,
        data: Data,
        law: tuple[np.ndarray, ...],
        steps: int,
        inputs: SeriesLike | None,
        level: float,
        linearize: str,
    ) -> Forecast:
        if steps < 1:
            raise ArgumentError(f"forecast: steps is {steps}. Pass at least 1.")
        if not 0 < level < 1:
            raise ArgumentError(f"forecast: level is {level}. Pass a number between 0 and 1, such as 0.9.")
        log_mode, mean, cov = law
        M, B, m = len(self.dynamics), data.series, self.observation_noise.shape[-1]
        shown = ahead_of(data, steps)
        empty = read(np.full((B, steps, m), np.nan), m)
        u = self._inputs(empty, inputs, "forecast")
        modes = self._modes._replace(  # type: ignore[attr-defined]
            mean=np.ascontiguousarray(mean.reshape(B, -1)),
            factor=_triangles(root(cov)).reshape(B, -1),
            log_probability=np.ascontiguousarray(log_mode),
            first=0,
        )
        _, *arrays = self._run(empty, u, "imm", linearize, modes)
        logs, means, covs = (torch.from_numpy(value) for value in arrays)
        weight = logs.exp()
        with torch.no_grad():
            images = [
                self._image(
                    "observation", k, means[:, k], covs[:, k], torch.from_numpy(u), linearize == "unscented"
                )
                for k in range(M)
            ]
        center = torch.stack([one.mean for one in images], 1)
        spread = torch.stack([one.Y @ one.Y.mT for one in images], 1) + self.observation_noise
        total, total_cov = collapse(weight, center, spread, self.observation_angles)
        deviation = torch.sqrt(spread.diagonal(dim1=-2, dim2=-1)).numpy()
        edges = [
            mixture_quantile(q, weight.numpy(), center.numpy(), deviation)
            for q in ((1 - level) / 2, (1 + level) / 2)
        ]
        state, state_cov = collapse(weight, means, covs, self.angles)
        values = (total, total_cov, *edges, weight, state, state_cov)
        names = ("output", None, "output", "output", "mode", "state", None)
        parts: Any = [arrange(value, shown, name) for value, name in zip(values, names, strict=True)]
        return Forecast(*(*parts, level))


def _triangles(roots: np.ndarray) -> np.ndarray:
    """Lower triangular factors of A A', for square A ``(..., n, n)``."""
    return np.ascontiguousarray(np.linalg.qr(roots.mT).R.mT)
