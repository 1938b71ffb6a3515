r"""Plain PyTorch: attention caught on its way through ``scaled_dot_product_attention`` and ``torch.nn.MultiheadAttention``.

A torch function mode sees every call of a torch function inside the watch, in the thread that opened it. `scaled_dot_product_attention` is
done by `attend` instead. ``multi_head_attention_forward``, which `nn.MultiheadAttention` ends in, is run with its own inner call of
`scaled_dot_product_attention` replaced likewise; where it makes the weights itself because they are wanted, it runs untouched and its
queries and keys are looked at in a second run. While a mode is on, torch leaves its fused paths for `nn.TransformerEncoderLayer` aside.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from exptilt.attention import attend
from exptilt.lens.interface import dense_sight, split_mask
from exptilt.lens.sight import look

if TYPE_CHECKING:
    from exptilt.lens.watch import Watch

_SDPA = F.scaled_dot_product_attention


class FunctionalMode(TorchFunctionMode):
    """Sends attention through a watch."""

    def __init__(self, watch: "Watch"):
        self.watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _SDPA:
            return _attention(self.watch, self._caller(), self.watch.kind, *args, **(kwargs or {}))
        if function is F.multi_head_attention_forward:
            return self._multihead(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _caller(self) -> nn.Module | None:
        """The nearest module of the model up the stack."""
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self.watch.layers:
                return owner
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def _multihead(self, query: Tensor, key: Tensor, *rest: Any, **keywords: Any) -> Any:
        module = self._caller()
        kind = "self" if query is key else "cross"
        wanted = keywords.get("need_weights", True)

        def inner(*args: Any, **kwargs: Any) -> Tensor:
            return _attention(self.watch, module, lambda _: kind, *args, only_look=wanted, **kwargs)

        if wanted:
            with torch.no_grad():
                _with_inner(inner)(query, key, *rest, **{**keywords, "need_weights": False})
            return F.multi_head_attention_forward(query, key, *rest, **keywords)
        return _with_inner(inner)(query, key, *rest, **keywords)


def _with_inner(inner: Callable[..., Tensor]) -> Callable[..., Any]:
    """`multi_head_attention_forward` with another function in the place of `scaled_dot_product_attention`."""
    original = F.multi_head_attention_forward
    names = {**original.__globals__, "scaled_dot_product_attention": inner, "has_torch_function": lambda _: False}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _attention(
    watch: "Watch", module: nn.Module | None, kind_of: Callable[[nn.Module | None], str], query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, only_look: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` with the same arguments, recorded."""
    lead, kind = query.shape[:-3], kind_of(module)
    q, k, v = (_four(x) for x in (query, key, value))
    N = max(x.shape[0] for x in (q, k, v))
    q, k, v = (x.expand(N, *x.shape[1:]) for x in (q, k, v))
    Q, K = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5 if scale is None else float(scale)}
    if is_causal and Q <= K:
        k, v, options["causal"] = k[:, :, :Q], v[:, :, :Q], True
        K = Q
    elif is_causal:
        attn_mask = torch.ones(Q, K, dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        sight = look(options, Q, K, watch.own_queries(q) if kind == "cross" else None, None, q.device)
    else:
        mask = attn_mask
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        mask = mask.flatten(0, -4) if mask.dim() > 4 else mask
        seen, bias = split_mask(mask, K)
        sight = dense_sight(seen, Q, K, kind, watch.own_queries(q) if kind == "cross" else None, q)
        options |= {name: x for name, x in (("mask", seen), ("bias", bias)) if x is not None}
    if dropout_p > 0 or only_look:
        with torch.no_grad():
            watch.note(module, kind, q, k, v, options, sight, attend(q, k, v, **options))
        if only_look:
            return torch.zeros_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1])
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    output = watch.attend(module, kind, q, k, v, options, sight)
    return output.reshape(*lead, *output.shape[1:]) if query.dim() > 3 else output.reshape(*query.shape[:-1], value.shape[-1])


def _four(x: Tensor) -> Tensor:
    """(batch, heads, length, dim); missing axes are 1, further ones are joined into batch."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4) if x.dim() > 4 else x
