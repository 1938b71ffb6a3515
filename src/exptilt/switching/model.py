"""Switching linear-Gaussian state-space models.

A Markov chain of modes picks, at each step, which linear system moves the state and which one is seen (THEORY E1, E2):

    P(s_t = j | s_{t−1} = i) = transition[i, j]
    x_t = W_{s_t} x_{t−1} + c_{s_t} + B_{s_t} u_t + w_t,   w_t ~ N(0, Q_{s_t})
    y_t = H_{s_t} x_t     + d_{s_t} + D_{s_t} u_t + v_t,   v_t ~ N(0, R_{s_t})

`SwitchingLinearGaussian` holds these matrices, checked once; what can be done with them is in the other files of this folder, one idea a
file, and
its methods only lead there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError
from . import checks
from .checks import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class SwitchingLinearGaussian:
    """A model with M modes, n states, m observed components and r inputs.

    All arguments are numpy arrays, torch tensors or nested lists; if one is a tensor, all become tensors and results are tensors. A matrix
    without a mode axis is shared by all modes. Every parameter but the initial law may have a leading time axis, ``(T, M, ...)``.

    Args:
        transition: ``(M, M)``; ``transition[i, j]`` = P(mode j next | mode i now), so rows sum to 1.
        dynamics: W, ``(M, n, n)`` or ``(n, n)``.
        process_noise: Q, ``(M, n, n)`` or ``(n, n)``.
        observation: H, ``(M, m, n)`` or ``(m, n)``.
        observation_noise: R, ``(M, m, m)`` or ``(m, m)``.
        initial_mean: ``(n,)`` or ``(M, n)``.
        initial_covariance: ``(n, n)`` or ``(M, n, n)``. ``inf`` on the diagonal marks a diffuse state (see `diffuse` in `inputs.py`).
        initial_probability: ``(M,)``.
        dynamics_offset, observation_offset: c ``(M, n)`` or ``(n,)``; d ``(M, m)`` or ``(m,)``.
        dynamics_input, observation_input: B ``(M, n, r)`` or ``(n, r)``; D ``(M, m, r)`` or ``(m, r)``; `inputs` are then given with the
            data.
        start: "before": the initial law is one step before the first observation; "first": it is the prior of the first one.
        maps, map_covariance: ``(M, M, n, n)``; entry [i, j] reads a state of mode i as a state of mode j, with the given covariance added.
            For modes whose states mean different things; see `join_modes`.

    Raises:
        ArgumentError: naming the matrix, the mode and the reason.
    """

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
        tensors = any(isinstance(getattr(self, f.name), torch.Tensor) for f in fields(self))
        for f in fields(self):
            if f.name != "start":
                object.__setattr__(self, f.name, checks.convert(f.name, getattr(self, f.name), tensors))
        if self.start not in ("before", "first"):
            raise ArgumentError(
                f'SwitchingLinearGaussian: start is {self.start!r}. Pass "before" or "first".'
            )
        if self.transition.ndim not in (2, 3) or self.transition.shape[-1] != self.transition.shape[-2]:
            raise ArgumentError(
                f"SwitchingLinearGaussian: transition has shape {tuple(self.transition.shape)}. Pass (M, M) or (T, M, M)."
            )
        if self.dynamics.ndim < 2 or self.observation.ndim < 2:
            raise ArgumentError(
                "SwitchingLinearGaussian: dynamics and observation are matrices. Pass (M, n, n) and (M, m, n)."
            )
        M, n, m = (
            int(self.transition.shape[-1]),
            int(self.dynamics.shape[-1]),
            int(self.observation.shape[-2]),
        )
        if min(M, n, m) == 0:
            raise ArgumentError(
                f"SwitchingLinearGaussian: {M} modes, {n} states, {m} observed components. Pass at least one of each."
            )
        r = 0
        for name in ("dynamics_input", "observation_input"):
            if getattr(self, name) is not None:
                r = int(getattr(self, name).shape[-1])
        shapes = {
            "dynamics": (n, n),
            "process_noise": (n, n),
            "observation": (m, n),
            "observation_noise": (m, m),
            "initial_mean": (n,),
            "initial_covariance": (n, n),
            "dynamics_offset": (n,),
            "observation_offset": (m,),
            "dynamics_input": (n, r),
            "observation_input": (m, r),
        }
        letters = {
            "dynamics": "(M, n, n)",
            "observation": "(M, m, n)",
            "observation_noise": "(M, m, m)",
            "initial_mean": "(M, n)",
        }
        for name, core in shapes.items():
            value = getattr(self, name)
            if value is None:
                continue
            words = (
                letters.get(name, "(M, " + ", ".join(map(str, core)) + ")")
                + f" with n = {n} states, m = {m} observed components"
            )
            value = checks.with_modes(name, value, core, M, words)
            if name.startswith("initial") and value.ndim != len(core) + 1:
                raise ArgumentError(
                    f"SwitchingLinearGaussian: {name} has shape {tuple(value.shape)}; the initial law does not vary in time. Pass {words}."
                )
            object.__setattr__(self, name, value)
            if name != "initial_covariance":
                checks.finite(name, value)
        if tuple(self.initial_probability.shape) != (M,):
            raise ArgumentError(
                f"SwitchingLinearGaussian: initial_probability has shape {tuple(self.initial_probability.shape)}. Pass ({M},)."
            )
        for name in ("transition", "initial_probability"):
            checks.finite(name, getattr(self, name))
            checks.stochastic(name, getattr(self, name))
        for name in ("process_noise", "observation_noise"):
            checks.covariance(name, getattr(self, name))
        self._check_initial_covariance()
        self._check_maps(M, n)
        checks.time_axis(
            {
                "transition": (self.transition, 2),
                **{name: (getattr(self, name), len(core) + 1) for name, core in shapes.items()},
            }
        )

    def _check_initial_covariance(self) -> None:
        P = checks.plain(self.initial_covariance)
        infinite = np.isposinf(P[0].diagonal())
        known = np.where(infinite[:, None] & infinite[None, :] & np.eye(len(infinite), dtype=bool), 0.0, P)
        if not np.isfinite(known).all() or (np.isposinf(P.diagonal(axis1=1, axis2=2)) != infinite).any():
            raise ArgumentError(
                "SwitchingLinearGaussian: initial_covariance holds infinities or NaN that do not mark diffuse states. "
                "A diffuse state has inf on the diagonal, in every mode alike, and 0 elsewhere in its row and column."
            )
        if (np.abs(known[:, infinite, :]) > 0).any() or (np.abs(known[:, :, infinite]) > 0).any():
            raise ArgumentError(
                "SwitchingLinearGaussian: a diffuse state (inf on the diagonal of initial_covariance) has covariances. Set them to 0."
            )
        checks.covariance("initial_covariance", known)

    def _check_maps(self, M: int, n: int) -> None:
        if self.maps is None and self.map_covariance is not None:
            raise ArgumentError("SwitchingLinearGaussian: map_covariance is given without maps. Pass both.")
        for name in ("maps", "map_covariance"):
            value = getattr(self, name)
            if value is not None:
                if tuple(value.shape) != (M, M, n, n):
                    raise ArgumentError(
                        f"SwitchingLinearGaussian: {name} has shape {tuple(value.shape)}. Pass {(M, M, n, n)}."
                    )
                checks.finite(name, value)
        if self.map_covariance is not None:
            checks.covariance("map_covariance", self.map_covariance)

    @property
    def modes(self) -> int:
        """M."""
        return int(self.transition.shape[-1])

    @property
    def states(self) -> int:
        """N."""
        return int(self.dynamics.shape[-1])

    @property
    def outputs(self) -> int:
        """M."""
        return int(self.observation.shape[-2])

    @property
    def steps(self) -> int | None:
        """T of the parameters that vary in time, None if none does."""
        ranks = {
            "transition": 2,
            "dynamics": 3,
            "process_noise": 3,
            "observation": 3,
            "observation_noise": 3,
            "dynamics_offset": 2,
        }
        ranks |= {"observation_offset": 2, "dynamics_input": 3, "observation_input": 3}
        return checks.time_axis({name: (getattr(self, name), rank) for name, rank in ranks.items()})

    def replace(self, **changes: Array) -> "SwitchingLinearGaussian":
        """A copy with some fields changed, checked again. Unknown names are refused.

        Args:
            changes: fields by name.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        unknown = set(changes) - set(values)
        if unknown:
            raise ArgumentError(
                f"replace: {sorted(unknown)} are not parameters. Pass some of {sorted(values)}."
            )
        return SwitchingLinearGaussian(**(values | changes))

    def filter(
        self,
        y: Any,
        *,
        method: str = "gpb2",
        inputs: Any = None,
        store: str = "all",
        particles: int = 500,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Filter one or many series; returns `Filtered`.

        Args:
            y: ``(T, m)``, ``(B, T, m)`` or a list of series; numpy, torch or pandas. NaN is missing.
            method: "gpb2", "imm", "gpb1", "exact" (all mode paths, small T) or "rbpf" (particles).
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
            store: "all", or "last" to keep only the last step of each series, in O(1) memory.
            particles: how many, for "rbpf".
            generator: a torch generator; None uses torch's own.
        """
        from .inference.filter import filter_series

        return filter_series(
            self, y, method=method, inputs=inputs, store=store, particles=particles, generator=generator
        )

    def smooth(self, y: Any, *, method: str = "gpb2", inputs: Any = None) -> Any:
        """Moments and mode probabilities given the whole series; returns `Smoothed`.

        Args:
            y: ``(T, m)``, ``(B, T, m)`` or a list of series; numpy, torch or pandas. NaN is missing.
            method: "gpb2" (Kim's smoother), "imm", "gpb1" or "exact".
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
        """
        from .inference.smooth import smooth_series

        return smooth_series(self, y, method=method, inputs=inputs)

    def most_likely_path(self, y: Any, *, method: str = "viterbi", inputs: Any = None) -> Any:
        """The most likely sequence of modes, whole numbers shaped as the data without their last axis.

        Args:
            y: ``(T, m)``, ``(B, T, m)`` or a list of series; numpy, torch or pandas. NaN is missing.
            method: "viterbi", or "exact" for small T.
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
        """
        from .inference.path import most_likely_path

        return most_likely_path(self, y, method=method, inputs=inputs)

    def fit(
        self,
        y: Any,
        *,
        method: str = "em",
        filter: str = "gpb2",
        fixed: Sequence[str] | Mapping[str, Any] = (),
        shared: Sequence[str] = (),
        inputs: Any = None,
        learn_initial: bool = False,
        restarts: int = 0,
        max_steps: int = 500,
        tolerance: float = 1e-6,
        standard_errors: bool = True,
        skip: int = 0,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Learn the parameters, starting from this model; returns `Fit`.

        Args:
            y: ``(T, m)``, ``(B, T, m)`` or a list of series; numpy, torch or pandas. NaN is missing.
            method: "em" or "mle".
            filter: the filter whose likelihood is maximised, "gpb2", "imm" or "gpb1" ("mle" takes "exact" too).
            fixed: names held fixed, or a mapping from names to masks, True where an entry is held.
            shared: names that all modes have in common.
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
            learn_initial: learn the initial law too; one series says next to nothing about it, so it is held unless asked for.
            restarts: how many more starts, drawn around the first; the best end is returned.
            max_steps: of each start.
            tolerance: stop when the log-likelihood rises by less than this, in nats.
            standard_errors: whether to work them out.
            skip: leave the first terms of each series out of the likelihood ("mle" only).
            generator: randomness of the restarts.
            progress: show a bar always, never, or (None) where somebody looks.
        """
        from .learning.fit import fit_model

        return fit_model(
            self,
            y,
            method=method,
            filter=filter,
            fixed=fixed,
            shared=shared,
            inputs=inputs,
            learn_initial=learn_initial,
            restarts=restarts,
            max_steps=max_steps,
            tolerance=tolerance,
            standard_errors=standard_errors,
            skip=skip,
            generator=generator,
            progress=progress,
        )

    def sample(self, steps: int, *, inputs: Any = None, generator: torch.Generator | None = None) -> Any:
        """Draw modes, states and observations; returns `Sample`.

        Args:
            steps: T.
            inputs: ``(T, r)`` where the model has input matrices.
            generator: a torch generator; None uses torch's own.
        """
        from .inference.simulate import sample

        return sample(self, steps, inputs=inputs, generator=generator)

    def posterior_draws(
        self,
        y: Any,
        draws: int,
        *,
        method: str = "gpb2",
        inputs: Any = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Draw modes and states given one series; returns `Draws`.

        Args:
            y: one series, ``(T, m)``.
            draws: how many.
            method: the filter that goes forwards.
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
            generator: a torch generator; None uses torch's own.
        """
        from .inference.simulate import posterior_draws

        return posterior_draws(self, y, draws, method=method, inputs=inputs, generator=generator)
