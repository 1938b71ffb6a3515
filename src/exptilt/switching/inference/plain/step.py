"""One step of GPB1, GPB2, IMM or Viterbi in torch, over any law: the recursion of csrc, written plainly.

It serves laws that the compiled core does not have (diffuse states, beliefs in any family) and derivatives
that its adjoint does not give. Laws come one by one; what a law can do is `Moves`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

Law = TypeVar("Law")


class Moves(Protocol[Law]):
    """Operations on laws that a step needs."""

    def read(self, law: Law, i: int, j: int) -> Law:
        """The law of mode i as mode j reads it."""

    def carry(self, law: Law, j: int) -> tuple[Law, torch.Tensor, int]:
        """The law moved by mode j and updated, the log-density of the observation, and its diffuse rank."""

    def collapse(self, weight: torch.Tensor, laws: Sequence[Law]) -> Law:
        """The M-projection of a mixture with weights ``(K,)`` that sum to 1."""


class Stepped(NamedTuple):
    """Laws and log probabilities by mode after a step, its log-likelihood term, and mixing weights [i, j].

    The term is −inf where what was seen has density 0 in every mode that can be reached.
    """

    laws: list[Any]
    log_mode: torch.Tensor
    term: torch.Tensor
    mixing: torch.Tensor


def step(
    moves: Moves[Law],
    method: str,
    laws: Sequence[Law],
    log_mode: torch.Tensor,
    log_transition: torch.Tensor,
    begun: bool = False,
) -> Stepped:
    """Laws and probabilities after one step; with `begun` the given laws are already predictions."""
    M = len(laws)
    score, mu = log_mode[:, None] + log_transition, log_mode.exp()[:, None].expand(M, M)
    weight = torch.eye(M, dtype=log_mode.dtype)
    after: list[Law]
    if begun or method in ("imm", "gpb1"):
        prior = log_mode if begun else torch.logsumexp(score, 0)
        sources = list(laws)
        if not begun:
            weight = mu if method == "gpb1" else by_column(score, mu)
            read = [[moves.read(law, i, j) for i, law in enumerate(laws)] for j in range(M)]
            sources = [moves.collapse(weight[:, j], read[j]) for j in range(M)]
        found = [moves.carry(law, j) for j, law in enumerate(sources)]
        gains = torch.stack([density for _, density, _ in found])
        log_weight = least_rank(prior + gains, np.array([rank for *_, rank in found]))
        after = [law for law, *_ in found]
    else:
        reached = ~torch.isneginf(score.detach())
        reached = reached | ~reached.any(0)  # the law of a mode that nothing leads to is an average over all
        where = reached.nonzero(as_tuple=True)
        ways = torch.stack(where, 1).tolist()
        pairs = [moves.carry(moves.read(laws[i], i, j), j) for i, j in ways]
        gains = torch.stack([density for _, density, _ in pairs])
        gains = least_rank(score[where] + gains, np.array([rank for *_, rank in pairs]))
        scores = torch.full_like(score, -torch.inf).index_put(where, gains)
        log_weight, weight = torch.logsumexp(scores, 0), by_column(scores, mu)
        if method == "viterbi":
            log_weight, best = scores.max(0)
            weight = torch.eye(M, dtype=log_mode.dtype)[best].mT
        parts = [[pair[0] for pair, (_, to) in zip(pairs, ways, strict=True) if to == j] for j in range(M)]
        after = [moves.collapse(weight[reached[:, j], j], part) for j, part in enumerate(parts)]
    term = torch.logsumexp(log_weight, 0)
    return Stepped(after, log_weight - term, term, weight)


def by_column(score: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Scores normalised by column; where all are −inf, the mode probabilities."""
    none = torch.isneginf(torch.logsumexp(score, 0))
    return torch.where(none, mu, torch.softmax(torch.where(none, 0.0, score), 0))


def least_rank(log_weight: torch.Tensor, rank: np.ndarray) -> torch.Tensor:
    """Log weights in the limit: −inf for those of larger rank than the least that has any weight."""
    there = ~torch.isneginf(log_weight.detach()).numpy()
    least = rank[there].min() if there.any() else 0
    return torch.where(torch.from_numpy(rank > least), -torch.inf, log_weight)
