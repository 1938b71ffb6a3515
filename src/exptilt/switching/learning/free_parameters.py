"""Which parameters are learned, and a vector of real numbers that stands for them.

A parameter is held fixed by name, or entry by entry with a mask; it may be shared by all modes. What is free
becomes unconstrained numbers:

    rows of probabilities   logits of the positive entries against staying, or the first (0 stays 0)
    covariances             Cholesky factor, its diagonal as logarithms; or log variances alone
    everything else         itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import plain
from ..parameters import INITIAL, RANKS, ModelParameters

PROBABILITIES = ("transition", "initial_probability")
COVARIANCES = ("process_noise", "observation_noise", "initial_covariance")


@dataclass(frozen=True)
class Free:
    """What is learned.

    Attributes:
        masks: for each parameter with something free, True at its free entries.
        shared: the parameters that all modes have in common.
    """

    masks: dict[str, np.ndarray]
    shared: frozenset[str]

    def any_of(self, names: Sequence[str]) -> bool:
        """Whether one of the parameters has something free."""
        return any(name in self.masks for name in names)


def choose(
    model: ModelParameters,
    fixed: str | Sequence[str] | Mapping[str, ArrayLike],
    shared: str | Sequence[str],
    learn_initial: bool,
) -> Free:
    """Read `fixed` and `shared`; what is shared starts from the values of mode 0."""
    names = [fixed] if isinstance(fixed, str) else fixed
    held: dict[str, ArrayLike] = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, True)
    shared = [shared] if isinstance(shared, str) else shared
    for name in (*held, *shared):
        if name not in RANKS:
            raise ArgumentError(f"fit: {name!r} is not a parameter. Pass some of {sorted(RANKS)}.")
    for name in shared:
        if name in PROBABILITIES:
            raise ArgumentError(
                f"fit: {name} cannot be shared by modes. Share matrices, noises, offsets or inputs."
            )
    masks = {}
    for name in RANKS:
        value = getattr(model, name)
        if value is None or (name in INITIAL and not learn_initial):
            continue
        shape = tuple(value.shape)
        try:
            mask = ~np.broadcast_to(np.asarray(held.get(name, False), dtype=bool), shape)
        except ValueError:
            raise ArgumentError(
                f"fit: the mask of {name} has shape {np.shape(held[name])}, the parameter {shape}. "
                "Pass one that fits."
            ) from None
        if not mask.any():
            continue
        if len(shape) == RANKS[name] + 1:
            raise ArgumentError(f"fit: {name} varies in time and cannot be learned. Add it to fixed.")
        if name in PROBABILITIES and not mask.all():
            raise ArgumentError(
                f"fit: {name} is learned whole or not at all. A transition that starts at 0 stays at 0."
            )
        if name in COVARIANCES:
            if not np.isfinite(plain(value)).all():
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
    return Free(masks, frozenset(shared) & frozenset(masks))


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


def _parts(free: Free, name: str, value: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The pieces of a parameter that are mapped on their own, with masks: one a mode, or one for all."""
    modes = 1 if name in free.shared or value.ndim == 1 else len(value)
    rows = value.reshape(1, -1) if value.ndim == 1 else value
    return list(zip(rows[:modes], free.masks[name].reshape(rows.shape)[:modes], strict=True))


def _reference(row: np.ndarray, k: int) -> int:
    """Which of the positive entries of row k the others are compared with: that of staying, if it is one."""
    return int((row[:k] > 0).sum()) if row[k] > 0 else 0


def _variances_alone(mask: np.ndarray, inside: np.ndarray) -> bool:
    return len(inside) > 1 and not mask[inside[0], inside[1]]


def to_vector(free: Free, model: ModelParameters) -> np.ndarray:
    """The numbers that stand for the free parameters of `model`."""
    out: list[np.ndarray] = []
    for name in free.masks:
        for k, (value, mask) in enumerate(_parts(free, name, plain(getattr(model, name)))):
            if name in PROBABILITIES:
                logs = np.log(value[value > 0])
                out.append(np.delete(logs - logs[_reference(value, k)], _reference(value, k)))
            elif name in COVARIANCES:
                inside = np.flatnonzero(mask.diagonal())
                block, alone = value[np.ix_(inside, inside)], _variances_alone(mask, inside)
                try:
                    L = np.diag(np.sqrt(block.diagonal())) if alone else np.linalg.cholesky(block)
                except np.linalg.LinAlgError:
                    L = np.zeros_like(block)
                if not (L.diagonal() > 0).all():
                    raise ArgumentError(
                        f"fit: {name} is learned but starts singular. Start from a positive definite one, "
                        "or fix what is zero."
                    )
                out += [np.log(L.diagonal()), L[np.tril_indices(0 if alone else len(inside), -1)]]
            else:
                out.append(value[mask])
    return np.concatenate(out)


def to_parameters(free: Free, model: ModelParameters, theta: torch.Tensor) -> dict[str, torch.Tensor]:
    """The free parameters as differentiable functions of `theta`; fixed entries are those of `model`."""
    out, rest = {}, theta

    def take(count: int) -> torch.Tensor:
        nonlocal rest
        taken, rest = rest[:count], rest[count:]
        return taken

    for name in free.masks:
        start = plain(getattr(model, name))
        pieces = []
        for k, (value, mask) in enumerate(_parts(free, name, start)):
            base = torch.from_numpy(np.where(mask, 0.0, value))
            if name in PROBABILITIES:
                where, at = np.flatnonzero(value > 0), _reference(value, k)
                logits = take(len(where) - 1)
                row = torch.softmax(torch.cat([logits[:at], logits.new_zeros(1), logits[at:]]), 0)
                pieces.append(base.index_add(0, torch.from_numpy(where), row))
            elif name in COVARIANCES:
                inside = np.flatnonzero(mask.diagonal())
                L = torch.diag(torch.exp(take(len(inside))))
                rows, columns = np.tril_indices(0 if _variances_alone(mask, inside) else len(inside), -1)
                L = L.index_put((torch.from_numpy(rows), torch.from_numpy(columns)), take(len(rows)))
                pick = torch.eye(len(value), dtype=torch.float64)[:, inside]
                pieces.append(base + pick @ L @ L.T @ pick.T)
            else:
                where = np.flatnonzero(mask)
                flat = base.reshape(-1).index_add(0, torch.from_numpy(where), take(len(where)))
                pieces.append(flat.reshape(value.shape))
        repeated = pieces * len(start) if name in free.shared else pieces
        out[name] = torch.stack(repeated).reshape(start.shape)
    return out
