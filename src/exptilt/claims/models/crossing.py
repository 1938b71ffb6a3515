r"""An encoder–decoder that reverses strings of digits: its cross-attention as a Hopfield network (C3).

The decoder's cross-attention reads keys of the encoder's output: patterns that no layer of the decoder
moves, which is Hopfield's condition. Its self-attention reads its own states, which every layer moves. The
output of each head is compared with a step of the library's `Hopfield`, with the keys as patterns and the
query as the state. The weights come with the package; ``examples/train_small_models.py`` made them.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from exptilt.claims.small_models import drawn, trained
from exptilt.memory import Hopfield

DIGITS, LENGTH, WIDTH, HEADS = 10, 8, 32, 2
KEPT = Path(__file__).parent / "kept" / "crossing.npz"


class Reverser(nn.Module):
    """One layer that reads the string, two that write it backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS + 1, WIDTH)  # the last is the start symbol
        self.place = nn.Parameter(0.3 * torch.randn(2, LENGTH, WIDTH))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        reads = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
        encoder = nn.TransformerEncoder(reads, 1, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.body = nn.Transformer(WIDTH, HEADS, 1, 2, 2 * WIDTH, custom_encoder=encoder, **options)
        self.out = nn.Linear(WIDTH, DIGITS)

    def forward(self, given: Tensor, written: Tensor) -> Tensor:
        """Scores of each output digit given the earlier ones in `written`, ``(string, LENGTH, DIGITS)``."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        shifted = torch.cat([torch.full_like(written[:, :1], DIGITS), written[:, :-1]], 1)
        source, target = self.digit(given) + self.place[0], self.digit(shifted) + self.place[1]
        scores: Tensor = self.out(self.body(source, target, tgt_mask=mask, tgt_is_causal=True))
        return scores


def strings(count: int, generator: torch.Generator) -> Tensor:
    """Random strings of digits, ``(count, LENGTH)``."""
    return torch.randint(DIGITS, (count, LENGTH), generator=generator)


def load(*, before: bool = False) -> Reverser:
    """The trained model, or the same one before training."""
    return drawn(Reverser) if before else trained(Reverser, KEPT)[0]


@lru_cache(maxsize=8)
def measured(before: bool, seed: int) -> dict[str, float]:
    """Measurements of a model's heads on strings it has not seen.

    Returns:
        right: share of digits that are written right.
        recall: how often one Hopfield step from a head's query is nearest to the pattern of the digit to be
            written; of the best head.
        weight: attention's mean weight on that pattern; of the same head.
        still: the largest change of the patterns between the decoder's layers, cross-attention.
        moves: the same in self-attention, relative to their size.
    """
    model, given = load(before=before), strings(100, torch.Generator().manual_seed(seed + 1))
    seen: dict[str, list[tuple[Tensor, Tensor, Any]]] = {"self": [], "cross": []}
    hooks = []
    for layer in model.body.decoder.layers:
        for name, part in (("self", layer.self_attn), ("cross", layer.multihead_attn)):

            def note(module: Any, inputs: Any, name: str = name) -> None:
                seen[name].append((inputs[0], inputs[1], module))

            hooks.append(cast(nn.Module, part).register_forward_pre_hook(note))
    with torch.no_grad():
        right = (model(given, given.flip(1)).argmax(-1) == given.flip(1)).double().mean()
        for hook in hooks:
            hook.remove()
        heads = [found for one in seen["cross"] for found in _recalled(*one)]
        steps = {name: some[1][1] - some[0][1] for name, some in seen.items()}
        sizes = {name: some[0][1].norm() for name, some in seen.items()}
    recall, weight = max(heads)
    return {
        "right": float(right),
        "recall": recall,
        "weight": weight,
        "still": float(steps["cross"].abs().max()),
        "moves": float(steps["self"].norm() / sizes["self"]),
    }


def _recalled(states: Tensor, source: Tensor, module: Any) -> list[tuple[float, float]]:
    """For each head, how often it recalls the pattern of the next digit, and its mean weight there."""
    (Wq, Wk, _), (bq, bk, _) = (getattr(module, f"in_proj_{x}").chunk(3) for x in ("weight", "bias"))
    q, k = ((x @ W.mT + b).unflatten(-1, (HEADS, -1)) for x, W, b in ((states, Wq, bq), (source, Wk, bk)))
    beta, due, found = q.shape[-1] ** -0.5, torch.arange(LENGTH - 1, -1, -1), []
    for head in range(HEADS):
        nearest, weights = [], []
        for state, patterns in zip(q[:, :, head].double(), k[:, :, head].double(), strict=True):
            step = Hopfield(patterns, beta).step(state)
            nearest.append(torch.cdist(step, patterns).argmin(-1) == due)
            weights.append(torch.softmax(beta * state @ patterns.mT, -1)[torch.arange(LENGTH), due])
        found.append((float(torch.cat(nearest).double().mean()), float(torch.cat(weights).mean())))
    return found
