"""Checks of a model's arguments when it is made; a message names the matrix, the mode and the reason."""

from typing import Any, TypeAlias

import numpy as np
import torch

from .._support.errors import ArgumentError

Array: TypeAlias = Any  # a numpy array or a tensor; no static type says which. Lists are converted.


def plain(value: Array) -> np.ndarray:
    """The value as a float64 numpy array, cut from any graph."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def precision(value: Array) -> float:
    """Rounding error of the given dtype: a float32 covariance is symmetric only to seven digits."""
    return float(
        torch.finfo(value.dtype).eps if isinstance(value, torch.Tensor) else np.finfo(np.float64).eps
    )


def safe_log(probability: torch.Tensor) -> torch.Tensor:
    """The logarithm, −inf at 0 with derivative 0 there: a probability of exactly 0 is kept."""
    positive = probability > 0
    return torch.where(positive, torch.log(torch.where(positive, probability, 1.0)), -torch.inf)


def row_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis on one thread; torch.softmax wakes all threads even for two numbers."""
    weight = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    return weight / weight.sum(-1, keepdim=True)


class Checker:
    """Checks of the arguments of one class, whose name the messages begin with."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def refuse(self, text: str) -> ArgumentError:
        """The error to raise, with the owner's name in front of `text`."""
        return ArgumentError(f"{self.owner}: {text}")

    def convert(self, name: str, value: Any, tensors: bool) -> Array:
        """`value` as a float64 array, or as a tensor of its own floating dtype (float64 if it has none)."""
        if value is None:
            return None
        advice = "Pass real numbers in a numpy array, a torch tensor or nested lists."
        try:
            if not isinstance(value, torch.Tensor):
                array = np.array(value)
                value = array if np.iscomplexobj(array) else array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise self.refuse(f"{name} is not a numeric array ({error}). {advice}") from None
        if value.is_complex() if isinstance(value, torch.Tensor) else np.iscomplexobj(value):
            raise self.refuse(f"{name} is complex. {advice}")
        if not tensors or isinstance(value, torch.Tensor):
            return value if not tensors or value.is_floating_point() else value.double()
        return torch.from_numpy(value)

    def with_modes(self, name: str, value: Array, core: tuple[int, ...], modes: int, words: str) -> Array:
        """`value` with a mode axis before its last axes `core`; without one it is shared by all modes."""
        rank, shape = len(core), tuple(value.shape)
        if len(shape) == rank:
            value = (
                value[None].expand(modes, *shape)
                if isinstance(value, torch.Tensor)
                else np.broadcast_to(value, (modes, *shape)).copy()
            )
        elif len(shape) not in (rank + 1, rank + 2):
            raise self.refuse(f"{name} has shape {shape}. Pass {words}.")
        if tuple(value.shape[-rank - 1 :]) != (modes, *core):
            raise self.refuse(
                f"{name} has shape {shape}, but with {modes} modes its last axes should be {(modes, *core)}. "
                f"Pass {words}."
            )
        return value

    def finite(self, name: str, value: Array) -> None:
        """Refuse NaN and infinities."""
        bad = np.argwhere(~np.isfinite(plain(value)))
        if len(bad):
            where = tuple(int(i) for i in bad[0])
            raise self.refuse(f"{name} holds {plain(value)[where]} at {where}. Pass finite numbers.")

    def stochastic(self, name: str, value: Array) -> None:
        """Refuse rows that are not probabilities."""
        rows = plain(value)
        if (rows < 0).any():
            where = tuple(int(i) for i in np.argwhere(rows < 0)[0])
            raise self.refuse(
                f"{name}{list(where)} is {rows[where]}, a negative probability. Pass numbers in [0, 1]."
            )
        sums = rows.sum(-1)
        wrong = np.argwhere(np.abs(sums - 1) > max(1e-6, 10 * precision(value)))
        if len(wrong):
            where = tuple(int(i) for i in wrong[0])
            of = f"row {where[-1]} of {name}" if where else name
            raise self.refuse(
                f"{of} sums to {sums[where]:.9g}, not 1. transition[i, j] is P(mode j next | mode i now), "
                "so rows sum to 1; a matrix whose columns do needs transposing."
            )

    def covariance(
        self, name: str, value: Array, scale: float = 1e-300, rounding: float | None = None
    ) -> None:
        """Refuse matrices that are not symmetric or not positive semi-definite, up to rounding.

        `scale` is the size of the numbers that `value` was computed from: the rounding of a posterior is
        relative to that size. `rounding` is the relative error of the input, by default that of `value`.
        """
        rounding = precision(value) if rounding is None else rounding
        stack = plain(value)
        flat, modes = stack.reshape(-1, *stack.shape[-2:]), stack.shape[-3]
        size = np.maximum(np.abs(flat).max((-1, -2), initial=0.0), max(scale, 1e-300))
        skew = np.abs(flat - flat.swapaxes(-1, -2)).max((-1, -2), initial=0.0) / size
        wrong = skew > max(1e-8, 100 * rounding)
        if wrong.any():
            k = int(np.argmax(wrong))
            raise self.refuse(
                f"{name} of mode {k % modes} is not symmetric (by {skew[k] * size[k]:.3g})."
                " Pass a covariance."
            )
        low = np.linalg.eigvalsh((flat + flat.swapaxes(-1, -2)) / 2).min(-1, initial=np.inf)
        wrong = low < -max(1e-9, 10 * rounding) * size
        if wrong.any():
            k = int(np.argmax(wrong))
            raise self.refuse(
                f"{name} of mode {k % modes} is not positive semi-definite (smallest eigenvalue "
                f"{low[k]:.6g}). Pass a covariance matrix, not its square root or its inverse."
            )
