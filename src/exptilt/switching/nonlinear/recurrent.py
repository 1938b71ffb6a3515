r"""Recurrent switching: the next mode depends on the state, by attention over modes.

    P(s_{t+1} = j | s_t = i, x_t) = softmax_j(log π_ij + ⟨R_j, x_t⟩)

The state is the query, the rows of R are keys, and the transition matrix gives each key its weight; all else
is a switching linear-Gaussian model. (Where all rows of π are softmax(r), this is softmax(R x + r).) Before
mode j moves the law N(m, P) of mode i, that law is tilted by the chance of going there,

    c_ij = E[p_j(x)],    E[x | i → j] = E[p_j(x) x] / c_ij,    and the covariance likewise.

These are integrals over as many directions as scores differ in, at most M − 1 and at most n, and are
computed as sums over a grid whose spacing goes with the scores' slopes (csrc/switching/recurrent.hpp). The
rest is GPB2: M² tilted laws are moved, updated and collapsed to M, and backwards Kim's pass goes through the
same tilted laws. With R = 0 nothing is tilted, and both are GPB2 and its smoother.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import Run
from ..checks import Array, Checker, plain
from ..inference.moments import SENSOR, STEP, by_row
from ..inference.passes import run_smoother
from ..inference.problem import Problem, prepare
from ..inference.results import Filtered, Laws, Smoothed
from ..inference.run import run_filter
from ..inference.simulate import Sample, root
from ..inference.smooth import smoothed
from ..model import SwitchingLinearGaussian
from ..series import Data, SeriesLike

_check = Checker("RecurrentSwitching")


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentSwitching:
    """A switching linear-Gaussian model whose transitions depend on the state.

    Args:
        model: the modes; ``transition[i, j]`` is P(mode j next | mode i now) where the state is 0.
        recurrence: R, ``(M, n)``: a row a mode; P(j next | i, x) is proportional to
            ``transition[i, j] * exp(recurrence[j] @ x)``.

    Example:
        >>> import numpy as np
        >>> modes = SwitchingLinearGaussian(
        ...     transition=np.full((2, 2), 0.5),
        ...     dynamics=[[1.0]],
        ...     dynamics_offset=[[1.0], [-1.0]],
        ...     process_noise=[[0.1]],
        ...     observation=[[1.0]],
        ...     observation_noise=[[0.5]],
        ...     initial_mean=[0.0],
        ...     initial_covariance=[[1.0]],
        ...     initial_probability=[0.5, 0.5],
        ... )
        >>> turns_back = RecurrentSwitching(model=modes, recurrence=[[-2.0], [2.0]])
        >>> post = turns_back.filter([[1.2], [2.1], [0.9], [0.2]])
        >>> post.mode_probability.argmax(1).tolist()
        [0, 0, 1, 1]
    """

    model: SwitchingLinearGaussian
    recurrence: Array

    def __post_init__(self) -> None:
        if not isinstance(self.model, SwitchingLinearGaussian):
            kind = type(self.model).__name__
            raise _check.refuse(f"model is a {kind}. Pass a SwitchingLinearGaussian.")
        R = plain(_check.convert("recurrence", self.recurrence, False))
        if R.shape != (self.model.modes, self.model.states):
            wanted = (self.model.modes, self.model.states)
            raise _check.refuse(f"recurrence has shape {R.shape}. Pass {wanted}: a row a mode.")
        _check.finite("recurrence", R)
        if self.model.maps is not None:
            raise _check.refuse(
                "the model has maps between modes, which are not supported here. Pass a model without maps."
            )
        object.__setattr__(self, "recurrence", R)

    @property
    def transition(self) -> Array:
        """Transition probabilities where the state is 0, ``(M, M)``."""
        return self.model.transition

    def filter(self, y: SeriesLike, *, inputs: SeriesLike | None = None) -> Filtered["RecurrentSwitching"]:
        """Filter one or many series, by GPB2 over tilted laws.

        Args:
            y: as for `SwitchingLinearGaussian.filter`.
            inputs: as for `SwitchingLinearGaussian.filter`.
        """
        problem, run = self._run(y, inputs, "filter")
        M, n, _ = problem.sizes
        out, rows = run.out, len(run.y)
        mean, cov = out.mode_mean.reshape(rows, M, n), out.mode_covariance.reshape(rows, M, n, n)
        laws = Laws(out.log_mode, mean, cov, out.terms, out.log_likelihood)
        return Filtered("gpb2", problem.data, laws, self)

    def smooth(self, y: SeriesLike, *, inputs: SeriesLike | None = None) -> Smoothed:
        """Moments and mode probabilities given the whole series: Kim's pass through the tilted laws.

        Args:
            y: as for `filter`.
            inputs: as for `filter`.
        """
        problem, run = self._run(y, inputs, "smooth")
        total = run.out.log_likelihood
        return smoothed("gpb2", problem, list(run_smoother(run, problem, [], over=True)[:4]), total)

    def sample(
        self, steps: int, *, inputs: SeriesLike | None = None, generator: torch.Generator | None = None
    ) -> Sample:
        """Draw modes, states and observations.

        Args:
            steps: T.
            inputs: ``(T, r)`` where the model has input matrices.
            generator: a torch generator; None uses torch's own.
        """
        if steps < 1:
            raise ArgumentError(f"sample: steps is {steps}. Pass at least 1.")
        n, m = self.model.states, self.model.outputs
        blank = np.full((steps, m), np.nan)
        data, problem = self._prepared(blank, inputs, "sample")
        now = by_row(problem.parameters, data.starts, STEP + SENSOR, self.model.modes)
        draw = torch.randn(steps + 1, n + m, dtype=torch.float64, generator=generator).numpy()
        u = torch.rand(steps + 1, dtype=torch.float64, generator=generator).numpy()
        begin = plain(self.model.initial_probability).cumsum()
        mode = int(np.searchsorted(begin, u[steps] * begin[-1], side="right"))
        x = plain(self.model.initial_mean)[mode]
        x = x + root(plain(self.model.initial_covariance))[mode] @ draw[steps, :n]
        modes, states, seen = np.empty(steps, np.int64), np.empty((steps, n)), np.empty((steps, m))
        for t in range(steps):
            transition, W, c, Q, H, d, R = (value[t if len(value) > 1 else 0] for value in now)
            if t or self.model.start == "before":
                with np.errstate(divide="ignore"):
                    score = np.log(transition[mode]) + self.recurrence @ x
                chance = np.exp(score - score.max()).cumsum()
                mode = int(np.searchsorted(chance, u[t] * chance[-1], side="right"))
                x = W[mode] @ x + c[mode] + root(Q[mode]) @ draw[t, :n]
            modes[t], states[t] = mode, x
            seen[t] = H[mode] @ x + d[mode] + root(R[mode]) @ draw[t, n:]
        return Sample(modes, states, seen)

    def _prepared(self, y: SeriesLike, inputs: SeriesLike | None, what: str) -> tuple[Data, Problem]:
        """The data, and the problem they make with the parameters."""
        with torch.no_grad():
            problem = prepare(self.model, y, inputs, what, proper=True)
        return problem.data, problem

    def _run(self, y: SeriesLike, inputs: SeriesLike | None, what: str) -> tuple[Problem, Run]:
        """The problem, and the run of the compiled filter."""
        _, problem = self._prepared(y, inputs, what)
        data, R = problem.data, np.ascontiguousarray(self.recurrence)
        return problem, run_filter(problem.parameters, data.rows, data.starts, "gpb2", recurrence=R)
