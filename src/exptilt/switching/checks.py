"""What must hold of a model, checked once when it is made; each message names the matrix, the mode and the reason."""

from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError

Array = Any  # numpy array or torch tensor


def plain(value: Array) -> np.ndarray:
    """A float64 numpy view or copy, cut from any graph."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def convert(name: str, value: Any, tensors: bool) -> Array:
    """`value` as float64 numpy array, or as a torch tensor of its own floating dtype (float64 where it has none)."""
    if value is None:
        return None
    try:
        if tensors:
            tensor = (
                value
                if isinstance(value, torch.Tensor)
                else torch.as_tensor(np.asarray(value, dtype=np.float64))
            )
            return tensor if tensor.is_floating_point() else tensor.double()
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"SwitchingLinearGaussian: {name} is not a numeric array ({error}). Pass a numpy array, a torch tensor or nested lists."
        ) from None


def with_modes(name: str, value: Array, core: tuple[int, ...], modes: int, words: str) -> Array:
    """`value` with a mode axis before its last ``len(core)`` axes; a matrix without one is shared by all modes, a longer one varies in
    time.
    """
    rank = len(core)
    shape = tuple(value.shape)
    if len(shape) == rank:
        value = (
            value[None].expand(modes, *shape)
            if isinstance(value, torch.Tensor)
            else np.broadcast_to(value, (modes, *shape)).copy()
        )
    elif len(shape) not in (rank + 1, rank + 2):
        raise ArgumentError(f"SwitchingLinearGaussian: {name} has shape {shape}. Pass {words}.")
    if tuple(value.shape[-rank - 1 :]) != (modes, *core):
        raise ArgumentError(
            f"SwitchingLinearGaussian: {name} has shape {shape}, but with {modes} modes its last axes should be "
            f"{(modes, *core)}. Pass {words}."
        )
    return value


def precision(value: Array) -> float:
    """The rounding error of what was given: a float32 covariance is symmetric only to seven digits."""
    return (
        torch.finfo(value.dtype).eps if isinstance(value, torch.Tensor) else float(np.finfo(np.float64).eps)
    )


def finite(name: str, value: Array) -> None:
    """No NaN, no infinity."""
    bad = ~np.isfinite(plain(value))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(
            f"SwitchingLinearGaussian: {name} holds {plain(value)[where]} at {where}. Pass finite numbers."
        )


def stochastic(name: str, value: Array) -> None:
    """Rows are probabilities."""
    rows = plain(value)
    if (rows < 0).any():
        where = tuple(int(i) for i in np.argwhere(rows < 0)[0])
        raise ArgumentError(
            f"SwitchingLinearGaussian: {name}{list(where)} is {rows[where]}, a negative probability. Pass numbers in [0, 1]."
        )
    sums = rows.sum(-1)
    wrong = np.abs(sums - 1) > max(1e-6, 10 * precision(value))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0]) if sums.ndim else ()
        of = f"row {where[-1]} of {name}" if where else name
        raise ArgumentError(
            f"SwitchingLinearGaussian: {of} sums to {sums[where] if where else sums:.9g}, not 1. "
            "transition[i, j] is P(mode j next | mode i now), so rows sum to 1; a matrix whose columns do needs transposing."
        )


def covariance(name: str, value: Array) -> None:
    """Symmetric and positive semi-definite, for each mode (and step)."""
    stack = plain(value)
    flat = stack.reshape(-1, *stack.shape[-2:])
    modes = stack.shape[-3]
    size = np.maximum(np.abs(flat).max((-1, -2), initial=0.0), 1e-300)
    skew = np.abs(flat - flat.swapaxes(-1, -2)).max((-1, -2), initial=0.0) / size
    slack = max(1e-8, 100 * precision(value))
    if (skew > slack).any():
        k = int(np.argmax(skew > slack))
        raise ArgumentError(
            f"SwitchingLinearGaussian: {name} of mode {k % modes} is not symmetric (by {skew[k] * size[k]:.3g}). Pass a covariance."
        )
    if flat.shape[-1]:
        low = np.linalg.eigvalsh((flat + flat.swapaxes(-1, -2)) / 2)[:, 0]
        slack = max(1e-9, 10 * precision(value))
        if (low < -slack * size).any():
            k = int(np.argmax(low < -slack * size))
            raise ArgumentError(
                f"SwitchingLinearGaussian: {name} of mode {k % modes} is not positive semi-definite (smallest eigenvalue {low[k]:.6g}). "
                "Pass a covariance matrix, not its square root or its inverse."
            )


def time_axis(values: dict[str, tuple[Array, int]]) -> int | None:
    """The common number of steps of those parameters that vary in time (given as value and rank without time), None if none does."""
    steps = {
        name: int(value.shape[0])
        for name, (value, rank) in values.items()
        if value is not None and value.ndim == rank + 1
    }
    if len(set(steps.values())) > 1:
        raise ArgumentError(
            f"SwitchingLinearGaussian: parameters that vary in time disagree on the number of steps: {steps}. Give all the same T."
        )
    return next(iter(steps.values()), None)


def safe_log(probability: torch.Tensor) -> torch.Tensor:
    """The logarithm, −inf at 0 with derivative 0 there: a probability of exactly 0 is structure."""
    positive = probability > 0
    return torch.where(positive, torch.log(torch.where(positive, probability, 1.0)), -torch.inf)
