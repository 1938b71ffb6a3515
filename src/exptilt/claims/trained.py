r"""F4 and F5: small models trained with and without their weights, and how sensitive each matrix is.

A transformer of two layers reads the characters of the text that comes with the package: four fifths for
training, the rest held out. Norms before each sublayer, skip connections, embeddings of characters and
places, input and output embeddings shared. A variant lacks some of the matrices: the identity stands in their
place. Half a minute a seed for all seven variants.
"""

from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from exptilt.claims.evidence import Findings, axes, bars, curve, dots, least, most, note
from exptilt.claims.ledger import APPENDIX, Between, claim
from exptilt.lens import models

WIDTH, LAYERS, CONTEXT, BATCH = 32, 2, 64, 16
HEADS = 4
VARIANTS = {
    "full": frozenset(("q", "k", "v", "o", "up", "down")),
    "no W_q, W_k": frozenset(("v", "o", "up", "down")),
    "W_q = W_k": frozenset(("q", "v", "o", "up", "down")),
    "no W_v": frozenset(("q", "k", "o", "up", "down")),
    "one head": frozenset(("q", "k", "v", "o", "up", "down")),
    "no MLP": frozenset(("q", "k", "v", "o")),
    "no weights": frozenset(),
}
Steps = Annotated[int, Between(20, 20_000)]


class Trained(NamedTuple):
    """A trained model: its weights, those it began with, and its held-out loss as it learnt."""

    weights: dict[str, Tensor]
    begun: dict[str, Tensor]
    steps: list[int]
    losses: list[float]


@lru_cache(maxsize=1)
def _text() -> tuple[Tensor, Tensor, int]:
    """Characters to train on, characters held out, and how many different ones there are."""
    text = models.read_text(models.default_folder() / "text.txt")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    return ids[: len(ids) * 4 // 5], ids[len(ids) * 4 // 5 :], len(letters)


def _begin(variant: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (_text()[2], WIDTH), "place": (CONTEXT, WIDTH)}
    for n in range(LAYERS):
        for name in ("q", "k", "v", "o", "up", "down"):
            out, into = {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}.get(name, (WIDTH, WIDTH))
            shapes[f"{n}.{name}"] = (out, into)
    # All variants of a seed begin alike: what one lacks is drawn and left out.
    drawn = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    kept = VARIANTS[variant]
    return {name: w for name, w in drawn.items() if "." not in name or name.split(".")[1] in kept}


def _logits(w: dict[str, Tensor], ids: Tensor, variant: str) -> Tensor:
    heads, shared = 1 if variant == "one head" else HEADS, variant == "W_q = W_k"
    x = w["embedding"][ids] + w["place"][: ids.shape[-1]]

    def through(name: str, y: Tensor) -> Tensor:
        return y @ w[name].mT if name in w else y

    for n in range(LAYERS):
        y = layer_norm(x, (WIDTH,))
        parts = [through(f"{n}.{name}", y) for name in ("q", "q" if shared else "k", "v")]
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + through(f"{n}.o", mixed)
        if f"{n}.up" in w:
            x = x + nn.functional.gelu(layer_norm(x, (WIDTH,)) @ w[f"{n}.up"].mT) @ w[f"{n}.down"].mT
    return layer_norm(x, (WIDTH,)) @ w["embedding"].mT


def held_out(w: dict[str, Tensor], variant: str) -> float:
    """Mean loss on the text held out, in nats a character."""
    rest = _text()[1]
    windows = rest[: len(rest) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad():
        return float(
            cross_entropy(_logits(w, windows[:, :-1], variant).flatten(0, 1), windows[:, 1:].flatten())
        )


@lru_cache(maxsize=32)
def trained(variant: str, seed: int, steps: int) -> Trained:
    """Train a variant; its held-out loss is measured ten times on the way, and the best weights are kept."""
    train, _, _ = _text()
    begun = _begin(variant, seed)
    w = {name: value.clone().requires_grad_() for name, value in begun.items()}
    optimizer = torch.optim.AdamW(w.values(), lr=4e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    at, losses, best = [0], [held_out(begun, variant)], begun
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, step / 40) * (1 - 0.9 * step / steps)
        first = torch.randint(len(train) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = train[first + torch.arange(CONTEXT + 1)]
        loss = cross_entropy(_logits(w, window[:, :-1], variant).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            now = held_out(w, variant)
            if now < min(losses):
                best = {name: value.detach().clone() for name, value in w.items()}
            at.append(step)
            losses.append(now)
    return Trained(best, begun, at, losses)


@claim(
    "F4",
    "How well does a model do without its weights?",
    r"\text{loss}(\text{without } W_q,W_k;\ W_v;\ \text{heads};\ \text{MLP};\ \text{any})"
    r"-\text{loss}(\text{full})",
    f"{APPENDIX} (“otherwise we might expect our language models to perform fairly well without any "
    "weights”)",
    question=True,
    full=True,
)
def ablation(seed: int, *, steps: Steps = 600) -> Findings:
    """The drafts explain attention without its weights, and note that all knowledge of the data must then be
    in them: without any, a language model should do badly. The same small model is trained with and without
    W_q, W_k, W_v, heads and MLP.

    Experiment:
        Seven variants from the same draws of weights and batches: the best held-out loss of each, less that
        of the full model. A part is needed if the loss rises by 0.02 nats a character or more, and all
        weights together if it rises by 0.2.

    Example:
        >>> from exptilt.claims.trained import trained
        >>> print(round(trained("no weights", seed=0, steps=20).losses[0]) > 3)
        True
    """
    runs = {variant: trained(variant, seed, steps) for variant in VARIANTS}
    best = {variant: min(run.losses) for variant, run in runs.items()}
    rise = {variant: value - best["full"] for variant, value in best.items() if variant != "full"}
    parts = [variant for variant in rise if variant != "no weights"]
    yield least("no weights at all: loss above the full model's", rise["no weights"], 0.2, "measured")
    yield from (
        least(f"{variant}: loss above the full model's", rise[variant], 0.02, "measured") for variant in parts
    )
    yield note("full model: held-out loss", best["full"])
    yield from (curve(variant, run.steps, run.losses) for variant, run in runs.items())
    yield axes("Held-out loss as the variants learn", "training step", "nats a character")


@claim(
    "F5",
    "Which weights are easier to train or less sensitive?",
    r"\text{loss}\big(W+\epsilon\|W\|Z/\|Z\|\big)-\text{loss}(W)\quad\text{for each }W",
    f"{APPENDIX} (“some weights may be less sensitive or at least easier to train than others”)",
    question=True,
    full=True,
)
def sensitivity(
    seed: int, *, steps: Steps = 600, noise: Annotated[float, Between(0.01, 2)] = 0.5
) -> Findings:
    """The drafts suspect that query and key matrices are less sensitive than those of values, output and MLP.
    Each kind of matrix of the trained model is disturbed, and set back to where it began.

    Experiment:
        The full model of F4. Every matrix of a kind, in both layers, with noise of half its norm (mean of
        eight draws), and with its weights before training: the rise of the held-out loss.

    Example:
        >>> from exptilt.claims.trained import VARIANTS
        >>> print(sorted(VARIANTS["full"]))
        ['down', 'k', 'o', 'q', 'up', 'v']
    """
    model = trained("full", seed, steps)
    base, generator = held_out(model.weights, "full"), torch.Generator().manual_seed(seed)
    disturbed, reset = {}, {}
    for kind in ("q", "k", "v", "o", "up", "down"):
        names = [f"{n}.{kind}" for n in range(LAYERS)]
        rises = []
        for _ in range(8):
            changed = dict(model.weights)
            for name in names:
                w = changed[name]
                z = torch.randn(w.shape, generator=generator)
                changed[name] = w + noise * w.norm() * z / z.norm()
            rises.append(held_out(changed, "full") - base)
        disturbed[kind] = sum(rises) / len(rises)
        reset[kind] = held_out(model.weights | {name: model.begun[name] for name in names}, "full") - base
    few, many = max(disturbed["q"], disturbed["k"]), min(disturbed["v"], disturbed["o"])
    mlp = min(disturbed["up"], disturbed["down"])
    yield most("noise: W_q, W_k over W_v, W_o", few / many, 1.0, "measured")
    yield most("noise: W_q, W_k over the MLP", few / mlp, 1.0, "measured")
    few, many = max(reset["q"], reset["k"]), min(reset["v"], reset["o"])
    yield most("set back: W_q, W_k over W_v, W_o", few / many, 1.0, "measured")
    yield from (note(f"{kind}: rise of the loss with noise", value) for kind, value in disturbed.items())
    yield from (note(f"{kind}: rise of the loss set back", value) for kind, value in reset.items())
    yield bars("noise of half its norm", list(disturbed), list(disturbed.values()))
    yield dots("set back to its start", list(reset), list(reset.values()))
    yield axes("Rise of the held-out loss by kind of matrix", "matrix", "nats a character")
