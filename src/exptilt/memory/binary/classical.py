r"""`ClassicalHopfield`: binary units, one weight for each pair, patterns as minima of a quadratic energy.

    E(σ) = −½ Σ_{i≠j} W_ij σ_i σ_j,    σ_i ← sign(Σ_j W_ij σ_j)    (a unit with field 0 keeps its value)

    Hebb             W = (1/N) Σ_μ x^μ x^μ'      recalls up to P ≈ 0.138 N random patterns, then collapses
    pseudo-inverse   W = X' (X X')⁺ X            every pattern is a fixed point while they are independent

The diagonal is 0 in both. Unit by unit in any order (asynchronous), no flip raises E, since W is symmetric
with zero diagonal. All at once (synchronous) no step raises −⟨σ(t), Wσ(t−1)⟩, and the network comes to
rest or to a cycle of two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.checks import choice, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.solution import Solution, Status

# A field this small relative to the largest weight is a tie: rounding keeps sums from cancelling.
_TIE = 1e-9
# Weights of a projection up to this size are rounding: with N independent patterns all of them are 0.
_NO_WEIGHT = 1e-12


@dataclass(frozen=True, eq=False, init=False)
class ClassicalHopfield:
    """A network of ±1 units.

    Args:
        weight: ``(N, N)``, symmetric, with a diagonal of 0.

    Example:
        >>> memory = ClassicalHopfield.hebbian(torch.tensor([[1.0, 1.0, -1.0, -1.0]]))
        >>> memory.retrieve(torch.tensor([1.0, -1.0, -1.0, -1.0])).value
        tensor([ 1.,  1., -1., -1.], dtype=torch.float64)
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        w = torch.as_tensor(weight, dtype=torch.float64)
        if w.ndim != 2 or w.shape[0] != w.shape[1] or not w.numel():
            raise ArgumentError(f"ClassicalHopfield: weight has shape {tuple(w.shape)}. Pass (N, N).")
        if not bool(w.isfinite().all()):
            raise ArgumentError("ClassicalHopfield: weight holds NaN or infinity. Pass finite numbers.")
        if bool((w.diagonal() != 0).any()) or float((w - w.mT).abs().max()) > 1e-12 * float(w.abs().max()):
            wanted = "Pass a symmetric one with a diagonal of 0, else the energy can rise"
            raise ArgumentError(f"ClassicalHopfield: weight is not symmetric, or has a diagonal. {wanted}.")
        object.__setattr__(self, "weight", (w + w.mT) / 2)

    @classmethod
    def hebbian(cls, patterns: Tensor) -> "ClassicalHopfield":
        """The network that Hebb's rule learns.

        Args:
            patterns: ``(P, N)`` of ±1.
        """
        x = spins("hebbian", "patterns", patterns)
        return cls((x.mT @ x / x.shape[-1]).fill_diagonal_(0))

    @classmethod
    def pseudo_inverse(cls, patterns: Tensor) -> "ClassicalHopfield":
        """The network that the projection rule learns; patterns may be dependent, and equal ones count once.

        Args:
            patterns: ``(P, N)`` of ±1.
        """
        x = spins("pseudo_inverse", "patterns", patterns)
        # From an orthonormal basis: exact to rounding, however alike the patterns are.
        _, size, basis = torch.linalg.svd(x, full_matrices=False)
        basis = basis[size > 1e-10 * size[0]]
        w = (basis.mT @ basis).fill_diagonal_(0)
        return cls(torch.where(w.abs() > _NO_WEIGHT, w, 0.0))

    @property
    def dimension(self) -> int:
        """N, how many units."""
        return self.weight.shape[-1]

    @cached_property
    def _tie(self) -> float:
        """The largest field that counts as 0 and flips no unit."""
        return _TIE * float(self.weight.abs().max())

    def energy(self, state: Tensor) -> Tensor:
        """The energy E of each state.

        Args:
            state: ``(..., N)`` of ±1.

        Returns:
            ``(...)``, float64.
        """
        s = self._state(state)
        return -0.5 * ((s @ self.weight) * s).sum(-1)

    def step(self, state: Tensor) -> Tensor:
        """The state after one update of all units at once.

        Args:
            state: ``(..., N)`` of ±1.

        Returns:
            ``(..., N)``.
        """
        s = self._state(state)
        field = s @ self.weight
        return torch.where(field.abs() <= self._tie, s, field.sign())

    def retrieve(
        self,
        state: Tensor,
        *,
        update: str = "asynchronous",
        max_steps: int = 200,
        throw: bool = True,
        generator: torch.Generator | None = None,
    ) -> Solution[Tensor]:
        """Update each state until nothing changes.

        Args:
            state: ``(..., N)`` of ±1.
            update: ``asynchronous``, unit by unit in a new random order each sweep; or ``synchronous``, all
                at once, which may end in a cycle of two: it stops there, and the status is ``STALLED``.
            max_steps: sweeps over all units at most.
            throw: raise a `ConvergenceError` where a state still changes; False reports it in the status.
            generator: draws the orders; None is seeded with 0, so that a call repeats itself.

        Returns:
            `Solution`: value ``(..., N)``, residual ``(...)`` the share of units that would still flip.
        """
        s = self._state(state)
        whole("ClassicalHopfield.retrieve", "max_steps", max_steps)
        choice("ClassicalHopfield.retrieve", "update", update, ("asynchronous", "synchronous"))
        value, steps = s.reshape(-1, self.dimension).clone(), 0
        chance = torch.Generator().manual_seed(0) if generator is None else generator
        cycles = torch.zeros(len(value), dtype=torch.bool)

        def sweeps() -> Iterator[int]:
            """Sweep until all states have ended; yields the index of each state as it ends."""
            nonlocal steps
            moving, before = torch.arange(len(value)), torch.zeros_like(value)
            while steps < max_steps and moving.numel():
                now = value[moving]
                if update == "synchronous":
                    new = self.step(now)
                else:
                    new = self._sweep(now, torch.randperm(self.dimension, generator=chance))
                value[moving] = new
                go = (new != now).any(-1)
                if update == "synchronous":
                    cycles[moving] = go & (new == before).all(-1)
                    go &= ~cycles[moving]
                yield from moving[~go].tolist()
                moving, before, steps = moving[go], now[go], steps + 1

        for _ in track(sweeps(), "states settled", total=len(value)):
            pass
        shape, taken = s.shape[:-1], torch.tensor(steps)
        residual = (self.step(value) != value).double().mean(-1)
        ended = torch.where(cycles, Status.STALLED.code, Status.MAX_STEPS.code)
        code = torch.where(residual == 0, Status.CONVERGED.code, ended).to(torch.int8).reshape(shape)
        residual = residual.reshape(shape)
        solution = Solution(value.reshape(s.shape), code, residual, taken, torch.zeros_like(residual))
        if throw:
            solution.or_raise()
        return solution

    def _sweep(self, value: Tensor, order: Tensor) -> Tensor:
        """States ``(B, N)`` after one update of every unit, in the given order."""
        weight, new = self.weight.contiguous(), value.clone(memory_format=torch.contiguous_format)
        field = new @ weight
        places = [x.data_ptr() for x in (weight, order, new, field)]
        native.call("network_sweep", native.frame("Network")(*new.shape, self._tie, *places))
        return new

    def _state(self, state: Tensor) -> Tensor:
        s, N = spins("ClassicalHopfield", "state", state), self.dimension
        if s.shape[-1] != N:
            got = f"state has shape {tuple(s.shape)}, the network {N} units"
            raise ArgumentError(f"ClassicalHopfield: {got}. Pass (..., {N}).")
        return s


def spins(caller: str, name: str, x: Tensor) -> Tensor:
    """Patterns ``(P, N)``, or states ``(..., N)``, of ±1, as float64."""
    patterns = name == "patterns"
    if not isinstance(x, Tensor) or not (x.ndim == 2 if patterns else x.ndim >= 1) or not x.numel():
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        wanted = f"Pass a tensor {'(P, N)' if patterns else '(..., N)'} of ±1, not empty."
        raise ArgumentError(f"{caller}: {name} is {got}. {wanted}")
    if x.dtype == torch.bool or x.is_complex() or not bool((x.abs() == 1).all()):
        wanted = "Pass 2 * bits − 1, or x.sign()."
        raise ArgumentError(f"{caller}: {name} holds something other than −1 and +1. {wanted}")
    return x.double()
