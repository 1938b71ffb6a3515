r"""The attention function that a watched transformers model calls: its arguments brought to those of `attend`.

A transformers model hands queries, keys, values, a mask and a number of keywords to whatever function its configuration names. Those
keywords that change scores are translated; those known to change nothing are listed here by name; any other raises, since a
score-changing option silently dropped would give wrong numbers.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.lens.heads.visibility import Sight, look
from exptilt.lens.watching.masks import RuleMask

if TYPE_CHECKING:
    from exptilt.lens.watching.watch import Watch

# What models pass along that says nothing about scores: bookkeeping of caches, positions already in the queries and keys, hints to kernels
# whose content is in the mask as well, and what is asked of the model as a whole. Not here: `cache`, which the attention function would
# have to fill itself, and `indices` and `block_indices` of sparse attention, which models put into the mask only for
# implementations they know.
HARMLESS = {
    *(
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "past_key_value",
        "past_key_values",
    ),
    *(
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "cu_seqlens",
        "max_seqlen",
        "seq_idx",
        "sliding_window",
    ),
    *("deterministic", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    *(
        "logits_to_keep",
        "layer_idx",
        "token_type_ids",
        "input_ids",
        "labels",
        "synced_gpus",
        "return_dict_in_generate",
    ),
}


def _refuse(watch: "Watch", module: nn.Module, what: str) -> ArgumentError:
    return ArgumentError(
        f"watch: {watch.model_name} ({type(module).__name__} {watch.layers.name(module)!r}) {what}"
    )


def attention_function(
    watch: "Watch", module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
    scaling: float | Tensor | None = None, dropout: float = 0.0, is_causal: bool | None = None, position_bias: Tensor | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as transformers asks, and record. Arguments other than `watch` are those of its attention interface.

    Args:
        watch: the open watch.
        module: the attention module.
        query: ``(batch, Hq, Q, D)``.
        key: ``(batch, Hkv, K, D)``.
        value: ``(batch, Hkv, K, Dv)``.
        attention_mask: a `RuleMask`, a dense mask ``(batch or 1, Hq or 1, Q or 1, K)``, boolean or to be added, or None.
        scaling: factor of <q,k>; 1/sqrt(D) if None.
        dropout: probability with which a weight is dropped.
        is_causal: used only where there is no mask; the module's own attribute if None.
        position_bias: ``(batch or 1, Hq, Q, K)``, added to the scores.
        softcap: c, for scores c·tanh(s/c).
        s_aux: ``(Hq,)``, scores of the sink.

    Returns:
        ``(batch, Q, Hq, Dv)``, and None for the weights, which are never made.
    """
    for name, given in others.items():
        if name == "output_attentions" and given:
            raise _refuse(
                watch,
                module,
                "is asked for output_attentions, the n×n weights that a watch does not make. Ask for them outside the watch.",
            )
        if given is not None and name not in HARMLESS and name != "output_attentions":
            raise _refuse(
                watch,
                module,
                f"passes {name!r} to attention, and watch does not know whether that changes scores.",
            )
    if s_aux is None and isinstance(getattr(module, "sinks", None), Tensor):
        raise _refuse(
            watch,
            module,
            "has sinks but does not pass them to its attention function as s_aux; watch cannot include them.",
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise _refuse(
            watch,
            module,
            f"has {query.shape[1]} query heads and {key.shape[1]} key heads; the second must divide the first.",
        )
    options: dict[str, Any] = {}
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling.to(query.dtype), 1.0
    options["scale"] = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if softcap is not None:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["sink"] = s_aux.to(query.dtype)
    kind = watch.kind(module)
    if attention_mask is None:
        causal = kind == "self" and watch.is_causal(module, is_causal)
        key, value, position_bias, sight = _without_mask(
            watch, query, key, value, position_bias, kind, causal, options
        )
    elif isinstance(attention_mask, RuleMask):
        key, value, position_bias, sight = _with_rule(
            watch, attention_mask, query, key, value, position_bias, kind, options
        )
    else:
        sight = _with_dense(watch, attention_mask, query, key, kind, options)
    if position_bias is not None:
        bias = options.get("bias")
        options["bias"] = (
            position_bias.to(query.dtype) if bias is None else position_bias.to(query.dtype) + bias
        )
    output = watch.attend(module, kind, query, key, value, options, sight, dropout)
    return output.transpose(1, 2).contiguous(), None


def _cut(x: Tensor | None, K: int) -> Tensor | None:
    """The part of a bias that belongs to the first K keys."""
    return x if x is None or x.shape[-1] in (1, K) else x[..., :K]


def _without_mask(
    watch: "Watch",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    kind: str,
    causal: bool,
    options: dict[str, Any],
) -> Any:
    """As transformers' own sdpa: no mask and a causal module mean that query i sees keys 0..i; one query alone sees all keys."""
    Q, K = query.shape[2], key.shape[2]
    if causal and 1 < Q <= K:
        options["causal"] = True
        K = Q
        key, value = key[:, :, :K], value[:, :, :K]
    elif causal and Q > K:
        options["mask"] = torch.ones(Q, K, dtype=torch.bool, device=query.device).tril()[None, None]
    real_query = watch.own_queries(query) if kind == "cross" else None
    return key, value, _cut(bias, K), look(options, Q, K, real_query, None, query.device)


def _with_rule(
    watch: "Watch",
    mask: RuleMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    kind: str,
    options: dict[str, Any],
) -> Any:
    """Causality, window and padding from the rule; the dense mask where `attend` does not know the rule or sequences end apart."""
    Q, K = query.shape[2], key.shape[2]
    rule, own = mask.rule, watch.own_queries(query) if kind == "cross" else None
    end = mask.query_offset - mask.key_offset + Q  # place of the last query among the keys, plus one
    fits = rule is not None and mask.shape[2] == Q and mask.shape[3] == K
    if rule is not None and rule.causal:
        fits = fits and Q <= end <= K
    elif rule is not None and rule.window is not None:
        fits = fits and end == K
    dense = None if fits else _fitting(watch, mask.dense(), Q, K)
    if fits and rule is not None and rule.causal:
        K = end  # a static cache is longer than what it holds
        key, value = key[:, :, :K], value[:, :, :K]
        options["causal"] = True
    if fits and rule is not None and rule.window is not None and rule.window < K:
        options["window"] = rule.window
    place = (kind, K, id(own))
    if place not in mask.sights:
        real_key = mask.positions(mask.key_offset, K)
        real_query = own if kind == "cross" else mask.positions(mask.query_offset, Q)
        shown = dense if dense is not None else None if real_key is None else real_key[:, None, None]
        mask.sights[place] = shown, look({**options, "mask": shown}, Q, K, real_query, real_key, query.device)
    shown, sight = mask.sights[place]
    if shown is not None:
        options["mask"] = shown
    return key, value, _cut(bias, K), sight


def _fitting(watch: "Watch", mask: Tensor, Q: int, K: int) -> Tensor:
    """A dense mask, cut to the keys."""
    if mask.dim() != 4 or mask.shape[3] < K or mask.shape[2] not in (1, Q):
        shape = tuple(mask.shape)
        raise ArgumentError(
            f"watch: {watch.model_name} gives {Q} queries and {K} keys a mask of shape {shape}. It must be 4-D and fit."
        )
    return mask if mask.shape[3] == K else mask[..., :K]


def _with_dense(
    watch: "Watch", mask: Tensor, query: Tensor, key: Tensor, kind: str, options: dict[str, Any]
) -> Sight:
    """A mask of the model's or the user's own making, used as it is; numbers at the bottom of their type hide a key."""
    Q, K = query.shape[2], key.shape[2]
    _fitting(watch, mask, Q, K)
    seen, bias, sight = watch.dense_sight(mask, Q, K, kind, query)
    if seen is not None:
        options["mask"] = seen
    if bias is not None:
        options["bias"] = bias.to(query.dtype)
    return sight


def split_mask(mask: Tensor, K: int) -> tuple[Tensor | None, Tensor | None]:
    """Booleans (True shows) and numbers to add, of which either may be None, from a dense mask."""
    mask = mask[..., :K]
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ArgumentError(
            f"watch: a mask of dtype {mask.dtype} says neither True and False nor what to add. Pass booleans or floats."
        )
    seen = mask > torch.finfo(mask.dtype).min / 2
    adds = mask.requires_grad or bool(((mask != 0) & seen).any())
    return (None if bool(seen.all()) else seen), (mask.masked_fill(~seen, 0.0) if adds else None)


def dense_sight(
    seen: Tensor | None, options: dict[str, Any], Q: int, K: int, kind: str, own: Tensor | None, query: Tensor
) -> Sight:  # fmt: skip
    """Sight of a dense mask: a key that nobody sees is padding, and in self-attention so is the query at its place.

    Args:
        seen: ``(batch or 1, Hq or 1, Q or 1, K or 1)`` booleans, or None for a mask that hides nothing.
        options: causal and window, if they apply beside the mask.
        Q: number of queries.
        K: number of keys.
        kind: "self" or "cross".
        own: ``(batch, Q)``, for cross-attention: which queries are real, None for all.
        query: ``(batch, Hq, Q, D)``.
    """
    real_query = own if kind == "cross" else None
    if seen is None:
        return look(options, Q, K, real_query, None, query.device)
    seen = seen.expand(*seen.shape[:3], K)
    real_key: Tensor | None = seen.any(1).any(1).expand(query.shape[0], K)
    if real_key is not None and bool(real_key.all()):
        real_key = None
    elif kind == "self" and Q == K:
        real_query = real_key
    return look({**options, "mask": seen}, Q, K, real_query, real_key, query.device)
