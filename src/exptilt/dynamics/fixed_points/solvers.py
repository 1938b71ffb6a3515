r"""Ways to a fixed point x = f(x), for many samples side by side.

With the residual r(x) = f(x) − x, each solver says where to go from x:

- **Picard**: x + ω r. Linear convergence at the rate of the Jacobian's spectral radius; ω < 1 tames
  oscillation.
- **Anderson**: with the last m differences ΔX, ΔR as rows, γ minimises ‖r − ΔRᵀγ‖² + λΣ‖Δr_i‖²γ_i² and x +
  ωr − (ΔX + ωΔR)ᵀγ is next. The ridge λ is relative to each entry of the Gram matrix's diagonal, so that it
  means the same for old, large differences and new, small ones.

An extrapolation that leads to twice the best residual went too far. Anderson then forgets what it knows of
the sample, goes back to its best point and takes 1, 2, 4, ... Picard steps from there, so that it converges
wherever Picard does.

A solver has one method, `step(x, image, residual, norm)`, on flat tensors ``(S, n)``; rows never mix.
"""

import torch
from torch import Tensor

from exptilt._support.linalg import matvec

_RISE = 2.0  # an extrapolation that leads to this multiple of the best residual went too far
_RIDGE = 10.0  # λ in eps


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
        """The next x ``(S, n)``, from x, f(x), r = f(x) − x and ‖r‖ ``(S,)``."""
        return damped(x, image, self.damping)


class Anderson:
    """Regularised Anderson acceleration: `turns` are the rows of ΔR, `goes` those of ΔX + ωΔR."""

    def __init__(self, window: int, damping: float) -> None:
        self.window, self.damping = window, damping
        self.count = 0
        self.erred = False
        self.ahead = self.residual = torch.empty(0)

    def step(self, x: Tensor, image: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """The next x ``(S, n)``, from x, f(x), r = f(x) − x and ‖r‖ ``(S,)``."""
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
        ridge = torch.where(diagonal > self.least, _RIDGE * torch.finfo(gram.dtype).eps * diagonal, 1.0)
        solved: Tensor = torch.linalg.solve_ex(gram + torch.diag_embed(ridge), right.unsqueeze(-1))[0]
        return solved
