r"""The patterns of largest weight at a state, their weights, and the weight of all others together.

With k patterns found, of scores s_1 … s_k, and R = Σ e^{βs} over all others,

    weight_i = e^{βs_i} / (Σ_j e^{βs_j} + R),      left_out = R / (Σ_j e^{βs_j} + R).

A sweep over all patterns finds the k largest scores and R exactly. A search index (FAISS) finds candidates
without a sweep; their scores are computed here, from the patterns, and R is bounded by its number of terms
times the largest that one of them can be:

    an index that compares with every pattern    s ≤ the smallest score found, and a margin for its rounding
    any other                                    s ≤ ‖x‖‖ξ‖ (dot), 1 (cosine), ½‖ξ‖² (euclidean)

The returned left_out is then an upper bound, each weight a lower one. The second bound is often as weak as 1.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError, needed
from exptilt.memory.landscape.margins import one_memory
from exptilt.memory.patterns import Keys, check_state
from exptilt.memory.separation import Softmax

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield


@dataclass(frozen=True)
class Nearest:
    """The k patterns of largest weight at each state, the heaviest first.

    Args:
        index: ``(..., k)``, their places; −1 where a search index found fewer.
        weight: ``(..., k)``, their weights among all patterns; lower bounds where `exact` is False.
        left_out: ``(...)``, the weight of all others together; an upper bound where `exact` is False.
        exact: whether weights are exact, or bounds.
        values: ``(..., k, Dv)``, their values, if the memory holds values.
    """

    index: Tensor
    weight: Tensor
    left_out: Tensor
    exact: bool
    values: Tensor | None


class SearchIndex:
    """A FAISS index of a memory's patterns, made by `Hopfield.search_index`; `faiss` is FAISS's own object.

    Args:
        memory: whose patterns are indexed; one memory, without leading axes.
        kind: a string of `faiss.index_factory`.
    """

    def __init__(self, memory: "Hopfield", kind: str) -> None:
        one_memory(memory, "search_index")
        faiss = needed("faiss", "faiss")
        self.similarity = memory.similarity
        metric = faiss.METRIC_L2 if self.similarity.name == "euclidean" else faiss.METRIC_INNER_PRODUCT
        try:
            self.faiss: Any = faiss.index_factory(memory.dimension, kind, metric)
        except RuntimeError as problem:
            raise ArgumentError(f"search_index: faiss knows no kind {kind!r} ({problem}).") from None
        self.exhaustive = isinstance(self.faiss, faiss.IndexFlat)
        if not self.faiss.is_trained:
            self.faiss.train(_floats(memory.keys.chosen(torch.arange(memory.count)[None])[0][0]))
        self.update(memory)

    @property
    def count(self) -> int:
        """How many patterns are indexed."""
        return int(self.faiss.ntotal)

    def update(self, memory: "Hopfield") -> None:
        """Add the patterns of the memory that are not indexed yet.

        Args:
            memory: the one that was indexed, with patterns appended.
        """
        begin = 0
        for key, _, _ in memory.keys.parts():
            new = key[0, max(0, self.count - begin) :]
            if len(new):
                self.faiss.add(_floats(new))
            begin += key.shape[-2]

    def _search(self, query: Tensor, k: int) -> Tensor:
        """Places ``(Q, k)`` of the patterns that FAISS finds nearest to ``(Q, D)``; −1 for missing ones."""
        return torch.from_numpy(self.faiss.search(_floats(query), k)[1]).to(query.device)


def _floats(x: Tensor) -> Any:
    """A float32 numpy array, which is what FAISS takes."""
    return x.detach().float().contiguous().cpu().numpy()


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


def _others(keys: Keys, query: Tensor, beta: Tensor, at: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Σ e^{βs − m} over the patterns that are not at the places `at`, and m ``(..., H, Q)`` ≥ `top`."""
    total = torch.zeros_like(top)
    for _, score, start in keys.tiles(query):
        n = score.shape[-1]
        local = torch.where((at >= start) & (at < start + n), at - start, n)
        counted = torch.zeros(*score.shape[:-1], n + 1, dtype=torch.bool, device=at.device)
        score = (beta * score).masked_fill(counted.scatter(-1, local, True)[..., :n], -torch.inf)
        higher = torch.maximum(top, score.detach().amax(-1))
        total = total * torch.exp(top - higher) + torch.exp(score - higher[..., None]).sum(-1)
        top = higher
    return total, top


def _cap(memory: "Hopfield", query: Tensor, smallest: Tensor, search: SearchIndex) -> Tensor:
    """An upper bound ``(1, Q)`` on the scores of patterns not found, given the `smallest` score found."""
    norm: Tensor = torch.linalg.vector_norm(query, dim=-1)
    kind = memory.similarity.name
    cap = norm * memory.size if kind == "dot" else norm.square() / 2 if kind == "euclidean" else norm
    if not search.exhaustive:
        return cap
    rounding = 2 * memory.dimension * torch.finfo(torch.float32).eps * (norm + memory.size).square()
    return torch.minimum(cap, smallest + rounding)


def search_index(self: "Hopfield", kind: str = "Flat") -> SearchIndex:
    """A FAISS index of the patterns, for `nearest`; needs the extra ``faiss``.

    Args:
        kind: a string of `faiss.index_factory`: ``Flat`` compares with every pattern, others, such as
            ``HNSW32`` or ``IVF1024,Flat``, with some.
    """
    return SearchIndex(self, kind)


def nearest(
    self: "Hopfield", state: Tensor, k: int = 1, *, search: SearchIndex | None = None, exact: bool = False
) -> Nearest:
    """The k patterns of largest weight at each state, their weights, and the weight of all others together.

    Args:
        state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.
        k: number of patterns.
        search: an index that finds candidates without a sweep; weights are then bounds. None sweeps.
        exact: with `search`, sweep for the weight of all others, so that no weight is a bound.

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
    if search is not None and (search.count, search.similarity) != (self.count, self.similarity):
        got = f"{search.count} patterns ({search.similarity.name})"
        wanted = f"Call search.update(memory), or make one for its {self.count} ({self.similarity.name})."
        raise ArgumentError(f"Hopfield.nearest: the index holds {got}. {wanted}")
    query, beta = self.similarity.query(self.rows(state)), self.head_beta[..., None, None]
    at = _largest(self.keys, query, k) if search is None else search._search(query[0], k)[None]
    found, sizes = at >= 0, at.shape[-2:]
    x, measure, values = self.reading.picked(at.clamp_min(0).flatten(-2))
    key, offset = self.similarity.keys(x.to(measure.dtype), measure), self.similarity.offset(measure)
    score = (key.unflatten(-2, sizes) * query[..., None, :]).sum(-1)
    score = score if offset is None else score + offset.unflatten(-1, sizes)
    sharp = (beta * score).masked_fill(~found, -torch.inf)
    top = sharp.detach().amax(-1).clamp_min(torch.finfo(score.dtype).min)
    if search is None or exact:
        rest, top = _others(self.keys, query, beta, at, top)
    else:
        cap = beta[..., 0] * _cap(self, query, score.masked_fill(~found, torch.inf).amin(-1), search)
        top = torch.maximum(top, cap.detach())
        rest = (self.count - found.sum(-1)) * torch.exp(cap - top)
    sharp, order = sharp.sort(dim=-1, descending=True, stable=True)
    share, lead = torch.exp(sharp - top[..., None]), state.shape[:-1]
    total = share.sum(-1) + rest
    weight, left_out = share / total[..., None], rest / total
    if values is not None:
        values = torch.take_along_dim(values.unflatten(-2, sizes), order[..., None], -2)
        values = values.reshape(*lead, *values.shape[-2:])
    index = at.gather(-1, order).reshape(*lead, k)
    is_exact = search is None or exact
    return Nearest(index, weight.reshape(*lead, k), left_out.reshape(lead), is_exact, values)
