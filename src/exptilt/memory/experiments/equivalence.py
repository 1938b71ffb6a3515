r"""A classical Hopfield network, a Boltzmann machine with Gaussian hidden units, and linear attention are one thing (THEORY C4).

**Boltzmann machine.** Join N spins to P Gaussian units by W = √(β/N) X', X (P, N) the patterns. Integrating the Gaussian units,

    −log ∫ e^{−E(σ,h)} dh = −(β/2N) Σ_μ <x^μ,σ>² − (P/2) log 2π = β (E_Hebb(σ) − P/2) − (P/2) log 2π,

where E_Hebb has no diagonal, which is what the P/2 makes up for (σ_i² = 1).

**Linear attention.** Attention without its exponential, keys and values both the patterns, is o(q) = Σ_μ <x^μ,q> x^μ = N W_Hebb q with
the diagonal left in. So a step of the classical network is the sign of linear attention minus the diagonal's share:
σ ← sign(o(σ) − Pσ). (As a recurrent state: S = Σ_μ x^μ x^μ', N×N numbers however many patterns.)

Each check below computes both sides by different routes and returns them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.binary.boltzmann import RestrictedBoltzmann
from exptilt.memory.binary.classical import ClassicalHopfield, _binary


@dataclass(frozen=True)
class Equivalence:
    """Two sides of an equation, computed by different routes.

    Args:
        left: ``(...)``.
        right: ``(...)``.
    """

    left: Tensor
    right: Tensor

    @property
    def gap(self) -> float:
        """The largest difference, relative to the largest value."""
        return float((self.left - self.right).abs().max() / (1 + self.left.abs().max()))


def hopfield_to_boltzmann(patterns: Tensor, *, beta: float = 1.0) -> RestrictedBoltzmann:
    """The Boltzmann machine of ±1 units and Gaussian hidden ones whose free energy is β times the Hebbian energy, but for a constant.

    Args:
        patterns: ``(P, N)`` of ±1.
        beta: inverse temperature.
    """
    if not beta > 0:
        raise ArgumentError(f"hopfield_to_boltzmann: beta is {beta}. Pass a number > 0.")
    x = _binary("hopfield_to_boltzmann", "patterns", patterns)
    weight = (beta / x.shape[1]) ** 0.5 * x.mT
    return RestrictedBoltzmann(weight, x.new_zeros(x.shape[1]), x.new_zeros(x.shape[0]), "gaussian", "spin")


def integrated_free_energy(machine: RestrictedBoltzmann, visible: Tensor, *, nodes: int = 4001) -> Tensor:
    """−log ∫ e^{−E(v,h)} dh by the trapezium rule, unit by unit, from the energy alone.

    For a Gaussian integrand the rule's error is e^{−2π²/step²}: nothing, once the step is below 0.7.

    Args:
        machine: one with Gaussian hidden units.
        visible: ``(..., V)``.
        nodes: of the rule, over all fields that occur and 12 deviations on both sides.

    Returns:
        ``(...)``.
    """
    if machine.hidden != "gaussian":
        raise ArgumentError(
            "integrated_free_energy: the hidden units are binary, and there is nothing to integrate. Pass Gaussian ones."
        )
    V, H = machine.weight.shape
    reach = (
        float(
            machine.hidden_bias.abs().max()
            + machine.weight.abs().sum(0).max() * max(abs(x) for x in machine.levels)
        )
        + 12
    )
    grid = torch.linspace(-reach, reach, nodes, dtype=visible.dtype)
    step = grid[1] - grid[0]
    if float(step) > 0.7:
        raise ArgumentError(
            f"integrated_free_energy: {nodes} nodes are too few over ±{reach:.3g}. Pass at least {int(3 * reach) + 1}."
        )
    rest = machine.energy(visible, visible.new_zeros(*visible.shape[:-1], H))
    total = rest.clone()
    for j in track(
        range(H), "integrals"
    ):  # given v the units are independent: the integral is a product, one factor a unit
        at = torch.zeros(nodes, H, dtype=visible.dtype)
        at[:, j] = grid
        energy = machine.energy(visible[..., None, :].expand(*visible.shape[:-1], nodes, V), at)
        total = total - torch.logsumexp(rest[..., None] - energy + torch.log(step), -1)
    return total


def _pair(what: str, patterns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Patterns ``(P, N)`` and states ``(..., N)`` of ±1, of the same N."""
    x, s = _binary(what, "patterns", patterns), _binary(what, "state", state)
    if x.ndim != 2 or s.shape[-1:] != x.shape[1:]:
        got = f"patterns {tuple(x.shape)}, state {tuple(s.shape)}"
        raise ArgumentError(f"{what}: got {got}. Pass patterns (P, N) and states (..., N) of the same N.")
    return x, s


def boltzmann_check(patterns: Tensor, state: Tensor, *, beta: float = 1.0) -> Equivalence:
    """Numerically integrated Gaussian units (left) against the Hebbian energy (right).

    Args:
        patterns: ``(P, N)`` of ±1.
        state: ``(..., N)`` of ±1.
        beta: inverse temperature.

    Example:
        >>> x = torch.randint(0, 2, (6, 5, 12), generator=torch.Generator().manual_seed(0)) * 2 - 1
        >>> boltzmann_check(x[0], x[1:], beta=0.7).gap < 1e-12
        True
    """
    x, s = _pair("boltzmann_check", patterns, state)
    P = len(x)
    left = integrated_free_energy(hopfield_to_boltzmann(x, beta=beta), s)
    constant = P / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    return Equivalence(left, beta * (ClassicalHopfield.hebbian(x).energy(s) - P / 2) - constant)


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without the exponential and without a normalizer, by its matrix of second moments.

    Args:
        query: ``(..., Q, D)``.
        key: ``(..., N, D)``.
        value: ``(..., N, Dv)``.

    Returns:
        ``(..., Q, Dv)``: Σ_n <k_n, q> v_n.
    """
    return query @ (key.mT @ value)


def linear_attention_check(patterns: Tensor, state: Tensor) -> Equivalence:
    """A step of linear attention less its diagonal (left) against a synchronous step of the Hebbian network (right).

    Args:
        patterns: ``(P, N)`` of ±1.
        state: ``(..., N)`` of ±1.
    """
    x, s = _pair("linear_attention_check", patterns, state)
    field = linear_attention(s[..., None, :], x, x)[..., 0, :] - len(x) * s  # whole numbers: exact
    return Equivalence(torch.where(field == 0, s, field.sign()), ClassicalHopfield.hebbian(x).step(s))
