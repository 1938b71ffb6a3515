r"""Who sees whom: the part of a call that says which queries and keys are real, and how many keys each query sees.

With causality and a window the keys that query i sees are an interval lo_i ≤ j < hi_i; with padding, the number of real keys in it is a
difference of two prefix sums. So counting costs O(n). Only a dense mask is counted cell by cell.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sight:
    """What is real and what is seen.

    Attributes:
        real_query: ``(batch, Q)`` booleans, or None if all are.
        real_key: ``(batch, K)`` booleans, or None if all are.
        visible: ``(batch or 1, heads or 1, Q)``, number of keys each query sees.
        counted: ``(batch or 1, heads or 1, Q)`` booleans, the queries that statistics are taken over: real ones that see a key.
            None if that is all of them.
        first: ``(batch,)``, place of the first real key; None if it is 0.
    """

    real_query: Tensor | None
    real_key: Tensor | None
    visible: Tensor
    counted: Tensor | None
    first: Tensor | None
    _relative: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def relative(self, sink: bool) -> tuple[Tensor, Tensor]:
        """1 / log of the number of outcomes (keys, and the sink), 0 where a query is not counted or has one; and how many have more."""
        if sink not in self._relative:
            outcomes = self.visible + int(sink)
            use = outcomes > 1 if self.counted is None else (outcomes > 1) & self.counted
            inverse = torch.where(use, 1 / outcomes.clamp(min=2).double().log(), 0.0)
            self._relative[sink] = inverse, use.sum(-1)
        return self._relative[sink]


def _interval(
    causal: bool, window: int | None, Q: int, K: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First key that each query sees, and the one after the last: two tensors (Q,)."""
    own = torch.arange(Q, device=device) + (K - Q)
    low, high = torch.zeros_like(own), torch.full_like(own, K)
    if causal:
        high = (own + 1).clamp(0, K)
    if window is not None:
        low = (own - window + 1).clamp(0, K)
        if not causal:
            high = (own + window).clamp(0, K)
    return low, torch.maximum(low, high)


def look(
    options: dict[str, Any],
    Q: int,
    K: int,
    real_query: Tensor | None,
    real_key: Tensor | None,
    device: torch.device,
) -> Sight:
    """Sight for keyword arguments of `attend`: causal and window, and a mask that either is ``real_key`` or has a query axis.

    Args:
        options: as in `AttentionCall`.
        Q: number of queries.
        K: number of keys.
        real_query: ``(batch, Q)`` or None.
        real_key: ``(batch, K)`` or None.
        device: where the counts live.
    """
    mask, causal, window = options.get("mask"), bool(options.get("causal")), options.get("window")
    if mask is not None and not (mask.shape[-2] == 1 and mask.shape[1] == 1):
        seen = mask
        if causal or window is not None:
            low, high = _interval(causal, window, Q, K, device)
            j = torch.arange(K, device=device)
            seen = mask & (j >= low[:, None]) & (j < high[:, None])
        visible = seen.sum(-1)
    else:
        low, high = _interval(causal, window, Q, K, device)
        if real_key is None:
            visible = (high - low)[None, None]
        else:
            total = torch.nn.functional.pad(real_key.cumsum(-1), (1, 0))
            visible = (total[:, high] - total[:, low])[:, None]
    visible = visible.expand(*visible.shape[:2], Q)
    counted = visible > 0
    if real_query is not None:
        counted = counted & real_query[:, None]
    everything = bool(counted.all())
    first = None if real_key is None or bool(real_key[:, 0].all()) else real_key.int().argmax(-1)
    return Sight(real_query, real_key, visible, None if everything else counted, first)
