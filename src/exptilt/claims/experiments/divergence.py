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
    """Measured growth of N points beside its theory."""

    lengths: Tensor  # (steps + 1, N), with patterns held still
    error: Tensor  # (N,), error of the growth a step (mean of the last quarter) over the pattern's length
    pattern: Tensor  # (N,), index of the pattern along which the point goes
    extreme: Tensor  # (N,), its distance from the hull of the others: 0 if it is not an extreme point
    moving_factor: float  # growth of the root mean square length at the last step, patterns moving along


def divergence_rate(
    *, count: int = 200, patterns: int = 50, dimension: int = 3, steps: int = 400, seed: int = 0
) -> DivergenceRate:
    """Measure how fast Gaussian points diverge without a renormaliser, over Gaussian patterns.

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
