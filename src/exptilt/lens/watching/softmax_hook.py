r"""Attention written out by hand: a softmax over scores whose result multiplies values.

    weights = softmax(scores, -1),   output = weights @ values

A softmax alone may be a router or a classifier; one that is then contracted over the axis it normalised is
attention. Between the two, weights may be dropped out, cast, masked or reshaped. Without ``softmax=True`` a
watch only learns which modules attend in this way, to report that it did not see them. With it, the watch
takes the scores, in which query and key can no longer be told apart, as the bias of a query of 0. This is the
slow way: the model has made all n×n scores.

Scores of shape (batch · heads, Q, K) are taken apart, the batch outside: by the number of heads if the module
says it, else by the batch of what the module or the model was given. Where neither is known, a watch refuses.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exptilt._support.errors import ArgumentError
from exptilt.lens.watching.call import Intercepted, Request
from exptilt.lens.watching.transformers_hook import read_dense

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_KEEPS = {
    *(F.dropout, torch.dropout, torch.dropout_, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float),
    *(Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.view, Tensor.reshape, torch.reshape),
    *(Tensor.contiguous, Tensor.masked_fill, torch.masked_fill, Tensor.expand, Tensor.flatten),
    *(torch.flatten, Tensor.mul, torch.mul, Tensor.__mul__, Tensor.nan_to_num, torch.nan_to_num),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}


@dataclass(frozen=True)
class _Pending:
    """A softmax that may turn out to be attention."""

    module: nn.Module | None
    scores: Tensor | None  # kept only if they are wanted
    length: int  # of the axis that was normalised


class Softmaxes:
    """Follows the outputs of a model's softmaxes until they are multiplied with values or freed."""

    def __init__(
        self, model: Intercepted, caller: Callable[[Intercepted], tuple[nn.Module | None, bool]]
    ) -> None:
        self.model, self._caller = model, caller
        self._followed: deque[tuple[weakref.ref[Tensor], _Pending]] = deque(maxlen=8)

    def called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Follow the output of a torch function if it comes from a softmax; record a product as attention."""
        if function in _SOFTMAX:
            self._softmax(args, kwargs or {}, output)
        elif self._followed:
            if function in _KEEPS:
                if isinstance(output, Tensor) and (found := self._find(args[:1])) is not None:
                    self._followed.append((weakref.ref(output), found))
            elif function in _PRODUCTS and (found := self._find(_left(function, args))) is not None:
                self._followed = deque([x for x in self._followed if x[1] is not found], maxlen=8)
                self._attended(found)

    def _find(self, tensors: Any) -> _Pending | None:
        """The softmax that gave one of the tensors, if its last axis is still the one that was normalised."""
        for x in tensors:
            for reference, pending in self._followed:
                if isinstance(x, Tensor) and reference() is x and x.shape[-1] == pending.length:
                    return pending
        return None

    def _softmax(self, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.model.busy or self.model.quiet:
            return
        scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(scores, Tensor) or scores.dim() < 2 or axis not in (-1, scores.dim() - 1):
            return
        module, ours = self._caller(self.model)
        if ours:
            kept = scores.detach().to(output.dtype) if self.model.softmax else None
            self._followed.append((weakref.ref(output), _Pending(module, kept, scores.shape[-1])))

    def _attended(self, found: _Pending) -> None:
        self.model.by_softmax[found.module] = None
        if found.scores is None:
            return
        scores = found.scores
        batch = self._batch(found.module, scores) if scores.dim() == 3 else math.prod(scores.shape[:-3])
        scores = scores.reshape(batch, -1, *scores.shape[-2:])
        batch, heads, Q, K = scores.shape
        query, key = scores.new_zeros(batch, heads, Q, 1), scores.new_zeros(batch, heads, K, 1)
        request = Request(found.module, self.model.kind(found.module), query, key, key, {"scale": 1.0})
        read_dense(scores, request, self.model.own_queries(request))
        self.model.mark_attended()
        self.model.look_at(request)

    def _batch(self, module: nn.Module | None, scores: Tensor) -> int:
        """Number of batch items in scores ``(batch · heads, Q, K)``; raises if that cannot be told."""
        rows, *lengths = scores.shape
        named = [x for name in _HEADS if isinstance(x := getattr(module, name, None), int)]
        given = [self.model.shapes[x] for x in (module, self.model.model) if x in self.model.shapes]
        batches = [rows / heads for heads in named[:1] if heads > 0]
        for shape in given:
            if len(shape) == 3:  # (batch, token, width), or tokens first
                batches += {a for a, b in (shape[:2], shape[1::-1]) if b in lengths and rows % a == 0}
            else:  # a token is (width,) or a number
                batches.append(shape[0] if len(shape) > 1 else 1)
        if not batches or batches[0] < 1 or rows % batches[0]:
            name = f"{type(module).__name__} {self.model.modules.name(module)!r}"
            raise ArgumentError(
                f"watch: {name} of {self.model.name} makes scores of shape {tuple(scores.shape)}, and "
                "neither its number of heads (num_heads) nor its input says how many of these are batch "
                "items. Set num_heads on it, or watch it with a batch of 1."
            )
        return int(batches[0])


def _left(function: Any, args: Any) -> Any:
    """The operands of a product whose last axis is contracted."""
    if function is not torch.einsum:
        return args[:1]
    operands = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = str(args[0]).replace(" ", "").partition("->")
    terms = inputs.split(",")
    return [x for x, term in zip(operands, terms, strict=False) if term[-1:] not in result]
