r"""Modes that are not linear: extended and unscented filters behind the same three recursions.

    x_t = f_{s_t}(x_{t−1}) + w_t,   y_t = h_{s_t}(x_t) + v_t

A Gaussian goes through a function g either by its tangent at the mean ("extended": mean g(x), covariance G P
G' with G the Jacobian, taken by automatic differentiation) or by 2n + 1 points that carry mean and covariance
("unscented", Julier and Uhlmann: x and x ± the columns of sqrt((n + κ) P), with weights κ/(n + κ) and ½/(n +
κ)). All else, mixing, weights in logarithms, collapse, missing components, is as for linear modes.

Angles: differences of components that are named as angles are taken around the circle, and their means are
circular, in collapse, sigma points and innovations alike. Functions take and return torch tensors whose last
axis is the state, and are called with many states at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._support.errors import ArgumentError
from .checks import Array, Checker
from .inference.moments import condition
from .series import SeriesLike, Values, arrange, arrange_total, read

Function = Callable[[torch.Tensor], torch.Tensor]
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
    function: Function, mean: torch.Tensor, cov: torch.Tensor, angles: Sequence[int], unscented: bool
) -> Image:
    """The law of function(x), x ~ N(mean, cov)."""
    n = len(mean)
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    root = vectors * torch.sqrt(values.clamp_min(0.0))
    if not unscented:
        tangent: Any = torch.autograd.functional.jacobian
        return Image(function(mean), root, tangent(function, mean) @ root)
    # n + κ = 3 matches a Gaussian's fourth moment; positive weights keep covariances positive
    spread = n + max(3.0 - n, 0.5)
    shift = torch.cat([torch.zeros(1, n, dtype=mean.dtype), root.T, -root.T]) * spread**0.5
    weight = torch.full((2 * n + 1,), 0.5 / spread, dtype=mean.dtype)
    weight[0] = 1 - n / spread
    image = function(mean + shift)
    center = average(weight, image, angles)
    scale = torch.sqrt(weight)[:, None]
    return Image(center, (scale * shift).T, (scale * wrap(image - center, angles)).T)


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


@dataclass(frozen=True, eq=False, kw_only=True)
class SwitchingNonlinear:
    """Modes with functions for dynamics and observation.

    Args:
        transition: ``(M, M)``, rows sum to 1.
        dynamics: one function a mode, from states ``(..., n)`` to states ``(..., n)``.
        process_noise: ``(M, n, n)`` or ``(n, n)``.
        observation: one function a mode, or one for all, from states ``(..., n)`` to ``(..., m)``.
        observation_noise: ``(M, m, m)`` or ``(m, m)``.
        initial_mean: ``(n,)`` or ``(M, n)``.
        initial_covariance: ``(n, n)`` or ``(M, n, n)``.
        initial_probability: ``(M,)``.
        angles: which state components are angles.
        observation_angles: which observed components are.
        start: "before" or "first", as for `SwitchingLinearGaussian`.
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
        for j in range(M):
            self._check_function("dynamics", j, self.dynamics[j], sizes["n"])
            self._check_function("observation", j, functions[j], sizes["m"])

    def _check_function(self, name: str, j: int, function: Function, size: int) -> None:
        """Refuse a function that does not map one state and several to ``size`` numbers each."""
        mean = self.initial_mean[j]
        for points in (mean, mean.expand(2, -1)):
            try:
                image = function(points)
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

    def _step(
        self, j: int, mean: torch.Tensor, cov: torch.Tensor, y: torch.Tensor, begun: bool, unscented: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predict and update one Gaussian in mode j: mean, covariance, log-density."""
        if not begun:
            image = through(self.dynamics[j], mean, cov, self.angles, unscented)
            mean, cov = image.mean, image.Y @ image.Y.T + self.process_noise[j]
        seen = ~torch.isnan(y)
        if not seen.any():
            return mean, cov, torch.zeros((), dtype=torch.float64)
        assert not callable(self.observation)
        image = through(self.observation[j], mean, cov, self.observation_angles, unscented)
        Y, R = image.Y[seen], self.observation_noise[j][seen][:, seen]
        e = wrap(torch.where(seen, y, image.mean) - image.mean, self.observation_angles)[seen]
        S = Y @ Y.T + R
        K, density, bad = condition(e, S, image.X @ Y.T, S.diagonal())
        if bad:
            raise ArgumentError(
                f"filter: the innovation covariance of mode {j} is not positive definite. "
                "Give observation_noise a positive one."
            )
        rest = image.X - K @ Y  # (I − K H) P^{1/2}: Joseph's form, a sum of positive terms
        return wrap(mean + K @ e, self.angles), rest @ rest.T + K @ R @ K.T, density

    def filter(self, y: SeriesLike, *, method: str = "imm", linearize: str = "extended") -> NonlinearFiltered:
        """Filter one series or a batch.

        Args:
            y: as for `SwitchingLinearGaussian.filter`.
            method: "imm", "gpb2" or "gpb1".
            linearize: "extended" or "unscented".
        """
        if method not in ("imm", "gpb2", "gpb1"):
            raise ArgumentError(
                f'filter: method is {method!r}. With nonlinear modes pass "imm", "gpb2" or "gpb1".'
            )
        if linearize not in ("extended", "unscented"):
            raise ArgumentError(f'filter: linearize is {linearize!r}. Pass "extended" or "unscented".')
        data = read(y, int(self.observation_noise.shape[-1]), what="filter")
        rows: list[tuple[torch.Tensor, ...]] = []
        with torch.no_grad():
            for cut in data.cuts:
                rows += self._one(data.tensor[cut].detach(), method, linearize == "unscented")
        terms, log_mode, mean, cov = (torch.stack(column) for column in zip(*rows, strict=True))
        total, total_cov = collapse(log_mode.exp(), mean, cov, self.angles)
        return NonlinearFiltered(
            arrange_total(data.totals(terms.numpy()), data),
            arrange(terms, data, None),
            arrange(log_mode.exp(), data, "mode"),
            arrange(total, data, "state"),
            arrange(total_cov, data, None),
            arrange(mean, data, None),
            arrange(cov, data, None),
        )

    def _one(self, y: torch.Tensor, method: str, unscented: bool) -> list[tuple[torch.Tensor, ...]]:
        """Term, log mode probabilities, mode means and covariances of each step of one series."""
        M, out = len(self.dynamics), list[tuple[torch.Tensor, ...]]()
        mean, cov, log_mode = self.initial_mean, self.initial_covariance, torch.log(self.initial_probability)
        for t, row in enumerate(y):

            def steps(
                means: torch.Tensor, covs: torch.Tensor, row: torch.Tensor = row, begun: bool = False
            ) -> list[torch.Tensor]:
                """Each of M laws moved and updated by the mode of its number."""
                parts = [self._step(j, means[j], covs[j], row, begun, unscented) for j in range(M)]
                return [torch.stack(column) for column in zip(*parts, strict=True)]

            score = log_mode[:, None] + torch.log(self.transition)
            if t == 0 and self.start == "first":
                mean, cov, density = steps(mean, cov, begun=True)
                log_weight = log_mode + density
            elif method == "gpb2":
                pairs = [steps(mean[i].expand(M, -1), cov[i].expand(M, -1, -1)) for i in range(M)]
                means, covs, density = (torch.stack(column) for column in zip(*pairs, strict=True))
                weight = self._weights(score + density, log_mode)
                mean, cov = collapse(weight.T, means.swapaxes(0, 1), covs.swapaxes(0, 1), self.angles)
                log_weight = torch.logsumexp(score + density, 0)
            else:
                weight = (
                    self._weights(score, log_mode)
                    if method == "imm"
                    else log_mode.exp()[:, None].expand(M, M)
                )
                mixed = collapse(weight.T, mean.expand(M, M, -1), cov.expand(M, M, -1, -1), self.angles)
                mean, cov, density = steps(*mixed)
                log_weight = torch.logsumexp(score, 0) + density
            term = torch.logsumexp(log_weight, 0)
            if not torch.isfinite(term):
                raise ArgumentError(
                    f"filter: at step {t} the observation has zero density in every mode within reach. "
                    "Scale the data, or widen observation_noise."
                )
            log_mode = log_weight - term
            out.append((term, log_mode, mean, cov))
        return out

    @staticmethod
    def _weights(score: torch.Tensor, log_mode: torch.Tensor) -> torch.Tensor:
        """P(mode i before | mode j): scores normalised by column; out of reach, the mode probabilities."""
        out_of_reach = torch.isneginf(torch.logsumexp(score, 0))
        return torch.where(out_of_reach, torch.exp(log_mode)[:, None], torch.softmax(score, 0))
