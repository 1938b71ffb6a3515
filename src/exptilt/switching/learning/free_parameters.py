"""The choice of learned parameters, and the vector of real numbers that they are functions of.

A parameter is held fixed by name, or entry by entry with a mask; it may be shared by all modes. What is free
becomes unconstrained numbers:

    rows of probabilities   logits of the free positive entries against staying, or the first (0 stays 0)
    covariances             Cholesky factor, its diagonal as logarithms; or log variances alone
    everything else         itself, or its logarithm or logit where it has bounds

The vector θ is 0 at the start, and scaled so that units do not matter: transformed parameters are r₀ + A θ,
with r₀ those of the start. A is diagonal, except where a parameter leans on another (an intercept on the
coefficients of regressors with a mean).

All entries of all parameters are gathered from the vector and from constants in one step; `Free` keeps the
indices.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..._support.transforms import apply
from ..parameters import INITIAL, RANKS

PROBABILITIES = ("transition", "initial_probability")
COVARIANCES = ("process_noise", "observation_noise", "initial_covariance", "covariance", "scale")
Arrays = Mapping[str, np.ndarray]
Bounds = Mapping[str, tuple[float, float]]


class Free:
    """Free entries of named arrays as functions of a vector of real numbers.

    Attributes:
        masks: for each parameter with something free, True at its free entries.
        shared: names of parameters with one value for all modes.
        size: length of the vector.
        bounds: lowest and highest value of parameters that have one.
    """

    def __init__(
        self,
        values: Arrays,
        masks: dict[str, np.ndarray],
        shared: frozenset[str] = frozenset(),
        bounds: Bounds | None = None,
        scales: Arrays | None = None,
        leans: Mapping[tuple[str, str], np.ndarray] | None = None,
    ) -> None:
        self.masks, self.shared = masks, shared & frozenset(masks)
        self.bounds, self._held = bounds or {}, dict[str, np.ndarray]()
        self._index: dict[str, np.ndarray] = {}
        self.size, constants = 0, list[np.ndarray]()
        for name, mask in masks.items():
            raw, stands = self._raw(name, values[name])
            own = stands[: 1 if name in self.shared else len(raw)]
            index = np.full(own.shape, -1)
            index[own] = self.size + np.arange(own.sum())
            self.size += int(own.sum())
            self._index[name] = np.broadcast_to(index, raw.shape)
            constants.append(raw[~stands])
            if name in (*PROBABILITIES, *COVARIANCES):
                self._held[name] = np.where(mask, 0.0, values[name])
        flat, at = list[np.ndarray](), self.size
        for index in self._index.values():
            flat.append(index.reshape(-1).copy())
            count = int((index < 0).sum())
            flat[-1][flat[-1] < 0] = at + np.arange(count)
            at += count
        scale = np.ones(self.size)
        for name, size in (scales or {}).items():
            if name in self._index:
                index = self._index[name]
                scale[index[index >= 0]] = np.broadcast_to(size, index.shape)[index >= 0]
        self._matrix = np.diag(scale)
        for (name, other), weight in (leans or {}).items():
            if {name, other} <= self._index.keys() and (name not in shared or other in shared):
                ones, rows = self._index[name], self._index[other]
                # a row of `other` for each entry of `name`: (M, k), or (M, lags, m, m) with a row for each m
                rows = rows if rows.ndim == 2 else rows.transpose(0, 2, 1, 3)
                for i, row in zip(ones.reshape(-1), rows.reshape(ones.size, -1), strict=True):
                    if i >= 0 and (row >= 0).all():
                        self._matrix[i, row] = -weight * scale[row]
        self._origin = np.zeros(self.size)
        self._origin = self._matrix @ self.vector(values)
        self._gather, self._constants = np.concatenate(flat), np.concatenate(constants)
        self._rest = {
            name: 1 - held.sum(-1, keepdims=True) if held.any() else 1.0
            for name, held in self._held.items()
            if name in PROBABILITIES
        }

    def any_of(self, names: Sequence[str]) -> bool:
        """Whether one of the parameters has free entries."""
        return any(name in self.masks for name in names)

    def count(self, name: str) -> int:
        """Number of entries of the vector that belong to a parameter."""
        return len(set(self._index[name].reshape(-1).tolist()) - {-1}) if name in self._index else 0

    def vector(self, values: Arrays) -> np.ndarray:
        """The numbers that stand for the free entries of `values`."""
        theta = np.empty(self.size)
        for name, index in self._index.items():
            raw, stands = self._raw(name, values[name])
            first = 1 if name in self.shared else len(raw)
            theta[index[:first][stands[:first]]] = raw[:first][stands[:first]]
        return np.asarray(np.linalg.solve(self._matrix, theta - self._origin))

    @property
    def bounded(self) -> np.ndarray:
        """``(size,)``, True for logits and logarithms, which go to ±∞ as a parameter nears its bound."""
        out = np.zeros(self.size, dtype=bool)
        for name, index in self._index.items():
            if name in PROBABILITIES or name in self.bounds:
                out[index[index >= 0]] = True
            elif name in COVARIANCES:
                diagonal = np.diagonal(index, axis1=-2, axis2=-1)
                out[diagonal[diagonal >= 0]] = True
        return out

    def low(self, floors: Arrays) -> np.ndarray:
        """``(size,)``, least values of the vector, from `floors` of positive parameters or deviations."""
        out = np.full(self.size, -np.inf)
        for name, floor in floors.items():
            if name in self._index:
                index = self._index[name]
                index = np.diagonal(index, axis1=-2, axis2=-1) if name in COVARIANCES else index
                at = index >= 0
                out[index[at]] = np.log(np.broadcast_to(floor, index.shape)[at])
        return (out - self._origin) / self._matrix.diagonal()

    def label(self, number: int, rank: np.ndarray | None = None) -> str:
        """Name of a number of the vector, such as "deviation of regime 1"; `rank` renumbers regimes."""
        name = next(name for name, index in self._index.items() if (index == number).any())
        regime, *where = np.argwhere(self._index[name] == number)[0].tolist()
        place = rank if rank is not None else np.arange(len(self._index[name]))
        if name == "transition":
            return f"{name}[{place[regime]}, {place[where[0]]}]"
        where = [] if name in COVARIANCES else where
        return (
            name
            + (str(where) if where else "")
            + ("" if name in self.shared else f" of regime {place[regime]}")
        )

    def same_regimes(self, theta: np.ndarray, rank: np.ndarray | None = None) -> str:
        """Names the first two regimes that differ in nothing but the chain; empty if all differ."""
        raw = self._matrix @ theta + self._origin
        raw = np.append(raw / self._matrix.diagonal(), np.nan)  # entries of −1, not learned, read NaN
        names = [name for name in self._index if not name.startswith(("transition", "initial"))]
        regimes = max((len(index) for index in self._index.values()), default=0)
        for i, j in combinations(range(regimes), 2):
            rows = [(raw[self._index[name][i]], raw[self._index[name][j]]) for name in names]
            if all(np.allclose(one, other, rtol=0, atol=1e-2, equal_nan=True) for one, other in rows):
                first, second = sorted((i, j) if rank is None else (int(rank[i]), int(rank[j])))
                return (
                    f"regimes {first} and {second} are the same: the transition probabilities are not "
                    "determined; try more starts or fewer regimes"
                )
        return ""

    def natural(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters with something free as differentiable functions of `theta`."""
        return dict(zip(self.masks, apply(_Natural, theta, self), strict=True))

    @np.errstate(all="ignore")  # a line search may try extreme values
    def values(
        self, theta: np.ndarray
    ) -> tuple[list[np.ndarray], Callable[[Sequence[np.ndarray]], np.ndarray]]:
        """The parameters with something free, and the function that takes derivatives in them back."""
        pool = np.concatenate([self._origin + self._matrix @ theta, self._constants])[self._gather]
        out, pulls, at = list[np.ndarray](), list[Callable[[np.ndarray], np.ndarray]](), 0
        for name, mask in self.masks.items():
            raw = pool[at : at + mask.size].reshape(mask.shape)
            at += mask.size
            if name in PROBABILITIES:
                value, pull = _softmax(raw, self._rest[name])
            elif name in COVARIANCES:
                value, pull = _square(raw)
            else:
                value, pull = _from_real(raw, *self.bounds.get(name, (-np.inf, np.inf)))
            out.append(value + self._held[name] if name in self._held else value)
            pulls.append(pull)

        @np.errstate(all="ignore")
        def back(bars: Sequence[np.ndarray]) -> np.ndarray:
            slopes = [pull(bar).reshape(-1) for pull, bar in zip(pulls, bars, strict=True)]
            slope = np.bincount(self._gather, np.concatenate(slopes), self.size)[: self.size]
            return np.asarray(slope @ self._matrix)

        return out, back

    def _raw(self, name: str, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A parameter before its transform, and which of its entries are numbers of the vector."""
        mask = self.masks[name]
        if name in PROBABILITIES:
            return _logits(value, mask)
        if name in COVARIANCES:
            return _factors(name, value, mask)
        with np.errstate(divide="ignore"):
            raw = _to_real(value, *self.bounds.get(name, (-np.inf, np.inf)))
        if not np.isfinite(raw[mask]).all():
            low, high = self.bounds[name]
            raise ArgumentError(
                f"fit: {name} is learned and starts at {value[mask].tolist()}. Start between {low:g} and "
                f"{high:g}, or fix it."
            )
        return raw, mask


def _to_real(value: np.ndarray, low: float, high: float) -> np.ndarray:
    if np.isinf(low):
        return value
    return np.asarray(np.log(value - low) if np.isinf(high) else np.log((value - low) / (high - value)))


Pulled = tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]  # a value, and its derivative taken back


def _from_real(raw: np.ndarray, low: float, high: float) -> Pulled:
    if np.isinf(low):
        return raw, lambda bar: bar
    if np.isinf(high):
        size = np.exp(raw)
        return low + size, lambda bar: bar * size
    share = 1 / (1 + np.exp(-raw))
    return low + (high - low) * share, lambda bar: bar * (high - low) * share * (1 - share)


@np.errstate(all="ignore")
def to_line(value: float, low: float, high: float) -> tuple[float, float]:
    """A number, or its logarithm or logit if it has bounds, and the slope of that transform."""
    if np.isinf(low):
        return value, 1.0
    place, above = _to_real(np.asarray(value), low, high), 1 / np.float64(value - low)
    return float(place), float(above if np.isinf(high) else above + 1 / np.float64(high - value))


@np.errstate(all="ignore")
def interval(value: float, below: float, above: float, low: float, high: float) -> tuple[float, float]:
    """The ends value − below and value + above, in logarithms above `low`, or in logits with a `high` too.

    These scales are nearer to normal in short samples, and the ends stay inside of the bounds.
    """
    place, slope = to_line(value, low, high)
    ends = [_from_real(np.asarray(place + slope * move), low, high)[0] for move in (-below, above)]
    return float(ends[0]), float(ends[1])


def _softmax(raw: np.ndarray, rest: np.ndarray | float) -> Pulled:
    weight = np.exp(raw - raw.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)

    def pull(bar: np.ndarray) -> np.ndarray:
        bar = bar * rest
        return np.asarray(weight * (bar - (bar * weight).sum(-1, keepdims=True)))

    return rest * weight, pull


def _square(raw: np.ndarray) -> Pulled:
    """L L', of L whose diagonal is given in logarithms."""
    L, diagonal = np.tril(raw, -1), np.arange(raw.shape[-1])
    L[..., diagonal, diagonal] = np.exp(raw[..., diagonal, diagonal])

    def pull(bar: np.ndarray) -> np.ndarray:
        out: np.ndarray = np.tril((bar + bar.mT) @ L)
        out[..., diagonal, diagonal] *= L[..., diagonal, diagonal]
        return out

    return L @ L.mT, pull


class _Natural(torch.autograd.Function):
    """`Free.values` with its derivative, as one torch operation, because many small ones take longer."""

    @staticmethod
    def forward(ctx: Any, theta: torch.Tensor, free: Free) -> tuple[torch.Tensor, ...]:
        values, ctx.pull = free.values(theta.detach().numpy())
        return tuple(torch.from_numpy(value) for value in values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *bars: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.pull([bar.numpy() for bar in bars])), None


def _logits(value: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the free positive entries of each row against one of them; −inf elsewhere."""
    rows, free = np.atleast_2d(value), np.atleast_2d(mask & (value > 0))
    raw, stands = np.full(rows.shape, -np.inf), free.copy()
    for k, row in enumerate(rows):
        if free[k].any():
            at = k if free[k, k] else int(np.argmax(free[k]))
            raw[k, free[k]] = np.log(row[free[k]] / row[at])
            stands[k, at] = False
        else:
            raw[k, 0] = 0.0  # fixed entries leave no probability to this row
    return raw.reshape(value.shape), stands.reshape(value.shape)


def _factors(name: str, value: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cholesky factors of the free blocks with log diagonals, and which entries are numbers of the vector."""
    raw, stands = np.zeros(value.shape), np.tril(mask)
    diagonal = np.arange(value.shape[-1])
    raw[:, diagonal, diagonal] = -np.inf
    for k, free in enumerate(mask):
        inside = np.flatnonzero(free.diagonal())
        block = value[k][np.ix_(inside, inside)]
        if len(inside) > 1 and not free[inside[0], inside[1]]:
            block = np.diag(block.diagonal())
        try:
            L = np.linalg.cholesky(block)
        except np.linalg.LinAlgError:
            L = np.zeros_like(block)
        if not (L.diagonal() > 0).all():
            raise ArgumentError(
                f"fit: {name} is learned but starts singular. Start from a positive definite one, "
                "or fix what is zero."
            )
        raw[k][np.ix_(inside, inside)] = np.tril(L, -1) + np.diag(np.log(L.diagonal()))
    return raw, stands


def choose(
    values: Arrays,
    fixed: str | Sequence[str] | Mapping[str, ArrayLike],
    shared: str | Sequence[str],
    learn_initial: bool,
    tied: Arrays | None = None,
    scales: Arrays | None = None,
    diagonal: str | Sequence[str] = (),
) -> Free:
    """The free entries by `fixed`, `shared` and `diagonal`; shared parameters start from those of mode 0.

    `tied` marks entries that constraints compute from others; `scales` are those of `Free`.
    """
    names = [fixed] if isinstance(fixed, str) else fixed
    held: dict[str, ArrayLike] = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, True)
    shared = [shared] if isinstance(shared, str) else shared
    for name in (*held, *shared):
        if name not in values and name not in RANKS:
            known = sorted(RANKS.keys() | values.keys())
            raise ArgumentError(f"fit: {name!r} is not a parameter. Pass some of {known}.")
    for name in shared:
        if name in PROBABILITIES:
            raise ArgumentError(
                f"fit: {name} cannot be shared by modes. Share matrices, noises, offsets or inputs."
            )
    masks, diagonal = {}, [diagonal] if isinstance(diagonal, str) else diagonal
    for name in diagonal:
        off = ~np.eye(values[name].shape[-1], dtype=bool) if name in COVARIANCES[:2] else None
        if off is None or values[name][..., off].any():
            raise ArgumentError(
                f"fit: diagonal has {name!r}. Pass process_noise or observation_noise, and start from a "
                "diagonal one."
            )
        held[name] = off | np.asarray(held.get(name, False), dtype=bool)
    for name, value in values.items():
        if name in INITIAL and not learn_initial:
            continue
        shape = value.shape
        try:
            mask = ~np.broadcast_to(np.asarray(held.get(name, False), dtype=bool), shape)
        except ValueError:
            raise ArgumentError(
                f"fit: the mask of {name} has shape {np.shape(held[name])}, the parameter {shape}. "
                "Pass one that fits."
            ) from None
        if tied and name in tied:
            mask = mask & ~tied[name]
        if not mask.any():
            continue
        if name in RANKS and len(shape) == RANKS[name] + 1:
            raise ArgumentError(f"fit: {name} varies in time and cannot be learned. Add it to fixed.")
        if name in COVARIANCES:
            if not np.isfinite(value).all():
                raise ArgumentError(
                    f"fit: {name} holds a diffuse state and cannot be learned. Add it to fixed."
                )
            _check_covariance_mask(name, mask)
        if name in shared and (mask != mask[:1]).any():
            raise ArgumentError(
                f"fit: {name} is shared, but its mask differs between modes. Pass one mask for all."
            )
        masks[name] = mask
    if not masks:
        raise ArgumentError("fit: every parameter is fixed. Leave at least one free.")
    return Free(values, masks, frozenset(shared), scales=scales)


def units(
    values: Arrays, rows: np.ndarray, inputs: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Scales of a model's parameters, and deviations to compare its noises with, in units of the data.

    The scale of an observed component is its deviation or that of its steps, whichever is less; the scale of
    a state is the deviation of its noise.
    """

    def sizes(variance: np.ndarray) -> np.ndarray:
        known = np.isfinite(variance) & (variance > 0)
        return np.asarray(np.sqrt(np.where(known, variance, 1.0)))

    def own(name: str) -> np.ndarray:
        diagonal = np.diagonal(values[name], axis1=-2, axis2=-1)
        return np.asarray(diagonal.reshape(-1, diagonal.shape[-1]).mean(0))

    Q, R, P = (own(name) for name in COVARIANCES[:3])
    x = sizes(np.where(Q > 0, Q, P))
    y = np.array([_deviation(column[~np.isnan(column)]) for column in rows.T])
    u = sizes(inputs.reshape(-1, inputs.shape[-1]).var(0)) if inputs.size else np.ones(inputs.shape[-1])
    scales = {
        "dynamics": x[:, None] / x,
        "dynamics_offset": x,
        "dynamics_input": x[:, None] / u,
        "observation": y[:, None] / x,
        "observation_offset": y,
        "observation_input": y[:, None] / u,
        "initial_mean": x,
    }
    for name, size in zip(COVARIANCES[:3], (sizes(Q), sizes(R), sizes(P)), strict=True):
        scales[name] = np.where(np.eye(len(size), dtype=bool), 1.0, size[:, None])
    return scales, {"observation_noise": y, "process_noise": x}


def _deviation(column: np.ndarray) -> float:
    """The deviation of a column or of its steps, whichever is less; 1 if nothing varies."""
    found = [float(part.std()) for part in (column, np.diff(column)) if len(part) > 1]
    return min([size for size in found if size > 0], default=1.0)


def _check_covariance_mask(name: str, mask: np.ndarray) -> None:
    """Free entries must be a principal block with all its covariances, or variances alone."""
    for k, free in enumerate(mask):
        inside = np.flatnonzero(free.diagonal())
        off = free & ~np.eye(len(free), dtype=bool)
        block = off[np.ix_(inside, inside)].sum()
        if off.sum() != block or block not in (0, len(inside) * (len(inside) - 1)):
            raise ArgumentError(
                f"fit: the mask of {name} in mode {k} frees some covariances but not others. Free "
                "variances alone, or all entries between some states."
            )
