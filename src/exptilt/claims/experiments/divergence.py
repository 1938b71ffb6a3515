r"""Without a renormaliser points diverge (THEORY B2), at a rate that is known.

Patterns x_n held still: once η is long, softmax picks the pattern with the largest ⟨x_n,η⟩, and η ← η +
step·x_n from then on. The pattern x_n stays picked only if ⟨x_n,x_n⟩ ≥ ⟨x_m,x_n⟩ for all m, which makes x_n
an extreme point of the hull. So

    ‖η_t‖ / t → step·‖x_n‖     along an extreme point x_n.

Patterns that move along: the longest points pick themselves, x ← x + step·x, and lengths grow by the factor
1 + step at each step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.plotting import COLOURS, caption, new_figure
from exptilt.dynamics.flow import Flow
from exptilt.families.numerics.hull import nearest_in_hull

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class DivergenceRate:
    """Measured growth beside its theory. N points, M patterns.

    Attributes:
        lengths: ``(steps + 1, N)``, ‖η‖ with patterns held still.
        slope: ``(N,)``, growth of the length in a step, mean over the last quarter of the run.
        theory: ``(N,)``, step·‖x‖ of the pattern along which the point goes.
        pattern: ``(N,)``, the place of that pattern.
        extreme: ``(N,)``, how far that pattern is from the hull of the others, 0 if it is not an extreme
            point.
        moving: ``(steps + 1,)``, root mean square length when the patterns move along.
        moving_factor: growth of `moving` at the last step.
        moving_theory: 1 + step.
    """

    lengths: Tensor
    slope: Tensor
    theory: Tensor
    pattern: Tensor
    extreme: Tensor
    moving: Tensor
    moving_factor: float
    moving_theory: float

    @property
    def error(self) -> Tensor:
        """Relative difference between measured and predicted slope, ``(N,)``."""
        return (self.slope - self.theory).abs() / self.theory

    def plot(self) -> "Figure":
        """Lengths against step, and measured against predicted slope."""
        with new_figure(9.0, 3.3) as figure:
            left, middle, right = figure.subplots(1, 3)
            some = self.lengths[:, :: max(1, self.lengths.shape[1] // 40)]
            left.plot(some, color=COLOURS[0], linewidth=0.8, alpha=0.6)
            caption(left, "Patterns held still: ‖η‖", "step")
            middle.scatter(self.theory, self.slope, s=14, color=COLOURS[0], alpha=0.6, linewidths=0)
            ends = [float(self.theory.min()), float(self.theory.max())]
            middle.plot(ends, ends, color="0.4", linewidth=0.9, zorder=0)
            caption(middle, "Growth of ‖η‖ in a step", "theory: step·‖x‖", "measured")
            right.semilogy(self.moving, color=COLOURS[1])
            caption(right, "Patterns moving along: rms length", "step")
            words = f"last factor {self.moving_factor:.4f}\ntheory {self.moving_theory:g}"
            right.text(0.05, 0.9, words, transform=right.transAxes, va="top")
        return figure


def divergence_rate(
    *,
    count: int = 200,
    patterns: int = 50,
    dimension: int = 3,
    beta: float = 1.0,
    step: float = 1.0,
    steps: int = 400,
    seed: int = 0,
) -> DivergenceRate:
    """Measure how fast points diverge without a renormaliser.

    Args:
        count: how many points.
        patterns: how many patterns, at least two, drawn from a standard Gaussian like the points.
        dimension: of both.
        beta: factor of the scores.
        step: size of a step.
        steps: number of steps.
        seed: of the draws.

    Example:
        >>> found = divergence_rate()
        >>> bool((found.error < 1e-3).all()), bool((found.extreme > 0).all())
        (True, True)
    """
    if min(count, dimension, steps) < 1 or patterns < 2:
        got = f"count {count}, patterns {patterns}, dimension {dimension}, steps {steps}"
        raise ArgumentError(f"divergence_rate: got {got}. Pass patterns >= 2, and 1 or more of the others.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(patterns, dimension, dtype=torch.float64, generator=generator)
    points = torch.randn(count, dimension, dtype=torch.float64, generator=generator)
    flow = Flow(None, beta=beta, step=step, patterns=x)
    states = flow.run(points, steps, measure_every=None, progress=False).states
    lengths = states.norm(dim=-1)
    last = max(1, steps // 4)
    slope = (lengths[-1] - lengths[-1 - last]) / last
    pattern = (states[-1] @ x.mT).argmax(-1)
    distance = torch.zeros(patterns, dtype=torch.float64)
    for place in set(pattern.tolist()):
        others = torch.cat([x[:place], x[place + 1 :]])
        distance[place] = (nearest_in_hull(others, x[place]) - x[place]).norm()
    # Lengths grow by 1 + step at each step: a few dozen steps suffice, and a thousand would overflow.
    short = min(steps, 60)
    moving = Flow(None, beta=beta, step=step).run(points, short, measure_every=None, progress=False).states
    size = moving.square().sum(-1).mean(-1).sqrt()
    still = (lengths, slope, step * x[pattern].norm(dim=-1), pattern, distance[pattern])
    return DivergenceRate(*still, size, float(size[-1] / size[-2]), 1 + step)
