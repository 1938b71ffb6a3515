r"""Differences between two studies, of two models, checkpoints or texts, and divergences of two models.

    d = x_a − x_b,      error² = error_a² + error_b²,      z = d / error

for every head if both have as many layers and heads, and for the mean over heads in any case. Errors of heads
are correlated, since heads read the same texts, so the error of their mean is given as the mean of their
errors, its upper bound. The two studies are taken as independent.

Two models that read the same tokens (before and after fine-tuning, quantised and not) are compared head by
head by the divergence of their attention, KL(p‖q) in nats, averaged over queries: each text beside itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.lens.studying.results import HeadMeasure, Study
from exptilt.lens.studying.study import read
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.modules import evaluating
from exptilt.lens.watching.watch import watch
from exptilt.tilting import divergence

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Difference of one statistic between two studies.

    Attributes:
        title, unit: of the statistic.
        means: of the first and the second study, over heads.
        difference: of the means, first minus second.
        error: its standard error; NaN where errors are not known.
        by_head: ``(layer, head)`` differences; None if the studies differ in numbers of layers or heads.
        head_error: ``(layer, head)``, standard errors of `by_head`, or None.
    """

    title: str
    unit: str
    means: tuple[float, float]
    difference: float
    error: float
    by_head: Array | None
    head_error: Array | None

    def differing(self) -> NDArray[np.bool_]:
        """``(layer, head)`` booleans: heads that differ by over two standard errors; empty if not known."""
        if self.by_head is None or self.head_error is None:
            return np.zeros((0, 0), dtype=bool)
        with np.errstate(invalid="ignore"):
            found: NDArray[np.bool_] = np.abs(self.by_head) > 2 * self.head_error
        return found


@dataclass(frozen=True)
class Divergences:
    """How far the heads of two models look at different tokens.

    Attributes:
        divergence: ``(layer, head)``, KL(first‖second) in nats, mean over queries and texts; infinite where
            the first sees a token that the second does not, NaN where a layer has fewer heads.
        error: ``(layer, head)``, its standard error over texts; NaN for one text.
        by_text: ``(text, layer, head)``.
    """

    divergence: Array
    error: Array
    by_text: Array

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row a head, the largest divergence first."""
        import pandas as pd

        places = np.argwhere(~np.isnan(self.divergence))
        rows = [(*place, self.divergence[tuple(place)], self.error[tuple(place)]) for place in places]
        made = pd.DataFrame(rows, columns=["layer", "head", "divergence", "error"])
        return made.sort_values("divergence", ascending=False, ignore_index=True)


@overload
def compare(first: Study, second: Study) -> dict[str, Difference]: ...


@overload
def compare(
    first: nn.Module, second: nn.Module, texts: Sequence[Any], tokenizer: Any = None
) -> Divergences: ...


def compare(
    first: Study | nn.Module,
    second: Study | nn.Module,
    texts: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> dict[str, Difference] | Divergences:
    """Differences of two studies, first minus second, or divergences of two models' heads over texts.

    Args:
        first: a study, or a model.
        second: a study of another model, checkpoint or text; or a model of as many layers and heads, which
            reads the same tokens.
        texts: for models: texts, or keyword arguments of the models for each text.
        tokenizer: for models that read texts.

    Returns:
        A `Difference` for every head measure that both studies have, by its name; for models `Divergences`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> class Letters:
        ...     def __call__(self, text, add_special_tokens=True):
        ...         return {"input_ids": [ord(c) for c in text]}
        ...
        ...     def decode(self, ids):
        ...         return "".join(chr(i) for i in ids)
        >>> config = GPT2Config(
        ...     vocab_size=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        ... )
        >>> studies = [
        ...     xt.lens.study(
        ...         GPT2LMHeadModel(config), Letters(), ["to be or not to be", "that is the question"]
        ...     )
        ...     for _ in range(2)
        ... ]
        >>> xt.lens.compare(*studies)["entropy"].by_head.shape
        (2, 2)
    """
    if isinstance(first, nn.Module) and isinstance(second, nn.Module):
        return _divergences(first, second, texts, tokenizer)
    if not isinstance(first, Study) or not isinstance(second, Study):
        got = f"{type(first).__name__} and {type(second).__name__}"
        raise ArgumentError(f"compare: got {got}. Pass two studies, or two models and texts.")
    found = {}
    for name, a in first.heads.items():
        b = second.heads.get(name)
        if a.value is not None and b is not None and b.value is not None:
            found[name] = _difference(a, a.value, b, b.value)
    return found


def divergence_measure(
    first: tuple[nn.Module, Any], second: tuple[nn.Module, Any], texts: Any, max_tokens: int | None, name: str
) -> HeadMeasure:
    """The divergence of each head from that of the model `name`, as a measure of a study; it may say why not.

    The models come with their tokenizers; `texts` and `max_tokens` are those of `study`.
    """
    value, error, reason = None, None, "the two models read different tokens."
    chunks = [read(model, tokenizer, texts, max_tokens).chunks for model, tokenizer in (first, second)]
    if [chunk.mark for chunk in chunks[0]] == [chunk.mark for chunk in chunks[1]]:
        try:
            given = [chunk.inputs(first[0]) for chunk in chunks[0]]
            found = _divergences(first[0], second[0], given, None)
            value, error, reason = found.divergence, found.error, ""
        except ArgumentError as problem:
            reason = str(problem).removeprefix("compare: ")
    about = (
        f"KL(p‖q) of this head's attention p from the attention q of the same head of {name}, mean over "
        "queries: 0 if both look at the same tokens."
    )
    assumes = "Both models read the same tokens, and heads with the same number belong together."
    title = f"divergence from {name}"
    return HeadMeasure(title, "nats", about, assumes, value, error, reason, span=(0.0, None))


def _divergences(first: nn.Module, second: nn.Module, texts: Any, tokenizer: Any) -> Divergences:
    """The divergence of each head, text by text."""
    if isinstance(texts, str | Mapping) or not texts or (tokenizer is None and isinstance(texts[0], str)):
        raise ArgumentError(
            "compare: two models need a list of texts and their tokenizer, or a list of keyword arguments "
            "such as [{'input_ids': ...}]."
        )
    found = []
    for text in track(list(texts), "texts"):
        given = tokenizer(text, return_tensors="pt") if isinstance(text, str) else text
        calls: tuple[list[AttentionCall], list[AttentionCall]] = ([], [])
        for model, seen in zip((first, second), calls, strict=True):
            with evaluating(model), torch.no_grad(), watch(model, observe=seen.append):
                model(**given)
        if len(calls[0]) != len(calls[1]):
            raise ArgumentError(
                f"compare: the models attend {len(calls[0])} and {len(calls[1])} times. Pass models of as "
                "many layers; studies of any two models can be compared."
            )
        rows = [_apart(a, b) for a, b in zip(*calls, strict=True)]
        widest = max(map(len, rows))
        found.append([np.pad(row, (0, widest - len(row)), constant_values=np.nan) for row in rows])
    by_text = np.array(found)
    error = np.full_like(by_text[0], np.nan)
    if len(by_text) > 1:
        with np.errstate(invalid="ignore"):
            error = by_text.std(0, ddof=1) / len(by_text) ** 0.5
    return Divergences(by_text.mean(0), error, by_text)


@torch.no_grad()
def _apart(a: AttentionCall, b: AttentionCall) -> Array:
    """(head,): KL of two calls of the same layer, mean over the queries that are real."""
    sizes = [(x.layer, x.query.shape[1], x.query.shape[2], x.key.shape[2]) for x in (a, b)]
    rules = [[x.options.get(name) for name in ("causal", "window")] for x in (a, b)]
    if sizes[0] != sizes[1] or rules[0] != rules[1]:
        raise ArgumentError(
            f"compare: layer, heads, queries and keys are {sizes[0]} and {sizes[1]}, causal and window "
            f"{rules[0]} and {rules[1]}. Pass models with the same heads over the same tokens."
        )
    hidden = [x.options["mask"] for x in (a, b) if x.options.get("mask") is not None]
    names = ("scale", "bias", "softcap", "sink")
    options = {name: (a.options.get(name), b.options.get(name)) for name in names}
    mask = None if not hidden else hidden[0] if len(hidden) == 1 else hidden[0] & hidden[1]
    tensors = (x.float() if x.dtype.itemsize < 4 else x for x in (a.query, a.key, b.query, b.key))
    found = divergence(*tensors, mask=mask, causal=bool(rules[0][0]), window=rules[0][1], **options)
    real = (
        torch.ones_like(found) if a.real_query is None else a.real_query[:, None].to(found).expand_as(found)
    )
    total = torch.where(real > 0, found, 0.0).sum((0, 2)) / real.sum((0, 2))
    return total.double().cpu().numpy()


def _difference(a: HeadMeasure, x: Array, b: HeadMeasure, y: Array) -> Difference:
    """The difference of measures a and b, whose values are x and y."""
    (first, first_error), (second, second_error) = _mean(x, a.error), _mean(y, b.error)
    by_head = head_error = None
    if x.shape == y.shape:
        by_head = x - y
        head_error = None if a.error is None or b.error is None else np.hypot(a.error, b.error)
    error = float(np.hypot(first_error, second_error))
    return Difference(a.title, a.unit, (first, second), first - second, error, by_head, head_error)


def _mean(value: Array, error: Array | None) -> tuple[float, float]:
    """Mean over heads and its standard error, NaN where not known."""
    known = np.isfinite(value)
    if not known.any():
        return float("nan"), float("nan")
    if error is None or not np.isfinite(error[known]).all():
        return float(value[known].mean()), float("nan")
    return float(value[known].mean()), float(error[known].mean())


def most_different(first: Study, second: Study, count: int = 5) -> list[tuple[str, int, int]]:
    """Statistic, layer and head of the largest differences that are sure, at most one a head, largest first.

    A difference is sure beyond two standard errors. Its size is in standard deviations of the statistic over
    all heads.
    """
    rows = []
    for name, found in compare(first, second).items():
        if found.by_head is None:
            continue
        spread = np.nanstd([study.heads[name].value for study in (first, second)])  # type: ignore[arg-type]
        for layer, head in np.argwhere(found.differing() & (spread > 0)):
            rows.append((abs(float(found.by_head[layer, head])) / spread, name, int(layer), int(head)))
    kept: dict[tuple[int, int], tuple[str, int, int]] = {}
    for _, name, layer, head in sorted(rows, key=lambda row: -row[0]):
        kept.setdefault((layer, head), (name, layer, head))
    return list(kept.values())[:count]
