"""A press for kvpress that joins keys in place of dropping them, beside two of kvpress's own.

A press makes the cache of a Hugging Face model smaller once the model has read a prompt. kvpress's presses
keep some keys and drop the others. `CollapsePress` calls `xt.compact`: the heaviest keys stay, the others are
joined in clusters, whose log-weights the attention below adds to the scores. Install kvpress first, with
`pip install kvpress`; version 0.5.5 asks for transformers below 5.3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

import exptilt as xt
from exptilt.lens import models
from exptilt.lens.caches import at_next_places

try:
    from kvpress import BasePress, KnormPress, StreamingLLMPress
except ImportError as problem:
    raise SystemExit(
        f"kvpress cannot be imported ({problem}). Install it with: pip install kvpress. Version 0.5.5 asks "
        "for transformers below 5.3."
    ) from problem

PROMPT, NEXT, RATIO = 512, 128, 0.9


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Causal attention with the log-weights that a press has left; the prompt's queries are kept for it."""
    weight = getattr(module, "log_weight", None)
    if query.shape[-2] == key.shape[-2]:
        module.query, module.log_weight, weight = query, None, None
    if weight is not None:
        weight = F.pad(weight, (0, key.shape[-2] - weight.shape[-1]))  # keys that came since have weight 1
    result = xt.attend(query, key, value, scale=options["scaling"], causal=True, log_weight=weight)
    return result.output.transpose(1, 2), None


@dataclass
class CollapsePress(BasePress):  # type: ignore[misc]
    """Keys joined in clusters, for a model whose attention is the function above."""

    compression_ratio: float = 0.0

    def post_init_from_model(self, model: nn.Module) -> None:
        self.model = model

    def compress(
        self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, weights: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        budget = max(1, round(keys.shape[-2] * (1 - self.compression_ratio)))
        queries = at_next_places(self.model, module, module.query, NEXT)
        few = xt.compact(keys, values, budget, queries, scale=module.scaling)
        module.log_weight = few.log_weight
        return few.key, few.value


@torch.no_grad()
def measure(model: nn.Module, ids: Tensor, press: Any) -> tuple[int, float]:
    """Keys that the press leaves of the prompt, and the loss of the tokens after it, in nats."""
    cache = DynamicCache()
    with press(model):
        model(ids[:, :PROMPT], past_key_values=cache)
    held = cache.layers[0].keys.shape[-2]
    places = torch.arange(PROMPT, ids.shape[1])[None]
    logits = model(ids[:, PROMPT:], past_key_values=cache, position_ids=places).logits
    return held, float(F.cross_entropy(logits[0, :-1], ids[0, PROMPT + 1 :]))


def main() -> None:
    loaded = models.load_model("smollm2")
    model, text = loaded.model.eval(), models.read_text(models.default_folder() / "text.txt")
    ids = loaded.tokenizer(text[:6000], return_tensors="pt").input_ids[:, : PROMPT + NEXT]
    AttentionInterface.register("with log-weights", attention)
    model.set_attn_implementation("with log-weights")
    print(f"{'press':20s} keys  loss of the next {NEXT} tokens")
    for press in (None, KnormPress, StreamingLLMPress, CollapsePress):
        made = KnormPress(compression_ratio=0.0) if press is None else press(compression_ratio=RATIO)
        held, loss = measure(model, ids, made)
        print(f"{'all keys' if press is None else press.__name__:20s} {held:4d}  {loss:.3f}")


if __name__ == "__main__":
    main()
