r"""Points on the circle: how many clusters form, and stay for a long time.

Near the uniform law, write the density as (1 + Σ_k c_k cos kθ)/2π. The velocity is (1/β) ∂_θ log Σ_j e^{β
cos(θ−θ_j)}, and since the kernel e^{β cos θ} has Fourier coefficients I_k(β) (modified Bessel functions),
the ripple of wave number k grows at the rate

    λ_k = k² I_k(β) / (β I_0(β)).

The fastest, k* = argmax_k k² I_k(β), tells how many clusters a nearly uniform law breaks into: 3 for β = 5.
The clusters attract each other only by e^{−β(1 − cos(2π/k))}, so they stay exponentially long before they
join (metastability). Rate and count are those of Bruno, Pasqualotto and Agazzi, "Emergence of
meta-stable clustering in mean-field transformer models" (ICLR 2025), whose experiment starts from the
uniform law with white noise of size 0.01 and β = 5.

`metastable_counts` starts there too: N points evenly spaced, each angle moved by a Gaussian of that size;
or N points drawn at random (``noise=None``), where all ripples begin at 1/√N and the fastest is only a
little ahead. Clusters are counted at one stated time, by the rule of `clusters`. It also measures λ_k,
from a single small ripple.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from exptilt._support.intervals import share_interval
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.observe.clusters import clusters


class MetastableCounts(NamedTuple):
    """Clusters on the circle at one time, for S seeds; and growth of the ripples 1..K, measured and λ_k."""

    predicted: int  # the wave number that grows fastest
    counts: Tensor  # (S,)
    time: float
    angles: Tensor  # (S, N)
    wave: Tensor  # (K,)
    rate: Tensor
    rate_theory: Tensor

    @property
    def tally(self) -> dict[int, int]:
        """How many seeds gave each count of clusters."""
        return dict(sorted(Counter(self.counts.tolist()).items()))

    @property
    def share(self) -> tuple[float, float, float]:
        """Share of seeds that gave the predicted count, with its exact 95% interval."""
        return share_interval(int((self.counts == self.predicted).sum()), len(self.counts))


def growth_rates(beta: float, largest: int) -> Tensor:
    """λ_k for k = 1..largest, ``(largest,)``."""
    k = np.arange(1, largest + 1)
    return torch.from_numpy(k**2 * special.ive(k, beta) / (beta * special.ive(0, beta)))


def metastable_counts(
    *,
    beta: float = 5.0,
    count: int = 1000,
    noise: float | None = 0.01,
    seeds: int = 12,
    time: float = 40.0,
    step: float = 0.25,
    seed: int = 0,
) -> MetastableCounts:
    """Count the clusters that `count` points on the circle form until `time`.

    `noise` is the standard deviation of the angles around an even spacing; None draws the angles at random.

    Example:
        >>> found = metastable_counts(count=100, seeds=2, step=0.5)
        >>> found.predicted
        3
    """
    steps = round(time / step)
    generator = torch.Generator().manual_seed(seed)
    if noise is None:
        angles = 2 * math.pi * torch.rand(seeds, count, dtype=torch.float64, generator=generator)
    else:
        even = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        angles = even + noise * torch.randn(seeds, count, dtype=torch.float64, generator=generator)
    flow = Flow("sphere", beta=beta, step=step)
    last = flow.run(on_circle(angles), steps, keep="last", measure_every=None, progress=False).last
    # k² I_k is largest near k = √(2β) for large β, as I_k falls like e^{−k²/2β}, and at k = 1 for small β:
    # always below 2√β + 2.
    largest = max(4, math.ceil(2 * math.sqrt(beta)) + 2)
    theory = growth_rates(beta, largest)
    return MetastableCounts(
        *(int(theory.argmax()) + 1, clusters(last, tolerance=0.1).count, steps * step),
        *(torch.atan2(last[..., 1], last[..., 0]), torch.arange(1, largest + 1)),
        *(_measured_rates(beta, largest), theory),
    )


def on_circle(angles: Tensor) -> Tensor:
    """Points ``(..., 2)`` of the unit circle at angles ``(...)``."""
    return torch.stack([angles.cos(), angles.sin()], -1)


def _measured_rates(beta: float, largest: int, time: float = 1.0, size: float = 1e-4) -> Tensor:
    """Growth of the k-th Fourier coefficient of evenly spaced points, each moved by size·sin(kθ)/k."""
    count = 16 * largest
    even = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    k = torch.arange(1, largest + 1, dtype=torch.float64).unsqueeze(-1)
    start = on_circle(even + size * (k * even).sin() / k)
    path = Flow("sphere", beta=beta).ode(start, time, samples=2, rtol=1e-10, atol=1e-12, progress=False)
    angles = torch.atan2(path.states[..., 1], path.states[..., 0])
    size_of = torch.polar(torch.ones_like(angles), k * angles).mean(-1).abs()
    return (size_of[1] / size_of[0]).log() / time
