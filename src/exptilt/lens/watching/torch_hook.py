r"""Intercept ``scaled_dot_product_attention`` and ``nn.MultiheadAttention`` of plain PyTorch models.

A torch function mode sees every call of a torch function inside the watch, in the thread that opened it.
`attend` takes the place of `scaled_dot_product_attention`. ``multi_head_attention_forward``, which
`nn.MultiheadAttention` ends in, runs with its inner call of `scaled_dot_product_attention` replaced likewise;
if the caller wants the weights, it runs untouched, and a second run records its queries and keys. While a
mode is on, torch does not use its fused paths for `nn.TransformerEncoderLayer`.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from exptilt.lens.watching.call import OPEN, Intercepted, Request
from exptilt.lens.watching.softmax_hook import Softmaxes
from exptilt.lens.watching.transformers_hook import read_dense

_SDPA = F.scaled_dot_product_attention


class FunctionalMode(TorchFunctionMode):
    """Torch function mode that sends the attention of a model to the functions of its `Intercepted`."""

    def __init__(self, model: Intercepted):
        self.model, self.softmaxes = model, Softmaxes(model, _caller)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _SDPA or function is F.multi_head_attention_forward:
            module, ours = _caller(self.model)
            if ours and function is _SDPA:
                return _attention(self.model, module, self.model.kind(module), False, *args, **(kwargs or {}))
            if ours:
                return self._multihead(module, *args, **(kwargs or {}))
        output = function(*args, **(kwargs or {}))
        self.softmaxes.called(function, args, kwargs, output)
        return output

    def _multihead(
        self, module: nn.Module | None, query: Tensor, key: Tensor, *rest: Any, **keywords: Any
    ) -> Any:
        wanted = keywords.get("need_weights", True)
        if wanted and self.model.quiet:  # torch makes the weights itself, with all their derivatives
            self.model.mark_attended()
            return F.multi_head_attention_forward(query, key, *rest, **keywords)
        inner = partial(_attention, self.model, module, "self" if query is key else "cross", wanted)
        if wanted:
            with torch.no_grad():
                _with_inner(inner)(query, key, *rest, **{**keywords, "need_weights": False})
            return F.multi_head_attention_forward(query, key, *rest, **keywords)
        return _with_inner(inner)(query, key, *rest, **keywords)


def innermost() -> Intercepted | None:
    """The model intercepted last in this thread and not yet given back; None if there is none."""
    return next((x for x in reversed(OPEN) if x.here), None)


def _caller(model: Intercepted) -> tuple[nn.Module | None, bool]:
    """The nearest module up the stack, the model's own first, or None; and whether the call is the model's.

    A call outside all modules counts as the model's.
    """
    frame: Any = sys._getframe(1)
    nearest: nn.Module | None = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            if model.knows(owner):
                return owner, True
            nearest = owner if nearest is None else nearest
        frame = frame.f_back
    return nearest, nearest is None


def _with_inner(inner: Callable[..., Tensor]) -> Callable[..., Any]:
    """`multi_head_attention_forward` that calls `inner` in place of `scaled_dot_product_attention`."""
    original = F.multi_head_attention_forward
    replaced = {"scaled_dot_product_attention": inner, "has_torch_function": lambda _: False}
    names = {**original.__globals__, **replaced}
    copy = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _attention(
    model: Intercepted,
    module: nn.Module | None,
    kind: str,
    only_look: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, recorded; with `only_look` the output is zeros."""
    original = partial(
        _SDPA, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    lead: tuple[int, ...] = cast(Any, torch.broadcast_shapes)(*(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (_four(x, lead) for x in (query, key, value))
    heads, key_heads = max(x.shape[1] for x in (q, k, v)), max(k.shape[1], v.shape[1])
    if not enable_gqa and any(x.shape[1] not in (1, heads) for x in (q, k, v)):
        return original()  # torch raises its own error
    q, k, v = (x.expand(-1, count, -1, -1) for x, count in ((q, heads), (k, key_heads), (v, key_heads)))
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5 if scale is None else float(scale)}
    others = 0 if module is None else model.elsewhere.get(module, 0)
    if 0 < others < k.shape[2] == q.shape[2]:
        kind = "self"  # of its own tokens and the others together, as in diffusers' joint attention
    request = Request(module, kind, q, k, v, options, dropout_p, model.quiet)
    biases = sys.modules.get("torch.nn.attention.bias")  # loaded if a CausalBias was made
    if biases is not None and isinstance(attn_mask, biases.CausalBias):
        lower_right = attn_mask.variant == biases.CausalVariant.LOWER_RIGHT
        is_causal, attn_mask = not lower_right, None
        options |= {"causal": True} if lower_right else {}
    if is_causal:
        request.see_from_the_start()
    if attn_mask is None:
        model.look(request)
    else:
        if attn_mask.dim() > 4 or attn_mask.shape[:-3] not in ((), (1,)):
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:])
        mask = _four(attn_mask, attn_mask.shape[:-3])
        read_dense(mask[..., : request.key.shape[2]], request, model.own_queries(request))
    if dropout_p > 0 or only_look:
        model.mark_attended()
        model.look_at(request)
        if only_look:
            return torch.zeros_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1])
        return original()
    output = model.work_out(request)
    return output.reshape(*lead, *output.shape[1:]) if query.dim() > 2 else output.reshape(*output.shape[2:])


def _four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(batch, heads, length, dim) from (*lead, heads, length, dim); missing axes are 1."""
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])
