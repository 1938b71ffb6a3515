r"""The attention function of a watched transformers model: translates its arguments to those of `attend`.

A transformers model hands queries, keys, values, a mask and a number of keywords to whatever function its
configuration names. Those keywords that change scores are translated; those known to change nothing are
listed here by name; any other raises, since a score-changing option silently dropped would give wrong
numbers.

The function is registered with transformers under a name of its own. A model that was loaded with
``attn_implementation="exptilt"`` attends by it also where nothing is watched: `attend` then gives the output,
with all derivatives.
"""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.lens.watching.call import OPEN, Intercepted, Request
from exptilt.lens.watching.masks import RuleMask, make_mask, real_keys, split_mask
from exptilt.tilting import attend

NAMES = {False: "exptilt", True: "exptilt-eager"}
"""Names of our attention with transformers; the second takes the place of eager attention."""

# Keywords that do not affect scores: bookkeeping of caches, positions already in the queries and keys, hints
# to kernels whose content is in the mask as well, and requests to the model as a whole. Not listed: `cache`,
# which the attention function would have to fill itself, and `indices` and `block_indices` of sparse
# attention, which models put into the mask only for implementations they know.
HARMLESS = {
    *("position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_value"),
    *("past_key_values", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens"),
    *("max_seqlen", "seq_idx", "sliding_window", "deterministic", "output_hidden_states"),
    *("output_attentions", "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep"),
    *("layer_idx", "token_type_ids", "input_ids", "labels", "synced_gpus", "return_dict_in_generate"),
}


def register() -> None:
    """Register exptilt's attention with transformers, as ``attn_implementation="exptilt"``; returns nothing.

    A model can then be loaded, trained and differentiated with it, and watched as any other:

        >>> from transformers import GPT2Config, GPT2Model
        >>> xt.lens.register()
        >>> model = GPT2Model._from_config(GPT2Config(n_layer=1), attn_implementation="exptilt")
        >>> model.config._attn_implementation
        'exptilt'

    It stays registered until Python ends. Registering again changes nothing.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as problem:
        raise MissingExtraError("transformers", "hf") from problem
    for eager, name in NAMES.items():
        if name not in AttentionInterface._global_mapping:
            AttentionInterface.register(name, partial(attention_function, eager))
            AttentionMaskInterface.register(name, partial(make_mask, eager=eager))


def uncast(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Wrap a function of a request: it runs outside autocast, on the request cast as autocast would."""

    def called(r: Request) -> Any:
        device = r.query.device.type
        if not torch.is_autocast_enabled(device):
            return function(r)
        r.cast(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return function(r)

    return called


@uncast
def _attend(r: Request) -> Tensor:
    """The output of a request, of which nothing is recorded."""
    return attend(r.query, r.key, r.value, **r.options, check=False, dropout=r.dropout).output


# The model to which calls belong that no one has taken over in their thread.
_NOBODY = Intercepted(nn.Module(), _attend, lambda _: None, lambda *_: None, quiet=True)


def _taken_over(module: nn.Module) -> Intercepted:
    """The model that was taken over last in this thread and knows a module; `_NOBODY` if there is none."""
    thread = get_ident()
    return next((x for x in reversed(OPEN) if x.thread == thread and x.knows(module)), _NOBODY)


def attention_function(
    eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Output ``(batch, Q, Hq, Dv)`` of one attention call, and None for the weights, which are never made.

    `eager` says that the model's own attention is eager, which without a mask sees everything. Other
    arguments are those of transformers' attention interface: query ``(batch, Hq, Q, D)``; a mask that is
    None, a `RuleMask`, or dense ``(batch or 1, Hq or 1, Q or 1, K)``, boolean or to be added; s_aux
    ``(Hq,)``, the scores of a sink.
    """
    model = _taken_over(module)
    _refuse(model, module, query, key, s_aux, others)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling.to(query.dtype), 1.0
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling)}
    if softcap is not None:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["sink"] = s_aux.to(query.dtype)
    request = Request(module, model.kind(module), query, key, value, options, dropout, model.quiet)
    if attention_mask is None:
        causal = not eager and request.kind == "self" and model.is_causal(module, is_causal)
        without_mask(model, request, causal)
    elif isinstance(attention_mask, RuleMask):
        if attention_mask.skipped and not model.is_causal(module, is_causal):
            without_mask(model, request, False)
        else:
            _with_rule(model, attention_mask, request)
    else:
        _with_dense(model, attention_mask, request)
    if position_bias is not None:
        bias, K = position_bias.to(query.dtype), request.key.shape[2]
        bias = bias if bias.shape[-1] in (1, K) else bias[..., :K]
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    return model.work_out(request).transpose(1, 2).contiguous(), None


def _refuse(
    model: Intercepted,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    sink: Tensor | None,
    others: dict[str, Any],
) -> None:
    """Raise for arguments that a watch cannot honour, or that may change scores in an unknown way."""
    heads, key_heads = query.shape[1], key.shape[1]
    sinks = sink is None and isinstance(getattr(module, "sinks", None), Tensor)
    strange = ", ".join(repr(x) for x, given in others.items() if given is not None and x not in HARMLESS)
    for wrong, text in (
        (
            others.get("output_attentions"),
            "is asked for output_attentions, the n×n weights that a watch does not make. Ask for them "
            "outside.",
        ),
        (strange, f"passes {strange} to attention, and watch does not know whether that changes scores."),
        (sinks, "has sinks but does not pass them to attention as s_aux; watch cannot include them."),
        (
            key_heads == 0 or heads % key_heads,
            f"has {heads} query heads and {key_heads} key heads; the second must divide the first.",
        ),
    ):
        if wrong:
            name = f"{type(module).__name__} {model.modules.name(module)!r}"
            raise ArgumentError(f"watch: {model.name} ({name}) {text}")


def without_mask(model: Intercepted, request: Request, causal: bool) -> None:
    """Complete a request without a mask as transformers' sdpa does: if `causal`, query i sees keys 0..i.

    A single query sees all keys.
    """
    if causal and request.query.shape[2] > 1:
        request.see_from_the_start()
    model.look(request)


def _with_rule(model: Intercepted, mask: RuleMask, request: Request) -> None:
    """Complete a request by the mask's rule, or by the dense mask if `attend` does not know the rule."""
    (Q, K), rule, options = request.lengths, mask.rule, request.options
    query_offset, key_offset = mask.offsets
    end = query_offset - key_offset + Q  # place of the last query among the keys, plus one
    fits = rule is not None and tuple(mask.shape[2:]) == (Q, K)
    if fits and rule is not None and rule.causal:
        fits = Q <= end <= K
    elif fits and rule is not None and rule.window is not None:
        fits = end == K
    if fits and rule is not None:
        if rule.causal:
            request.keep_keys(end)  # a static cache is longer than what it holds
            options["causal"] = True
        if rule.window is not None and rule.window < request.key.shape[2]:
            options["window"] = rule.window
    K, own, known = request.key.shape[2], model.own_queries(request), model.masks.of(mask)
    place = (request.kind, K, id(own))
    if place not in known:
        real_key = mask.positions(key_offset, K)
        real_query = own if request.kind == "cross" else mask.positions(query_offset, Q)
        shown = None if real_key is None else real_key[:, None, None]
        shown = shown if fits else _fitting(model, mask.shown(), request)
        if shown is not None:
            options["mask"] = shown
        request.look(real_query, real_key)
        known[place] = shown, getattr(request, "visible", None)
    shown, request.visible = known[place]
    if shown is not None:
        options["mask"] = shown


def _fitting(model: Intercepted, mask: Tensor, request: Request) -> Tensor:
    """A dense mask cut to the number of keys; raises if it does not fit the request."""
    Q, K = request.lengths
    if mask.dim() != 4 or mask.shape[3] < K or mask.shape[2] not in (1, Q):
        shape = tuple(mask.shape)
        raise ArgumentError(
            f"watch: {model.name} gives {Q} queries and {K} keys a mask of shape {shape}. "
            "It must be 4-D and fit."
        )
    return mask[..., :K]


def _with_dense(model: Intercepted, mask: Tensor, request: Request) -> None:
    """Complete a request by a dense mask of the model's or the user's own making."""
    known, own = model.masks.of(mask), model.own_queries(request)
    cut = _fitting(model, mask, request)
    place = (request.kind, request.lengths, id(own), request.query.shape[0])
    if place not in known:
        read_dense(cut, request, own)
        found = request.options.get("mask"), request.options.get("bias")
        known[place] = *found, getattr(request, "visible", None)
    seen, bias, request.visible = known[place]
    if seen is not None:
        request.options["mask"] = seen
    if bias is not None:
        request.options["bias"] = bias.to(request.query.dtype)


def read_dense(mask: Tensor, request: Request, own: Tensor | None) -> None:
    """Put a dense mask ``(batch or 1, Hq or 1, Q or 1, K)`` into the options, joined with any mask there.

    A key that nobody sees is padding, and in self-attention so is the query at its place; `own` says which
    queries ``(batch, Q)`` of cross-attention are real.
    """
    (Q, K), options = request.lengths, request.options
    if (there := options.pop("mask", None)) is not None:
        mask = mask & there if mask.dtype == torch.bool else mask.masked_fill(~there, -torch.inf)
    seen, bias = split_mask(mask)
    real_key = None if request.quiet else real_keys(seen, request.query.shape[0], K)
    real_query = real_key if request.kind == "self" and Q == K and real_key is not None else own
    options |= {name: x for name, x in (("mask", seen), ("bias", bias)) if x is not None}
    request.look(real_query, real_key)
