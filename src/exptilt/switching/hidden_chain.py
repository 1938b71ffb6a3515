"""The exact likelihood of a Markov regression: a hidden chain whose modes are the regimes of several steps.

`Modes` numbers the modes, `Laws` says what is observed in each, `likelihood` is differentiable in all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError
from .kernels.chain import chain_pass
from .kernels.kalman import LOG_TWO_PI
from .learning.chain import AGE, INPUT, driven

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
        into: ``(ways,)``, that mode.
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
        dense = np.zeros((K, K))
        np.put_along_axis(dense, after, P[0].reshape(K, M), 1)
        try:
            back = np.linalg.inv(np.eye(K) - dense.T + 1.0)
        except np.linalg.LinAlgError:
            raise ArgumentError("fit: the chain has no single stationary law.") from None
        law = back.sum(1)
        rows = P[: order + 1]
        factors = np.broadcast_to(rows, (order + 1, *P.shape[1:])).reshape(-1)[steps]
        way = law[start] * factors.prod(0)
        out = np.bincount(self.into, way, len(self.age))

        def pull(bar: np.ndarray) -> np.ndarray:
            P_bar, way_bar = np.zeros(P.shape), bar[self.into]
            law_bar = np.bincount(start, way_bar * factors.prod(0), K)
            P_bar[0] += np.take_along_axis(np.outer(law, law_bar @ back), after, 1).reshape(P.shape[1:])
            tables = np.zeros((order + 1) * K * M)
            for k in range(order):
                others = np.delete(factors, k, 0).prod(0)
                np.add.at(tables, steps[k], way_bar * law[start] * others)
            tables = tables.reshape(order + 1, *P.shape[1:])
            P_bar[: len(rows)] += tables if len(rows) > 1 else tables.sum(0)
            return P_bar

        return out, pull

    @cached_property
    def _ways(self) -> tuple[np.ndarray, ...]:
        """Successors of regimes with ages; flat indices of where each way starts and of its steps."""
        s, d, (M, D) = self.paths_before, self.ages_before, (self.after.shape[1], self.durations)
        regime, age, to = np.indices((M, D, M))
        after = np.where(to == regime, np.minimum(age + 1, D - 1), 0) + D * to
        lag = np.arange(self.order)[:, None]  # the step from lag k + 1 to lag k is that into step order − k
        steps = (((self.order - lag) * M + s.T[1:]) * D + d.T[1:]) * M + s.T[:-1]
        return after.reshape(M * D, M), s[:, -1] * D + d[:, -1], steps


class Laws:
    """Offset, input matrix and deviation of each mode, from named parts; `pull` takes derivatives back."""

    def __init__(self, modes: Modes, parts: Mapping[str, np.ndarray]) -> None:
        self.modes, self.parts = modes, parts
        a, b, paths = parts["intercept"], parts.get("coefficients"), modes.paths
        self.now, lags = paths[:, 0], paths[:, 1:]
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


class ChainLikelihood(torch.autograd.Function):
    """log p(y) of observations ``(T,)`` from transitions ``(T or 1, M, D, M)`` and the parts of `PARTS`.

    The derivative in a log-density is the smoothed probability of its mode, that in a transition the expected
    number of times it was made, divided by its probability.
    """

    @staticmethod
    def forward(
        ctx: Any, modes: Modes, y: np.ndarray, inputs: np.ndarray, names: Sequence[str], *given: torch.Tensor
    ) -> torch.Tensor:
        """The value, with all derivatives kept; `given` are the transitions and the parts called `names`."""
        P, *parts = (value.detach().numpy() for value in given)
        laws = Laws(modes, dict(zip(names, parts, strict=True)))
        initial, pull = modes.initial(P)
        z = (y[:, None] - laws.offset - inputs @ laws.matrix.T) / laws.deviation
        seen = ~np.isnan(y)
        if missing := not seen.all():
            z[~seen] = 0.0
        logs = -0.5 * (z * z + LOG_TWO_PI) - np.log(laws.deviation)
        if missing:
            logs[~seen] = 0.0
        into = np.ascontiguousarray(P[min(len(P) - 1, modes.order) :])
        share, P_bar, initial_bar = np.zeros_like(logs), np.zeros_like(into), np.zeros_like(initial)
        ways = np.ascontiguousarray(laws.now), modes.age, modes.after
        value = chain_pass(logs, into, *ways, initial, share, P_bar, initial_bar)
        if missing:
            share[~seen] = 0.0
        slope = share * z / laws.deviation
        whole = pull(initial_bar)
        whole[len(P) - len(P_bar) :] += P_bar
        spread = (share * (z * z - 1)).sum(0) / laws.deviation
        bars = laws.pull(slope.sum(0), slope.T @ inputs, spread)
        ctx.bars = whole, *(bars[name] for name in names)
        return given[0].new_tensor(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, bar: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What was kept, times `bar`."""
        return (None,) * 4 + tuple(float(bar) * torch.from_numpy(value) for value in ctx.bars)


def likelihood(
    modes: Modes,
    y: np.ndarray,
    inputs: np.ndarray,
    covariates: torch.Tensor | None,
    named: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """log p(y) as a differentiable function of the named parameters."""
    P = driven(named["transition"], named.get(INPUT), covariates, named.get(AGE), modes.durations)
    names = [name for name in PARTS if name in named]
    apply: Any = ChainLikelihood.apply
    value: torch.Tensor = apply(modes, y, inputs, names, P, *(named[name] for name in names))
    return value
