r"""Outputs z(w) of a model, the sum of a loss over a batch, and the Hessian of that loss in z.

The cross-entropy of a language model splits at the hidden states in front of the head: z = (h, W, b), with
logits s = softcap(scale ⟨h, W⟩) + b that are never kept. A block of tokens at a time,

    ṡ = ∂s · (ḣ, Ẇ, ḃ),   u = p (ṡ − ⟨p, ṡ⟩),   (∂s)ᵀ u,      p = softmax(s)

is the Hessian of the sum of cross-entropies in the logits, between the two derivatives of the logits. It is
the Fisher information of the predictions as well, because it does not depend on the targets.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import pytree
from exptilt.losses.cross_entropy import linear_cross_entropy
from exptilt.tilting.problem import wide_dtype

Weights = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
IGNORED = -100
BLOCK = 2**22  # logits in a block: 16 MB in float32, enough rows for a matrix product at full speed
SAMPLE = 16  # tokens of the first text on which the head is compared with the model's own logits and loss


class Reached(Exception):
    """Carries the input of the head out of the model, which stops there."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Model:
    """A model as a function of the chosen weights; all other parameters are constants."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        config = getattr(model, "config", None)
        self.options = {"use_cache": False} if hasattr(config, "use_cache") else {}

    def __call__(self, weights: Weights, batch: Any, *, labels: bool) -> Any:
        """The output for a batch; `labels` says whether the model is given the labels of a dict."""
        all_weights = {name: p.detach() for name, p in self.module.named_parameters()} | weights
        if isinstance(batch, Mapping):
            given = {k: v for k, v in batch.items() if labels or k != "labels"}
            return functional_call(self.module, all_weights, (), given | self.options)
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return functional_call(self.module, all_weights, (inputs,), self.options)


class CrossEntropy:
    """Cross-entropy of labels ≠ −100, as the model's own loss: of the next token for a causal model.

    Attributes:
        streamed: whether logits are computed in blocks from the input of the head, and never kept.
        shifted: whether the label of a token belongs to the token before it.
    """

    def __init__(self, model: nn.Module, first: Any) -> None:
        self.model = Model(model)
        self.module = model
        config = getattr(model, "config", None)
        self.labels = bool(getattr(config, "is_encoder_decoder", False))  # they make the decoder's input
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = float(
            getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", 0) or 1)
        )
        finder = getattr(model, "get_output_embeddings", None)
        found = finder() if finder is not None else None
        self.head = found if isinstance(found, nn.Linear) else None
        self.streamed, self.shifted, self.classes = False, isinstance(first, Mapping), 0
        with torch.no_grad():
            self._compare(first)

    def _compare(self, first: Any) -> None:
        """Hold head and labels against the model's own logits and loss, on a few tokens."""
        small = _beginning(first)
        batch = {**small, "labels": small["labels"].clamp_min(0)} if isinstance(small, Mapping) else small
        self._labels(batch)
        plain: Weights = {}
        hidden = self._hidden(plain, batch) if self.head is not None else None
        own = None
        if isinstance(batch, Mapping) and hasattr(self.module, "config"):
            output = self.model(plain, batch, labels=True)
            own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        else:
            logits = self._logits(plain, batch)
        if logits is not None:
            self.classes = logits.shape[-1]
            shifted, self.shifted = self.shifted and logits.ndim > 2, False
            self._rows(batch, logits.shape[:-1])
            self.shifted = shifted
        if hidden is not None and logits is not None:
            rows, W, b = hidden.flatten(0, -2), self.head.weight, self.head.bias  # type: ignore[union-attr]
            found = self._scores(rows, W, b).reshape(logits.shape)
            size = float(logits.abs().max())
            near = 64 * torch.finfo(logits.dtype).eps * (size + 1)
            self.streamed = bool((found - logits).abs().max() <= near)
        if own is None:
            return
        if logits is None:
            raise ArgumentError(
                f"Curvature: {type(self.module).__name__} returns no logits. Pass loss as a function of its "
                "output and the batch."
            )
        apart = {}
        for shifted in (True, False) if logits.ndim > 2 else (False,):
            self.shifted = shifted
            keep, target = self._rows(batch, logits.shape[:-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, -2)[keep].double(), target)
            apart[shifted] = float((loss - own).abs())
        self.shifted = min(apart, key=lambda x: apart[x])
        if not apart[self.shifted] <= 1e-2 * float(own.abs()):
            raise ArgumentError(
                f"Curvature: the loss of {type(self.module).__name__} is not the mean cross-entropy of its "
                f"labels ({float(own):.4g} on a few tokens). Pass loss as a function of output and batch."
            )

    def _labels(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
            found: Tensor = batch["labels"]
        elif isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
            found = batch[1]
        else:
            got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ArgumentError(
                f"Curvature: a batch of data has no labels (it is {got}). For 'cross_entropy' pass "
                "{'input_ids': ids, 'labels': ids} or (inputs, labels); labels of −100 do not count."
            )
        if found.is_floating_point():
            raise ArgumentError(
                f"Curvature: labels of data are {found.dtype}. Pass whole numbers, or loss as a function."
            )
        return found

    def _rows(self, batch: Any, shape: Any = None) -> tuple[Tensor, Tensor]:
        """Places of the rows that count, and their targets."""
        labels = self._labels(batch)
        if shape is not None and labels.shape != shape:
            raise ArgumentError(
                f"Curvature: labels of data are {tuple(labels.shape)}, the model predicts for {tuple(shape)}."
                " Pass one label for each."
            )
        if self.shifted:
            after = torch.full_like(labels, IGNORED)
            after[:, :-1] = labels[:, 1:]
            labels = after
        flat = labels.reshape(-1)
        keep = (flat != IGNORED).nonzero()[:, 0]
        return keep, flat[keep]

    def count(self, batch: Any) -> int:
        """How many labels of the batch count; raises if one of them is no class."""
        _, target = self._rows(batch)
        good = (target >= 0) & (target < self.classes)
        wanted = f"from 0 to {self.classes - 1}, or −100"
        checks.entries("Curvature", "labels of data that count", target, good, wanted)
        return target.numel()

    def _hidden(self, weights: Weights, batch: Any) -> Tensor | None:
        """The input of the head; None if the model does not call it."""

        def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise Reached(inputs[0])

        hook = self.head.register_forward_pre_hook(stop)  # type: ignore[union-attr]
        try:
            self.model(weights, batch, labels=self.labels)
        except Reached as reached:
            return reached.hidden
        finally:
            hook.remove()
        return None

    def _logits(self, weights: Weights, batch: Any) -> Tensor:
        output = self.model(weights, batch, labels=self.labels)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise ArgumentError(
                f"Curvature: {type(self.module).__name__} returns a {type(output).__name__} without logits. "
                "Pass loss as a function of its output and the batch."
            )
        return logits

    def _head(self, weights: Weights) -> tuple[str | None, str | None]:
        """Names of the head's weight and bias among the weights; None for constants."""
        found = [
            next((name for name, p in self.module.named_parameters() if p is q and name in weights), None)
            for q in (self.head.weight, self.head.bias)  # type: ignore[union-attr]
        ]
        return found[0], found[1]

    def outputs(self, batch: Any) -> Callable[[Weights], Outputs]:
        """The function from weights to (h, W, b) of the rows that count, or to their logits."""
        keep, _ = self._rows(batch)

        def found(weights: Weights) -> Outputs:
            if not self.streamed:
                logits = self._logits(weights, batch)
                return (logits.flatten(0, -2).index_select(0, keep),)
            hidden = self._hidden(weights, batch)
            rows = hidden.flatten(0, -2).index_select(0, keep)  # type: ignore[union-attr]
            return (rows, *(weights[name].view_as(weights[name]) for name in self._head(weights) if name))

        return found

    def _parts(self, z: Outputs, weights: Weights) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows, weight and bias, those that are constants included."""
        named = self._head(weights)
        given = iter(z[1:])
        W = next(given) if named[0] else self.head.weight.detach()  # type: ignore[union-attr]
        b: Tensor | None = self.head.bias  # type: ignore[union-attr]
        b = next(given) if named[1] else (b.detach() if b is not None else None)
        return z[0], W, b

    def losses(self, batch: Any) -> Callable[[Weights], Tensor]:
        """The function from weights to the loss of each label that counts."""
        _, target = self._rows(batch)

        def found(weights: Weights) -> Tensor:
            z = self.outputs(batch)(weights)
            if not self.streamed:
                return nn.functional.cross_entropy(z[0].to(wide_dtype(z[0].dtype)), target, reduction="none")
            h, W, b = self._parts(z, weights)
            b = None if b is None else b.to(h.dtype)
            result: Tensor = linear_cross_entropy(
                h, W.to(h.dtype), target, bias=b, softcap=self.softcap, scale=self.scale, reduction="none"
            )
            return result

        return found

    def sequences(self, batch: Any) -> Callable[[Weights], Tensor]:
        """The function from weights to the sum of losses of each sequence."""
        labels = self._labels(batch)
        keep, _ = self._rows(batch)
        owner = keep // (labels.numel() // labels.shape[0])

        def found(weights: Weights) -> Tensor:
            losses = self.losses(batch)(weights)
            return losses.new_zeros(labels.shape[0]).index_add(0, owner, losses)

        return found

    def _scores(self, h: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        s = self.scale * (h @ W.T)
        s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
        return s if b is None else s + b

    def bend(self, batch: Any, z: Outputs, along: Outputs, weights: Weights) -> Outputs:
        """The Hessian of the sum of losses in the logits, pulled back to z, times a direction of z."""
        if not self.streamed:
            return (_covariance(z[0], along[0]),)
        h, W, b = self._parts(z, weights)
        wide = wide_dtype(h.dtype)
        h, W = h.to(wide), W.to(wide)
        b = None if b is None else b.to(wide)
        named = self._head(weights)
        rest = iter(x.to(wide) for x in along[1:])
        h_dot = along[0].to(wide)
        W_dot, b_dot = next(rest) if named[0] else None, next(rest) if named[1] else None
        by_h = torch.empty_like(h)
        by_W = torch.zeros_like(W) if named[0] else None
        by_b = torch.zeros_like(b) if named[1] and b is not None else None
        for rows in torch.arange(len(h), device=h.device).split(max(1, BLOCK // len(W))):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            a_dot = h_dot[here] @ W.T
            if W_dot is not None:
                a_dot.addmm_(h[here], W_dot.T)
            s, a_dot = h[here] @ W.T, a_dot.mul_(self.scale)
            s = s.mul_(self.scale)
            slope = None
            if self.softcap is not None:
                s = torch.tanh_(s.div_(self.softcap))
                slope = 1 - s * s
                s, a_dot = s.mul_(self.softcap), a_dot.mul_(slope)
            if b is not None:
                s += b
            if b_dot is not None:
                a_dot += b_dot
            u = _covariance(s, a_dot)
            if by_b is not None:
                by_b += u.sum(0)
            u = u.mul_(self.scale) if slope is None else u.mul_(slope).mul_(self.scale)
            by_h[here] = u @ W
            if by_W is not None:
                by_W.addmm_(u.T, h[here])
        found = (by_h, *(x for x in (by_W, by_b) if x is not None))
        return tuple(x.to(y.dtype) for x, y in zip(found, z, strict=True))


def push(function: Callable[[Any], Any], at: Any, along: Any) -> tuple[Any, Any]:
    """Value and forward derivative of a function of one argument."""
    found: Any = jvp(function, (at,), (along,))
    return found[0], found[1]


def _covariance(logits: Tensor, along: Tensor) -> Tensor:
    """(diag p − p pᵀ) times a direction of the logits, row by row."""
    p = logits.softmax(-1)
    return p.mul_(along - (p * along).sum(-1, keepdim=True))


def _beginning(batch: Any) -> Any:
    """The first tokens of the first text of a dict; other batches whole."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return batch

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:1] != ids.shape[:1]:
            return x
        return x[:1, :SAMPLE] if x.shape[:2] == ids.shape else x[:1]

    return {name: part(x) for name, x in batch.items()}


class FunctionLoss:
    """A user's function of the model's output and the batch: one loss for each item, or one number."""

    streamed, shifted = False, False

    def __init__(self, model: nn.Module, function: Callable[[Any, Any], Tensor], batches: int) -> None:
        self.model, self.function, self.batches = Model(model), function, batches
        self.module = model

    def _values(self, output: Any, batch: Any) -> Tensor:
        found = self.function(output, batch)
        if not isinstance(found, Tensor) or not found.is_floating_point():
            got = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise ArgumentError(
                f"Curvature: loss returned {got}. Return a tensor of losses, one for each item, or a number."
            )
        if found.ndim == 0 and self.batches > 1:
            raise ArgumentError(
                f"Curvature: loss returns one number for a batch, and there are {self.batches} batches, "
                "whose weights it does not say. Return one loss for each item "
                "(reduction='none'): the operator is that of their mean."
            )
        return found

    def _takes_labels(self, batch: Any) -> bool:
        return isinstance(batch, Mapping) and hasattr(self.module, "config")

    def _output(self, weights: Weights, batch: Any) -> Any:
        return self.model(weights, batch, labels=self._takes_labels(batch))

    def count(self, batch: Any) -> int:
        """How many items the batch has; also checks that the loss of one reads no output of another."""
        weights: Weights = {}
        with torch.no_grad():
            output = self._output(weights, batch)
        leaves, _ = _leaves(output)
        for x in leaves:
            x.requires_grad_()
        values = self._values(_rebuilt(output, leaves), batch)
        if values.ndim == 0 or len(values) == 1 or not values.requires_grad:
            return values.numel()
        slopes = torch.autograd.grad(values[0].sum(), leaves, allow_unused=True)
        for slope in slopes:
            if slope is not None and slope.shape[:1] == values.shape[:1] and bool(slope[1:].any()):
                raise ArgumentError(
                    "Curvature: the loss of item 0 depends on the outputs of other items, so the loss is not "
                    "a sum over items (a contrastive loss, or one normalised by the batch). Return one "
                    "number, and pass all data as one batch."
                )
        return values.numel()

    def outputs(self, batch: Any) -> Callable[[Weights], Outputs]:
        """The function from weights to the tensors of the model's output."""
        return lambda weights: tuple(_leaves(self._output(weights, batch))[0])

    def losses(self, batch: Any) -> Callable[[Weights], Tensor]:
        """The function from weights to the loss of each item."""
        return lambda weights: self._values(self._output(weights, batch), batch).reshape(-1)

    def sequences(self, batch: Any) -> Callable[[Weights], Tensor]:
        """The function from weights to the sums of losses along the first axis of what it returns."""

        def found(weights: Weights) -> Tensor:
            values = self._values(self._output(weights, batch), batch)
            if values.ndim == 0:
                raise ArgumentError(
                    "Curvature: loss returns one number, and this needs one for each sample. Return a tensor "
                    "whose first axis is the batch (reduction='none')."
                )
            return values.reshape(len(values), -1).sum(1)

        return found

    def bend(self, batch: Any, z: Outputs, along: Outputs, weights: Weights) -> Outputs:
        """The Hessian of the sum of losses in the outputs, times a direction of the outputs."""
        with torch.no_grad():
            output = self._output({}, batch)
        names = _leaves(output)[1]

        def total(z: Outputs) -> Tensor:
            return self._values(_rebuilt(output, list(z)), batch).sum()

        found: Outputs
        slope, found = push(grad(total), z, along)
        if "loss" in names and bool(slope[names.index("loss")].any()):
            raise ArgumentError(
                "Curvature: loss reads output.loss, in which it is linear, so a Gauss-Newton matrix that "
                "splits at the output would be 0. Pass 'cross_entropy', a function of output.logits, or "
                "kind='hessian'."
            )
        return found


def _leaves(output: Any) -> tuple[list[Tensor], list[str]]:
    """The real tensors of an output, and their names if it is a dict."""
    if isinstance(output, Mapping):
        named = [(str(k), x) for k, x in output.items() if isinstance(x, Tensor) and x.is_floating_point()]
        return [x for _, x in named], [k for k, _ in named]
    found = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return found, [""] * len(found)


def _rebuilt(output: Any, leaves: list[Tensor]) -> Any:
    """The output with other tensors in place of its real ones."""
    given = iter(leaves)
    if isinstance(output, Mapping):
        new = {
            k: next(given) if isinstance(x, Tensor) and x.is_floating_point() else x
            for k, x in output.items()
        }
        kind: Any = type(output)
        return kind(**new) if hasattr(output, "to_tuple") else new
    flat, spec = pytree.tree_flatten(output)
    return pytree.tree_unflatten(
        [next(given) if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat], spec
    )
