r"""Attention written out by hand: a softmax over scores whose result multiplies values.

    weights = softmax(scores, -1),   output = weights @ values

A softmax alone may be a router or a classifier; one that is then contracted over the axis it normalised is
attention. Between the two, weights may be dropped out, cast, masked or reshaped. Without ``softmax=True`` a
watch only learns which modules attend in this way, to report that it did not see them. With it, the watch
takes the scores, in which query and key can no longer be told apart, as the bias of a query of 0. This is the
slow way: the model has made all n×n scores.

Scores of shape (batch · heads, Q, K) are taken apart, the batch outside: by the number of heads if the module
says it, else by the batch of what the module and the model were given. Where these do not tell, or disagree,
or the output is then taken apart with the heads outside, a watch refuses.
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
_APART = {
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split),
}
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
        # The last output whose batch and heads are one axis, and how many of each there are.
        self._joined: tuple[weakref.ref[Tensor], _Pending, int, int] | None = None

    def called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Follow the output of a torch function if it comes from a softmax; record a product as attention."""
        if function in _SOFTMAX:
            self._softmax(args, kwargs or {}, output)
        elif function in _APART and self._joined is not None and self._joined[0]() is args[0]:
            _, last, batch, heads = self._joined
            pieces = output.shape[:2] if isinstance(output, Tensor) else (len(output), len(output[0]))
            if tuple(pieces) == (heads, batch):
                raise self._refusal(last, "its output is taken apart with the heads outside of the batch")
        elif self._followed:
            if function in _KEEPS:
                if isinstance(output, Tensor) and (found := self._find(args[:1])) is not None:
                    self._followed.append((weakref.ref(output), found))
            elif function in _PRODUCTS and (found := self._find(_left(function, args))) is not None:
                self._followed = deque([x for x in self._followed if x[1] is not found], maxlen=8)
                self._attended(found, output)

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

    def _attended(self, found: _Pending, output: Tensor) -> None:
        self.model.by_softmax[found.module] = None
        if found.scores is None:
            return
        scores = found.scores
        joined = scores.dim() == 3
        batch = self._batch(found) if joined else math.prod(scores.shape[:-3])
        scores = scores.reshape(batch, -1, *scores.shape[-2:])
        batch, heads, Q, K = scores.shape
        if (
            joined
            and batch > 1
            and heads > 1
            and not type(found.module).__module__.startswith("transformers.")
        ):
            if batch == heads:
                raise self._refusal(found, "there are as many batch items as heads")
            self._joined = weakref.ref(output), found, batch, heads
        query, key = scores.new_zeros(batch, heads, Q, 1), scores.new_zeros(batch, heads, K, 1)
        request = Request(found.module, self.model.kind(found.module), query, key, key, {"scale": 1.0})
        read_dense(scores, request, self.model.own_queries(request))
        self.model.mark_attended()
        self.model.look_at(request)

    def _batch(self, found: _Pending) -> int:
        """Number of batch items in scores ``(batch · heads, Q, K)``; raises if that cannot be told."""
        assert found.scores is not None
        rows, *lengths = found.scores.shape
        named = [x for name in _HEADS if isinstance(x := getattr(found.module, name, None), int)]
        batches = {rows / heads for heads in named[:1] if heads > 0}
        for shape in [self.model.shapes.get(x) for x in (found.module, self.model.model) if not named]:
            if shape is not None and len(shape) == 3:  # (batch, token, width), or tokens first
                batches |= {a for a, b in (shape[:2], shape[1::-1]) if b in lengths}
            elif shape is not None:  # (batch, token), (token, width), or pictures and the like
                batches |= {shape[0]} if len(shape) > 1 else {1}
                batches |= {1} if len(shape) == 2 and shape[0] in lengths else set()
        batches = {x for x in batches if x >= 1 and x == int(x) and rows % x == 0}
        if len(batches) != 1:
            raise self._refusal(
                found, "neither its number of heads (num_heads) nor its input tells them apart"
            )
        return int(batches.pop())

    def _refusal(self, found: _Pending, why: str) -> ArgumentError:
        """The error for scores whose batch items and heads cannot be told apart."""
        assert found.scores is not None
        name = f"{type(found.module).__name__} {self.model.modules.name(found.module)!r}"
        return ArgumentError(
            f"watch: {name} of {self.model.name} makes scores of shape {tuple(found.scores.shape)}, batch "
            f"and heads in one axis, and {why}. Make them (batch, heads, query, key), set num_heads, or "
            "watch a batch of another size, such as 1."
        )


def _left(function: Any, args: Any) -> Any:
    """The operands of a product whose last axis is contracted."""
    if function is not torch.einsum:
        return args[:1]
    operands = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = str(args[0]).replace(" ", "").partition("->")
    terms = inputs.split(",")
    return [x for x, term in zip(operands, terms, strict=False) if term[-1:] not in result]
