r"""The patterns of largest weight at a state, and how far each pattern stands out from the others.

With k patterns found, of scores s_1 … s_k, and R = Σ e^{βs} over all others,

    weight_i = e^{βs_i} / (Σ_j e^{βs_j} + R),      left_out = R / (Σ_j e^{βs_j} + R).

R is summed by itself, so that it is accurate even where it is tiny. The separation of a pattern,

    Δ_i = min_{j≠i} (s_ii − s_ij):  dot ⟨x_i,x_i⟩ − ⟨x_i,x_j⟩,  cosine 1 − cos,  euclidean ½‖x_i − x_j‖²,

decides whether it can be retrieved (``theory.py``). Both sweep over tiles of the patterns: no matrix of all
scores is ever made.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.patterns import Keys, check_state, laid_out
from exptilt.memory.separation import Softmax

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_BLOCK = 1024  # patterns compared with all others at once


@dataclass(frozen=True)
class Nearest:
    """The k patterns of largest weight at each state, the heaviest first.

    Args:
        index: ``(..., k)``, their places.
        weight: ``(..., k)``, their weights among all patterns.
        left_out: ``(...)``, the weight of all others together.
        values: ``(..., k, Dv)``, their values, if the memory holds values.
    """

    index: Tensor
    weight: Tensor
    left_out: Tensor
    values: Tensor | None


@torch.no_grad()
def _largest(keys: Keys, query: Tensor, k: int) -> Tensor:
    """Places ``(..., H, Q, k)`` of the k largest scores."""
    top = query.new_empty(*query.shape[:-1], 0)
    at = torch.empty_like(top, dtype=torch.int64)
    for _, score, start in keys.tiles(query):
        place = torch.arange(start, start + score.shape[-1], device=query.device).expand(score.shape)
        joined = torch.cat([top, score], -1)
        top, best = joined.topk(min(k, joined.shape[-1]), -1)
        at = torch.cat([at, place], -1).gather(-1, best)
    return at


def _others(keys: Keys, query: Tensor, beta: Tensor, at: Tensor, top: Tensor) -> Tensor:
    """Σ e^{βs − top} ``(..., H, Q)`` over the patterns not at the places `at`; `top` is the largest βs."""
    total = torch.zeros_like(top)
    for _, score, start in keys.tiles(query):
        n = score.shape[-1]
        local = torch.where((at >= start) & (at < start + n), at - start, n)
        counted = torch.zeros(*score.shape[:-1], n + 1, dtype=torch.bool, device=at.device)
        score = (beta * score).masked_fill(counted.scatter(-1, local, True)[..., :n], -torch.inf)
        total = total + torch.exp(score - top[..., None]).sum(-1)
    return total


def nearest(self: "Hopfield", state: Tensor, k: int = 1) -> Nearest:
    """The k patterns of largest weight at each state, their weights, and the weight of all others together.

    Args:
        state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.
        k: number of patterns.

    Returns:
        `Nearest`: index and weight ``(..., k)``, left_out ``(...)``, values ``(..., k, Dv)``.

    Example:
        >>> memory = xt.memory.Hopfield(torch.eye(4), beta=2.0)
        >>> found = memory.nearest(torch.tensor([0.0, 1.0, 0.5, 0.0]), 2)
        >>> found.index, found.weight, found.left_out
        (tensor([1, 2]), tensor([0.6103, 0.2245]), tensor(0.1652))
    """
    check_state(self, state)
    if whole("Hopfield.nearest", "k", k) > self.count:
        raise ArgumentError(
            f"Hopfield.nearest: k is {k}, and the memory holds {self.count} patterns. Pass at most "
            f"{self.count}."
        )
    if not isinstance(self.rule, Softmax):
        raise ArgumentError(f"Hopfield.nearest: the separation is {self.rule}. Pass 'softmax' to Hopfield.")
    query, beta = self.similarity.query(laid_out(self, state)), self.head_beta[..., None, None]
    lead = state.shape[:-1]
    at = _largest(self.keys, query, k)
    key, _, offset = self.keys.chosen(at.flatten(-2))
    score = (key.unflatten(-2, at.shape[-2:]) * query[..., None, :]).sum(-1)
    sharp = beta * (score if offset is None else score + offset.unflatten(-1, at.shape[-2:]))
    top = sharp.detach().amax(-1)
    share, rest = torch.exp(sharp - top[..., None]), _others(self.keys, query, beta, at, top)
    total = share.sum(-1) + rest
    weight, left_out = (share / total[..., None]).reshape(*lead, k), (rest / total).reshape(lead)
    values = None
    if self.values is not None:
        held = self.values if self.lead else self.values[None]
        held = held.expand(*at.shape[:-2], *held.shape[-2:])
        values = torch.take_along_dim(held, at.flatten(-2)[..., None], -2).reshape(*lead, k, -1)
    return Nearest(at.reshape(*lead, k), weight, left_out, values)


def separation(self: "Hopfield") -> Tensor:
    """How far each pattern stands out: Δ_i = min_{j≠i} (s_ii − s_ij), in scores of this memory's similarity.

    Costs N² products in O(N) memory. Equal patterns have separation 0; a pattern alone has infinity.

    Returns:
        ``(..., N)``.
    """
    keys, found = self.keys, []
    every = torch.arange(self.count, device=self.beta.device)
    for at in track(every.split(_BLOCK), "separation"):
        query, _, offset = keys.chosen(at.expand(*(self.lead or (1,)), -1))
        own = (query * query).sum(-1) + (0.0 if offset is None else offset)
        top = torch.full_like(own, -torch.inf)
        for _, score, start in keys.tiles(query):
            others = torch.arange(start, start + score.shape[-1], device=at.device)
            top = torch.maximum(top, score.masked_fill(at[:, None] == others, -torch.inf).amax(-1))
        found.append(own - top)
    gap = torch.cat(found, -1)
    return gap if self.lead else gap[0]
