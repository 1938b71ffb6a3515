"""A cache for Hugging Face models that compacts itself as it grows.

Once a layer holds `fresh` keys more than its budget, all keys but the last few are replaced by weighted ones
(`exptilt.compact`), found with the queries of the last tokens, rotated on to the next `fresh` places. The
cache is a running filter: what is compact already is made smaller again together with what has come since.
Log-weights reach the scores through exptilt's attention, which the model must be set to.
"""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exptilt._support import checks
from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.attention.compaction import compact, share_budget

if TYPE_CHECKING:
    from transformers import Cache


def compact_cache(
    model: nn.Module, budget: int, *, fresh: int = 256, recent: int = 32, queries: int = 1024
) -> "Cache":
    """A cache of transformers for `model` that holds about `budget` keys a layer, however long the text.

    Pass it as ``past_key_values`` to the model or to ``model.generate``. One cache serves one text, or one
    batch of texts without padding.

    Args:
        model: a transformers model set to exptilt's attention: ``xt.lens.register()``, then
            ``model.set_attn_implementation("exptilt")``.
        budget: keys to leave in each layer and head, on average over layers: those with a larger error get
            more.
        fresh: keys beyond its budget at which a layer is made smaller.
        recent: how many of the last keys stay as they are, on top of the budget.
        queries: how many queries of the last tokens are kept, to compact with. Many are needed: a key that
            none of them attends to may be lost. They take memory as well, whatever the length of the text: as
            much as so many keys for each query head.

    Returns:
        A ``transformers.Cache``; ``compactions`` counts how often it was made smaller.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=50,
        ...     hidden_size=32,
        ...     intermediate_size=32,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=4,
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> xt.lens.register()
        >>> model.set_attn_implementation("exptilt")
        >>> cache = xt.lens.compact_cache(model, 16, fresh=16, recent=8)
        >>> text = 1 + torch.arange(100)[None] % 49
        >>> made = model.generate(
        ...     text, past_key_values=cache, max_new_tokens=30, do_sample=False, pad_token_id=0
        ... )
        >>> cache.get_seq_length(), cache.layers[0].keys.shape[-2] < 60
        (129, True)
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "exptilt":
        raise ArgumentError(
            "compact_cache: the model does not attend by exptilt, which adds compact keys' log-weights. "
            'Call xt.lens.register() and model.set_attn_implementation("exptilt").'
        )
    checks.whole("compact_cache", "recent", recent, least=0)
    for name, x in (("budget", budget), ("fresh", fresh), ("queries", queries)):
        checks.whole("compact_cache", name, x)
    made: Cache = _classes()[1](model, budget, fresh, recent, queries)
    return made


def moved_on(model: nn.Module, module: nn.Module, query: Tensor, places: int) -> Tensor:
    """Rotated queries ``(..., D)`` as they would be so many places later; unchanged without rotary positions.

    Rotations of a plane add up, so the model's own rotation is applied once more.
    """
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    rotary = next((m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None)
    if rotate is None or rotary is None:
        return query
    at = torch.tensor([[places]], device=query.device)
    cos, sin = (x / getattr(rotary, "attention_scaling", 1.0) for x in rotary(query, at))
    return rotate(query, query, cos, sin)[0]  # type: ignore[no-any-return]


def at_next_places(model: nn.Module, module: nn.Module, query: Tensor, span: int) -> Tensor:
    """Rotated queries ``(..., Q, D)`` of the last Q tokens, moved to the next `span` places, in turn.

    Queries to come will stand there, and a query attends to other keys from another place.
    """
    Q = query.shape[-2]
    pieces = query.split(span, -2)
    return torch.cat([moved_on(model, module, x, Q - i * span) for i, x in enumerate(pieces)], -2)


@cache
def _classes() -> tuple[type, type]:
    """The classes of a layer and of the cache; transformers is loaded only when one is asked for."""
    try:
        from transformers import cache_utils
    except ImportError as problem:
        raise MissingExtraError("transformers", "hf") from problem

    Cache: Any = cache_utils.Cache
    DynamicLayer: Any = cache_utils.DynamicLayer

    class CompactLayer(DynamicLayer):  # type: ignore[misc]
        """Keys and values of one layer, their log-weights, and the last queries that read them."""

        is_croppable = False

        def __init__(self) -> None:
            super().__init__()
            self.total, self.keep = 0, 1
            self.log_weight: Tensor | None = None
            self.query: Any = None
            self.module: Any = None

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            keys, values = super().update(key_states, value_states)
            self.total += key_states.shape[-2]
            new = keys.new_zeros(key_states.shape[:-1], dtype=torch.promote_types(keys.dtype, torch.float32))
            self.log_weight = new if self.log_weight is None else torch.cat([self.log_weight, new], -1)
            keys = keys[:]
            keys.compact_layer = self  # exptilt's attention finds the log-weights by it
            return keys, values

        def read(self, module: nn.Module, query: Tensor, mask: Any) -> dict[str, Any]:
            """Options of `attend` for queries that read this layer, which are kept for compaction."""
            rule = getattr(mask, "rule", None)
            padded = mask is not None and (rule is None or mask.positions(0, self.total) is not None)
            if padded or (rule is not None and (not rule.causal or rule.window is not None)):
                raise ArgumentError(
                    "compact_cache: a mask of padding, of a window or of the user's own needs the position "
                    "of each key, which compact keys do not have. Pass texts of one length without padding."
                )
            query = query.detach()
            self.module = module
            self.query = query if self.query is None else torch.cat([self.query, query], -2)
            self.query = self.query[..., -self.keep :, :]
            return {"log_weight": self.log_weight, "causal": query.shape[-2] > 1}

        def get_seq_length(self) -> int:
            return self.total

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            held = self.keys.shape[-2] if self.is_initialized else 0
            return held + query_length, self.total - held

        def reset(self) -> None:
            super().reset()
            self.total, self.log_weight, self.query = 0, None, None

        def crop(self, tokens_to_remove: int) -> None:
            if tokens_to_remove:
                raise ArgumentError("compact_cache: tokens cannot be taken back out of compact keys.")

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._of_batch(lambda x: x.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            self._of_batch(lambda x: x[indices])

        def _of_batch(self, change: Any) -> None:
            for name in ("keys", "values", "log_weight", "query"):
                x = getattr(self, name)
                setattr(self, name, x if x is None else change(x))

    class CompactCache(Cache):  # type: ignore[misc]
        """A cache that compacts all layers before the first one grows too long."""

        def __init__(self, model: nn.Module, budget: int, fresh: int, recent: int, queries: int):
            super().__init__(layer_class_to_replicate=CompactLayer)
            self.model, self.budget, self.fresh = model, budget, fresh
            self.recent, self.queries, self.compactions = recent, queries, 0

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *given: Any, **more: Any
        ) -> Any:
            if layer_idx == 0:
                held = sum(x.keys.shape[-2] for x in self.layers if x.is_initialized)
                if held > (self.budget + self.recent + self.fresh) * max(1, len(self.layers)):
                    self.compact()
            found = super().update(key_states, value_states, layer_idx, *given, **more)
            self.layers[layer_idx].keep = self.queries
            return found

        @torch.no_grad()
        def compact(self) -> None:
            """Make all layers smaller: `recent` keys as they are, and `budget` on average for the others."""
            if any(x.query is None for x in self.layers):
                raise ArgumentError(
                    "compact_cache: no queries were seen. The model must attend by exptilt while the cache "
                    'is in use: model.set_attn_implementation("exptilt").'
                )
            old = [x.keys.shape[-2] - self.recent for x in self.layers]
            layers = [
                {
                    "key": x.keys[..., :n, :],
                    "value": x.values[..., :n, :],
                    "queries": at_next_places(self.model, x.module, x.query, self.fresh),
                    "log_weight": x.log_weight[..., :n],
                    "scale": x.module.scaling,
                }
                for x, n in zip(self.layers, old, strict=True)
            ]
            budgets = share_budget(layers, self.budget)
            for x, layer, n, budget in zip(self.layers, layers, old, budgets, strict=True):
                if budget < n:
                    few = compact(budget=budget, **layer)
                    x.keys = torch.cat([few.key, x.keys[..., n:, :]], -2)
                    x.values = torch.cat([few.value, x.values[..., n:, :]], -2)
                    x.log_weight = torch.cat([few.log_weight, x.log_weight[..., n:]], -1)
            self.compactions += 1

    return CompactLayer, CompactCache
