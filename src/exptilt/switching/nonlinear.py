r"""Modes that are not linear: extended and unscented filters behind the same three recursions.

    x_t = f_{s_t}(x_{t−1}) + w_t,   y_t = h_{s_t}(x_t) + v_t

A Gaussian goes through a function g either by its tangent at the mean ("extended": mean g(m), covariance G P G' with G the Jacobian,
taken by automatic
differentiation) or by 2n + 1 points that carry mean and covariance ("unscented", Julier and Uhlmann: m and m ± the columns of sqrt((n +
κ) P), with weights
κ/(n + κ) and ½/(n + κ)). All else, mixing, weights in logarithms, collapse, missing components, is as for linear modes.

Angles: differences of components that are named as angles are taken around the circle, and their means are circular, in collapse, sigma
    points and innovations
alike. Functions take and return torch tensors whose last axis is the state, and are called with many states at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError
from . import checks
from .kernels.kalman import LOG_TWO_PI
from .series import Data, arrange, read

Function = Callable[[torch.Tensor], torch.Tensor]


def wrap(difference: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """Bring the components named in `angles` to (−π, π]."""
    if not angles:
        return difference
    out = difference.clone()
    part = difference[..., list(angles)]
    out[..., list(angles)] = torch.atan2(torch.sin(part), torch.cos(part))
    return out


def average(weight: torch.Tensor, points: torch.Tensor, angles: Sequence[int]) -> torch.Tensor:
    """Σ weight · points over the axis before the last, on the circle for angles."""
    out = (weight[..., None] * points).sum(-2)
    if angles:
        part = points[..., list(angles)]
        sine, cosine = (
            (weight[..., None] * torch.sin(part)).sum(-2),
            (weight[..., None] * torch.cos(part)).sum(-2),
        )
        out[..., list(angles)] = torch.atan2(sine, cosine)
    return out


def collapse(
    weight: torch.Tensor, mean: torch.Tensor, cov: torch.Tensor, angles: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of mixtures: weight ``(..., K)``, mean ``(..., K, n)``, cov ``(..., K, n, n)``."""
    out = average(weight, mean, angles)
    delta = wrap(mean - out[..., None, :], angles)
    return out, (weight[..., None, None] * (cov + delta[..., None] * delta[..., None, :])).sum(-3)


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

    log_likelihood: Any
    log_likelihood_terms: Any
    mode_probability: Any
    mean: Any
    covariance: Any
    mode_mean: Any
    mode_covariance: Any


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

    transition: Any
    dynamics: Sequence[Function]
    process_noise: Any
    observation: Function | Sequence[Function]
    observation_noise: Any
    initial_mean: Any
    initial_covariance: Any
    initial_probability: Any
    angles: tuple[int, ...] = ()
    observation_angles: tuple[int, ...] = ()
    start: str = "before"

    def __post_init__(self) -> None:
        if self.start not in ("before", "first"):
            raise ArgumentError(f'SwitchingNonlinear: start is {self.start!r}. Pass "before" or "first".')
        names = (
            "transition",
            "process_noise",
            "observation_noise",
            "initial_mean",
            "initial_covariance",
            "initial_probability",
        )
        for name in names:
            value = getattr(self, name)
            tensor = (
                value
                if isinstance(value, torch.Tensor)
                else torch.as_tensor(np.asarray(value, dtype=np.float64))
            )
            object.__setattr__(self, name, tensor.double())
            checks.finite(name, getattr(self, name))
        M = int(self.transition.shape[-1])
        if tuple(self.transition.shape) != (M, M) or tuple(self.initial_probability.shape) != (M,):
            raise ArgumentError(
                f"SwitchingNonlinear: transition is {tuple(self.transition.shape)}, initial_probability "
                f"{tuple(self.initial_probability.shape)}."
            )
        checks.stochastic("transition", self.transition)
        checks.stochastic("initial_probability", self.initial_probability)
        n, m = int(self.process_noise.shape[-1]), int(self.observation_noise.shape[-1])
        cores = {
            "process_noise": (n, n),
            "observation_noise": (m, m),
            "initial_mean": (n,),
            "initial_covariance": (n, n),
        }
        for name, core in cores.items():
            object.__setattr__(
                self, name, checks.with_modes(name, getattr(self, name), core, M, f"{(M, *core)}")
            )
            if name != "initial_mean":
                checks.covariance(name, getattr(self, name))
        functions = [self.observation] * M if callable(self.observation) else list(self.observation)
        if (
            len(self.dynamics) != M
            or len(functions) != M
            or not all(callable(f) for f in (*self.dynamics, *functions))
        ):
            raise ArgumentError(
                f"SwitchingNonlinear: pass {M} functions for dynamics, and one or {M} for observation."
            )
        object.__setattr__(self, "observation", functions)

    def _through(
        self,
        function: Function,
        mean: torch.Tensor,
        cov: torch.Tensor,
        angles: Sequence[int],
        unscented: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Mean, covariance and cross-covariance (state by result) of function(x), x ~ N(mean, cov)."""
        n = mean.shape[-1]
        if not unscented:
            G = torch.autograd.functional.jacobian(function, mean)
            return function(mean), G @ cov @ G.T, cov @ G.T
        kappa = max(
            3.0 - n, 0.5
        )  # n + κ = 3 matches a Gaussian's fourth moment; positive weights keep covariances positive
        values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
        columns = (vectors * torch.sqrt(values.clamp_min(0.0) * (n + kappa))).T
        points = torch.cat([mean[None], mean + columns, mean - columns])
        weight = torch.full((2 * n + 1,), 0.5 / (n + kappa), dtype=torch.float64)
        weight[0] = kappa / (n + kappa)
        image = function(points)
        center = average(weight, image, angles)
        delta = wrap(image - center, angles)
        shift = points - mean
        return center, delta.T @ (weight[:, None] * delta), shift.T @ (weight[:, None] * delta)

    def _step(
        self, j: int, mean: torch.Tensor, cov: torch.Tensor, y: torch.Tensor, begun: bool, unscented: bool
    ) -> tuple[torch.Tensor, ...]:
        """Predict and update one Gaussian in mode j: mean, covariance, log-density."""
        if not begun:
            mean, cov, _ = self._through(self.dynamics[j], mean, cov, self.angles, unscented)
            cov = cov + self.process_noise[j]
        seen = ~torch.isnan(y)
        if not seen.any():
            return mean, cov, torch.zeros((), dtype=torch.float64)
        assert not callable(self.observation)
        center, spread, cross = self._through(
            self.observation[j], mean, cov, self.observation_angles, unscented
        )
        S = (spread + self.observation_noise[j])[seen][:, seen]
        e = wrap(torch.where(seen, y, center) - center, self.observation_angles)[seen]
        L, bad = torch.linalg.cholesky_ex(S)
        if bad.any():
            raise ArgumentError(
                f"filter: the innovation covariance of mode {j} is not positive definite. Give observation_noise a positive one."
            )
        K = torch.cholesky_solve(cross[:, seen].T, L).T
        z = torch.linalg.solve_triangular(L, e[:, None], upper=False)[:, 0]
        mean = wrap(mean + K @ e, self.angles)
        cov = cov - K @ S @ K.T
        return mean, (cov + cov.T) / 2, -0.5 * (len(e) * LOG_TWO_PI + z @ z) - torch.log(L.diagonal()).sum()

    def filter(self, y: Any, *, method: str = "imm", linearize: str = "extended") -> NonlinearFiltered:
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
        columns: list[list[torch.Tensor]] = [[], [], [], []]
        with torch.no_grad():
            for a, b in zip(data.starts[:-1], data.starts[1:], strict=True):
                self._one(data.tensor[a:b].detach(), method, linearize == "unscented", columns)
        terms, log_mode, mean, cov = (torch.stack(column) for column in columns)
        total, total_cov = collapse(log_mode.exp(), mean, cov, self.angles)
        return self._result(data, terms, log_mode, mean, cov, total, total_cov)

    def _one(self, y: torch.Tensor, method: str, unscented: bool, columns: list[list[torch.Tensor]]) -> None:
        M, _n = self.initial_mean.shape
        mean, cov, log_mode = self.initial_mean, self.initial_covariance, torch.log(self.initial_probability)
        for t, row in enumerate(y):
            begun = t == 0 and self.start == "first"
            score = log_mode[:, None] + torch.log(self.transition)
            if begun:
                prior, parts = (
                    log_mode,
                    [self._step(j, mean[j], cov[j], row, True, unscented) for j in range(M)],
                )
            elif method == "gpb2":
                pairs = [
                    [self._step(j, mean[i], cov[i], row, False, unscented) for i in range(M)]
                    for j in range(M)
                ]
                score = score + torch.stack(
                    [torch.stack([pairs[j][i][2] for j in range(M)]) for i in range(M)]
                )
                prior = torch.logsumexp(score, 0)
                weight = self._weights(score, log_mode)
                moved = [
                    collapse(
                        weight[:, j],
                        torch.stack([part[0] for part in pairs[j]]),
                        torch.stack([part[1] for part in pairs[j]]),
                        self.angles,
                    )
                    for j in range(M)
                ]
                parts = [(m, P, torch.zeros((), dtype=torch.float64)) for m, P in moved]
            else:
                prior = torch.logsumexp(score, 0)
                weight = (
                    self._weights(score, log_mode)
                    if method == "imm"
                    else torch.exp(log_mode)[:, None].expand(M, M)
                )
                mixed = [collapse(weight[:, j], mean, cov, self.angles) for j in range(M)]
                parts = [self._step(j, *mixed[j], row, False, unscented) for j in range(M)]
            log_weight = prior + torch.stack([part[2] for part in parts])
            term = torch.logsumexp(log_weight, 0)
            if not torch.isfinite(term):
                raise ArgumentError(
                    f"filter: at step {t} the observation has zero density in every mode that can be reached."
                )
            log_mode = log_weight - term
            mean, cov = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
            for column, value in zip(columns, (term, log_mode, mean, cov), strict=True):
                column.append(value)

    @staticmethod
    def _weights(score: torch.Tensor, log_mode: torch.Tensor) -> torch.Tensor:
        """P(mode i before | mode j), columns of scores normalised; a mode that cannot be reached takes the mode probabilities."""
        return torch.where(
            torch.isneginf(torch.logsumexp(score, 0)), torch.exp(log_mode)[:, None], torch.softmax(score, 0)
        )

    def _result(self, data: Data, terms: torch.Tensor, log_mode: torch.Tensor, mean: torch.Tensor, cov: torch.Tensor, total: torch.Tensor,
                total_cov: torch.Tensor) -> NonlinearFiltered:  # fmt: skip
        def out(value: torch.Tensor, names: str | None = None) -> Any:
            return arrange(value, data, names, last=False)

        sums = torch.stack([terms[a:b].sum() for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)])
        likelihood: Any = sums if data.layout != "single" else sums[0]
        if data.kind != "torch":
            likelihood = float(likelihood) if data.layout == "single" else likelihood.numpy()
        return NonlinearFiltered(
            likelihood,
            out(terms),
            out(log_mode.exp(), "mode"),
            out(total, "state"),
            out(total_cov),
            out(mean),
            out(cov),
        )
