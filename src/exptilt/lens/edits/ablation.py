r"""What each head does to a model's output: zero it, or put in its place what it wrote on another prompt.

For text t and head h, with ℓ_t the loss of the model as it is and ℓ_{t,h} that without the head,

    effect_h = mean_t (ℓ_{t,h} − ℓ_t) ± 1.96 · standard error over texts,

each text beside itself.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt._support.checks import choice
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.lens.edits import changes
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.modules import evaluating
from exptilt.lens.watching.watch import watch

Array = NDArray[np.float64]
Measure = Callable[[Any, Mapping[str, Any]], Tensor]
_HOW = {"zero": changes.zero, "mean": changes.mean}


@dataclass(frozen=True)
class Effects:
    """The effect of each head.

    Attributes:
        effect: ``(layer, head)``, mean over texts; NaN where a layer has fewer heads.
        error: ``(layer, head)``, its standard error over texts; NaN for one text.
        base: mean over texts of the measure itself, nothing changed.
    """

    effect: Array
    error: Array
    base: float

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row a head: effect, and the ends of its 95 % interval."""
        import pandas as pd

        places = np.argwhere(np.isfinite(self.effect))
        rows = [
            (layer, head, x, x - 1.96 * error, x + 1.96 * error)
            for layer, head in places
            for x, error in [(self.effect[layer, head], self.error[layer, head])]
        ]
        return pd.DataFrame(rows, columns=["layer", "head", "effect", "low", "high"])


def ablate(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    how: str = "zero",
    measure: Measure | None = None,
    progress: bool | None = None,
) -> Effects:
    """How the loss of each text changes when a head is taken out, for every head: an `Effects`.

    Args:
        model: a model that `watch` can take over; it runs in eval mode and is left as it was found.
        inputs: its keyword arguments, a batch of texts.
        how: "zero", or "mean": the head writes its mean over the text.
        measure: of the model's output and the inputs, ``(batch,)``, one number a text. By default the
            next-token loss in nats; of a model that does not predict the next token, the relative change of
            its logits, or of its first output.
        progress: show a progress bar; None shows one where it takes long.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
        >>> found = xt.lens.edits.ablate(
        ...     model, {"input_ids": torch.arange(24).reshape(2, 12)}, progress=False
        ... )
        >>> found.effect.shape
        (2, 2)
    """
    edit = _HOW[choice("ablate", "how", how, _HOW)]
    return _effects(model, inputs, lambda place: edit([place]), measure, progress)


def patch(
    model: nn.Module,
    clean: Mapping[str, Any],
    corrupt: Mapping[str, Any],
    measure: Measure,
    *,
    progress: bool | None = None,
) -> Effects:
    """Put a head's output on the clean prompt into the corrupt one, head by head: the `Effects` of that.

    Args:
        model: a model that `watch` can take over.
        clean: its keyword arguments, a batch of texts.
        corrupt: as many texts of as many tokens.
        measure: of the model's output and the inputs, ``(batch,)``, such as the logit of the right answer.
        progress: as in `ablate`.
    """
    calls: list[AttentionCall] = []
    with evaluating(model), torch.no_grad(), watch(model, observe=calls.append):
        model(**clean)
    return _effects(model, corrupt, lambda place: changes.resample(calls, [place]), measure, progress)


def _effects(
    model: nn.Module,
    inputs: Mapping[str, Any],
    edit: Callable[[tuple[int, int]], changes.Edit],
    measure: Measure | None,
    progress: bool | None,
) -> Effects:
    heads: dict[int, int] = {}
    causal = True

    def count(call: AttentionCall) -> None:
        nonlocal causal
        if call.step:
            raise ArgumentError(
                f"edits: layer {call.layer} attends more than once in a forward pass, so a head has no "
                "single output to take away. "
                "Use watch(model, edit=...) with a function that picks the call."
            )
        heads[call.layer] = call.query.shape[1]
        causal = causal and not sees_ahead(call)

    def run() -> Any:  # on copies of what is not a tensor, since a cache grows with every call
        return model(**{name: x if isinstance(x, Tensor) else deepcopy(x) for name, x in inputs.items()})

    def measured(output: Any) -> Tensor:
        assert measure is not None
        found = measure(output, inputs)
        if not isinstance(found, Tensor) or found.dim() != 1 or not found.isfinite().all():
            got = f"{found!r:.100}"
            raise ArgumentError(
                f"edits: measure must give one finite number a text, a tensor (batch,). Got {got}. "
                "The loss of a text of one token is not finite: leave such texts out."
            )
        return found.double()

    with evaluating(model), torch.no_grad():
        with watch(model, observe=count):
            output = run()
        measure = default_measure(model, output, inputs, causal) if measure is None else measure
        base = measured(output)
        effect, error = np.full((2, max(heads) + 1, max(heads.values())), np.nan)
        for layer in track(sorted(heads), "layers", show=progress):
            for head in range(heads[layer]):
                with watch(model, edit=edit((layer, head))):
                    apart = measured(run()) - base
                effect[layer, head] = float(apart.mean())
                if len(apart) > 1:
                    error[layer, head] = float(apart.std() / len(apart) ** 0.5)
    return Effects(effect, error, float(base.mean()))


def sees_ahead(call: AttentionCall) -> bool:
    """Whether a token sees a later one of the same sequence."""
    ahead = 1 + call.key.shape[2] - call.query.shape[2]
    return call.kind != "cross" and bool(call.pattern(0).triu(ahead).any())


def _main(output: Any) -> Tensor:
    """The logits of a model's output, or else its first tensor that is more than a number."""
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output
    parts = [getattr(output, "logits", None), *(parts if isinstance(parts, tuple | list) else [parts])]
    return next(x for x in parts if isinstance(x, Tensor) and x.dim() > 0)


def default_measure(model: Any, output: Any, inputs: Mapping[str, Any], causal: bool) -> Measure:
    """Next-token loss of each text, or the relative change of the model's logits or first output."""
    base, which = _main(output), "decoder_" if "decoder_input_ids" in inputs else ""
    ids, real = inputs.get(f"{which}input_ids"), inputs.get(f"{which}attention_mask")
    use = torch.ones(base.shape[:2], device=base.device)
    use = real.to(base.dtype) if isinstance(real, Tensor) and real.shape == base.shape[:2] else use
    head = getattr(model, "get_output_embeddings", lambda: None)() is not None
    if head and not which and getattr(model.config, "is_encoder_decoder", False):
        raise ArgumentError("edits: give an encoder and decoder its decoder_input_ids, or pass a measure.")
    if head and (causal or which) and isinstance(ids, Tensor) and base.shape[:2] == ids.shape:
        both = use[:, 1:] * use[:, :-1]

        def loss(output: Any, _: Mapping[str, Any]) -> Tensor:
            wrong = nn.functional.cross_entropy(
                output.logits[:, :-1].mT.float(), ids[:, 1:], reduction="none"
            )
            return (wrong * both).sum(1) / both.sum(1)

        return loss

    def size(x: Tensor) -> Tensor:
        return (
            (x.flatten(2).square().sum(-1) * use).sum(1).sqrt() if x.dim() > 2 else x.flatten(1).norm(dim=1)
        )

    return lambda output, _: size(_main(output) - base) / size(base)
