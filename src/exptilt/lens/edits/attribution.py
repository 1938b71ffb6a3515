r"""What each key of each head does to a loss, by exact formulas: no head or key is run without.

With g the gradient of the loss by what a head writes, leaving key j out of it moves the loss, to first order
in what the head writes, by

    Σ_i ⟨g_i, p_ij/(1 − p_ij) (o_i − v_j)⟩  =  −Σ_i p_ij ⟨g_i, v_j⟩  +  the rest.

The change of what the head writes is exact (`leave_one_out`). The first term is the part of the values (OV):
the pattern stays, the value is 0. The second is that of the pattern (QK): the others take over the weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.lens.edits.ablation import Measure, default_measure
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.modules import evaluating
from exptilt.lens.watching.watch import watch
from exptilt.tilting import attend
from exptilt.tilting.counterfactual import leave_one_out
from exptilt.tilting.problem import per_query_head


@dataclass(frozen=True)
class Attribution:
    """What leaving out each key of each head would do to a loss, to first order in what the head writes.

    Attributes:
        total: for each layer ``(batch, head, key)``: the change of the loss, in its own unit.
        value: the part by which the key's value is missing, the pattern as it is (OV).
        pattern: the part by which the other keys take over its weight (QK).
        loss: ``(batch,)``, the loss itself.
    """

    total: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    pattern: tuple[Tensor, ...]
    loss: Tensor

    def by_head(self) -> Tensor:
        """``(layer, batch, head)``: what the head writes to the loss, to first order: −⟨g, o⟩, keys summed.

        This is what leaving out the whole head would change; layers must have as many heads.
        """
        return torch.stack([x.sum(-1) for x in self.value])


def attribute(model: nn.Module, inputs: Mapping[str, Any], *, measure: Measure | None = None) -> Attribution:
    """What each key of each head does to the loss of each text: an `Attribution`, from one backward pass.

    Args:
        model: a model that `watch` can take over; it runs in eval mode and is left as it was found.
        inputs: its keyword arguments, a batch of texts.
        measure: of the model's output and the inputs, ``(batch,)``, one number a text; a text must not depend
            on the others of the batch. By default the next-token loss in nats, as in `ablate`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
        >>> found = xt.lens.edits.attribute(model, {"input_ids": torch.arange(24).reshape(2, 12)})
        >>> found.total[0].shape, torch.allclose(found.value[1] + found.pattern[1], found.total[1])
        (torch.Size([2, 2, 12]), True)
    """
    calls: list[AttentionCall] = []
    written: list[Tensor] = []

    def leaf(call: AttentionCall) -> Tensor:
        """The call's own output, as the start of a graph where nothing before asks for one."""
        output = call.tilted.output
        output = output if output.requires_grad else output.detach().requires_grad_()
        calls.append(call)
        written.append(output)
        return output

    with evaluating(model), torch.enable_grad(), watch(model, edit=leaf):
        output = model(**inputs)
    if len({call.layer for call in calls}) < len(calls):
        raise ArgumentError("attribute: a layer attends more than once in a forward pass. Pass a whole text.")
    measure = default_measure(model, output, inputs, _is_causal(calls)) if measure is None else measure
    loss = measure(output, inputs)
    if not isinstance(loss, Tensor) or loss.dim() != 1 or not loss.requires_grad:
        raise ArgumentError(
            "attribute: measure must give one number a text, a tensor (batch,) with a gradient. "
            f"Got {loss!r:.100}."
        )
    gradients = torch.autograd.grad(loss.sum(), written, allow_unused=True)
    found = [_of_call(call, g) for call, g in zip(calls, gradients, strict=True)]
    found = [
        x for _, x in sorted(zip((call.layer for call in calls), found, strict=True), key=lambda x: x[0])
    ]
    total, value = (tuple(x) for x in zip(*found, strict=True))
    return Attribution(total, value, tuple(x - y for x, y in zip(total, value, strict=True)), loss.detach())


def _is_causal(calls: list[AttentionCall]) -> bool:
    """Whether no layer lets a token see a later one."""
    ahead = [1 + call.key.shape[2] - call.query.shape[2] for call in calls]
    return not any(
        call.kind != "cross" and bool(call.pattern(0).triu(n).any())
        for call, n in zip(calls, ahead, strict=True)
    )


def _of_call(call: AttentionCall, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """Total and value's part (batch, head, key) of one layer."""
    q, k, v = (x.detach() for x in (call.query, call.key, call.value))
    g = torch.zeros_like(call.tilted.output) if gradient is None else gradient
    options = {name: x.detach() if isinstance(x, Tensor) else x for name, x in call.options.items()}
    total = leave_one_out(q, k, v, direction=g, **options).total
    own = per_query_head(v, q.shape[1], 1).clone().requires_grad_()  # one gradient for each query head
    heads = per_query_head(k, q.shape[1], 1)
    if "log_weight" in options:
        options["log_weight"] = per_query_head(options["log_weight"], q.shape[1], -2)
    with torch.enable_grad():
        output = attend(q, heads, own, **options).output
    pulled = torch.autograd.grad(output, own, g.to(output.dtype))[0]  # Σ_i p_ij g_i
    return total, -(pulled * own.detach()).sum(-1).to(total.dtype)
