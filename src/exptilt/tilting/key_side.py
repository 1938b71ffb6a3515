"""The weights of attention a few rows of one head at a time, and which keys a query attends to most."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.tilting.arguments import Call
from exptilt.tilting.divergences import Side
from exptilt.tilting.problem import Inputs, wide_dtype

CELLS = 2**18  # weights of one head held at a time: 1 MB in float32


def weight_rows(call: Call, G: Tensor) -> Iterator[tuple[tuple[int, ...], slice, slice, Tensor, Tensor]]:
    """Head by head, chunks of queries: (batch and head, rows, keys seen, their weights, the sink's)."""
    t, rule = call.inputs, call.settings.rule
    wide, K = wide_dtype(t.query.dtype), t.key.shape[-2]
    size = max(1, CELLS // max(1, K))
    for index in product(*map(range, t.query.shape[:-2])):
        parts: Any = (x if x is None else _head(x.detach(), index, t.query.shape[-3]) for x in t)
        one = Inputs(*parts)
        side = Side(one._replace(query=one.query.to(wide)), rule)
        for start in range(0, t.query.shape[-2], size):
            rows = slice(start, min(start + size, t.query.shape[-2]))
            place = torch.arange(rows.start, rows.stop, device=t.query.device)
            keys = side.keys(place, K)
            s = side.scores([x[rows] for x in side.rows], side.shared, place, keys)[0]
            g = G[index][rows, None]
            g = torch.where(g == -torch.inf, 0.0, g)
            sink = s.new_zeros(len(place), 0) if one.sink is None else (one.sink - g).exp()
            yield index, rows, keys, s.sub_(g).exp_(), sink


def _head(x: Tensor, index: tuple[int, ...], heads: int) -> Tensor:
    """The part of an input for one batch item and query head, with an axis of one head."""
    *batch, head = index
    at = [0 if size == 1 else i for i, size in zip(batch, x.shape, strict=False)]
    return x[(*at, head * x.shape[len(batch)] // heads)][None]


@torch.no_grad()
def top_keys(call: Call, G: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places and weights (..., Hq, Q, k) of the heaviest keys of each query, and the weight left.

    Places of keys that a query does not see are −1, with weight 0. The sink's weight is left over.
    """
    K = call.inputs.key.shape[-2]
    checks.whole("attend", "top", count)
    if count > K:
        raise ArgumentError(f"attend: top is {count}, there are {K} keys. Pass at most as many.")
    shape = call.inputs.query.shape[:-1]
    places = torch.full((*shape, count), -1, device=G.device)
    weight, rest = G.new_zeros(*shape, count), G.new_zeros(shape)
    for index, rows, keys, p, outside in weight_rows(call, G):
        few = min(count, p.shape[-1])
        best = p.topk(few, -1)
        places[index][rows, :few] = torch.where(best.values > 0, best.indices + keys.start, -1)
        weight[index][rows, :few] = best.values
        rest[index][rows] = p.scatter_(-1, best.indices, 0.0).sum(-1) + outside.sum(-1)
    return places, weight, rest


def segment_values(segments: Any, key: Tensor) -> Tensor:
    """(..., K, S): 1 where a key belongs to a segment; attention over them is the mass of segments."""
    good = isinstance(segments, Tensor) and not segments.is_floating_point() and segments.dtype != torch.bool
    if not good or segments.shape != key.shape[-2:-1]:
        got = (
            f"{tuple(segments.shape)} {segments.dtype}"
            if isinstance(segments, Tensor)
            else type(segments).__name__
        )
        raise ArgumentError(
            f"attend: segments is {got}. Pass a whole number from 0 for each of {key.shape[-2]} keys: (K,)."
        )
    if is_concrete(segments) and segments.numel() and bool((segments < 0).any()):
        raise ArgumentError("attend: segments has a negative number. Number them from 0.")
    made = torch.nn.functional.one_hot(segments.long()).to(wide_dtype(key.dtype))
    return made.expand(*key.shape[:-2], *made.shape)
