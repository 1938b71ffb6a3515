r"""Points on a sphere with equal pairwise cosines: a flow that is one ordinary differential equation.

Let ⟨x_i,x_j⟩ = γ for all i ≠ j, n points of length 1. Point i attends to itself with e^β/Z and to each
other with a = e^{βγ}/Z, Z = e^β + (n−1)e^{βγ}. With m_i = Σ_j A_ij x_j and the velocity m_i − x_i⟨x_i,m_i⟩,

    d⟨x_i,x_k⟩/dt = 2(⟨m_i,x_k⟩ − γ⟨m_i,x_i⟩) = 2(aγ(n−2) + a + A_iiγ − γ(A_ii + (n−1)aγ))
                  = 2a(1 + (n−2)γ − (n−1)γ²),

    γ' = 2 e^{βγ}(1 − γ)((n−1)γ + 1) / (e^β + (n−1)e^{βγ}).

The cosines stay equal, and γ goes to 1: one cluster. This is the equation of Geshkovski, Letrouit,
Polyanskiy and Rigollet, "A mathematical perspective on transformers" (section 6), derived here again.
`equal_cosine` compares the simulator with the equation: orthogonal points must agree to the solver's
tolerance, steps of size h up to O(h).
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from exptilt.dynamics.flow import Flow


class EqualCosine(NamedTuple):
    """Mean cosine by time ``(T,)``: of the equation, of the continuous flow, and of the flow in steps."""

    time: Tensor
    theory: Tensor
    continuous: Tensor
    stepped: Tensor

    @property
    def continuous_error(self) -> float:
        """Largest difference from theory of the continuous flow."""
        return float((self.continuous - self.theory).abs().max())

    @property
    def stepped_error(self) -> float:
        """Largest difference from theory of the flow in steps."""
        return float((self.stepped - self.theory).abs().max())


def cosine_rate(cosine: float, *, count: int, beta: float) -> float:
    """The derivative γ' by the equation above, of `count` points."""
    other = np.exp(beta * (cosine - 1))  # e^{βγ}/e^β
    return float(2 * other * (1 - cosine) * ((count - 1) * cosine + 1) / (1 + (count - 1) * other))


def equal_cosine(
    *, count: int = 32, beta: float = 1.0, time: float = 8.0, samples: int = 81, substeps: int = 10
) -> EqualCosine:
    """Compare the simulator with the equation, with `substeps` of the discrete flow between two samples.

    Example:
        >>> found = equal_cosine(count=8, time=4.0, samples=21)
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
    orthogonal, total = torch.eye(count, dtype=torch.float64), (samples - 1) * substeps
    smooth = Flow("sphere", beta=beta).ode(
        orthogonal, time, samples=samples, keep="last", rtol=1e-9, atol=1e-11, progress=False
    )
    steps = Flow("sphere", beta=beta, step=time / total).run(
        orthogonal, total, keep="last", measure_every=substeps, progress=False
    )
    theory = torch.from_numpy(solved.y[0])
    return EqualCosine(torch.from_numpy(times), theory, smooth.mean_cosine, steps.mean_cosine)
