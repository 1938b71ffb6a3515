r"""Points on a sphere with equal pairwise cosines: a flow that is one ordinary differential equation.

Let ⟨x_i,x_j⟩ = γ for all i ≠ j, n points of length 1. Point i attends to itself with e^β/Z and to each
other with a = e^{βγ}/Z, Z = e^β + (n−1)e^{βγ}. With m_i = Σ_j A_ij x_j and the velocity m_i − x_i⟨x_i,m_i⟩,

    d⟨x_i,x_k⟩/dt = 2(⟨m_i,x_k⟩ − γ⟨m_i,x_i⟩) = 2(aγ(n−2) + a + A_iiγ − γ(A_ii + (n−1)aγ))
                  = 2a(1 + (n−2)γ − (n−1)γ²),

    γ' = 2 e^{βγ}(1 − γ)((n−1)γ + 1) / (e^β + (n−1)e^{βγ}).

The cosines stay equal, and γ goes to 1: one cluster. This is the equation of Geshkovski, Letrouit,
Polyanskiy and Rigollet, "A mathematical perspective on transformers" (section 6), derived here again.
Random points in high dimension have cosines near 0, so they follow it from γ = 0 up to about 1/√dimension.
`equal_cosine` compares the simulator with the equation: orthogonal points must agree to the solver's
tolerance, random ones the better the higher the dimension, steps of size h up to O(h).
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from exptilt.dynamics.flow import Flow


class EqualCosine(NamedTuple):
    """Mean cosine by time: theory, continuous flow, flow in steps, and random points.

    Attributes:
        time: ``(T,)``.
        theory: ``(T,)``, γ of the equation.
        continuous: ``(T,)``, of orthogonal points under `Flow.ode`.
        stepped: ``(T,)``, of orthogonal points under `Flow.run` with small steps.
        random: ``(len(dimensions), T)``, of random points under `Flow.ode`.
    """

    time: Tensor
    theory: Tensor
    continuous: Tensor
    stepped: Tensor
    random: Tensor

    @property
    def continuous_error(self) -> float:
        """Largest difference from theory of the continuous flow."""
        return float((self.continuous - self.theory).abs().max())

    @property
    def stepped_error(self) -> float:
        """Largest difference from theory of the flow in steps."""
        return float((self.stepped - self.theory).abs().max())


def cosine_rate(cosine: float, *, count: int, beta: float) -> float:
    """The derivative γ' by the equation above, of n = `count` points.

    Args:
        cosine: γ.
        count: n.
        beta: β.
    """
    other = np.exp(beta * (cosine - 1))  # e^{βγ}/e^β
    return float(2 * other * (1 - cosine) * ((count - 1) * cosine + 1) / (1 + (count - 1) * other))


def equal_cosine(
    *,
    count: int = 32,
    beta: float = 1.0,
    time: float = 8.0,
    samples: int = 81,
    substeps: int = 10,
    dimensions: tuple[int, ...] = (64, 1024),
    seed: int = 0,
) -> EqualCosine:
    """Compare the simulator with the equation for equal cosines.

    Args:
        count: n, how many points, at least two.
        beta: factor of the scores.
        time: when to end.
        samples: number of times at which to compare.
        substeps: steps of the discrete flow between two samples.
        dimensions: of the random points.
        seed: of the draws.

    Example:
        >>> found = equal_cosine(count=8, time=4.0, samples=21, dimensions=(16,))
        >>> found.continuous_error < 1e-6
        True
    """
    times = np.linspace(0.0, time, samples)
    solved = solve_ivp(
        lambda _, y: [cosine_rate(float(y[0]), count=count, beta=beta)],
        *((0.0, time), [0.0], "DOP853", times),
        rtol=1e-12,
        atol=1e-14,
    )
    theory = torch.from_numpy(solved.y[0])
    flow, orthogonal = Flow("sphere", beta=beta), torch.eye(count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def followed(start: Tensor, rtol: float = 1e-6, atol: float = 1e-8) -> Tensor:
        path = flow.ode(start, time, samples=samples, keep="last", rtol=rtol, atol=atol, progress=False)
        return path.mean_cosine

    continuous = followed(orthogonal, 1e-9, 1e-11)
    steps, total = Flow("sphere", beta=beta, step=time / (samples - 1) / substeps), (samples - 1) * substeps
    stepped = steps.run(orthogonal, total, keep="last", measure_every=substeps, progress=False).mean_cosine
    draws = [torch.randn(count, d, dtype=torch.float64, generator=generator) for d in dimensions]
    stack = torch.stack([followed(x) for x in draws]) if draws else theory.new_empty(0, samples)
    return EqualCosine(torch.from_numpy(times), theory, continuous, stepped, stack)
