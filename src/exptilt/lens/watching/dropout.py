r"""Attention whose weights are dropped, in O(n) memory: a tile of queries at a time, made again in the backward pass.

    output_i = Σ_j d_ij p_ij v_j,     d_ij = 0 with probability p, else 1/(1 − p).

The tile of weights exists only while it is used: `torch.utils.checkpoint` makes it anew, with the same random numbers, for the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_TILE_CELLS = 1 << 22  # weights held at once


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    probability: float,
    start: int,
    length: int,
) -> Tensor:
    """Output of the queries start.. of `length` in all; query holds these rows only, key and value all heads repeated."""
    K, rows = key.shape[2], query.shape[2]
    s = options["scale"] * (query @ key.mT).to(
        torch.float64 if query.dtype == torch.float64 else torch.float32
    )
    if options.get("softcap") is not None:
        s = options["softcap"] * torch.tanh(s / options["softcap"])

    def part(x: Tensor) -> Tensor:
        return x if x.shape[-2] == 1 else x[..., start : start + rows, :]

    if options.get("bias") is not None:
        s = s + part(options["bias"])
    if options.get("mask") is not None:
        s = s.masked_fill(~part(options["mask"]), -torch.inf)
    own = (torch.arange(start, start + rows, device=query.device) + (K - length))[:, None]
    j = torch.arange(K, device=query.device)
    if options.get("causal"):
        s = s.masked_fill(j > own, -torch.inf)
    if options.get("window") is not None:
        s = s.masked_fill(own - j >= options["window"], -torch.inf)
        if not options.get("causal"):
            s = s.masked_fill(j - own >= options["window"], -torch.inf)
    if options.get("sink") is not None:
        s = torch.cat([s, options["sink"].to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    dead = torch.isneginf(s).all(-1, keepdim=True)  # sees nothing: output 0, as in `attend`
    weights = torch.softmax(s.masked_fill(dead, 0.0), -1)[..., :K].masked_fill(dead, 0.0)
    return F.dropout(weights, probability).to(value.dtype) @ value


def dropped(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], probability: float) -> Tensor:
    """(N, Hq, Q, Dv): attention with dropped weights.

    Args:
        query: ``(N, Hq, Q, D)``.
        key: ``(N, Hkv, K, D)``.
        value: ``(N, Hkv, K, Dv)``.
        options: keyword arguments of `attend`.
        probability: with which a weight is dropped.
    """
    N, Hq, Q, _ = query.shape
    key, value = (x.repeat_interleave(Hq // x.shape[1], 1) if x.shape[1] != Hq else x for x in (key, value))
    height = max(1, _TILE_CELLS // max(1, N * Hq * key.shape[2]))
    tiles = [
        checkpoint(
            _rows, query[:, :, i : i + height], key, value, options, probability, i, Q, use_reentrant=False
        )
        for i in range(0, Q, height)
    ]
    return torch.cat(tiles, 2) if tiles else query.new_zeros(N, Hq, 0, value.shape[-1])
