r"""Attention with dropout in O(n) memory: one tile of queries at a time, made again in the backward pass.

    output_i = Σ_j d_ij p_ij v_j,     d_ij = 0 with probability p, else 1/(1 − p).

The tile of weights exists only while it is used: `torch.utils.checkpoint` makes it anew, with the same random
numbers, for the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from exptilt.tilting.arguments import prepare
from exptilt.tilting.problem import Inputs, per_query_head
from exptilt.tilting.score_rule import ScoreRule

_TILE_CELLS = 1 << 22  # weights held at once


def _rows(t: Inputs, rule: ScoreRule, probability: float, rows: slice) -> Tensor:
    """Output of the queries in `rows`; the keys and values of `t` are repeated for all heads."""
    K = t.key.shape[-2]
    s = rule.block(t, rule.scale * (t.query[..., rows, :] @ t.key.mT), 0, K, rows).scores
    if t.sink is not None:
        s = torch.cat([s, t.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
    dead = torch.isneginf(s).all(-1, keepdim=True)  # sees nothing: output 0, as in `attend`
    weights = torch.softmax(s.masked_fill(dead, 0.0), -1)[..., :K].masked_fill(dead, 0.0)
    return F.dropout(weights, probability) @ t.value


def dropped(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], probability: float) -> Tensor:
    """Attention ``(batch, Hq, Q, Dv)``, each weight dropped with `probability`; `options` as in `attend`."""
    call = prepare("watch", query, key, value, **options, autocast=True)
    t, (N, heads, Q, _) = call.inputs, query.shape
    sums = torch.promote_types(t.query.dtype, torch.float32)
    key, value = (per_query_head(x.to(sums), heads, -3) for x in (t.key, t.value))
    t = t._replace(query=t.query.to(sums), key=key, value=value)
    height = max(1, _TILE_CELLS // max(1, N * heads * key.shape[-2]))
    with torch.autocast(query.device.type, enabled=False):
        tiles = [
            checkpoint(_rows, t, call.settings.rule, probability, slice(i, i + height), use_reentrant=False)
            for i in range(0, Q, height)
        ]
        output = torch.cat(tiles, 2) if tiles else query.new_zeros(N, heads, 0, value.shape[-1])
    return output.to(call.dtype)
