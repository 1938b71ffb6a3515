r"""A tilting problem in its canonical form.

Scores, the same for every backend:

    s_ij = softcap(scale <q_i, k_j>) + bias_ij + log_weight_j,     −inf where key j is hidden from query i.

`Tensors` holds what the scores are made of, with one batch axis N in front: query (N, Hq, Q, D), key (N, Hkv, K, D),
value (N, Hkv, K, Dv; Dv = 0 when only G is wanted), bias and mask (N or 1, Hq or 1, Q or 1, K or 1) or None, log_weight
(N, Hkv or Hq, K) or None. Query head h reads key head h // (Hq/Hkv). `Options` holds the numbers. A sink is not part of the scores:
it is one more outcome, joined in afterwards (``rules.py``).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What is not a tensor: the scale, who sees whom, the softcap."""

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None


class Tensors(NamedTuple):
    """What scores are made of; shapes in the module's docstring."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    log_weight: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """Which derivatives a backward sweep is asked for."""

    query: bool = True
    key: bool = True
    value: bool = True
    log_weight: bool = True
    bias: bool = True

    def flags(self) -> list[bool]:
        """The five, in order."""
        return [self.query, self.key, self.value, self.log_weight, self.bias]


class Gradients(NamedTuple):
    """What a backward sweep yields; of size 0 where not asked for.

    query (N, Hq, Q, D), key (N, Hkv, K, D), value (N, Hkv, K, Dv), column_sum (N, Hq, K) and row_sum (N, Hq, Q) of the derivative by
    the scores, and that derivative itself summed to bias's shape where bias has both a query and a key axis.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    column_sum: Tensor
    row_sum: Tensor
    bias: Tensor


def has_full_bias(t: Tensors) -> bool:
    """Whether the bias differs both by query and by key; otherwise its gradient is a row or column sum."""
    return t.bias is not None and t.bias.shape[2] > 1 and t.bias.shape[3] > 1


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """(N, Hkv, ...) → (N, heads, ...): each key head repeated for the query heads that read it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def per_key_head(x: Tensor, heads: int) -> Tensor:
    """(N, Hq, ...) → (N, heads, ...): summed over the query heads that read a key head."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def visibility(options: Options, length_q: int, start: int, stop: int, length_k: int, device: torch.device) -> Tensor | None:
    """(Q, stop − start) booleans, which of the keys start..stop each query may see; None if all of them."""
    if not options.causal and options.window is None:
        return None
    own = torch.arange(length_q, device=device)[:, None] + (length_k - length_q)
    j = torch.arange(start, stop, device=device)[None, :]
    seen = torch.ones(length_q, stop - start, dtype=torch.bool, device=device)
    if options.causal:
        seen = seen & (j <= own)
    if options.window is not None:
        seen = seen & (own - j < options.window)
        if not options.causal:
            seen = seen & (j - own < options.window)
    return seen
