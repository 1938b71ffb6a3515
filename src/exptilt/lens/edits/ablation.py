r"""What each head does to a model's output: zero it, or put in its place what it wrote on another prompt.

For text t and head h, with ℓ_t the loss of the model as it is and ℓ_{t,h} that without the head,

    effect_h = mean_t (ℓ_{t,h} − ℓ_t) ± 1.96 · standard error over texts,

each text beside itself. The blocks before a head's own do not feel its change, so they run once: what they
gave is kept, and given again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from exptilt.lens.questions.blocks import block_of
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
            (layer, head, *(self.effect[layer, head] + k * self.error[layer, head] for k in (0, -1.96, 1.96)))
            for layer, head in places
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
            next-token loss in nats; of a model that predicts no tokens, the relative change of its first
            output.
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
    """`Effects` on a corrupt prompt of heads that write what they wrote on the clean one, one at a time.

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

    def count(call: AttentionCall) -> None:
        if call.step:
            raise ArgumentError(
                f"ablate: layer {call.layer} attends more than once in a forward pass, so a head has no "
                "single output to take away. "
                "Use watch(model, edit=...) with a function that picks the call."
            )
        heads[call.layer] = call.query.shape[1]

    with evaluating(model), torch.no_grad():
        with (
            watch(model, observe=count) as seen,
            _Prefix(model, list(seen.modules.layer_names().values())) as kept,
        ):
            output = model(**inputs)
        measure = _default(model, output, inputs) if measure is None else measure
        base = measure(output, inputs).double()
        places = [(layer, head) for layer in sorted(heads) for head in range(heads[layer])]
        effect, error = np.full((2, max(heads) + 1, max(heads.values())), np.nan)
        for layer, head in track(places, "heads", show=progress):
            with kept.given_again(seen.modules.layer_names()[layer]), watch(model, edit=edit((layer, head))):
                apart = measure(model(**inputs), inputs).double() - base
            effect[layer, head] = float(apart.mean())
            if len(apart) > 1:
                error[layer, head] = float(apart.std() / len(apart) ** 0.5)
    return Effects(effect, error, float(base.mean()))


class _Prefix:
    """The outputs of the blocks of one run, to be given again up to a block."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        found = dict.fromkeys(block for name in names if (block := block_of(model, name)) is not None)
        self._model, self._order, self._outputs = model, list(found), dict[str, Any]()
        self._hooks = ExitStack()

    def __enter__(self) -> "_Prefix":
        for name in self._order:
            handle = self._model.get_submodule(name).register_forward_hook(
                lambda _, args, output, name=name: self._outputs.__setitem__(name, output)
            )
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.close()

    @contextmanager
    def given_again(self, name: str) -> Iterator[None]:
        """Have the blocks before that of a module give what they gave, without running."""
        own = block_of(self._model, name)
        before = self._order[: self._order.index(own)] if own in self._order else []
        with ExitStack() as restore:
            for block in before:
                module = self._model.get_submodule(block)
                module.forward = lambda *_, output=self._outputs[block], **__: output
                restore.callback(delattr, module, "forward")
            yield


def _default(model: nn.Module, output: Any, inputs: Mapping[str, Any]) -> Measure:
    """Next-token loss of each text, or the relative change of the model's first output."""
    ids, logits, real = inputs.get("input_ids"), getattr(output, "logits", None), inputs.get("attention_mask")
    if isinstance(ids, Tensor) and logits is not None and logits.shape[:2] == ids.shape:
        use = torch.ones_like(ids) if real is None else real

        def loss(output: Any, _: Mapping[str, Any]) -> Tensor:
            wrong = nn.functional.cross_entropy(
                output.logits[:, :-1].mT.float(), ids[:, 1:], reduction="none"
            )
            return (wrong * use[:, 1:]).sum(1) / use[:, 1:].sum(1)

        return loss
    base = output[0].detach()
    use = torch.ones(base.shape[:2], device=base.device) if real is None else real.to(base.dtype)

    def change(output: Any, _: Mapping[str, Any]) -> Tensor:
        def size(x: Tensor) -> Tensor:
            return (x.flatten(2).square().sum(-1) * use).sum(1).sqrt()

        return size(output[0] - base) / size(base)

    return change
