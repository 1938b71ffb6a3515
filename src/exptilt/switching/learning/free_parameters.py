"""Which parameters are learned, and a vector of real numbers that stands for them.

A parameter is held fixed by name, or entry by entry with a mask; it may be shared by all modes. What is free becomes unconstrained numbers:

    rows of probabilities   logits of the positive entries (an entry that starts at 0 is structure and stays 0), the first one as reference
    covariances             Cholesky factor with logarithms on its diagonal, or log variances where all covariances are fixed
    everything else         itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import plain
from ..model import SwitchingLinearGaussian

RANKS = {
    "transition": 2,
    "dynamics": 3,
    "process_noise": 3,
    "observation": 3,
    "observation_noise": 3,
    "initial_mean": 2,
    "initial_covariance": 3,
    "initial_probability": 1,
    "dynamics_offset": 2,
    "observation_offset": 2,
    "dynamics_input": 3,
    "observation_input": 3,
}
INITIAL = ("initial_mean", "initial_covariance", "initial_probability")
PROBABILITIES = ("transition", "initial_probability")
COVARIANCES = ("process_noise", "observation_noise", "initial_covariance")


@dataclass(frozen=True)
class Free:
    """What is learned: for each parameter with something free, a mask of its free entries and whether all modes share it."""

    masks: dict[str, np.ndarray]
    shared: frozenset[str]

    def count(self, model: SwitchingLinearGaussian) -> int:
        """How many real numbers are free."""
        return len(to_vector(self, model))


def choose(
    model: SwitchingLinearGaussian,
    fixed: Sequence[str] | Mapping[str, Any],
    shared: Sequence[str],
    learn_initial: bool,
    what: str = "fit",
) -> Free:
    """Read `fixed` and `shared`.

    Args:
        model: the start.
        fixed: names held fixed, or a mapping from names to masks, True where an entry is held (True alone: all of it).
        shared: names that all modes have in common; they start from the values of mode 0.
        learn_initial: whether the initial law is learned at all.
        what: the caller, for messages.
    """
    held: dict[str, Any] = (
        dict(fixed)
        if isinstance(fixed, Mapping)
        else dict.fromkeys([fixed] if isinstance(fixed, str) else fixed, True)
    )
    for name in (*held, *shared):
        if name not in RANKS:
            raise ArgumentError(f"{what}: {name!r} is not a parameter. Pass some of {sorted(RANKS)}.")
    for name in shared:
        if name in PROBABILITIES:
            raise ArgumentError(
                f"{what}: {name} cannot be shared by modes. Share dynamics, noises, observation, offsets or inputs."
            )
    masks = {}
    for name, rank in RANKS.items():
        value = getattr(model, name)
        if value is None or (name in INITIAL and not learn_initial):
            continue
        shape = tuple(value.shape)
        try:
            mask = ~np.broadcast_to(np.asarray(held.get(name, False), dtype=bool), shape)
        except ValueError:
            raise ArgumentError(
                f"{what}: the mask of {name} has shape {np.shape(held[name])}, the parameter {shape}. Pass one that fits."
            ) from None
        if not mask.any():
            continue
        if len(shape) == rank + 1:
            raise ArgumentError(f"{what}: {name} varies in time and cannot be learned. Add it to fixed.")
        if name in PROBABILITIES and not mask.all():
            raise ArgumentError(
                f"{what}: {name} is learned whole or not at all. A transition that starts at probability 0 stays at 0."
            )
        if name in COVARIANCES:
            if not np.isfinite(plain(value)).all():
                raise ArgumentError(
                    f"{what}: {name} holds a diffuse state and cannot be learned. Add it to fixed."
                )
            _check_covariance_mask(name, mask, what)
        if name in shared and (mask != mask[:1]).any():
            raise ArgumentError(
                f"{what}: {name} is shared, but its mask differs between modes. Pass one mask for all."
            )
        masks[name] = mask
    if not masks:
        raise ArgumentError(f"{what}: every parameter is fixed. Leave at least one free.")
    return Free(masks, frozenset(shared) & frozenset(masks))


def _check_covariance_mask(name: str, mask: np.ndarray, what: str) -> None:
    """Free entries must be a principal block with all its covariances, or variances alone."""
    for k, free in enumerate(mask):
        inside = np.flatnonzero(free.diagonal())
        off = free & ~np.eye(len(free), dtype=bool)
        block = off[np.ix_(inside, inside)]
        full, none = block.sum() == len(inside) * (len(inside) - 1), not block.any()
        if off.sum() != block.sum() or not (full or none):
            raise ArgumentError(
                f"{what}: the mask of {name} in mode {k} frees some covariances but not others. Free variances alone, "
                f"or all entries between some states."
            )


def _parts(free: Free, name: str, value: Any) -> list[tuple[Any, np.ndarray]]:
    """The pieces of a parameter that are mapped on their own: one a mode, or one for all."""
    mask = free.masks[name]
    if name in PROBABILITIES:
        rows = value.reshape(-1, value.shape[-1])
        return [(rows[k], mask.reshape(rows.shape)[k]) for k in range(len(rows))]
    modes = 1 if name in free.shared else len(value)
    return [(value[k], mask[k]) for k in range(modes)]


def to_vector(free: Free, model: SwitchingLinearGaussian) -> np.ndarray:
    """The numbers that stand for the free parameters of `model`."""
    out: list[np.ndarray] = []
    for name in free.masks:
        for value, mask in _parts(free, name, plain(getattr(model, name))):
            if name in PROBABILITIES:
                positive = value[value > 0]
                out.append(np.log(positive[1:]) - np.log(positive[0]))
            elif name in COVARIANCES:
                inside = np.flatnonzero(mask.diagonal())
                block = value[np.ix_(inside, inside)]
                alone = len(inside) > 1 and not mask[inside[0], inside[1]]
                try:
                    L = np.diag(np.sqrt(block.diagonal())) if alone else np.linalg.cholesky(block)
                except np.linalg.LinAlgError:
                    L = np.zeros_like(block)
                if len(inside) and not (L.diagonal() > 0).all():
                    raise ArgumentError(
                        f"fit: {name} is learned but starts singular. Start from a positive definite one, or fix what is zero."
                    )
                out.append(np.log(L.diagonal()))
                if not alone:
                    out.append(L[np.tril_indices(len(inside), -1)])
            else:
                out.append(value[mask])
    return np.concatenate(out) if out else np.zeros(0)


def to_parameters(free: Free, model: SwitchingLinearGaussian, theta: torch.Tensor) -> dict[str, torch.Tensor]:
    """The free parameters as differentiable functions of `theta`; fixed entries are those of `model`."""
    out, used = {}, 0

    def take(count: int) -> torch.Tensor:
        nonlocal used
        used += count
        return theta[used - count : used]

    for name in free.masks:
        start = plain(getattr(model, name))
        pieces = []
        for value, mask in _parts(free, name, start):
            base = torch.from_numpy(np.where(mask, 0.0, value))
            if name in PROBABILITIES:
                where = np.flatnonzero(value > 0)
                row = torch.softmax(torch.cat([torch.zeros(1, dtype=torch.float64), take(len(where) - 1)]), 0)
                pieces.append(base.index_add(0, torch.from_numpy(where), row))
            elif name in COVARIANCES:
                inside = np.flatnonzero(mask.diagonal())
                k = len(inside)
                L = torch.diag(torch.exp(take(k)))
                if not (k > 1 and not mask[inside[0], inside[1]]):
                    rows, columns = np.tril_indices(k, -1)
                    L = L.index_put((torch.from_numpy(rows), torch.from_numpy(columns)), take(len(rows)))
                pick = torch.zeros(len(value), k, dtype=torch.float64)
                pick[torch.from_numpy(inside), torch.arange(k)] = 1.0
                pieces.append(base + pick @ L @ L.T @ pick.T)
            else:
                where = np.flatnonzero(mask.reshape(-1))
                pieces.append(
                    base.reshape(-1)
                    .index_add(0, torch.from_numpy(where), take(len(where)))
                    .reshape(value.shape)
                )
        if name in free.shared:
            pieces = pieces * len(start)
        out[name] = torch.stack(pieces).reshape(start.shape)
    return out
