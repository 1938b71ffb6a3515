"""Switching linear-Gaussian state-space models.

A Markov chain of modes picks, at each step, which linear system moves the state and which one is seen (THEORY
E1, E2):

    P(s_t = j | s_{t−1} = i) = transition[i, j]
    x_t = W_{s_t} x_{t−1} + c_{s_t} + B_{s_t} u_t + w_t,   w_t ~ N(0, Q_{s_t})
    y_t = H_{s_t} x_t     + d_{s_t} + D_{s_t} u_t + v_t,   v_t ~ N(0, R_{s_t})

`SwitchingLinearGaussian` holds these matrices, checked once (`parameters.py`); its methods lead to
`inference` and `learning`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import ArrayLike

from .inference.filter import filter_series
from .inference.online import OnlineState
from .inference.results import Filtered, Smoothed
from .inference.simulate import Draws, Sample, posterior_draws, sample
from .inference.smooth import most_likely_path, smooth_series
from .learning.fit import fit_model
from .learning.summary import Fit
from .learning.walk_forward import WalkForward, walk_forward
from .parameters import ModelParameters
from .series import SeriesLike, Values


@dataclass(frozen=True, eq=False, kw_only=True)
class SwitchingLinearGaussian(ModelParameters):
    """A model with M modes, n states, m observed components and r inputs.

    All arguments are numpy arrays, torch tensors or nested lists; if one is a tensor, all become tensors and
    results are tensors. A matrix without a mode axis is shared by all modes. Every parameter but the initial
    law may have a leading time axis, ``(T, M, ...)``.

    Args:
        transition: ``(M, M)``; ``transition[i, j]`` = P(mode j next | mode i now), so rows sum to 1.
        dynamics: W, ``(M, n, n)`` or ``(n, n)``.
        process_noise: Q, ``(M, n, n)`` or ``(n, n)``.
        observation: H, ``(M, m, n)`` or ``(m, n)``.
        observation_noise: R, ``(M, m, m)`` or ``(m, m)``.
        initial_mean: ``(n,)`` or ``(M, n)``.
        initial_covariance: ``(n, n)`` or ``(M, n, n)``. ``inf`` on the diagonal marks a diffuse state.
        initial_probability: ``(M,)``.
        dynamics_offset, observation_offset: c ``(M, n)`` or ``(n,)``; d ``(M, m)`` or ``(m,)``.
        dynamics_input, observation_input: B ``(M, n, r)`` or ``(n, r)``; D ``(M, m, r)`` or ``(m, r)``;
            `inputs` are then given with the data.
        start: "before": the initial law is one step before the first observation; "first": it is the prior of
            the first one.
        maps, map_covariance: ``(M, M, n, n)``; entry [i, j] reads a state of mode i as a state of mode j,
            with the given covariance added. For modes whose states mean different things; see `join_modes`.

    Raises:
        ArgumentError: naming the matrix, the mode and the reason.
    """

    def filter(
        self,
        y: SeriesLike,
        *,
        method: str = "gpb2",
        inputs: SeriesLike | None = None,
        store: str = "all",
        particles: int = 500,
        generator: torch.Generator | None = None,
    ) -> Filtered[Self]:
        """Filter one or many series.

        Args:
            y: ``(T, m)``, ``(B, T, m)`` or a list of series; numpy, torch or pandas. NaN is missing.
            method: "gpb2", "imm", "gpb1", "gpb3" and so on (any k: M^{k−1} laws are kept, exact for k > T),
                "exact" (all mode paths, small T) or "rbpf" (particles).
            inputs: ``(T, r)``, or one for each series, where the model has input matrices.
            store: "all", or "last" to keep only the last step of each series, in O(1) memory.
            particles: how many, for "rbpf".
            generator: a torch generator; None uses torch's own.
        """
        return filter_series(
            self, y, method=method, inputs=inputs, store=store, particles=particles, generator=generator
        )

    def smooth(self, y: SeriesLike, *, method: str = "gpb2", inputs: SeriesLike | None = None) -> Smoothed:
        """Moments and mode probabilities given the whole series.

        Args:
            y: as for `filter`.
            method: "gpb2" (Kim's smoother), "imm", "gpb1", "gpb3" and so on, or "exact".
            inputs: as for `filter`.
        """
        return smooth_series(self, y, method=method, inputs=inputs)

    def online(
        self,
        *,
        method: str = "imm",
        batch: int | None = None,
        clock: "Callable[[float], SwitchingLinearGaussian] | None" = None,
        time: float = 0.0,
    ) -> OnlineState:
        """A filter to be fed one observation at a time; see `OnlineState`.

        Args:
            method: "imm", "gpb2" or "gpb1".
            batch: how many members share this model; None for one, whose results have no batch axis.
            clock: function from the time since the last step to the model of a step of that length; steps
                then take `time=`.
            time: time of the initial law, with a clock.
        """
        return OnlineState.begin(self, method=method, batch=batch, clock=clock, time=time)

    def most_likely_path(
        self, y: SeriesLike, *, method: str = "viterbi", inputs: SeriesLike | None = None
    ) -> Values:
        """The most likely sequence of modes: integers with the shape of the data without their last axis.

        With ``start="before"`` the sequence that is maximised begins with the mode before the first
        observation, which is not returned.

        Args:
            y: as for `filter`.
            method: "viterbi", or "exact" for small T.
            inputs: as for `filter`.
        """
        return most_likely_path(self, y, method=method, inputs=inputs)

    def fit(
        self,
        y: SeriesLike,
        *,
        method: str = "em",
        filter: str = "gpb2",
        fixed: str | Sequence[str] | Mapping[str, ArrayLike] = (),
        shared: str | Sequence[str] = (),
        inputs: SeriesLike | None = None,
        learn_initial: bool = False,
        restarts: int = 0,
        max_steps: int = 500,
        tolerance: float = 1e-6,
        skip: int = 0,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
        constraints: str | Sequence[str] = (),
        initial: str = "given",
        transition_inputs: ArrayLike | None = None,
        durations: int = 1,
        diagonal: str | Sequence[str] = (),
    ) -> Fit[Self]:
        """Learn the parameters, starting from this model.

        Args:
            y: as for `filter`.
            method: "em" or "mle".
            filter: the filter whose likelihood is maximised, "gpb2", "imm" or "gpb1" ("mle" takes "gpb3" and
                so on and "exact" too).
            fixed: names held fixed, or a mapping from names to masks, True where an entry is held.
            shared: names that all modes have in common.
            inputs: as for `filter`.
            learn_initial: learn the initial law too; one series says next to nothing about it, so it is held
                unless asked for.
            restarts: how many more starts, drawn around the first; the best end is returned.
            max_steps: of each start.
            tolerance: stop when the log-likelihood rises by less than this, in nats.
            skip: leave the first terms of each series out of the likelihood ("mle" only), as some papers do.
            generator: randomness of the restarts.
            progress: show a bar: True, False, or None for only on a terminal.
            constraints: texts such as "observation_noise[1] = 4 * observation_noise[0]"; the left side is
                computed from the right, not learned ("mle" only).
            initial: "given", or "stationary": the initial law is the stationary one of the chain and, for
                states that are not diffuse, of each mode's dynamics, and moves with them as they are learned
                ("mle" only). "stationary chain" does this for the modes, and leaves the law of the state as
                given.
            transition_inputs: ``(T, k)`` covariates that drive the transitions ("mle" only); more rows are
                for forecasts. See "transition_input" in `Fit.estimates`.
            durations: how many ages of a regime to tell apart ("mle" only): the chance that it ends then
                depends on how long it has lasted. See "transition_age" in `Fit.estimates`.
            diagonal: "process_noise" or "observation_noise", or both, if only their variances are learned.
        """
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
            skip=skip,
            generator=generator,
            progress=progress,
            constraints=constraints,
            initial=initial,
            transition_inputs=transition_inputs,
            durations=durations,
            diagonal=diagonal,
        )

    def walk_forward(
        self,
        y: SeriesLike,
        *,
        first: int | None = None,
        every: int | None = None,
        inputs: ArrayLike | None = None,
        level: float = 0.9,
        options: Mapping[str, Any] | None = None,
    ) -> WalkForward[Self]:
        """Probabilities and predictions that use the past alone, parameters included: no look-ahead.

        The model is fitted to the first steps, filters until the next fit, and so on; each fit starts from
        the one before. This model is the first start: do not take it from a fit of the whole series.

        Args:
            y: one series, as for `filter`.
            first: how many steps the first fit sees; None for half of them.
            every: how many steps from fit to fit; None for ten fits.
            inputs: ``(T, r)``, where the model has input matrices.
            level: of the intervals of the predictions.
            options: of `fit`, by name, such as {"fixed": …, "shared": …, "method": "mle"}.
        """
        return walk_forward(self, y, first=first, every=every, inputs=inputs, level=level, options=options)

    def sample(
        self, steps: int, *, inputs: SeriesLike | None = None, generator: torch.Generator | None = None
    ) -> Sample:
        """Draw modes, states and observations.

        Args:
            steps: T.
            inputs: ``(T, r)`` where the model has input matrices.
            generator: a torch generator; None uses torch's own.
        """
        return sample(self, steps, inputs=inputs, generator=generator)

    def posterior_draws(
        self,
        y: SeriesLike,
        draws: int,
        *,
        method: str = "gpb2",
        inputs: SeriesLike | None = None,
        particles: int = 500,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """Draw modes and states given one series.

        Args:
            y: one series, ``(T, m)``.
            draws: how many.
            method: the filter that goes forwards: "gpb2", "imm", "gpb1", "exact", or "rbpf", whose draws are
                exact as particles become many.
            inputs: as for `filter`.
            particles: how many, for "rbpf".
            generator: a torch generator; None uses torch's own.
        """
        return posterior_draws(
            self, y, draws, method=method, inputs=inputs, particles=particles, generator=generator
        )
