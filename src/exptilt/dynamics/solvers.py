r"""Ways to a fixed point x = f(x), for many samples side by side.

With the residual r(x) = f(x) − x, each solver says where to go from x:

- **Picard**: x + ω r. Linear convergence at the rate of the Jacobian's spectral radius; ω < 1 tames oscillation.
- **Anderson**: with the last m differences ΔX, ΔR as rows, γ minimises ‖r − ΔRᵀγ‖² + λ‖γ‖² and x + ωr − (ΔX + ωΔR)ᵀγ is next. The
  Gram matrix ΔRΔRᵀ is scaled to unit diagonal first, so that λ means the same early, when differences are large, and late.
- **Broyden** (the good one): keeps the inverse B of the Jacobian of r, from B = −I, by rank-one changes (Sherman–Morrison)
  B ← B + (Δx − BΔr)(ΔxᵀB) / (ΔxᵀBΔr), and goes to x − B r. When the window is full it begins anew.
- **Newton–Krylov**: solves (I − J) d = r by GMRES, only as exactly as pays off, and goes to x + t d, with t halved for
  a sample whose residual did not fall.

Anderson and Broyden forget what they know of a sample whose residual has risen tenfold over its best: what they extrapolated from was wrong.

A solver has one method, `step(x, image, norm)`, on flat tensors ``(S, n)``; rows never mix.
"""

from typing import Protocol

import torch
from torch import Tensor

from exptilt._support.linalg import dot, matvec
from exptilt.dynamics.krylov import gmres
from exptilt.dynamics.levels import Seat
from exptilt.dynamics.tape import Tape

_RISE = 10.0


class Solver(Protocol):
    """Says where to go next."""

    def step(self, x: Tensor, image: Tensor, norm: Tensor) -> Tensor:
        """The next x ``(S, n)``, from x, f(x) and ‖f(x) − x‖ ``(S,)``."""


class Picard:
    """x + ω (f(x) − x)."""

    def __init__(self, damping: float) -> None:
        self.damping = damping

    def step(self, x: Tensor, image: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        return image if self.damping == 1 else torch.lerp(x, image, self.damping)


class Anderson:
    """Regularised Anderson acceleration with a window."""

    def __init__(self, window: int, damping: float, regularization: float) -> None:
        self.window, self.damping, self.regularization = window, damping, regularization
        self.count = 0

    def step(self, x: Tensor, image: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        residual = image - x
        if self.count == 0:
            shape = (x.shape[0], self.window, x.shape[1])
            self.moves, self.turns = x.new_zeros(shape), x.new_zeros(shape)
            self.gram = x.new_zeros(x.shape[0], self.window, self.window)
            self.best = norm
        else:
            place = (self.count - 1) % self.window
            self.moves[:, place] = x - self.x
            self.turns[:, place] = residual - self.residual
            self.best = torch.minimum(self.best, norm)
            wrong = norm > _RISE * self.best
            if bool(wrong.any()):
                self.moves[wrong], self.turns[wrong], self.gram[wrong] = 0.0, 0.0, 0.0
                self.best = torch.where(wrong, norm, self.best)
            row = matvec(self.turns, self.turns[:, place])
            self.gram[:, place], self.gram[:, :, place] = row, row
        self.x, self.residual = x, residual
        self.count += 1
        known = min(self.count - 1, self.window)
        ahead = image if self.damping == 1 else torch.lerp(x, image, self.damping)
        if known == 0:
            return ahead
        weight = self._weights(self.gram[:, :known, :known], matvec(self.turns[:, :known], residual))
        back = torch.bmm(weight.unsqueeze(1), self.moves[:, :known]) + self.damping * torch.bmm(weight.unsqueeze(1), self.turns[:, :known])
        return ahead - back.squeeze(1)

    def _weights(self, gram: Tensor, right: Tensor) -> Tensor:
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
        scaled = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        scaled.diagonal(dim1=-2, dim2=-1).fill_(1 + self.regularization)
        solved, _ = torch.linalg.solve_ex(scaled, (right * scale).unsqueeze(-1))
        return solved.squeeze(-1) * scale


class Broyden:
    """Good Broyden, limited memory: B = −I + UᵀV, a sample's pairs of rows in U and V."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = -1

    def step(self, x: Tensor, image: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        residual = image - x
        if self.count < 0:
            shape = (x.shape[0], self.window, x.shape[1])
            self.left, self.right = x.new_zeros(shape), x.new_zeros(shape)
            self.best = norm
            self.count = 0
        else:
            self._learn(x - self.x, residual - self.residual)
            self.best = torch.minimum(self.best, norm)
            wrong = norm > _RISE * self.best
            if bool(wrong.any()):
                self.left[wrong], self.right[wrong] = 0.0, 0.0
                self.best = torch.where(wrong, norm, self.best)
        self.x, self.residual = x, residual
        return x - self._apply(self.left, self.right, residual)

    def _apply(self, left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
        """−v + Σ_i left_i <right_i, v>."""
        return torch.bmm(matvec(right, vector).unsqueeze(1), left).squeeze(1) - vector

    def _learn(self, move: Tensor, turn: Tensor) -> None:
        if self.count == self.window:
            self.left.zero_()
            self.right.zero_()
            self.count = 0
        forward, backward = self._apply(self.left, self.right, turn), self._apply(self.right, self.left, move)
        bottom = dot(backward, turn)
        sound = bottom.abs() > 1e-3 * torch.finfo(move.dtype).eps * torch.linalg.vector_norm(backward, dim=-1) * torch.linalg.vector_norm(
            turn, dim=-1
        )
        self.left[:, self.count] = (move - forward) * torch.where(sound, 1 / bottom, 0.0).unsqueeze(-1)
        self.right[:, self.count] = backward
        self.count += 1


class NewtonKrylov:
    """Inexact Newton with GMRES and halving."""

    def __init__(self, seat: Seat, window: int) -> None:
        self.seat, self.window = seat, window
        self.base: Tensor | None = None

    def step(self, x: Tensor, image: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        if self.base is None:
            self.base, self.move, self.norm, self.size = x, torch.zeros_like(x), norm, torch.ones_like(norm)
            fell = torch.ones_like(norm, dtype=torch.bool)
            force = torch.full_like(norm, 0.1)
        else:
            # Armijo's rule; a step halved to nothing is taken as it is, else the sample would stand still for ever.
            fell = (norm <= (1 - 1e-4 * self.size) * self.norm) | (self.size < 1e-3)
            force = (0.9 * (norm / self.norm) ** 2).clamp(
                1e-6, 0.1
            )  # Eisenstat and Walker's second choice: as exact as the last step was good
        if bool(fell.any()):
            residual = torch.where(fell.unsqueeze(-1), image - x, 0.0)
            tape = Tape(self.seat, x.reshape(self.seat.full))

            def operator(vector: Tensor) -> Tensor:
                return vector - tape.push(vector.reshape(1, *self.seat.full)).reshape(vector.shape)

            move, _ = gmres(operator, residual, force, restart=self.window, max_restarts=2)
            self.base, self.move = torch.where(fell.unsqueeze(-1), x, self.base), torch.where(fell.unsqueeze(-1), move, self.move)
        self.norm, self.size = torch.where(fell, norm, self.norm), torch.where(fell, 1.0, self.size / 2)
        return self.base + self.size.unsqueeze(-1) * self.move
