r"""The Gaussian as a fixed point of attention over a continuous law that moves with the points (THEORY B5b).

Let the points have a law p of mean 0 and covariance 1, with cumulant generating function K. Attention over
all of p is ∇K(βx), so one step is x ← x + ∇K(βx), then full whitening. For a Gaussian ∇K(βx) = βx:
whitening undoes the step, and the law stays. Near it K(t) = |t|²/2 + κ(t)/k!, κ the cumulants of order k as
a form, and

    x + ∇K(βx) = (1 + β) x + β^{k−1} ∇κ(x)/k!,

whose cumulants of order k are, to first order and after whitening, κ times 1 + kβ^{k−1}/(1 + β): every one
grows, and the Gaussian repels. N points begin with cumulants of about N^{−1/2}, and so collapse after a
time that grows as log N / (2 log factor).

`cumulant_growth` integrates one step numerically, from p = Gaussian density times 1 + Σ_a c_a
He_k(⟨u_a,x⟩), for which E e^{⟨t,x⟩} = e^{|t|²/2}(1 + Σ_a c_a ⟨u_a,t⟩^k) without error. `collapse_times`
lets points move.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.polynomial.hermite_e import hermegauss, hermeval

from exptilt.dynamics import Flow

_REACH = 9.0  # the Gaussian weight beyond is e^−40


def growth_theory(order: int, beta: float) -> float:
    """Factor of the cumulants of this order in one step, to first order."""
    return 1 + order * beta ** (order - 1) / (1 + beta)


def cumulant_growth(order: int, beta: float, dimension: int, *, size: float = 1e-9, seed: int = 0) -> float:
    """Factor by which a cumulant of this order grows in one whitened step from a law near a Gaussian.

    Args:
        order: k, 3 or more.
        beta: inverse temperature.
        dimension: 1 to 3.
        size: of the cumulant before the step, over k!.
        seed: of the two directions u_a of the perturbation.
    """
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((2, dimension))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    weights = size * np.array([1.0, 0.5])
    nodes, mass = hermegauss(48 if dimension < 3 else 24)
    grid = np.stack(np.meshgrid(*[nodes] * dimension, indexing="ij"), -1).reshape(-1, dimension)
    w = np.prod(np.stack(np.meshgrid(*[mass / mass.sum()] * dimension, indexing="ij"), -1), -1).ravel()
    keep = np.abs(grid).max(-1) < _REACH
    grid, w = grid[keep], w[keep]
    along = grid @ directions.T
    w = w * (1 + hermeval(along, [0.0] * order + [1.0]) @ weights)
    power = (beta * along) ** (order - 1)
    slope = order * (power * weights) @ directions / (1 + (power * beta * along) @ weights)[:, None]
    moved = grid + beta * grid + slope

    def cumulant(x: np.ndarray) -> float:
        """Cumulant of this order along the first direction, after whitening."""
        x = x - w @ x
        root = np.linalg.inv(np.linalg.cholesky((x * w[:, None]).T @ x))
        values, turn = np.linalg.eigh(root.T @ root)
        t = (x @ (turn * np.sqrt(values)) @ turn.T) @ directions[0]
        return float(w @ hermeval(t, [0.0] * order + [1.0]))  # E He_k is the cumulant, to first order

    return cumulant(moved) / cumulant(grid)


def collapse_times(
    counts: Sequence[int], beta: float, *, runs: int, seed: int = 0, level: float = 0.5
) -> np.ndarray:
    """Step at which skewness or excess kurtosis of points on a line passes `level`, ``(counts, runs)``."""
    times = np.full((len(counts), runs), math.nan)
    for i, count in enumerate(counts):
        for j in range(runs):
            generator = torch.Generator().manual_seed(seed + 1000 * j + i)
            x = torch.randn(count, 1, dtype=torch.float64, generator=generator)
            flow, before = Flow("whiten", beta=beta), 0.0
            for step in range(200):
                z = (x - x.mean()) / x.std(correction=0)
                now = math.log(max(abs(float(z.pow(3).mean())), abs(float(z.pow(4).mean() - 3))))
                if now > math.log(level):  # between two steps, by the logarithm
                    times[i, j] = (
                        max(0.0, step - 1 + (math.log(level) - before) / (now - before)) if step else 0.0
                    )
                    break
                before, x = now, flow(x)
    return times
