"""The checked matrices of a switching linear-Gaussian model; `model.py` adds the public methods."""

import warnings
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np
import torch

from .._support.errors import ExptiltWarning
from .checks import Array, Checker, plain, precision

# The axes of each parameter after the mode axis, and how many axes each has without a time axis.
CORES = {
    "dynamics": "nn",
    "process_noise": "nn",
    "observation": "mn",
    "observation_noise": "mm",
    "initial_mean": "n",
    "initial_covariance": "nn",
    "dynamics_offset": "n",
    "observation_offset": "m",
    "dynamics_input": "nr",
    "observation_input": "mr",
}
RANKS = {"transition": 2, "initial_probability": 1} | {name: 1 + len(core) for name, core in CORES.items()}
INITIAL = ("initial_mean", "initial_covariance", "initial_probability")
_check = Checker("SwitchingLinearGaussian")


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelParameters:
    """The checked fields of `SwitchingLinearGaussian`, whose docstring describes them."""

    transition: Array
    dynamics: Array
    process_noise: Array
    observation: Array
    observation_noise: Array
    initial_mean: Array
    initial_covariance: Array
    initial_probability: Array
    dynamics_offset: Array = None
    observation_offset: Array = None
    dynamics_input: Array = None
    observation_input: Array = None
    start: str = "before"
    maps: Array = None
    map_covariance: Array = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "start"}
        tensors = any(isinstance(value, torch.Tensor) for value in given.values())
        for name, value in given.items():
            object.__setattr__(self, name, _check.convert(name, value, tensors))
        if self.start not in ("before", "first"):
            raise _check.refuse(f'start is {self.start!r}. Pass "before" or "first".')
        shape = tuple(self.transition.shape)
        if len(shape) not in (2, 3) or shape[-1] != shape[-2]:
            raise _check.refuse(f"transition has shape {shape}. Pass (M, M) or (T, M, M).")
        if self.dynamics.ndim < 2 or self.observation.ndim < 2:
            raise _check.refuse("dynamics and observation are matrices. Pass (M, n, n) and (M, m, n).")
        M, n, m = self.modes, self.states, self.outputs
        if min(M, n, m) == 0:
            raise _check.refuse(f"{M} modes, {n} states, {m} observed components. Pass at least one of each.")
        inputs = [value for value in (self.dynamics_input, self.observation_input) if value is not None]
        sizes = {"n": n, "m": m, "r": int(inputs[-1].shape[-1]) if inputs else 0}
        for name, letters in CORES.items():
            value = getattr(self, name)
            if value is None:
                continue
            words = f"(M, {', '.join(letters)}) with n = {n} states, m = {m} observed components"
            value = _check.with_modes(name, value, tuple(sizes[c] for c in letters), M, words)
            if name in INITIAL and value.ndim != RANKS[name]:
                raise _check.refuse(
                    f"{name} has shape {tuple(value.shape)}; the initial law does not vary in time. "
                    f"Pass {words}."
                )
            object.__setattr__(self, name, value)
            if name != "initial_covariance":
                _check.finite(name, value)
        shape = tuple(self.initial_probability.shape)
        if shape != (M,):
            raise _check.refuse(f"initial_probability has shape {shape}. Pass ({M},).")
        for name in ("transition", "initial_probability"):
            _check.finite(name, getattr(self, name))
            _check.stochastic(name, getattr(self, name))
        for name in ("process_noise", "observation_noise"):
            _check.covariance(name, getattr(self, name))
        self._check_initial_covariance()
        self._check_maps(M, n)
        if len(set(self._lengths().values())) > 1:
            raise _check.refuse(
                f"parameters that vary in time disagree on the number of steps: {self._lengths()}. "
                "Give all the same T."
            )

    def _check_initial_covariance(self) -> None:
        P = plain(self.initial_covariance)
        infinite = self.diffuse
        known = np.where(np.diag(infinite), 0.0, P)
        if not np.isfinite(known).all() or (np.isposinf(P.diagonal(axis1=1, axis2=2)) != infinite).any():
            raise _check.refuse(
                "initial_covariance holds infinities or NaN that do not mark diffuse states. A diffuse state "
                "has inf on the diagonal, in every mode alike, and 0 elsewhere in its row and column."
            )
        if (known[:, infinite, :] != 0).any() or (known[:, :, infinite] != 0).any():
            raise _check.refuse(
                "a diffuse state (inf on the diagonal of initial_covariance) has covariances. Set them to 0."
            )
        noises = (plain(self.process_noise), plain(self.observation_noise))
        scale = max(np.abs(noise).max() for noise in noises)
        _check.covariance("initial_covariance", known, scale, precision(self.initial_covariance))
        self._warn_of_wide(known, noises[1])

    def _warn_of_wide(self, known: np.ndarray, noise: np.ndarray) -> None:
        """Warn if the initial law is so wide beside the noise that float64 loses the observation."""
        H, R = plain(self.observation), noise.diagonal(axis1=-2, axis2=-1)
        wide = np.einsum("...ai,...ij,...aj->...a", H, known, H)
        ratio = np.where(R > 0, wide / np.where(R > 0, R, 1.0), 0.0)
        if ratio.max() * self.states > 1 / np.finfo(np.float64).eps:
            warnings.warn(
                f"{type(self).__name__}: initial_covariance gives an observed component {ratio.max():.1e} "
                "times the variance of its noise. Covariances in float64 keep no digit of the smaller one. "
                "Mark such states diffuse (inf on the diagonal), which is exact.",
                ExptiltWarning,
                stacklevel=5,
            )

    def _check_maps(self, M: int, n: int) -> None:
        if self.maps is None and self.map_covariance is not None:
            raise _check.refuse("map_covariance is given without maps. Pass both.")
        for name, value in (("maps", self.maps), ("map_covariance", self.map_covariance)):
            if value is not None:
                if tuple(value.shape) != (M, M, n, n):
                    raise _check.refuse(f"{name} has shape {tuple(value.shape)}. Pass {(M, M, n, n)}.")
                _check.finite(name, value)
        if self.map_covariance is not None:
            _check.covariance("map_covariance", self.map_covariance)

    def _lengths(self) -> dict[str, int]:
        """The number of steps of each parameter that varies in time."""
        values = {name: getattr(self, name) for name in RANKS}
        return {k: len(v) for k, v in values.items() if v is not None and v.ndim == RANKS[k] + 1}

    @property
    def modes(self) -> int:
        """The number of modes, M."""
        return int(self.transition.shape[-1])

    @property
    def states(self) -> int:
        """The number of components of the state, n."""
        return int(self.dynamics.shape[-1])

    @property
    def outputs(self) -> int:
        """The number of observed components, m."""
        return int(self.observation.shape[-2])

    @property
    def steps(self) -> int | None:
        """The number of steps of the parameters that vary in time, None if none does."""
        return next(iter(self._lengths().values()), None)

    @property
    def diffuse(self) -> np.ndarray:
        """``(n,)``, True for the states that start diffuse."""
        return np.asarray(np.isposinf(plain(self.initial_covariance)[0].diagonal()))

    @property
    def is_torch(self) -> bool:
        """Whether the parameters are tensors."""
        return isinstance(self.transition, torch.Tensor)

    def replace(self, **changes: Array) -> Self:
        """A copy with some fields changed, checked again. Unknown names are refused.

        Args:
            changes: fields by name.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        unknown = set(changes) - set(values)
        if unknown:
            raise _check.refuse(f"{sorted(unknown)} are not parameters. Pass some of {sorted(values)}.")
        return type(self)(**(values | changes))

    def _replaced(self, **changes: Array) -> Self:
        """A copy with some fields changed to valid values, which are not checked again."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        return copy


Model = TypeVar("Model", bound=ModelParameters)
