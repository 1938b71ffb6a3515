"""The scores of attention a few rows of one head at a time, and which keys a query attends to most."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, is_concrete, is_wrapped
from exptilt.tilting.arguments import Call
from exptilt.tilting.backends import cpu, dispatch
from exptilt.tilting.divergences import Side
from exptilt.tilting.problem import Inputs, wide_dtype

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CELLS = 2**18  # weights of one head held at a time: 1 MB in float32


def score_rows(call: Call) -> Iterator[tuple[tuple[int, ...], slice, slice, Tensor]]:
    """Head by head, chunks of queries: (batch and head, rows, keys seen, scores).

    Scores (rows, keys) are −inf where hidden; if there is a sink, its score is one more column.
    """
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
            s = s if one.sink is None else torch.cat([s, one.sink.expand(len(place), 1)], -1)
            yield index, rows, keys, s


def weights_of(s: Tensor) -> Tensor:
    """The weights of scores (rows, outcomes); 0 in rows that see nothing."""
    if not s.shape[-1]:
        return s
    p = s.softmax(-1)  # NaN in all of a row that sees nothing
    dead = (s[:, :1] == -torch.inf) & p[:, :1].isnan()
    return p if is_concrete(dead) and not bool(dead.any()) else p.masked_fill(dead, 0.0)


def _head(x: Tensor, index: tuple[int, ...], heads: int) -> Tensor:
    """The part of an input for one batch item and query head, with an axis of one head."""
    *batch, head = index
    at = [0 if size == 1 else i for i, size in zip(batch, x.shape, strict=False)]
    return x[(*at, head * x.shape[len(batch)] // heads)][None]


def swept(call: Call) -> bool:
    """Whether the compiled sweeps of the keys' side can run on the tensors of a call."""
    t = call.inputs
    some = min(t.query.shape[-2], t.key.shape[-2], t.query.shape[-1]) > 0
    plain = dispatch.all_plain(t) and not any(is_wrapped(x) for x in t if x is not None)
    return some and plain and call.settings.backend == "cpu" and t.query.device.type == "cpu"


def weight_rows(shift: Tensor, weight: Tensor) -> Tensor:
    """Rows that make weights of scores, as sweeps read them: shift, 1 / weight; 0 if no key is seen."""
    seen = weight != 0
    inverse = 1 / torch.where(seen, weight, 1.0)
    return torch.where(seen, torch.stack([shift, inverse]), 0.0)


@torch.no_grad()
def top_keys(
    call: Call, count: int, parts: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Places and weights (..., Hq, Q, k) of the heaviest keys of each query, and the weight left.

    Places of keys that a query does not see are −1, with weight 0. The sink's weight is left over. `parts`
    are those of the result of the call, if they are known.
    """
    K = call.inputs.key.shape[-2]
    checks.whole("attend", "top", count)
    if count > K:
        raise ArgumentError(f"attend: top is {count}, there are {K} keys. Pass at most as many.")
    if parts is not None and swept(call):
        shift, weight, _ = (x.detach() for x in parts)
        rows, sink = weight_rows(shift, weight), call.inputs.sink
        places, weight, rest = cpu.heaviest(call.inputs, call.settings.rule, rows, count)
        return places, weight, rest if sink is None else rest + sink_weight(rows, sink)
    shape = call.inputs.query.shape[:-1]
    found: list[list[Tensor]] = []
    with full_precision(call.inputs.query.device):
        for _, _, keys, s in score_rows(call):
            width = keys.stop - keys.start
            best = s[:, :width].topk(min(count, width), -1)
            p, lack = weights_of(s), (0, count - best.indices.shape[-1])
            places = torch.where(best.values == -torch.inf, -1, best.indices + keys.start)
            weight = p.gather(-1, best.indices)
            rest = p.scatter(-1, best.indices, 0.0).sum(-1)
            found.append([pad(places, lack, value=-1), pad(weight, lack), rest])
    wide = wide_dtype(call.inputs.query.dtype)
    empty = call.inputs.query.new_empty(0, count, dtype=wide)
    found = found or [[empty.long(), empty, empty[:, 0]]]
    places, weight, rest = (torch.cat(x) for x in zip(*found, strict=True))
    return places.reshape(*shape, count), weight.reshape(*shape, count), rest.reshape(shape)


def sink_weight(rows: Tensor, sink: Tensor) -> Tensor:
    """The sink's share (..., Hq, Q) of the weight, from the rows of `weight_rows`."""
    return torch.exp(sink.detach().unsqueeze(-1) - rows[0]) * rows[1]


def segment_values(segments: Any, key: Tensor) -> Tensor:
    """(..., K, S): 1 where a key belongs to a segment; attention over them is the mass of segments."""
    good = isinstance(segments, Tensor) and segments.dtype in _WHOLE
    if not good or segments.shape != key.shape[-2:-1]:
        got = (
            f"{tuple(segments.shape)} {segments.dtype}"
            if isinstance(segments, Tensor)
            else type(segments).__name__
        )
        raise ArgumentError(
            f"attend: segments is {got}. Pass a whole number from 0 for each of {key.shape[-2]} keys: (K,)."
        )
    if segments.device != key.device or segments.is_meta:
        raise ArgumentError(
            f"attend: segments is on {segments.device}, key on {key.device}. Pass both on one device; "
            "on meta the number of segments cannot be seen."
        )
    if is_concrete(segments) and segments.numel() and bool((segments < 0).any()):
        raise ArgumentError("attend: segments has a negative number. Number them from 0.")
    made = one_hot(segments.long()) if segments.numel() else segments.new_zeros(0, 0)
    made = made.to(wide_dtype(key.dtype))
    return made.expand(*key.shape[:-2], *made.shape)
