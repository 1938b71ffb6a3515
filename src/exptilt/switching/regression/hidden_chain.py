"""The exact likelihood of a Markov regression: a hidden chain whose modes are the regimes of several steps.

`Modes` numbers the modes, `Laws` holds the law of y in each, `likelihood` returns log p(y) and all
derivatives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from ..._support import native
from ..._support.errors import ArgumentError
from ..arrays import filled
from ..learning.chain import AGE, INPUT, driven
from ..learning.named import pulled
from ..model import SwitchingLinearGaussian

MOST = 256  # largest number of modes, regimes to the power of order + 1
PARTS = ("intercept", "coefficients", "autoregression", "deviation")


@dataclass(frozen=True)
class Modes:
    """The modes of a chain whose last order + 1 regimes, and the age of the latest, are told apart.

    Attributes:
        order, durations: how many lags, and how many ages.
        paths: ``(K, order + 1)``, the regimes of each mode, the latest first.
        age: ``(K,)``, from 0; the last is that age or more.
        after: ``(K, M)``, the mode that comes after each if regime r comes next.
        paths_before, ages_before: for the initial law: ``(ways, order + 1)`` regimes and ages from the latest
            back, for each of the ways that lead to a mode;
        into: ``(ways,)``, the mode that each way leads to.
    """

    order: int
    durations: int
    paths: np.ndarray
    age: np.ndarray
    after: np.ndarray
    paths_before: np.ndarray
    ages_before: np.ndarray
    into: np.ndarray

    @classmethod
    def of(cls, regimes: int, order: int, durations: int) -> "Modes":
        """All modes of `regimes` regimes."""
        last = durations - 1
        ways = []
        for path, first in product(product(range(regimes), repeat=order + 1), range(durations)):
            ages = [first]
            for k in range(order - 1, -1, -1):  # from the earliest regime to the latest
                ages.insert(0, min(ages[0] + 1, last) if path[k] == path[k + 1] else 0)
            ways.append((path, tuple(ages)))
        names = sorted({(path, ages[0]) for path, ages in ways})
        number = {name: k for k, name in enumerate(names)}
        after = [
            [number[(r, *path[:-1]), min(age + 1, last) if r == path[0] else 0] for r in range(regimes)]
            for path, age in names
        ]
        return cls(
            order=order,
            durations=durations,
            paths=np.array([path for path, _ in names]),
            age=np.array([age for _, age in names]),
            after=np.array(after),
            paths_before=np.array([path for path, _ in ways]),
            ages_before=np.array([ages for _, ages in ways]),
            into=np.array([number[path, ages[0]] for path, ages in ways]),
        )

    def initial(self, P: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """The law of the modes at step `order`, where step 0 is stationary under the transitions of step 0.

        Returns it, and the function that takes its derivative back to P ``(T or 1, M, D, M)``.
        """
        (after, start, steps), (M, D), order = self._ways, P.shape[1:3], self.order
        K = M * D
        dense = np.ones((K, K)) + np.eye(K)  # 1 + I − P', by columns
        dense.reshape(-1)[after] -= P[0].reshape(-1)
        try:
            back = np.linalg.inv(dense.T)
        except np.linalg.LinAlgError:
            raise ArgumentError(
                "fit: the chain has no single stationary law. Let every regime reach the others."
            ) from None
        law = back.sum(1)
        if not order:

            def pull_law(bar: np.ndarray) -> np.ndarray:
                P_bar = np.zeros(P.shape)
                P_bar[0] = np.outer(law, bar @ back).reshape(-1)[after].reshape(P.shape[1:])
                return P_bar

            return law, pull_law
        rows = P[: order + 1]
        factors = np.broadcast_to(rows, (order + 1, *P.shape[1:])).reshape(-1)[steps]
        ends = np.ones((1, len(start)))
        earlier = np.concatenate([ends, factors]).cumprod(0)
        way = law[start] * earlier[-1]
        out = np.bincount(self.into, way, len(self.age))

        def pull(bar: np.ndarray) -> np.ndarray:
            P_bar, way_bar = np.zeros(P.shape), bar[self.into]
            law_bar = np.bincount(start, way_bar * earlier[-1], K)
            P_bar[0] += np.outer(law, law_bar @ back).reshape(-1)[after].reshape(P.shape[1:])
            others = earlier[:-1] * np.concatenate([ends, factors[:0:-1]]).cumprod(0)[::-1]
            weight = way_bar * law[start] * others
            tables = np.bincount(steps.reshape(-1), weight.reshape(-1), (order + 1) * K * M)
            tables = tables.reshape(order + 1, *P.shape[1:])
            P_bar[: len(rows)] += tables if len(rows) > 1 else tables.sum(0)
            return P_bar

        return out, pull

    @cached_property
    def rows(self) -> np.ndarray:
        """``(K,)``, the row of the transitions ``(M D, M)`` for each mode's regime and age."""
        return np.asarray(self.paths[:, 0] * self.durations + self.age)

    @cached_property
    def _ways(self) -> tuple[np.ndarray, ...]:
        """Flat indices of: each successor of a regime with its age, where each way starts, and its steps."""
        s, d, (M, D) = self.paths_before, self.ages_before, (self.after.shape[1], self.durations)
        regime, age, to = np.indices((M, D, M))
        after = np.where(to == regime, np.minimum(age + 1, D - 1), 0) + D * to + M * D * (D * regime + age)
        lag = np.arange(self.order)[:, None]  # the step from lag k + 1 to lag k is that into step order − k
        steps = (((self.order - lag) * M + s.T[1:]) * D + d.T[1:]) * M + s.T[:-1]
        return after.reshape(-1), s[:, -1] * D + d[:, -1], steps


class Laws:
    """Offset, input matrix and deviation of each mode, from named parts; `pull` takes derivatives back."""

    def __init__(self, modes: Modes, parts: Mapping[str, np.ndarray]) -> None:
        self.modes, self.parts = modes, parts
        a, b, paths = parts["intercept"], parts.get("coefficients"), modes.paths
        self.now, lags = np.ascontiguousarray(paths[:, 0]), paths[:, 1:]
        self.offset, columns, K = a[self.now], list[np.ndarray](), len(paths)
        if b is not None:
            columns.append(b[self.now])
        if modes.order:
            phi = parts["autoregression"][self.now]
            self.offset = self.offset - (phi * a[lags]).sum(1)
            columns.append(phi)
            if b is not None:
                columns.append(-(phi[:, :, None] * b[lags]).reshape(K, -1))
        self.matrix = np.concatenate([np.zeros((K, 0)), *columns], 1)
        self.deviation = parts["deviation"][self.now]

    def pull(self, offset: np.ndarray, matrix: np.ndarray, deviation: np.ndarray) -> dict[str, np.ndarray]:
        """The derivatives in the parts, from those in the laws."""
        a, b, lags, now = (
            self.parts["intercept"],
            self.parts.get("coefficients"),
            self.modes.paths[:, 1:],
            self.now,
        )
        order, k = self.modes.order, 0 if b is None else b.shape[1]
        bars = {name: np.zeros(value.shape) for name, value in self.parts.items()}
        np.add.at(bars["intercept"], now, offset)
        np.add.at(bars["deviation"], now, deviation)
        if b is not None:
            np.add.at(bars["coefficients"], now, matrix[:, :k])
        if order:
            phi = self.parts["autoregression"][now]
            phi_bar = matrix[:, k : k + order] - offset[:, None] * a[lags]
            np.add.at(bars["intercept"], lags, -phi * offset[:, None])
            if b is not None:
                late = matrix[:, k + order :].reshape(len(now), order, k)
                phi_bar = phi_bar - (late * b[lags]).sum(2)
                np.add.at(bars["coefficients"], lags, -phi[:, :, None] * late)
            np.add.at(bars["autoregression"], now, phi_bar)
        return bars


def likelihood(
    modes: Modes, y: np.ndarray, inputs: np.ndarray, P: np.ndarray, parts: Mapping[str, np.ndarray]
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """log p(y) of observations ``(T,)``, and its derivatives in P ``(T or 1, M, D, M)`` and in the parts."""
    laws = Laws(modes, parts)
    given = laws.offset, laws.matrix, laws.deviation
    known = {"y": np.ascontiguousarray(y), "known": np.ascontiguousarray(inputs), "inputs": inputs.shape[1]}
    value, P_bar, bars = _pass(modes, P, len(y), given, known)
    return value, P_bar, laws.pull(*bars)


def density_likelihood(
    modes: Modes, P: np.ndarray, densities: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """log p(y) from log-densities ``(T, K)``, and its derivatives in P and in them: P(mode | y)."""
    T, K = densities.shape
    smoothed = np.empty((T, K))
    given = np.zeros(K), np.zeros((K, 0)), np.ones(K)
    known = {"given": np.ascontiguousarray(densities), "smoothed": smoothed, "inputs": 0}
    value, P_bar, _ = _pass(modes, P, T, given, known)
    return value, P_bar, smoothed


def _pass(
    modes: Modes, P: np.ndarray, steps: int, laws: tuple[np.ndarray, ...], known: dict[str, Any]
) -> tuple[float, np.ndarray, list[np.ndarray]]:
    """log p(y), and its derivatives in P and in offsets, matrices and deviations; `known` are the data."""
    initial, pull = modes.initial(P)
    into = P[min(len(P) - 1, modes.order) :]
    given = *laws, initial, into
    values = np.concatenate([part.reshape(-1) for part in given])
    bars = np.zeros(len(values))
    frame = filled(
        "HiddenChain",
        steps=steps,
        modes=len(initial),
        regimes=P.shape[1],
        table=into[0].size if len(into) > 1 else 0,
        rows=modes.rows,
        after=modes.after,
        values=values,
        bars=bars,
        **known,
    )
    native.call("chain_pass", frame)
    pieces, at = list[np.ndarray](), 0
    for part in given:
        pieces.append(bars[at : at + part.size].reshape(part.shape))
        at += part.size
    *laws_bar, initial_bar, into_bar = pieces
    whole = pull(initial_bar)
    whole[len(P) - len(into) :] += into_bar
    return frame.log_likelihood, whole, laws_bar


def transitions(
    modes: Modes, covariates: torch.Tensor | None, named: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
    """Transitions ``(T or 1, M, D, M)`` of named parameters, and the function that pulls derivatives back."""
    moved = {name: named[name] for name in ("transition", INPUT, AGE) if name in named}
    if len(moved) == 1:
        P = moved["transition"][None, :, None, :]
        shape = (1, P.shape[1], modes.durations, P.shape[3])
        return np.broadcast_to(P, shape), lambda bar: {"transition": bar.sum((0, 2))}

    def drive(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"P": driven(x["transition"], x.get(INPUT), covariates, x.get(AGE), modes.durations)}

    made, pull = pulled(drive, moved)
    return made["P"], lambda bar: pull({"P": bar})


def chain_model(
    modes: Modes, P: np.ndarray, offset: np.ndarray, matrix: np.ndarray, noise: np.ndarray
) -> SwitchingLinearGaussian:
    """The model of a chain with transitions ``(T or 1, M, D, M)`` and an observation law for each of K modes.

    Offsets are ``(K, m)``, input matrices ``(K, m, r)``, noise covariances ``(K, m, m)``.
    """
    dense, initial = np.zeros((len(P), len(modes.age), len(modes.age))), modes.initial(P)[0]
    after = np.broadcast_to(modes.after, (len(P), *modes.after.shape))
    np.put_along_axis(dense, after, P[:, modes.paths[:, 0], modes.age], 2)
    zero = np.zeros((1, 1))
    return SwitchingLinearGaussian(
        transition=dense[0] if len(dense) == 1 else dense[modes.order :],
        dynamics=zero,
        process_noise=zero,
        observation=np.zeros((offset.shape[1], 1)),
        observation_noise=noise,
        observation_offset=offset,
        observation_input=matrix if matrix.size else None,
        initial_mean=zero[0],
        initial_covariance=zero,
        initial_probability=initial / initial.sum(),
        start="first",
    )
