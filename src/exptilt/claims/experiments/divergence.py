r"""Without a renormaliser points diverge (THEORY B2), at a rate that is known.

Patterns x_n held still: once η is long, softmax picks the pattern with the largest ⟨x_n,η⟩, and η ← η + x_n
from then on. The pattern x_n stays picked only if ⟨x_n,x_n⟩ ≥ ⟨x_m,x_n⟩ for all m, which makes x_n an extreme
point of the hull. So

    ‖η_t‖ / t → ‖x_n‖     along an extreme point x_n.

Patterns that move along: the longest points pick themselves, x ← x + x, and lengths double at each step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt.dynamics.flow import Flow
from exptilt.families.numerics.hull import nearest_in_hull


class DivergenceRate(NamedTuple):
    """Measured growth beside its theory. N points, M patterns.

    Attributes:
        lengths: ``(steps + 1, N)``, ‖η‖ with patterns held still.
        error: ``(N,)``, relative difference between the growth of the length in a step, mean over the last
            quarter of the run, and the length of the pattern along which the point goes.
        pattern: ``(N,)``, the place of that pattern.
        extreme: ``(N,)``, how far that pattern is from the hull of the others, 0 if it is not an extreme
            point.
        moving_factor: growth of the root mean square length at the last step when the patterns move along.
    """

    lengths: Tensor
    error: Tensor
    pattern: Tensor
    extreme: Tensor
    moving_factor: float


def divergence_rate(
    *, count: int = 200, patterns: int = 50, dimension: int = 3, steps: int = 400, seed: int = 0
) -> DivergenceRate:
    """Measure how fast points diverge without a renormaliser.

    Args:
        count: how many points.
        patterns: how many patterns, at least two, drawn from a standard Gaussian like the points.
        dimension: of both.
        steps: number of steps.
        seed: of the draws.

    Example:
        >>> found = divergence_rate()
        >>> bool((found.error < 1e-3).all()), bool((found.extreme > 0).all())
        (True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(patterns, dimension, dtype=torch.float64, generator=generator)
    points = torch.randn(count, dimension, dtype=torch.float64, generator=generator)
    states = Flow(None, patterns=x).run(points, steps, measure_every=None, progress=False).states
    lengths = states.norm(dim=-1)
    last = max(1, steps // 4)
    slope = (lengths[-1] - lengths[-1 - last]) / last
    pattern = (states[-1] @ x.mT).argmax(-1)
    distance = torch.zeros(patterns, dtype=torch.float64)
    for place in set(pattern.tolist()):
        others = torch.cat([x[:place], x[place + 1 :]])
        distance[place] = (nearest_in_hull(others, x[place]) - x[place]).norm()
    # Lengths double at each step: a few dozen steps suffice, and a thousand would overflow.
    moving = Flow(None).run(points, min(steps, 60), measure_every=None, progress=False).states
    size = moving.square().sum(-1).mean(-1).sqrt()
    theory = x[pattern].norm(dim=-1)
    error = (slope - theory).abs() / theory
    return DivergenceRate(lengths, error, pattern, distance[pattern], float(size[-1] / size[-2]))
