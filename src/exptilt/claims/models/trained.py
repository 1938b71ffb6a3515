r"""F4 and F5: a small language model trained with and without its weights, and what each matrix is worth.

A transformer of two layers reads "tiny Shakespeare" (1.1 million characters): eight tenths for training,
one for choosing the step, one for the loss that is reported. A run keeps some of the parts qk (W_q, W_k),
vo (W_v, W_o) and mlp; the identity stands in place of matrices that it lacks, and nothing in place of an
MLP. Beside the losses stand those of n-grams, smoothed by absolute discounts.

All runs take an hour or two. Their results are in ``kept/trained.json``, which
``examples/train_without_weights.py`` made.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from exptilt.claims.evidence import Check, Findings, axes, bars, dots, note
from exptilt.claims.ledger import APPENDIX, claim

PARTS = {"qk": ("q", "k"), "vo": ("v", "o"), "mlp": ("up", "down")}
KINDS = tuple(kind for kinds in PARTS.values() for kind in kinds)
FULL, NOTHING = "qk+vo+mlp", "none"
VARIANTS = tuple("+".join(some) or NOTHING for n in (3, 2, 1, 0) for some in combinations(PARTS, n))
KEPT = Path(__file__).parent / "kept" / "trained.json"


@cache
def results() -> dict[str, Any]:
    """The runs that come with the package."""
    found: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
    return found


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
def ablation(seed: int) -> Findings:
    """The drafts explain attention without its weights, and note that all knowledge of the data must then be
    in them: without any, a language model should do badly. The same small model is trained with and without
    its query and key matrices (qk), its value and output matrices (vo) and its MLP, in all eight ways. The
    draft's own case is "mlp": no weights in attention, the MLP kept.

    Experiment:
        Two layers of width 64 trained on 0.9 million characters of Shakespeare, at least 5 seeds, the same
        draws and batches for all eight. Loss on a text apart from both training and choice, less that of the
        full model of the same seed. A part is needed if the loss rises by 0.02 nats a character, all
        together if by 0.2. N-grams are beside them, and the full model must beat the trigrams. The results
        come with the package; `examples/train_without_weights.py` trains again, for an hour or two.

    Example:
        >>> from exptilt.claims.models.trained import VARIANTS
        >>> print(VARIANTS)
        ('qk+vo+mlp', 'qk+vo', 'qk+mlp', 'vo+mlp', 'qk', 'vo', 'mlp', 'none')
    """
    found = results()
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
def sensitive(seed: int) -> Findings:
    """The drafts suspect that query and key matrices are less sensitive, or easier to train, than those of
    values, output and MLP. Each kind of matrix is disturbed, set back to where it began, and left untrained
    from the beginning: the less the loss rises, the more the other matrices make up for it.

    Experiment:
        The models of F4. Every matrix of a kind, in both layers, with noise of half its norm (mean of four
        draws), and with its weights before training: the rise of the test loss. Models trained with one part
        left as it was drawn: their loss above the full model's, seed by seed.

    Example:
        >>> from exptilt.claims.models.trained import PARTS
        >>> print(PARTS["qk"], PARTS["vo"], PARTS["mlp"])
        ('q', 'k') ('v', 'o') ('up', 'down')
    """
    found = results()
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
