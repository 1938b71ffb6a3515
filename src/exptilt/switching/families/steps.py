"""The filter step by step in torch, for any beliefs and dynamics, with derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.families import ExponentialFamily, Mixture, log_marginal_likelihood, posterior, project

from ..checks import safe_log
from ..inference.plain.step import step
from .compiled import Passed, impossible, kim_mixing

if TYPE_CHECKING:
    from .model import SwitchingFamily


def own(model: "SwitchingFamily", belief: ExponentialFamily) -> ExponentialFamily:
    """Each mode's belief moved by its own dynamics, D_j(belief_j), ``(..., M)``."""
    moved = [move(belief[..., j]) for j, move in enumerate(model.dynamics)]
    return type(belief).stack(moved, -1)


def merged(log_weight: Tensor, belief: ExponentialFamily) -> ExponentialFamily:
    """One member for each mixture ``(..., K)``; where all weights are 0 they count as equal."""
    nothing = log_weight.isneginf().all(-1, keepdim=True)
    return project(Mixture(torch.where(nothing, 0.0, log_weight), belief), type(belief))


@dataclass(frozen=True)
class FamilyMoves:
    """Moves of beliefs in one step; `row` is the observation, None if it is missing."""

    model: "SwitchingFamily"
    row: Tensor | None

    def read(self, law: ExponentialFamily, i: int, j: int) -> ExponentialFamily:
        """The belief itself: all modes use one family."""
        return law

    def carry(self, law: ExponentialFamily, j: int) -> tuple[ExponentialFamily, Tensor, int]:
        """The belief moved by mode j and updated by the observation, and its log marginal likelihood."""
        law = self.model.dynamics[j](law)
        if self.row is None:
            return law, torch.zeros_like(self.model.transition[0, 0]), 0
        likelihood, y = self.model.likelihood, self.row[None]
        return posterior(law, likelihood, y), log_marginal_likelihood(law, likelihood, y), 0

    def collapse(self, weight: Tensor, laws: Sequence[ExponentialFamily]) -> ExponentialFamily:
        """The M-projection of a mixture."""
        return merged(safe_log(weight), type(laws[0]).stack(laws, -1))


def by_steps(
    model: "SwitchingFamily", y: Tensor, there: Tensor, starts: np.ndarray, method: str, what: str
) -> Passed:
    """The pass over all series, one after the other."""
    found = []
    for a, b in pairwise(starts):
        found += _one(model, y[a:b], there[a:b], method, what)
    terms, levels, beliefs, mixings = zip(*found, strict=True)
    return Passed(
        torch.stack(terms), torch.stack(levels), type(beliefs[0]).stack(beliefs), torch.stack(mixings)
    )


def _one(
    model: "SwitchingFamily", y: Tensor, there: Tensor, method: str, what: str
) -> list[tuple[Tensor, Tensor, ExponentialFamily, Tensor]]:
    belief, level = model._started(), safe_log(model.initial_probability)
    laws, log_transition, out = [belief[j] for j in range(len(level))], safe_log(model.transition), []
    for t, row in enumerate(y):
        before = level
        try:
            moves = FamilyMoves(model, row if there[t] else None)
            laws, level, term, mixing = step(moves, method, laws, level, log_transition)
        except ArgumentError as error:
            text = f"SwitchingFamily.{what}: at step {t}, y = {row.tolist()}: {error}"
            raise ArgumentError(text) from None
        if not bool(term.isfinite()):
            raise ArgumentError(impossible(what, t, row))
        if method == "gpb1":  # its weights do not depend on the mode that follows
            mixing = kim_mixing(before[None], log_transition)[0]
        out.append((term, level, type(laws[0]).stack(laws, -1), mixing))
    return out
