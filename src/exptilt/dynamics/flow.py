r"""A flow: ascend the log-normalizer, renormalise, repeat.

    η ← RN(η + step · g(η)),      g(η) = Σ_n softmax_n(β⟨x_n,η⟩) x_n     (``ascent.py``, ``renormalizers.py``)

With moving patterns this is self-attention with a skip connection and a norm after it, layer upon layer
without weights; with patterns held still this is cross-attention, and without RN each point diverges along an
extreme point of the patterns' hull (THEORY B2). As step → 0 and steps·step → time it becomes an ordinary
differential equation on the constraint that RN keeps (``continuous.py``).

`Flow` holds the settings. `flow(points)` is one update; `flow.run` repeats it, measures states and keeps
those asked for.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt._support.linalg import common_shape
from exptilt._support.progress import track
from exptilt._support.transforms import full_precision
from exptilt.dynamics.ascent import Slope, slope
from exptilt.dynamics.continuous import integrate, on_constraint, velocity
from exptilt.dynamics.observe.points import check_points
from exptilt.dynamics.observe.snapshot import growth
from exptilt.dynamics.renormalizers import Renormalizer, as_renormalizer
from exptilt.dynamics.trajectory import Recorder, Trajectory, kept_steps
from exptilt.families import Empirical
from exptilt.families.measure import Measure

Keep = Literal["all", "last"] | int


@dataclass(frozen=True, eq=False)
class Flow:
    """Ascent on a log-normalizer with renormalisation.

    Args:
        renormalize: "layer", "rms", "batch", "whiten", "sphere", None, an instance such as
            ``Whiten(mean, covariance)``, or any function from points ``(..., N, D)`` to points.
        beta: factor of the scores ⟨x,η⟩, ≥ 0; it does not multiply the step.
        step: step size along g, > 0.
        patterns: the measure that is ascended: None for the points themselves; ``(..., M, D)`` for patterns
            held still; or a `Measure` on D-vectors, such as `Gaussian`, or `Empirical` for patterns with
            weights, whose batch axes are those in front of N.
        causal: point i sees only patterns j ≤ i + M − N: with moving patterns, those up to itself.
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
        number("Flow", "beta", self.beta, least=0)
        number("Flow", "step", self.step, above=0)
        patterns, mask, kind = self.patterns, self.mask, type(self.patterns).__name__
        chooses = self.causal or mask is not None
        if isinstance(patterns, Tensor):
            check_points("Flow", patterns, "patterns")
        elif patterns is not None and not isinstance(patterns, Measure):
            raise ArgumentError(f"Flow: patterns is a {kind}. Pass None, a tensor (..., M, D) or a Measure.")
        elif chooses and patterns is not None and not isinstance(patterns, Empirical):
            raise ArgumentError(
                f"Flow: causal and mask choose among patterns, and a {kind} has none. "
                "Pass points, or Empirical(points)."
            )
        if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim > 1):
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
        """One update of the points; differentiable, and usable as the function of `fixed_point`.

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
        with full_precision(points.device):
            result = renormalize(points)
        if not isinstance(result, Tensor) or result.shape != points.shape or result.dtype != points.dtype:
            kind = type(result).__name__
            got = f"shape {tuple(result.shape)} and {result.dtype}" if isinstance(result, Tensor) else kind
            raise ArgumentError(
                f"Flow: renormalize must return points of shape {tuple(points.shape)} and {points.dtype}; "
                f"got {got}."
            )
        return result

    def _start(self, name: str, points: Tensor) -> Tensor:
        """The points, expanded to the batch axes of patterns and mask; an error if they do not fit."""
        check_points(name, points)
        shapes = {"points": points.shape[:-2]}
        if (given := self.patterns) is not None:
            if isinstance(given, Measure):
                what, dimension, batch = type(given).__name__, given.dimension, given.batch_shape
            else:
                what, dimension, batch = "patterns", given.shape[-1], given.shape[:-2]
            if dimension != points.shape[-1] or given.dtype != points.dtype:
                raise ArgumentError(
                    f"{name}: points are {tuple(points.shape)} {points.dtype}, the {what} has dimension "
                    f"{dimension} and dtype {given.dtype}. Both must agree."
                )
            shapes[what] = batch
        if self.mask is not None:
            shapes["mask"] = self.mask.shape[:-2]
        try:
            batch = common_shape(*shapes.values())
        except RuntimeError as problem:
            got = ", ".join(f"{what} {tuple(shape)}" for what, shape in shapes.items())
            raise ArgumentError(
                f"{name}: batch axes do not match: {got}. They must agree or be 1."
            ) from problem
        return points if batch == points.shape[:-2] else points.expand(*batch, *points.shape[-2:])

    def run(
        self,
        points: Tensor,
        steps: int,
        *,
        keep: Keep = "all",
        measure_every: int | None = 1,
        tolerance: float = 0.05,
        progress: bool | None = None,
    ) -> Trajectory:
        """The `Trajectory` of many steps, without gradients.

        Nothing of size N×N is made, and with ``keep="last"`` memory does not grow with the steps.

        Args:
            points: ``(..., N, D)``, the start, repeated along batch axes that only patterns or mask have.
                State 0 is this start, not renormalised.
            steps: number of steps.
            keep: states to keep: "all", "last", or an integer k for every k-th. The last is always kept.
            measure_every: steps between measurements; the last state is always measured. None: only the
                first and the last. A measurement costs about as much as a step, or a few.
            tolerance: largest gap within a cluster, see `clusters`.
            progress: True shows a progress bar, False none, None one if standard error is a terminal; it
                appears after two seconds.
        """
        whole("Flow.run", "steps", steps, least=0)
        if measure_every is not None:
            whole("Flow.run", "measure_every", measure_every, otherwise=", or None for first and last alone")
        measured = {*range(0, steps + 1, measure_every or max(steps, 1)), steps}
        recorder = Recorder(tolerance, kept_steps(keep, steps), measured)
        with torch.no_grad():
            state = self._start("Flow", points.detach() if isinstance(points, Tensor) else points)
            grew = None
            for count in track(range(steps), "flow", show=progress):
                G, gradient = self.slope(state)
                ascended = torch.add(state, gradient, alpha=self.step)
                new = self._renormalized(ascended)
                recorder.add(count, self.step * count, state, G, grew)
                check_step(new, count + 1)
                grew = growth(state, ascended, new) if count + 1 in measured else None
                state = new
            recorder.add(steps, self.step * steps, state, self.slope(state).log_normalizer, grew)
        return recorder.trajectory()

    def ode(
        self,
        points: Tensor,
        time: float,
        *,
        samples: int = 101,
        keep: Keep = "all",
        rtol: float = 1e-6,
        atol: float = 1e-8,
        tolerance: float = 0.05,
        max_evaluations: int = 100_000,
        progress: bool | None = None,
    ) -> Trajectory:
        """The continuous limit dη/dt = D RN(η) g(η), by torchdiffeq's Dormand–Prince (``exptilt[ode]``).

        D RN(η) projects the velocity on the constraint that RN keeps. A flow of n steps of size h is at
        time n·h.

        Args:
            points: ``(..., N, D)``, float32 or float64, the start; it is renormalised first, as the
                equation lives on the constraint.
            time: when to end, > 0.
            samples: number of times, evenly spread from 0 to `time`, at which the state is measured.
            keep: measured states to keep: "all", "last", or every k-th and the last.
            rtol: relative tolerance of the error of a step, ≥ 0.
            atol: absolute tolerance, ≥ 0; one of the two must be positive.
            tolerance: largest gap within a cluster, see `clusters`.
            max_evaluations: most evaluations of the velocity; more is an error.
            progress: as for `run`.
        """
        points, renormalize = self._start("Flow.ode", points), as_renormalizer(self.renormalize)
        number("Flow.ode", "time", time, above=0)
        whole("Flow.ode", "samples", samples, least=2, otherwise=": the start and the end at least")
        good = (type(x) in (int, float) and 0 <= x < torch.inf for x in (rtol, atol))
        if not all(good) or rtol == atol == 0:
            raise ArgumentError(
                f"Flow.ode: rtol is {rtol!r} and atol is {atol!r}. Pass finite numbers ≥ 0, not both 0."
            )
        if points.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"Flow.ode: points are {points.dtype}, too coarse for steps of adaptive size. "
                "Pass float32 or float64."
            )
        recorder = Recorder(tolerance, kept_steps(keep, samples - 1), set(range(samples)))
        times = torch.linspace(0.0, float(time), samples, dtype=torch.float64)
        with torch.no_grad(), full_precision(points.device):
            state = on_constraint(renormalize, points.detach())
            recorder.add(0, 0.0, state, self.slope(state).log_normalizer, None)
            states = integrate(
                lambda x: velocity(self.slope, renormalize, x),
                *(state, times),
                rtol=rtol,
                atol=atol,
                max_evaluations=max_evaluations,
            )
            bar = track(states, "flow, continuous", total=samples - 1, show=progress)
            for count, state in enumerate(bar, start=1):
                recorder.add(count, float(times[count]), state, self.slope(state).log_normalizer, None)
        return recorder.trajectory()


def check_step(points: Tensor, count: int) -> None:
    """Raise if a point is not finite after this step, and say which."""
    good = points.isfinite().all(-1)
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise ConvergenceError(
            f"Flow: after step {count} the point at index {index} is not finite: {points[index].tolist()}. "
            "Without a renormaliser points diverge; pass renormalize=, a smaller step, or fewer steps."
        )
