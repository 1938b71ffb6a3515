r"""A classical Hopfield network, a Boltzmann machine with Gaussian units, and linear attention are one thing.

**Boltzmann machine** (THEORY C4). Join N spins to P Gaussian units by W = √(β/N) X', X (P, N) the patterns.
Integrating the Gaussian units,

    −log ∫ e^{−E(σ,h)} dh = −(β/2N) Σ_μ ⟨x^μ,σ⟩² − (P/2) log 2π = β (E_Hebb(σ) − P/2) − (P/2) log 2π,

where P/2 makes up for the diagonal that E_Hebb lacks (σ_i² = 1).

**Linear attention.** Attention without its exponential, keys and values both the patterns, is o(q) = Σ_μ
⟨x^μ,q⟩ x^μ = N W_Hebb q with the diagonal left in. So a step of the classical network is the sign of linear
attention minus the diagonal's share: σ ← sign(o(σ) − Pσ).

Each check below computes both sides by different routes and returns them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.binary.boltzmann import RestrictedBoltzmann, hopfield_to_boltzmann
from exptilt.memory.binary.classical import ClassicalHopfield, spins


class Equivalence(NamedTuple):
    """Two sides of an equation ``(...)``, computed by different routes."""

    left: Tensor
    right: Tensor

    @property
    def gap(self) -> float:
        """The largest difference, relative to the largest value."""
        return float((self.left - self.right).abs().max() / (1 + self.left.abs().max()))


def integrated_free_energy(machine: RestrictedBoltzmann, visible: Tensor) -> Tensor:
    """−log ∫ e^{−E(v,h)} dh ``(...)`` of a machine with Gaussian hidden units, from the energy alone.

    By the trapezium rule, unit by unit, over all fields that occur and 12 deviations on both sides. For a
    Gaussian integrand the rule's error is e^{−2π²/step²}, nothing at a step of ¼.
    """
    V, H = machine.weight.shape
    fields = machine.weight.abs().sum(0).max() * max(abs(level) for level in machine.levels)
    reach = math.ceil(float(machine.hidden_bias.abs().max() + fields) + 12)
    grid = torch.linspace(-reach, reach, 8 * reach + 1, dtype=visible.dtype)
    rest = machine.energy(visible, visible.new_zeros(*visible.shape[:-1], H))
    total, pairs = rest.clone(), visible[..., None, :].expand(*visible.shape[:-1], len(grid), V)
    # Given v the units are independent: the integral is a product, one factor a unit.
    for j in track(range(H), "integrals"):
        energy = machine.energy(pairs, torch.eye(H, dtype=grid.dtype)[j] * grid[:, None])
        total = total - torch.logsumexp(rest[..., None] - energy, -1) - math.log(1 / 4)
    return total


def _pair(what: str, patterns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Patterns ``(P, N)`` and states ``(..., N)`` of ±1, of the same N."""
    x, s = spins(what, "patterns", patterns), spins(what, "state", state)
    if s.shape[-1:] != x.shape[1:]:
        got = f"patterns {tuple(x.shape)}, state {tuple(s.shape)}"
        raise ArgumentError(f"{what}: got {got}. Pass patterns (P, N) and states (..., N) of the same N.")
    return x, s


def boltzmann_check(patterns: Tensor, state: Tensor, *, beta: float = 1.0) -> Equivalence:
    """Numerically integrated Gaussian units (left) against the Hebbian energy (right) at states ``(..., N)``.

    Example:
        >>> x = torch.randint(0, 2, (6, 5, 12), generator=torch.Generator().manual_seed(0)) * 2 - 1
        >>> boltzmann_check(x[0], x[1:], beta=0.7).gap < 1e-12
        True
    """
    x, s = _pair("boltzmann_check", patterns, state)
    half = len(x) / 2
    right = beta * (ClassicalHopfield.hebbian(x).energy(s) - half) - half * math.log(2 * math.pi)
    return Equivalence(integrated_free_energy(hopfield_to_boltzmann(x, beta=beta), s), right)


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without exponential and normalizer: Σ_n ⟨k_n, q⟩ v_n, from the matrix Σ_n k_n v_n'."""
    return query @ (key.mT @ value)


def linear_attention_check(patterns: Tensor, state: Tensor) -> Equivalence:
    """A step of linear attention less its diagonal (left) against a step of the Hebbian network (right)."""
    x, s = _pair("linear_attention_check", patterns, state)
    field = linear_attention(s[..., None, :], x, x)[..., 0, :] - len(x) * s  # whole numbers: exact
    return Equivalence(torch.where(field == 0, s, field.sign()), ClassicalHopfield.hebbian(x).step(s))
