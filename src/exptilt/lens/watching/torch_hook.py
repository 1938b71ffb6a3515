r"""Plain PyTorch: attention caught on its way through ``scaled_dot_product_attention`` and ``torch.nn.MultiheadAttention``.

A torch function mode sees every call of a torch function inside the watch, in the thread that opened it. `scaled_dot_product_attention` is
done by `attend` instead. ``multi_head_attention_forward``, which `nn.MultiheadAttention` ends in, is run with its own inner call of
`scaled_dot_product_attention` replaced likewise; where it makes the weights itself because they are wanted, it runs untouched and its
queries and keys are looked at in a second run. While a mode is on, torch leaves its fused paths for `nn.TransformerEncoderLayer` aside.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from exptilt._support.transforms import function_modes
from exptilt.attention import attend
from exptilt.lens.heads.visibility import look
from exptilt.lens.watching.transformers_hook import dense_sight, split_mask

if TYPE_CHECKING:
    from exptilt.lens.watching.watch import Watch

_SDPA = F.scaled_dot_product_attention


class FunctionalMode(TorchFunctionMode):
    """Sends attention through a watch."""

    def __init__(self, watch: "Watch"):
        self.watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _SDPA or function is F.multi_head_attention_forward:
            module, ours = _caller(self.watch)
            if ours and function is _SDPA:
                return _attention(self.watch, module, self.watch.kind(module), False, *args, **(kwargs or {}))
            if ours:
                return self._multihead(module, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _multihead(
        self, module: nn.Module | None, query: Tensor, key: Tensor, *rest: Any, **keywords: Any
    ) -> Any:
        kind = "self" if query is key else "cross"
        wanted = keywords.get("need_weights", True)

        def inner(*args: Any, **kwargs: Any) -> Tensor:
            return _attention(self.watch, module, kind, wanted, *args, **kwargs)

        if wanted:
            with torch.no_grad():
                _with_inner(inner)(query, key, *rest, **{**keywords, "need_weights": False})
            return F.multi_head_attention_forward(query, key, *rest, **keywords)
        return _with_inner(inner)(query, key, *rest, **keywords)


def open_watch() -> "Watch | None":
    """The watch that was opened last in this thread and is still open."""
    modes = [mode for mode in function_modes() if isinstance(mode, FunctionalMode)]
    return modes[-1].watch if modes else None


def _caller(watch: "Watch") -> tuple[nn.Module | None, bool]:
    """The nearest module up the stack, None if there is none; and whether it is one of the watched model's (or there is none)."""
    frame = sys._getframe(2)
    nearest: nn.Module | None = None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            if watch.knows(owner):
                return owner, True
            nearest = owner if nearest is None else nearest
        frame = frame.f_back  # type: ignore[assignment]
    return nearest, nearest is None


def _with_inner(inner: Callable[..., Tensor]) -> Callable[..., Any]:
    """`multi_head_attention_forward` with another function in the place of `scaled_dot_product_attention`."""
    original = F.multi_head_attention_forward
    names = {
        **original.__globals__,
        "scaled_dot_product_attention": inner,
        "has_torch_function": lambda _: False,
    }
    copy = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _attention(
    watch: "Watch", module: nn.Module | None, kind: str, only_look: bool, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` with its own arguments, recorded; `only_look` leaves the output out."""
    original = partial(
        _SDPA, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    q, k, v = (_four(x, lead) for x in (query, key, value))
    heads = max(x.shape[1] for x in (q, k, v))
    if not enable_gqa and any(x.shape[1] not in (1, heads) for x in (q, k, v)):
        return original()  # torch says what is wrong
    q, k, v = (
        q.expand(-1, heads, -1, -1),
        *(x.expand(-1, max(k.shape[1], v.shape[1]), -1, -1) for x in (k, v)),
    )
    Q, K = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5 if scale is None else float(scale)}
    if is_causal and Q <= K:
        k, v, options["causal"] = k[:, :, :Q], v[:, :, :Q], True
        K = Q
    elif is_causal:
        triangle = torch.ones(Q, K, dtype=torch.bool, device=q.device).tril()
        if attn_mask is None:
            attn_mask = triangle
        else:
            attn_mask = (
                attn_mask & triangle
                if attn_mask.dtype == torch.bool
                else attn_mask.masked_fill(~triangle, -torch.inf)
            )
    if attn_mask is None:
        sight = look(options, Q, K, watch.own_queries(q) if kind == "cross" else None, None, q.device)
    else:
        mask = (
            attn_mask
            if attn_mask.dim() <= 4 and attn_mask.shape[:-3] in ((), (1,))
            else attn_mask.expand(*lead, *attn_mask.shape[-3:])
        )
        mask = _four(mask, mask.shape[:-3])
        seen, bias = split_mask(mask, K)
        sight = dense_sight(seen, options, Q, K, kind, watch.own_queries(q) if kind == "cross" else None, q)
        options |= {name: x for name, x in (("mask", seen), ("bias", bias)) if x is not None}
    if dropout_p > 0 or only_look:
        with torch.no_grad():
            watch.note(module, kind, q, k, v, options, sight, attend(q, k, v, **options, check=watch.check))
        if only_look:
            return torch.zeros_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1])
        return original()
    output = watch.attend(module, kind, q, k, v, options, sight)
    return output.reshape(*lead, *output.shape[1:]) if query.dim() > 2 else output.reshape(*output.shape[2:])


def _four(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(batch, heads, length, dim) from (*lead, heads, length, dim); missing axes are 1."""
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])
