r"""What each head does to a model's output: zero it, or put in its place what it wrote on another prompt.

For text t and head h, with ℓ_t the loss of the model as it is and ℓ_{t,h} that without the head,

    effect_h = mean_t (ℓ_{t,h} − ℓ_t) ± 1.96 · standard error over texts,

each text beside itself. The blocks before a head's own do not feel its change, so they run once: what they
gave is kept, and given again. Where that does not give the model's own output (later blocks may read the
cache that earlier ones fill), all blocks run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
        ahead = 1 + call.key.shape[2] - call.query.shape[2]
        causal = causal and (call.kind == "cross" or not call.pattern(0).triu(ahead).any())

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
        with watch(model, observe=count) as seen, _Prefix(model) as kept:
            output = run()
        measure = default_measure(model, output, inputs, causal) if measure is None else measure
        names, base, whole = seen.modules.layer_names(), measured(output), _main(output)
        effect, error = np.full((2, max(heads) + 1, max(heads.values())), np.nan)
        for layer in track(sorted(heads), "layers", show=progress):
            before = kept.before(names[layer])
            if before and not kept.repeats(before, run, whole):
                before = []
            for head in range(heads[layer]):
                with kept.given_again(before), watch(model, edit=edit((layer, head))):
                    apart = measured(run()) - base
                effect[layer, head] = float(apart.mean())
                if len(apart) > 1:
                    error[layer, head] = float(apart.std() / len(apart) ** 0.5)
    return Effects(effect, error, float(base.mean()))


class _Prefix:
    """Keeps the outputs of all blocks of one run, so that those before a chosen block need not run again."""

    def __init__(self, model: nn.Module):
        self._model, self._ran, self._outputs = model, list[str](), dict[str, Any]()
        self._hooks = ExitStack()

    def __enter__(self) -> "_Prefix":
        lists = [(name, x) for name, x in self._model.named_modules() if isinstance(x, nn.ModuleList)]
        for name, module in ((f"{name}.{i}", x) for name, blocks in lists for i, x in enumerate(blocks)):
            handle = module.register_forward_hook(lambda *given, name=name: self._keep(name, given[-1]))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.close()

    def _keep(self, name: str, output: Any) -> None:
        self._ran.append(name)
        self._outputs[name] = output

    def before(self, name: str) -> list[str]:
        """Blocks that ran once, and ended before the block of a module did."""
        own = block_of(self._model, name)
        first = self._ran[: self._ran.index(own)] if own in self._ran else []
        return [block for block in first if self._ran.count(block) == 1]

    @contextmanager
    def given_again(self, blocks: Sequence[str]) -> Iterator[None]:
        """Inside the context these blocks return their kept outputs without running."""
        with ExitStack() as restore:
            for block in blocks:
                module = self._model.get_submodule(block)
                if "forward" in vars(module):  # put there by another hand
                    restore.callback(setattr, module, "forward", module.forward)
                else:
                    restore.callback(delattr, module, "forward")
                module.forward = lambda *_, output=self._outputs[block], **__: output
            yield

    def repeats(self, blocks: Sequence[str], run: Callable[[], Any], whole: Tensor) -> bool:
        """Whether the model still gives its output `whole` when some blocks do not run."""
        try:
            with self.given_again(blocks), watch(self._model):
                found = _main(run())
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False  # a later block misses something that these leave behind
        return torch.allclose(found, whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


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
