r"""A flow: ascend the log-normalizer, renormalise, repeat.

    η ← RN(η + step · g(η)),      g(η) = Σ_n softmax_n(β<x_n,η>) x_n          (``ascent.py``, ``renormalizers.py``)

With moving patterns it is self-attention with a skip connection and a norm after it, layer upon layer without weights; with patterns held
still it is cross-attention, and without RN each point runs off along an extreme point of the patterns' hull (THEORY B2). As step → 0 and
steps·step → time it becomes an ordinary differential equation on the constraint that RN keeps (``ode.py``).

`Flow` holds the settings. `flow(points)` is one update; `flow.kernel` is the pair (init, step) that every recursion of the package has;
`flow.run` repeats it, measures every state and keeps what was asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt._support.progress import track
from exptilt.dynamics.ascent import Slope, slope
from exptilt.dynamics.continuous import solve
from exptilt.dynamics.observe.points import check_points, full_precision
from exptilt.dynamics.observe.snapshot import growth
from exptilt.dynamics.renormalizers import Renormalizer, as_renormalizer
from exptilt.dynamics.trajectory import Recorder, Trajectory, kept_steps
from exptilt.families import Empirical
from exptilt.families.measure import Measure


class FlowState(NamedTuple):
    """Where a flow is.

    Attributes:
        points: ``(..., N, D)``.
        steps: how many it has taken.
    """

    points: Tensor
    steps: int


class FlowInfo(NamedTuple):
    """What a step saw.

    Attributes:
        log_normalizer: ``(..., N)``, G(βη) at the points before the step; −inf where a point sees nothing.
        ascended: ``(..., N, D)``, the points after the ascent and before the renormaliser.
    """

    log_normalizer: Tensor
    ascended: Tensor


class Kernel(NamedTuple):
    """A recursion: `init` makes a state, `step` is pure and returns the next one with what it saw."""

    init: Callable[[Tensor], FlowState]
    step: Callable[[FlowState], tuple[FlowState, FlowInfo]]


@dataclass(frozen=True, eq=False)
class Flow:
    """Ascent on a log-normalizer with renormalisation.

    Args:
        renormalize: "layer", "rms", "batch", "whiten", "sphere", None, an instance such as ``Whiten(mean, covariance)``, or any function
            from points ``(..., N, D)`` to points.
        beta: factor of the scores <x,η>, ≥ 0; it does not multiply the step.
        step: how far to go along g, > 0.
        patterns: what g is of: None, the points themselves; ``(..., M, D)``, patterns held still; or a `Measure` on D-vectors, such as
            `Gaussian`, or `Empirical` for patterns with weights. Its batch axes are those in front of N.
        causal: point i sees only patterns j ≤ i + M − N: with moving patterns, itself and those before it.
        mask: booleans that broadcast to ``(..., N, M)``, True where a point may see a pattern.

    Example:
        >>> flow = Flow("sphere", beta=2.0)
        >>> flow(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([[0.9980, 0.0633],
                [0.0633, 0.9980]])
    """

    renormalize: str | Renormalizer | None = "layer"
    beta: float = 1.0
    step: float = 1.0
    patterns: Tensor | Measure | None = None
    causal: bool = False
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        as_renormalizer(self.renormalize)
        for name, value, good in (("beta", self.beta, "≥ 0"), ("step", self.step, "> 0")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name == "step" and value == 0):
                raise ArgumentError(f"Flow: {name} is {value!r}. Pass a finite number {good}.")
        still = isinstance(self.patterns, Measure) and not isinstance(self.patterns, Empirical)
        if still and (self.causal or self.mask is not None):
            kind = type(self.patterns).__name__
            raise ArgumentError(
                f"Flow: causal and mask choose among patterns, and a {kind} has none. Pass points, or Empirical(points)."
            )
        if isinstance(self.patterns, Tensor):
            check_points("Flow: patterns", self.patterns)
        elif self.patterns is not None and not isinstance(self.patterns, Measure):
            raise ArgumentError(
                f"Flow: patterns is a {type(self.patterns).__name__}. Pass None, a tensor (..., M, D) or a Measure."
            )
        if self.mask is not None and (
            not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool or self.mask.ndim < 2
        ):
            raise ArgumentError(
                "Flow: mask must be a tensor of booleans (..., N, M), True where a point may see a pattern."
            )

    def slope(self, points: Tensor) -> Slope:
        """G(βη) and g(η) at every point.

        Args:
            points: ``(..., N, D)``.
        """
        return slope(points, self.patterns, beta=self.beta, causal=self.causal, mask=self.mask)

    def __call__(self, points: Tensor) -> Tensor:
        """One update. Differentiable; a function fit for `fixed_point`.

        Args:
            points: ``(..., N, D)``, finite (which cannot be checked within `torch.func` and `torch.compile`).

        Returns:
            ``(..., N, D)``.
        """
        points = self._start("Flow", points)
        return self._renormalized(torch.add(points, self.slope(points).gradient, alpha=self.step))

    def _renormalized(self, points: Tensor) -> Tensor:
        renormalize = as_renormalizer(self.renormalize)
        if renormalize is None:
            return points
        with full_precision(points):
            result = renormalize(points)
        if not isinstance(result, Tensor) or result.shape != points.shape or result.dtype != points.dtype:
            got = (
                f"shape {tuple(result.shape)} and {result.dtype}"
                if isinstance(result, Tensor)
                else type(result).__name__
            )
            raise ArgumentError(
                f"Flow: renormalize must return points of shape {tuple(points.shape)} and {points.dtype}; got {got}."
            )
        return result

    @property
    def kernel(self) -> Kernel:
        """The pair (init, step), pure: ``state = init(points)``, then ``state, info = step(state)``. Differentiable."""

        def init(points: Tensor) -> FlowState:
            return FlowState(self._start("Flow", points), 0)

        def step(state: FlowState) -> tuple[FlowState, FlowInfo]:
            G, gradient = self.slope(state.points)
            ascended = torch.add(state.points, gradient, alpha=self.step)
            return FlowState(self._renormalized(ascended), state.steps + 1), FlowInfo(G, ascended)

        return Kernel(init, step)

    def _start(self, name: str, points: Tensor) -> Tensor:
        """The points, once they are known to fit, with the batch axes of patterns and mask."""
        check_points(name, points)
        shapes = {"points": points.shape[:-2]}
        if self.patterns is not None:
            measure = isinstance(self.patterns, Measure)
            what = type(self.patterns).__name__ if measure else "patterns"
            dimension = (
                self.patterns.dimension if isinstance(self.patterns, Measure) else self.patterns.shape[-1]
            )
            if dimension != points.shape[-1] or self.patterns.dtype != points.dtype:
                raise ArgumentError(
                    f"{name}: points are {tuple(points.shape)} {points.dtype}, the {what} has dimension {dimension} and dtype "
                    f"{self.patterns.dtype}. Both must agree."
                )
            shapes[what] = (
                self.patterns.batch_shape if isinstance(self.patterns, Measure) else self.patterns.shape[:-2]
            )
        if self.mask is not None:
            shapes["mask"] = self.mask.shape[:-2]
        try:
            batch = torch.broadcast_shapes(*shapes.values())
        except RuntimeError as problem:
            got = ", ".join(f"{what} {tuple(shape)}" for what, shape in shapes.items())
            raise ArgumentError(
                f"{name}: batch axes do not match: {got}. They must agree or be 1."
            ) from problem
        return points if batch == points.shape[:-2] else points.expand(*batch, *points.shape[-2:])

    def run(
        self, points: Tensor, steps: int, *, keep: Literal["all", "last"] | int = "all", measure_every: int | None = 1,
        tolerance: float = 0.05, progress: bool | None = None,
    ) -> Trajectory:  # fmt: skip
        """Take many steps, without gradients.

        Nothing of size N×N is made, and with ``keep="last"`` memory does not grow with the steps.

        Args:
            points: ``(..., N, D)``, the start, repeated along batch axes that only patterns or mask have. It is not renormalised: state 0
                is what was given.
            steps: how many.
            keep: which states: "all", "last", or an integer k for every k-th. The last is always kept.
            measure_every: measure every so many steps, and the last; None, only the first and the last. Measuring costs about as much as
                a step, or a few.
            tolerance: of the rule for clusters, see `clusters`.
            progress: True shows a bar, False none, None one where standard error is a terminal; always after two seconds.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ArgumentError(f"Flow.run: steps is {steps!r}. Pass an integer ≥ 0.")
        kept = kept_steps(keep, steps)
        if measure_every is not None and (
            isinstance(measure_every, bool) or not isinstance(measure_every, int) or measure_every < 1
        ):
            raise ArgumentError(
                f"Flow.run: measure_every is {measure_every!r}. Pass an integer ≥ 1, or None for first and last alone."
            )
        measured = {*range(0, steps + 1, measure_every or max(steps, 1)), steps}
        recorder = Recorder(tolerance)
        init, step = self.kernel
        with torch.no_grad():
            state, grew = init(points.detach() if isinstance(points, Tensor) else points), None
            for count in track(range(steps), "flow", show=progress):
                new, info = step(state)
                recorder.add(
                    count,
                    self.step * count,
                    state.points,
                    info.log_normalizer,
                    grew,
                    count in kept,
                    count in measured,
                )
                check_step(new.points, new.steps)
                grew = growth(state.points, info.ascended, new.points) if new.steps in measured else None
                state = new
            G = self.slope(state.points).log_normalizer
            recorder.add(steps, self.step * steps, state.points, G, grew, True, True)
        return recorder.trajectory()

    def ode(
        self, points: Tensor, time: float, *, samples: int = 101, keep: Literal["all", "last"] | int = "all", rtol: float = 1e-6,
        atol: float = 1e-8, tolerance: float = 0.05, max_evaluations: int = 100_000, progress: bool | None = None,
    ) -> Trajectory:  # fmt: skip
        """The continuous limit dη/dt = D RN(η) g(η), by the adaptive Dormand–Prince method of torchdiffeq (``pip install 'exptilt[ode]'``).

        D RN(η) projects the velocity on the constraint that RN keeps. A flow of n steps of size h is at time n·h.

        Args:
            points: ``(..., N, D)``, float32 or float64, the start; it is renormalised first, as the equation lives on the constraint.
            time: how far to go.
            samples: at how many times, evenly spread from 0 to `time`, the state is measured.
            keep: which of these states: "all", "last", or every k-th and the last.
            rtol: relative tolerance of the error of a step, ≥ 0.
            atol: absolute tolerance, ≥ 0; one of the two must be positive.
            tolerance: of the rule for clusters.
            max_evaluations: of the velocity; more is an error.
            progress: as for `run`.
        """
        points = self._start("Flow.ode", points)
        renormalize = as_renormalizer(self.renormalize)
        return solve(
            self.slope, renormalize, points, time, samples=samples, keep=keep, rtol=rtol, atol=atol, tolerance=tolerance,
            max_evaluations=max_evaluations, progress=progress,
        )  # fmt: skip


def check_step(points: Tensor, count: int) -> None:
    """Raise if a point is not finite after this step, and say which."""
    good = points.isfinite().all(-1)
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise ConvergenceError(
            f"Flow: after step {count} the point at index {index} is not finite: {points[index].tolist()}. "
            "Without a renormaliser points run off to infinity; pass renormalize=, a smaller step, or fewer steps."
        )
