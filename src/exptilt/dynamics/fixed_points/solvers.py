r"""Ways to a fixed point x = f(x), for many samples side by side.

With the residual r(x) = f(x) − x, each solver says where to go from x:

- **Picard**: x + ω r. Linear convergence at the rate of the Jacobian's spectral radius; ω < 1 tames
  oscillation.
- **Anderson**: with the last m differences ΔX, ΔR as rows, γ minimises ‖r − ΔRᵀγ‖² + λΣ‖Δr_i‖²γ_i² and x +
  ωr − (ΔX + ωΔR)ᵀγ is next. The ridge λ is relative to each entry of the Gram matrix's diagonal, so that it
  means the same for old, large differences and new, small ones.
- **Broyden** (the good one): keeps the inverse B of the Jacobian of r, from B = −I, by rank-one changes
  (Sherman–Morrison) B ← B + (Δx − BΔr)(ΔxᵀB) / (ΔxᵀBΔr), and goes to x − B r. When the window is full it
  begins anew.
- **Newton–Krylov**: solves (I − J) d = r by GMRES, only as exactly as pays off, and goes to x + t d, with t
  halved while a sample's residual does not fall. Where no t helps, ‖r‖ has a minimum that is no fixed
  point: then 1, 2, 4, ... Picard steps lead away.

An extrapolation that leads to twice the best residual went too far. Anderson then forgets what it knows of
the sample, goes back to its best point and takes 1, 2, 4, ... Picard steps from there, so that it converges
wherever Picard does. Broyden goes back to its best point too, learns from the miss, and halves its next
step; where nothing gets better for long it forgets, and takes 1, 2, 4, ... Picard steps. A Picard step that
leads away (f has a slope below −2, say) is no reason to forget: it shows the slope.

A solver has one method, `step(x, image, residual, norm)`, on flat tensors ``(S, n)``; rows never mix.
"""

from typing import Protocol

import torch
from torch import Tensor

from exptilt._support.linalg import dot, matvec
from exptilt.dynamics.fixed_points.jacobian import Jacobian
from exptilt.dynamics.fixed_points.krylov import gmres
from exptilt.dynamics.fixed_points.problem import Problem

_RISE = 2.0
_IDLE = 12  # steps of Broyden without a better residual, after which it forgets and takes Picard steps


class Solver(Protocol):
    """A rule for the next point; `damping` is ω of the Picard step taken if its result is not finite."""

    damping: float

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """The next x ``(S, n)``, from x, f(x), r = f(x) − x and ‖r‖ ``(S,)``."""


def damped(x: Tensor, image: Tensor, damping: float) -> Tensor:
    """Picard's step x + ω r."""
    return image if damping == 1 else torch.lerp(x, image, damping)


def _where(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a in the rows that are True, else b."""
    return torch.where(rows.unsqueeze(-1), a, b)


class Picard:
    """Picard's iteration: the next point is x + ω r."""

    def __init__(self, damping: float) -> None:
        self.damping = damping

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        return damped(x, image, self.damping)


class Anderson:
    """Regularised Anderson acceleration: `turns` are the rows of ΔR, `goes` those of ΔX + ωΔR."""

    def __init__(self, window: int, damping: float, regularization: float) -> None:
        self.window, self.damping, self.regularization = window, damping, regularization
        self.count = 0
        self.erred = False
        self.ahead = self.residual = torch.empty(0)

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        ahead = damped(x, image, self.damping)
        if self.count == 0:
            shape = (x.shape[0], self.window, x.shape[1])
            self.goes, self.turns = x.new_zeros(shape), x.new_zeros(shape)
            self.gram = x.new_zeros(x.shape[0], self.window, self.window)
            self.wait, self.dose = torch.zeros_like(norm), torch.ones_like(norm)
            self.best, self.retreat, following = norm, ahead, ahead
            self.least = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps
        else:
            place, known = (self.count - 1) % self.window, min(self.count, self.window)
            torch.sub(ahead, self.ahead, out=self.goes[:, place])
            torch.sub(residual, self.residual, out=self.turns[:, place])
            turns, goes, gram = self.turns[:, :known], self.goes[:, :known], self.gram[:, :known, :known]
            wrong = norm > _RISE * self.best
            if self.count == 1:  # the first step was Picard's: no reason to forget
                wrong = torch.zeros_like(wrong)
            elif bool(wrong.any()):
                self._forget(wrong)
            row = matvec(turns, turns[:, place])
            gram[:, place], gram[:, :, place] = row, row
            weights = self._weights(gram, matvec(turns, residual))
            following = torch.baddbmm(ahead.unsqueeze(1), weights.mT, goes, alpha=-1).squeeze(1)
            if self.erred:
                following = _where(self.wait > 0, _where(wrong, self.retreat, ahead), following)
                self.wait = (self.wait - 1).clamp_min(0)
            self.retreat = _where(norm < self.best, ahead, self.retreat)
            self.best = torch.minimum(self.best, norm)
            if self.erred:
                self.best = self.best.masked_fill(self.wait > 0, torch.inf)
        self.ahead, self.residual = ahead, residual
        self.count += 1
        return following

    def _forget(self, wrong: Tensor) -> None:
        self.erred = True
        self.goes[wrong], self.turns[wrong], self.gram[wrong] = 0.0, 0.0, 0.0
        self.wait = torch.where(wrong, self.dose, self.wait)
        self.dose = torch.where(wrong, 2 * self.dose, self.dose)

    def _weights(self, gram: Tensor, right: Tensor) -> Tensor:
        """γ ``(S, m, 1)``; 0 for a row that was forgotten, or whose squares underflow."""
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        ridge = torch.where(diagonal > self.least, self.regularization * diagonal, 1.0)
        solved: Tensor = torch.linalg.solve_ex(gram + torch.diag_embed(ridge), right.unsqueeze(-1))[0]
        return solved


class Broyden:
    """Good Broyden with limited memory: B = −I + UᵀV, with at most `window` rows in U and V."""

    damping = 1.0

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = -1
        self.x = self.residual = torch.empty(0)

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        if self.count < 0:
            shape = (x.shape[0], self.window, x.shape[1])
            self.left, self.right = x.new_empty(shape), x.new_empty(shape)
            self.best, self.best_x, self.best_residual = norm, x, residual
            self.misses, self.idle, self.wait = (torch.zeros_like(norm) for _ in range(3))
            self.dose = torch.ones_like(norm)
            self.count = 0
            self.x, self.residual = x, residual
            return image
        self._learn(x - self.x, residual - self.residual)
        walked = self.wait > 0
        self.wait = (self.wait - 1).clamp_min(0)
        self.idle = torch.where(walked | (norm < 0.9 * self.best), 0.0, self.idle + 1)
        better = walked | (norm <= self.best)
        self.best = torch.where(better, norm, self.best)
        self.best_x = _where(better, x, self.best_x)
        self.best_residual = _where(better, residual, self.best_residual)
        wrong, lost = norm > _RISE * self.best, self.idle > _IDLE
        self.wait = torch.where(lost, self.dose, self.wait)
        self.dose = torch.where(lost, 2 * self.dose, self.dose)
        self.misses = torch.where(wrong, self.misses + 1, 0.0)
        self.x, self.residual = _where(wrong, self.best_x, x), _where(wrong, self.best_residual, residual)
        forgets = self.wait > 0
        if bool(forgets.any()):
            self.left[forgets], self.right[forgets] = 0.0, 0.0
        size = torch.where(wrong & ~forgets, 0.5 ** (self.misses - 1), 1.0)
        return self.x - size.unsqueeze(-1) * self._apply(self.left, self.right, self.residual)

    def _apply(self, left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
        """−v + Σ_i left_i ⟨right_i, v⟩."""
        if self.count == 0:
            return -vector
        left, right, row = left[:, : self.count], right[:, : self.count], vector.unsqueeze(1)
        return torch.baddbmm(row, torch.bmm(row, right.mT), left, beta=-1).squeeze(1)

    def _learn(self, move: Tensor, turn: Tensor) -> None:
        if self.count == self.window:
            self.count = 0
        forward, backward = self._apply(self.left, self.right, turn), self._apply(self.right, self.left, move)
        bottom = dot(backward, turn)
        sizes = torch.linalg.vector_norm(backward, dim=-1) * torch.linalg.vector_norm(turn, dim=-1)
        sound = bottom.abs() > 1e-3 * torch.finfo(move.dtype).eps * sizes
        self.left[:, self.count] = (move - forward) * torch.where(sound, 1 / bottom, 0.0).unsqueeze(-1)
        self.right[:, self.count] = backward
        self.count += 1


class NewtonKrylov:
    """Inexact Newton: steps are solved by GMRES, and halved until the residual falls."""

    damping = 1.0

    def __init__(self, problem: Problem, window: int) -> None:
        self.problem, self.window = problem, window
        self.base: Tensor | None = None

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """See `Solver.step`."""
        if self.base is None:
            self.base, self.right, self.move, self.norm = x, residual, residual, norm
            self.size, self.wait, self.dose = (
                torch.ones_like(norm),
                torch.zeros_like(norm),
                torch.ones_like(norm),
            )
            fell = torch.ones_like(norm, dtype=torch.bool)
            force = torch.full_like(norm, 0.1)
        else:
            fell = (norm <= (1 - 1e-4 * self.size) * self.norm) | (self.wait > 0)  # Armijo's rule
            # Eisenstat and Walker's second choice: as exact as the last step was good.
            force = (0.9 * (norm / self.norm) ** 2).clamp(1e-6, 0.1)
            self.wait = (self.wait - 1).clamp_min(0)
            self.size = torch.where(fell, 1.0, self.size / 2)
            self.base, self.right = _where(fell, x, self.base), _where(fell, residual, self.right)
            self.norm = torch.where(fell, norm, self.norm)
        wanted = fell & (self.wait == 0)
        if bool(wanted.any()):
            right = _where(wanted, residual, torch.zeros_like(residual))
            self.move = _where(wanted, self._newton(x, right, force), self.move)
        stuck = self.size < 0.01
        self.wait = torch.where(stuck, self.dose, self.wait)
        self.dose = torch.where(stuck, 2 * self.dose, self.dose)
        self.size = self.size.masked_fill(stuck, 1.0)
        self.move = _where(self.wait > 0, self.right, self.move)
        return self.base + self.size.unsqueeze(-1) * self.move

    def _newton(self, x: Tensor, right: Tensor, force: Tensor) -> Tensor:
        jacobian = Jacobian(self.problem, x.reshape(self.problem.full))

        def operator(vector: Tensor) -> Tensor:
            return jacobian.push(vector.reshape(1, *self.problem.full)).reshape(vector.shape)

        return gmres(operator, right, force, restart=self.window, max_restarts=2, grow=False)[0]
