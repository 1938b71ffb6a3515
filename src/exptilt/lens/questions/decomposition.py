r"""A forward pass as a sum: what each head and each MLP wrote to the residual stream, and to the logits.

A block adds to the stream, so its last state x is a sum of parts, and with the final norm held as it is on
this text (σ its factor, γ its weight, β its bias) so is a logit,

    x = embedding + Σ_layers (Σ_heads write + bias + mlp),
    logit_t = c (⟨w_t, β⟩ + b_t) + Σ_parts c ⟨w_t, γ (part − mean of the part, if the norm centres) / σ⟩.

The second line is direct logit attribution: what a part does to a logit on its way straight to the output,
not through later layers; the sum over all parts is the logit itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.lens.questions.blocks import Passage, Tracer, inputs
from exptilt.lens.watching.modules import evaluating
from exptilt.lens.watching.record import by_layer
from exptilt.lens.watching.watch import watch

Array = NDArray[np.float64]
NEAR = 1e-4  # relative difference up to which two tensors of a model are the same but for rounding


@dataclass(frozen=True)
class Attribution:
    """What the parts of a model add to one logit, or to the difference of two.

    Attributes:
        heads: ``(layer, head)``; NaN where a layer has fewer heads.
        mlps: ``(layer,)``.
        biases: ``(layer,)``, of the output projections of attention.
        embedding: of the token's embedding.
        constant: of the final norm's bias and of the output's.
        logit: what the model gives; all of the above sum to it.
    """

    heads: Array
    mlps: Array
    biases: Array
    embedding: float
    constant: float
    logit: float

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row a part: its name, layer, head and what it adds, the largest first."""
        import pandas as pd

        rows: list[tuple[str, int, int, float]] = [
            (f"L{i}H{j}", int(i), int(j), self.heads[i, j]) for i, j in np.argwhere(np.isfinite(self.heads))
        ]
        for name, values in (("mlp", self.mlps), ("bias", self.biases)):
            rows += [(f"L{i} {name}", i, -1, float(x)) for i, x in enumerate(values)]
        rows += [("embedding", -1, -1, self.embedding), ("constant", -1, -1, self.constant)]
        table = pd.DataFrame(rows, columns=["part", "layer", "head", "adds"])
        return table.sort_values("adds", key=abs, ascending=False, ignore_index=True)


@dataclass(frozen=True, repr=False)
class Cache:
    """The residual stream of one text, part by part; see `cache`.

    Attributes:
        labels: the tokens, as texts if there was a tokenizer.
        hidden: ``(layer + 1, token, width)``, the stream before each block, and after the last.
        writes: one tensor ``(head, token, width)`` for each layer, what each head adds to the stream.
        biases: ``(layer, token, width)``, what attention adds beside its heads.
        mlps: ``(layer, token, width)``, what the rest of the block adds.
    """

    labels: Sequence[Any]
    hidden: Tensor
    writes: Sequence[Tensor]
    biases: Tensor
    mlps: Tensor
    _end: "_End | str"  # from the stream to the logits, or why there is none

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        every = (self.hidden, self.biases, self.mlps, *self.writes)
        return sum(x.numel() * x.element_size() for x in every)

    def __repr__(self) -> str:
        layers, tokens, width = self.mlps.shape
        size = f"{tokens} tokens, {layers} layers, width {width}, {self.nbytes / 1e6:.1f} MB"
        return f"<Cache of {size}; attribute(token) splits a logit>"

    @torch.no_grad()
    def attribute(self, token: int, *, position: int = -1, against: int | None = None) -> Attribution:
        """What each head, MLP and embedding adds to a logit: an `Attribution`.

        Args:
            token: id of the token whose logit it is.
            position: which token of the text predicts it; the last by default.
            against: id of another token, for the difference of the two logits.
        """
        end = self._end
        if isinstance(end, str):
            raise ArgumentError(f"attribute: {end}")
        size, count = end.weight.shape[0], self.hidden.shape[1]
        ids = [token] if against is None else [token, against]
        known = all(isinstance(i, int) and 0 <= i < size for i in ids)
        if not known or not -count <= position < count:
            raise ArgumentError(
                f"attribute: got token {token!r}, against {against!r}, position {position}. Pass tokens by "
                f"their ids, 0 to {size - 1}; the text has {count} positions."
            )
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)[: len(ids)]
        w = (signs[:, None] * end.weight[ids].double().cpu()).sum(0)
        way = w * end.gain.double().cpu() * float(end.size[position])
        way = way - way.mean() if end.centred else way

        def through(x: Tensor) -> Array:
            found: Array = (x[..., position, :].double().cpu() @ way).numpy()
            return found

        constant = w @ end.shift.double().cpu() + (signs * end.bias[ids].double().cpu()).sum()
        logit = float((signs * end.logits[position, ids].double().cpu()).sum())
        return Attribution(
            by_layer([through(x) for x in self.writes]),
            through(self.mlps),
            through(self.biases),
            float(through(self.hidden[0])),
            float(constant),
            logit,
        )


@torch.no_grad()
def cache(model: nn.Module, text: Any, tokenizer: Any = None) -> Cache:
    """Hidden states and the writes of all heads and MLPs on one text, as a `Cache` with token labels.

    It takes heads + 3 times the memory of the model's hidden states: ``nbytes`` says how much.

    Args:
        model: a transformers model whose blocks add to the residual stream and leave it as it is; a decoder
            with its own output layer for `Cache.attribute`.
        text: token ids ``(token,)``, the inputs of the model with them, or a string if there is a tokenizer.
        tokenizer: gives the labels.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
        >>> seen = xt.lens.cache(model, torch.arange(12))
        >>> parts = seen.attribute(7)
        >>> sums = parts.heads.sum() + parts.mlps.sum() + parts.biases.sum()
        >>> bool(abs(sums + parts.embedding + parts.constant - parts.logit) < 1e-5)
        True
    """
    if isinstance(text, str) and tokenizer is None:
        raise ArgumentError("cache: text is a string and there is no tokenizer. Pass both, or token ids.")
    given = tokenizer(text) if isinstance(text, str) else text
    ids = torch.as_tensor(given["input_ids"] if isinstance(given, Mapping) else given)
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point():
        raise ArgumentError(
            f"cache: got ids of shape {tuple(ids.shape)} and {ids.dtype}. Pass one text, (token,)."
        )
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ArgumentError(f"cache: {name} has an encoder and a decoder. Pass one of them.")
    found: list[Passage] = []
    tracer, end = Tracer(model, lambda _, passage: found.append(passage)), _Ends(model)
    with evaluating(model), watch(model, observe=tracer.observe) as seen, tracer.attached(seen), end:
        output = model(**inputs(model, ids))
    if not found:
        raise ArgumentError(f"cache: the blocks of {name} were not found: its layers are in no ModuleList.")
    writes, biases, mlps, states = [], [], [], [found[0].hidden[0]]
    for layer, passage in enumerate(found):
        write, middle, after = passage.writes(), passage.middle(), passage.output
        normed = any(after is not None and torch.equal(event.after, after) for event in passage.norms)
        if write is None or middle is None or after is None or len(passage.calls) != 1 or normed:
            why = "ends in a norm (post-norm)" if normed else "adds something else than its projection"
            raise ArgumentError(f"cache: block {layer} of {name} {why}, so the stream is no sum of writes.")
        writes.append(write)
        biases.append(middle[0] - passage.hidden[0] - write.sum(0))
        mlps.append(after[0] - middle[0])
        states.append(after[0])
    labels = ids.tolist() if tokenizer is None else [tokenizer.decode([int(i)]) for i in ids]
    last = end.read(states[-1], output)
    return Cache(labels, torch.stack(states), writes, torch.stack(biases), torch.stack(mlps), last)


@dataclass(frozen=True)
class _End:
    """From the last hidden state to the logits: logits = weight · (size γ (x − mean) + shift) + bias."""

    centred: bool  # whether the norm takes the mean away
    size: Tensor  # (token,), its factor on this text
    gain: Tensor  # (width,), γ
    shift: Tensor  # (width,), β
    weight: Tensor  # (vocabulary, width), times the model's own factor on logits
    bias: Tensor  # (vocabulary,)
    logits: Tensor  # (token, vocabulary)


class _Ends:
    """Hooks that see what goes into the output layer, and into the norm before it."""

    def __init__(self, model: nn.Module):
        self._name, self._hooks = type(model).__name__, list[Any]()
        self._head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        self._norms = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._given: Tensor | None = None

    def __enter__(self) -> None:
        if isinstance(self._head, nn.Module):
            self._hooks.append(self._head.register_forward_pre_hook(self._reach))
            self._hooks += [norm.register_forward_hook(self._norm) for norm in self._norms]

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(output, Tensor) and args[0].dim() == 3:
            self._calls = [(module, args[0][0], output[0])]  # the last one is the one before the output

    def _reach(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._given = args[0][0]

    def read(self, stream: Tensor, output: Any) -> "_End | str":
        """The way from the last state ``(token, width)`` to the logits, or a sentence why there is none."""
        if self._given is None or not self._calls:
            return f"{self._name} has no output layer after a norm, so no logits. Load it with its head."
        (norm, x, y), y_head = self._calls[0], self._given
        if x.shape != stream.shape or not _same(x, stream) or not _same(y, y_head):
            return f"{self._name} does more than a norm between its last block and its output layer."
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
        plain, logits = nn.functional.linear(y_head, weight, bias), output.logits[0]
        c = (plain * logits).double().sum() / plain.double().square().sum()
        if not _same(c * plain.double(), logits):
            return f"the logits of {self._name} are no multiple of its output layer's (softcapped, say)."
        shift = getattr(norm, "bias", None)
        shift = torch.zeros_like(x[0]) if shift is None else shift
        known = getattr(norm, "weight", None)
        gains = [torch.ones_like(x[0])] if known is None else [known, 1 + known]
        for centred, gain in ((centred, gain) for centred in (True, False) for gain in gains):
            z = (x - x.mean(-1, keepdim=True) if centred else x).double() * gain.double()
            size = ((y - shift).double() * z).sum(-1) / z.square().sum(-1).clamp_min(1e-300)
            if _same(size[:, None] * z + shift.double(), y):
                c = c.to(weight.dtype)
                return _End(centred, size, gain, shift, c * weight, c * bias, logits)
        return f"the norm before the output of {self._name} ({type(norm).__name__}) is of an unknown kind."


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same up to rounding."""
    return x.shape == y.shape and float((x.double() - y.double()).norm()) <= NEAR * float(y.double().norm())
