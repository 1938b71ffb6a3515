r"""Recurrent switching: the next mode depends on the state, by attention over modes.

    P(s_{t+1} = j | s_t = i, x_t) = softmax_j(log π_ij + ⟨R_j, x_t⟩)

The state is the query, the rows of R are keys, and the transition matrix gives each key its weight; all else
is a switching linear-Gaussian model. (Where all rows of π are softmax(r), this is softmax(R x + r).) Before
mode j moves the law N(m, P) of mode i, that law is tilted by the chance of going there,

    c_ij = E[p_j(x)],    E[x | i → j] = E[p_j(x) x] / c_ij,    and the covariance likewise.

These are integrals over as many directions as scores differ in, at most M − 1 and at most n: with P = L L',
x = m + L u, only the components of u in the row space of (R − R_0) L matter, and the others stay as they are.
They are sums over `NODES` nodes in each such direction. The rest is GPB2: M² tilted laws are
moved, updated and collapsed to M, and backwards Kim's pass goes through the same tilted laws. With R = 0
nothing is tilted, and both are GPB2 and its smoother.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import LOG_TWO_PI
from ..checks import Array, Checker, plain
from ..inference.moments import SENSOR, STEP, by_row, mixture, rauch
from ..inference.problem import prepare
from ..inference.results import Filtered, Laws, Smoothed
from ..inference.simulate import Sample, root
from ..model import SwitchingLinearGaussian
from ..series import Data, SeriesLike

_check = Checker("RecurrentSwitching")
NODES = 63  # in each direction, evenly from −7 to 7: of smooth functions such sums are exact to rounding
MOST = 4000  # nodes in all; with more than two directions there are fewer in each, those of Gauss–Hermite


class Tilted(NamedTuple):
    """Laws of mode i on the way to mode j, ``(M, M, ...)``, and the chances c_ij of going there."""

    chance: np.ndarray
    mean: np.ndarray
    cov: np.ndarray


class Pass(NamedTuple):
    """Filter results of one series: laws after each step, and tilted laws before it."""

    terms: np.ndarray
    log_mode: np.ndarray
    mean: np.ndarray
    cov: np.ndarray
    tilted: list[Tilted | None]
    every: list[Any]  # transition, W, c, Q, H, d, R by step


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentSwitching:
    """A switching linear-Gaussian model whose transitions depend on the state.

    Args:
        model: the modes; ``transition[i, j]`` is P(mode j next | mode i now) where the state is 0.
        recurrence: R, ``(M, n)``: a row a mode; P(j next | i, x) is proportional to
            ``transition[i, j] * exp(recurrence[j] @ x)``.

    Example:
        >>> import numpy as np
        >>> modes = SwitchingLinearGaussian(
        ...     transition=np.full((2, 2), 0.5),
        ...     dynamics=[[1.0]],
        ...     dynamics_offset=[[1.0], [-1.0]],
        ...     process_noise=[[0.1]],
        ...     observation=[[1.0]],
        ...     observation_noise=[[0.5]],
        ...     initial_mean=[0.0],
        ...     initial_covariance=[[1.0]],
        ...     initial_probability=[0.5, 0.5],
        ... )
        >>> turns_back = RecurrentSwitching(model=modes, recurrence=[[-2.0], [2.0]])
        >>> post = turns_back.filter([[1.2], [2.1], [0.9], [0.2]])
        >>> post.mode_probability.argmax(1).tolist()
        [0, 0, 1, 1]
    """

    model: SwitchingLinearGaussian
    recurrence: Array

    def __post_init__(self) -> None:
        if not isinstance(self.model, SwitchingLinearGaussian):
            kind = type(self.model).__name__
            raise _check.refuse(f"model is a {kind}. Pass a SwitchingLinearGaussian.")
        R = plain(_check.convert("recurrence", self.recurrence, False))
        if R.shape != (self.model.modes, self.model.states):
            wanted = (self.model.modes, self.model.states)
            raise _check.refuse(f"recurrence has shape {R.shape}. Pass {wanted}: a row a mode.")
        _check.finite("recurrence", R)
        if self.model.maps is not None:
            raise _check.refuse(
                "the model has maps between modes, which are not supported here. Pass a model without maps."
            )
        object.__setattr__(self, "recurrence", R)

    @property
    def transition(self) -> Array:
        """The weights of modes where the state is 0, ``(M, M)``."""
        return self.model.transition

    def filter(self, y: SeriesLike, *, inputs: SeriesLike | None = None) -> Filtered["RecurrentSwitching"]:
        """Filter one or many series, by GPB2 over tilted laws.

        Args:
            y: as for `SwitchingLinearGaussian.filter`.
            inputs: as there.
        """
        data, passes = self._passes(y, inputs, "filter")
        log_mode, mean, cov = (np.concatenate([getattr(one, k) for one in passes]) for k in Pass._fields[1:4])
        terms = np.concatenate([one.terms for one in passes])
        return Filtered("gpb2", data, Laws(log_mode, mean, cov, terms, data.totals(terms)), self)

    def smooth(self, y: SeriesLike, *, inputs: SeriesLike | None = None) -> Smoothed:
        """Moments and mode probabilities given the whole series: Kim's pass through the tilted laws.

        Args:
            y: as for `filter`.
            inputs: as for `filter`.
        """
        data, passes = self._passes(y, inputs, "smooth")
        found = [self._back(one) for one in passes]
        log_mode, mean, cov, pairs = (np.concatenate(column) for column in zip(*found, strict=True))
        total = np.array([one.terms.sum() for one in passes])
        return Smoothed("gpb2", data, Laws(log_mode, mean, cov, total=total), pairs)

    def sample(
        self, steps: int, *, inputs: SeriesLike | None = None, generator: torch.Generator | None = None
    ) -> Sample:
        """Draw modes, states and observations.

        Args:
            steps: T.
            inputs: ``(T, r)`` where the model has input matrices.
            generator: a torch generator; None uses torch's own.
        """
        if steps < 1:
            raise ArgumentError(f"sample: steps is {steps}. Pass at least 1.")
        n, m = self.model.states, self.model.outputs
        blank = np.full((steps, m), np.nan)
        _, (now,) = self._prepared(blank, inputs, "sample")
        draw = torch.randn(steps + 1, n + m, dtype=torch.float64, generator=generator).numpy()
        u = torch.rand(steps + 1, dtype=torch.float64, generator=generator).numpy()
        begin = plain(self.model.initial_probability).cumsum()
        mode = int(np.searchsorted(begin, u[steps] * begin[-1], side="right"))
        x = plain(self.model.initial_mean)[mode]
        x = x + root(plain(self.model.initial_covariance))[mode] @ draw[steps, :n]
        modes, states, seen = np.empty(steps, np.int64), np.empty((steps, n)), np.empty((steps, m))
        for t in range(steps):
            transition, W, c, Q, H, d, R = (value[t if len(value) > 1 else 0] for value in now)
            if t or self.model.start == "before":
                with np.errstate(divide="ignore"):
                    score = np.log(transition[mode]) + self.recurrence @ x
                chance = np.exp(score - score.max()).cumsum()
                mode = int(np.searchsorted(chance, u[t] * chance[-1], side="right"))
                x = W[mode] @ x + c[mode] + root(Q[mode]) @ draw[t, :n]
            modes[t], states[t] = mode, x
            seen[t] = H[mode] @ x + d[mode] + root(R[mode]) @ draw[t, n:]
        return Sample(modes, states, seen)

    def _prepared(self, y: SeriesLike, inputs: SeriesLike | None, what: str) -> tuple[Data, list[list[Any]]]:
        """The data, and for each series transition, W, c, Q, H, d, R by step."""
        with torch.no_grad():
            problem = prepare(self.model, y, inputs, what, proper=True)
        data, p, M = problem.data, problem.parameters, self.model.modes
        every = by_row(p, data.starts, STEP + SENSOR, M)
        cut = [[value[one] if len(value) > 1 else value for value in every] for one in data.cuts]
        return data, cut

    def _passes(self, y: SeriesLike, inputs: SeriesLike | None, what: str) -> tuple[Data, list[Pass]]:
        data, cuts = self._prepared(y, inputs, what)
        series = zip(data.cuts, cuts, strict=True)
        return data, [self._forward(data.rows[cut], now, what) for cut, now in series]

    def _forward(self, y: np.ndarray, every: list[Any], what: str) -> Pass:
        model = self.model
        mean, cov = plain(model.initial_mean), plain(model.initial_covariance)
        with np.errstate(divide="ignore"):
            log_mode = np.log(plain(model.initial_probability))
        rows: list[tuple[Any, ...]] = []
        for t, row in enumerate(y):
            transition, W, c, Q, H, d, R = (value[t if len(value) > 1 else 0] for value in every)
            if t == 0 and model.start == "first":
                tilted, ahead, spread = None, mean[None], cov[None]
                score = log_mode[None]
            else:
                tilted = tilt(self.recurrence, transition, mean, cov)
                ahead = (W @ tilted.mean[..., None])[..., 0] + c
                spread = W @ tilted.cov @ W.mT + Q
                with np.errstate(divide="ignore"):
                    score = log_mode[:, None] + np.log(tilted.chance)
            after, after_cov, density = see(row, ahead, spread, H, d, R, f"{what}: at step {t}")
            score = score + density
            top = score.max()
            if not np.isfinite(top):
                raise ArgumentError(f"{what}: at step {t} the observation has density 0 in every mode.")
            share = np.exp(score - top)
            total = share.sum(0)
            weight = np.where(total > 0, share / np.where(total > 0, total, 1.0), 1.0 / len(share))
            mean, cov = mixture(weight.T, after.swapaxes(0, 1), after_cov.swapaxes(0, 1))
            term = top + np.log(total.sum())
            with np.errstate(divide="ignore"):
                log_mode = top + np.log(total) - term
            rows.append((term, log_mode, mean, cov, tilted))
        terms, levels, means, covs, tilts = zip(*rows, strict=True)
        return Pass(np.array(terms), np.array(levels), np.array(means), np.array(covs), list(tilts), every)

    def _back(self, seen: Pass) -> tuple[np.ndarray, ...]:
        """Smoothed log mode probabilities, moments by mode, and pairs of one series."""
        M, T = self.model.modes, len(seen.terms)
        probability, mean, cov = np.exp(seen.log_mode[-1]), seen.mean[-1], seen.cov[-1]
        first = plain(self.model.initial_probability)
        rows = []
        for t in range(T - 1, -1, -1):
            tilted = seen.tilted[t]
            if tilted is None:
                rows.append((probability, mean, cov, np.diag(probability)))
                break
            _, W, c, Q, *_ = (value[t if len(value) > 1 else 0] for value in seen.every)
            joint = (np.exp(seen.log_mode[t - 1]) if t else first)[:, None] * tilted.chance
            reach = joint.sum(0)
            pair = probability * np.where(reach > 0, joint / np.where(reach > 0, reach, 1.0), 0.0)
            rows.append((probability, mean, cov, pair))
            F, P = np.broadcast_to(W, (M, *W.shape)), tilted.cov
            S = F @ P @ F.mT + Q
            J = P @ F.mT @ np.linalg.pinv((S + S.mT) / 2, hermitian=True)
            gap = mean - (F @ tilted.mean[..., None])[..., 0] - c
            x, V = rauch(tilted.mean, P, J, F, np.broadcast_to(Q, P.shape), gap, cov)
            total = pair.sum(1, keepdims=True)
            weight = np.where(total > 0, pair / np.where(total > 0, total, 1.0), 1.0 / M)
            probability, (mean, cov) = pair.sum(1), mixture(weight, x, V)
        columns = [np.array(column[::-1]) for column in zip(*rows, strict=True)]
        with np.errstate(divide="ignore"):
            return (np.log(columns[0]), *columns[1:])


def tilt(R: np.ndarray, transition: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> Tilted:
    """Laws N(mean_i, cov_i) tilted by the chance of going to each mode, and these chances."""
    M, n = mean.shape
    chance, means, covs = np.empty((M, M)), np.empty((M, M, n)), np.empty((M, M, n, n))
    for i in range(M):
        L = root(cov[i])
        _, s, directions = np.linalg.svd((R - R[0]) @ L)
        V = directions[: int((s > 1e-12 * max(s.max(initial=0.0), 1e-300)).sum())].T
        nodes, weight, squares = grid(V.shape[1])
        LV = L @ V
        with np.errstate(divide="ignore"):
            score = np.log(transition[i]) + (mean[i] + nodes @ LV.T) @ R.T
        p = np.exp(score - score.max(1, keepdims=True))
        share = weight[:, None] * p / p.sum(1, keepdims=True)
        total = share.sum(0)
        chance[i], share = total, share / np.where(total > 0, total, 1.0)
        center = share.T @ nodes
        spread = (share.T @ squares).reshape(M, *V.shape[1:], *V.shape[1:]) - np.eye(V.shape[1])
        spread -= center[:, :, None] * center[:, None]
        here = (total > 0)[:, None, None]
        means[i] = mean[i] + np.where(here[..., 0], center @ LV.T, 0.0)
        covs[i] = cov[i] + np.where(here, LV @ spread @ LV.T, 0.0)
    return Tilted(chance, means, (covs + covs.mT) / 2)


@cache
def grid(directions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes ``(K, directions)`` and weights of a standard Gaussian, and products of two coordinates."""
    each = min(NODES, int(MOST ** (1 / max(directions, 1))))
    x, w = np.polynomial.hermite_e.hermegauss(each) if each < NODES else (np.linspace(-7, 7, NODES),) * 2
    w = w if each < NODES else np.exp(-x * x / 2)
    nodes = np.array(list(product(x, repeat=directions))).reshape(each**directions, directions)
    weight = np.array([np.prod(part) for part in product(w / w.sum(), repeat=directions)])
    return nodes, weight, (nodes[:, :, None] * nodes[:, None]).reshape(len(nodes), -1)


def see(
    row: np.ndarray, mean: np.ndarray, cov: np.ndarray, H: Any, d: Any, R: Any, where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Laws ``(..., M, n)`` given what of a row is seen, and its log-densities."""
    there = ~np.isnan(row)
    if not there.any():
        return mean, cov, np.zeros(mean.shape[:-1])
    H, d, R = H[:, there], d[:, there], R[:, there][:, :, there]
    e = row[there] - (H @ mean[..., None])[..., 0] - d
    S = H @ cov @ H.mT + R
    try:
        factor = np.linalg.cholesky(S)
    except np.linalg.LinAlgError:
        raise ArgumentError(
            f"{where} the innovation covariance of some mode is not positive definite. Give "
            "observation_noise (or process_noise) a positive one."
        ) from None
    K = np.linalg.solve(S, H @ cov).mT
    z = np.linalg.solve(factor, e[..., None])[..., 0]
    logs = np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
    rest = np.eye(mean.shape[-1]) - K @ H
    out = rest @ cov @ rest.mT + K @ R @ K.mT
    return (
        mean + (K @ e[..., None])[..., 0],
        (out + out.mT) / 2,
        -0.5 * ((z * z).sum(-1) + e.shape[-1] * LOG_TWO_PI) - logs,
    )
