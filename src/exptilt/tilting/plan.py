r"""A plan: a few integers in place of a mask, for packed sequences and dropped weights.

It is `Inputs.packing`, int64 (..., 1, rows, width), with rows

    0       where the queries of each sequence begin, then where the last ends
    1, 2    where the keys of each sequence begin, and where they end
    3       the seed of dropped weights, and how many of 2³² are dropped; absent without

Query i stands at the key that is as far from the end of its sequence's keys as i is from the end of its
queries.
"""

import math

import torch
from torch import Tensor

_ALL, _NEVER = 0xFFFFFFFF, 1 << 40


def drops(plan: Tensor) -> bool:
    """Whether a plan drops weights."""
    return plan.shape[-2] == 4


def make(
    query_starts: Tensor,
    key_starts: Tensor,
    key_ends: Tensor,
    seed: Tensor | None = None,
    dropped: float = 0.0,
) -> Tensor:
    """The plan (1, rows, width), from starts (B + 1), (B) and ends (B)."""
    width = max(3, query_starts.shape[0])

    def line(x: Tensor, rest: int | Tensor) -> Tensor:
        x = x.to(torch.int64)
        return torch.cat([x, x.new_zeros(width - x.shape[0]) + rest])

    lines = [line(query_starts, query_starts[-1]), line(key_starts, _NEVER), line(key_ends, 0)]
    if dropped and seed is not None:
        cut = seed.new_full((), min(round(dropped * 2**32), _ALL))
        lines.append(line(torch.stack([seed, cut]), 0))
    return torch.stack(lines).unsqueeze(0)


def _spans(
    own: Tensor, ends: Tensor, starts: Tensor, stops: Tensor, n: int, back: int | None, ahead: int | None
) -> Tensor:
    """(..., 2, n): the first key that each of n queries sees, and the one after the last.

    A query sees at most `back` keys back and `ahead` ahead. own and ends are where the queries of sequences
    begin and end, starts and stops where their keys do. With the two exchanged: which queries see each key.
    """
    x = torch.arange(n, device=own.device).expand(*own.shape[:-1], n)
    b = (torch.searchsorted(own.contiguous(), x.contiguous(), right=True) - 1).clamp(min=0)
    end, first, last = (a.gather(-1, b) for a in (ends, starts, stops))
    place = x + (last - end)
    last = last if ahead is None else torch.minimum(last, place + ahead + 1)
    first = first if back is None else torch.maximum(first, place - back)
    return torch.stack([first, torch.where(x < end, last, first)], -2)


def spans(
    plan: Tensor, causal: bool, window: int | None, length_q: int, length_k: int
) -> tuple[Tensor, Tensor]:
    """(..., 2, Q): first key each query may see and the one after the last; (..., 2, K): same for keys."""
    queries, keys, ends = plan[..., 0, :-1], plan[..., 1, :-1], plan[..., 2, :-1]
    stops = plan[..., 0, 1:]
    back = None if window is None else window - 1
    ahead = 0 if causal else back
    seen = _spans(queries, stops, keys, ends, length_q, back, ahead)
    return seen, _spans(keys, ends, queries, stops, length_k, ahead, back)


def mix(x: Tensor) -> Tensor:
    """A number below 2³² that looks random, for each number below 2³².

    This is lowbias32 of C. Wellons, "Prospecting for hash functions", 2018.
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _ALL
    x = (x ^ (x >> 15)) * 0x846CA68B & _ALL
    return x ^ (x >> 16)


def kept(plan: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor:
    """(..., heads, Q, stop − start) booleans, for queries of shape (..., heads, Q): the weights kept."""
    *lead, heads, length_q = shape
    device = plan.device
    seed, cut = (x.unsqueeze(-1) & _ALL for x in plan[..., 3, :2].unbind(-1))
    head = torch.arange(math.prod(lead) * heads, device=device).reshape(*lead, heads, 1)
    row = mix((mix(seed ^ mix(head)) + torch.arange(length_q, device=device)) & _ALL)
    column = mix(torch.arange(start, stop, device=device) + 1)
    return mix(row.unsqueeze(-1) ^ column) >= cut.unsqueeze(-1)


def planned(
    plan: Tensor, causal: bool, window: int | None, shape: torch.Size, length_k: int, start: int, stop: int
) -> Tensor:
    """(..., heads or 1, Q, stop − start) booleans: which of the keys start..stop each query sees."""
    first, last = spans(plan, causal, window, shape[-1], length_k)[0].unsqueeze(-1).unbind(-3)
    j = torch.arange(start, stop, device=plan.device)
    seen = (first <= j) & (j < last)
    return seen & kept(plan, shape, start, stop) if drops(plan) else seen
