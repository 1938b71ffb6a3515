"""One attention call, as a lens sees it: what went into the scores, and the tilted measures that came out.

Everything is as the scores see it: queries and keys after rotary embeddings and per-head norms, grouped key heads not yet repeated. So

    attend(call.query, call.key, call.value, **call.options)

gives `call.tilted` again, and whatever theory says of G, ∇G or the keys can be asked of these tensors without knowing the model.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exptilt.tilting import Tilted


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer did in one forward pass.

    Attributes:
        layer: place among the attention modules of the model, in the order of its definition, from 0.
        name: dotted name of the attention module inside the model.
        module: that module; None for a bare call of `scaled_dot_product_attention` outside any.
        kind: "self" or "cross".
        step: how often this layer was called before in this watch; decoding with a cache calls it once per token.
        query: ``(batch, Hq, Q, D)``.
        key: ``(batch, Hkv, K, D)``; Hkv divides Hq. Keys that a static cache has room for, but does not hold yet, are left out.
        value: ``(batch, Hkv, K, Dv)``.
        options: keyword arguments of `attend`: scale, causal, window, softcap, bias, mask, sink, those that apply.
        real_query: ``(batch, Q)`` booleans, False at padding; None if nothing is padded.
        real_key: ``(batch, K)`` booleans likewise.
        tilted: output and statistics, before dropout; key mass if the watch was asked for it. Detached unless it keeps the graph.
    """

    layer: int
    name: str
    module: nn.Module | None
    kind: str
    step: int
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    real_query: Tensor | None
    real_key: Tensor | None
    tilted: Tilted
