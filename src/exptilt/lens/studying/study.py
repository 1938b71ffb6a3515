r"""`study`: put a transformer under the theory, on texts of your choice.

    units = one forward pass per chunk of text (`unit`), kept in a store as they finish
    study = means over units with standard errors (`summary`), and the same for each checkpoint

What is measured and what each number means is in `definitions`; how, in `heads`, `ascent`, `local_gaussian`, `link` and `hidden`.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.lens.questions.weights import measure_weights
from exptilt.lens.studying import summary
from exptilt.lens.studying.checkpoints import Checkpoint, Moment, moments
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.studying.one_text import Options, measure_unit
from exptilt.lens.studying.results import Study, Training
from exptilt.lens.studying.store import Store, Unit, fingerprint
from exptilt.lens.studying.texts import Chunk, Cut, as_texts, context_length, cut, token_texts
from exptilt.lens.watching.watch import NothingSeenError

CHUNK = 512  # tokens in a chunk, if the model can read as many: long enough for distributions, short enough to have several
TRAINING_CHUNKS = 8  # on which checkpoints are measured
STRIP, MANY_HEADS, SHORT_STRIP = 64, 100, 32  # tokens in a strip; fewer where there are many heads to show


def study(
    model: nn.Module, tokenizer: Any, texts: str | Sequence[str] | Mapping[str, str], *, name: str | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    max_tokens: int | None = None, chunk: int | None = None, seed: int = 0, store: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Study:  # fmt: skip
    """Measure every head and layer of a transformer on texts.

    The model is run on its own device, in eval mode, one chunk of text at a time, and left as it was found.

    Args:
        model: a transformers model that reads tokens.
        tokenizer: its tokenizer.
        texts: one text, several, or several by name; longer ones than the context are cut.
        name: of the model, for the report; by default what the model was loaded from.
        checkpoints: the same model in training: folders, functions that return a model, or pairs of a step and either.
        max_tokens: stop after so many tokens, special ones included; notes say what was left out.
        chunk: most tokens the model reads at once, at least 2; by default 512, or as many as it can.
        seed: of the sample of hidden states.
        store: folder where finished parts are kept: an interrupted study resumes there, a repeated one is instant.
        progress: show a bar with time left; None where standard error is a terminal.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> tiny = GPT2LMHeadModel(
        ...     GPT2Config(vocab_size=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        ... )
        >>> class Letters:
        ...     def __call__(self, text, add_special_tokens=True):
        ...         return {"input_ids": [ord(c) for c in text]}
        ...
        ...     def decode(self, ids):
        ...         return "".join(chr(i) for i in ids)
        >>> found = xt.lens.study(tiny, Letters(), ["to be or not to be", "that is the question"])
        >>> found.heads["entropy"].value.shape
        (2, 2)
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(
            f"study: model is a {type(model).__name__}. Pass a transformers model, such as AutoModel.from_pretrained gives."
        )
    if (reads := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise ArgumentError(
            f"study: {type(model).__name__} reads {reads}, not text. Pass a model that reads tokens."
        )
    for label, given in (("chunk", chunk), ("max_tokens", max_tokens)):
        if given is not None and (
            isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 2
        ):
            raise ArgumentError(f"study: {label} is {given!r}. Pass a number of tokens, at least 2, or None.")
    context = context_length(model, tokenizer)
    length = min(x for x in (CHUNK if chunk is None else int(chunk), context) if x is not None)
    read, names_of_texts = as_texts(texts)
    taken = cut(tokenizer, read, length=length, max_tokens=max_tokens, vocabulary=_vocabulary(model))
    chunks = taken.chunks
    series = moments(checkpoints)
    sample = int(np.clip(2 * summary.SAMPLE // len(chunks), 8, 256))
    options = Options(
        seed=seed, sample=sample, strip=STRIP if _head_total(model) <= MANY_HEADS else SHORT_STRIP
    )
    plan = _Plan(model, series, chunks, options, Store(store))
    units, weights = plan.run(progress)
    used = [token for unit in units for token in unit["token_ids"].tolist()]
    names = dict(zip(sorted(set(used)), token_texts(tokenizer, sorted(set(used))), strict=True))
    strip = units[0]["strip"].shape[-1]
    return Study(
        name=name or getattr(model.config, "_name_or_path", "") or type(model).__name__,
        facts=_facts(model, units[0], context),
        text_facts=_text_facts(chunks, names_of_texts if isinstance(texts, Mapping) else None, length),
        heads=summary.head_measures(units, weights),
        layers=summary.layer_measures(units),
        details=summary.details(units, names),
        strip_tokens=token_texts(tokenizer, chunks[0].ids[:strip].tolist()),
        training=plan.training() if series else None,
        notes=_notes(taken, names_of_texts, length, context, units[0], len(plan.few) if series else None),
        seed=seed,
        layer_names=[
            f"{n} (cross)" if kind == "cross" else str(n)
            for n, kind in zip(units[0]["name"], units[0]["kind"], strict=True)
        ],
    )


@dataclass
class _Plan:
    """The work of a study, unit by unit."""

    model: nn.Module
    series: list[Moment]
    chunks: list[Chunk]
    options: Options
    store: Store

    def __post_init__(self) -> None:
        wanted = (
            np.linspace(0, len(self.chunks) - 1, min(TRAINING_CHUNKS, len(self.chunks))).round().astype(int)
        )
        self.few = [self.chunks[i] for i in wanted]
        self.found: list[tuple[Moment | None, list[Unit], Unit]] = []

    def run(self, progress: bool | None) -> tuple[list[Unit], Unit]:
        """Do all of it; units and weights of the model itself."""
        total = len(self.chunks) + 1 + len(self.series) * (len(self.few) + 1)
        for _ in track(self._steps(), "studying", total=total, show=progress):
            pass
        return self.found[0][1], self.found[0][2]

    def _steps(self) -> Iterator[None]:
        yield from self._one(None, self.model, self.chunks)
        for moment in self.series:
            yield from self._one(moment, moment.load(self.model), self.few)

    def _one(self, moment: Moment | None, model: nn.Module, chunks: list[Chunk]) -> Iterator[None]:
        mark = fingerprint(model)
        units: list[Unit] = []
        with _evaluating(model):
            weights = self.store.get(
                {"model": mark, "what": "weights"}, partial(_seen, measure_weights, model, chunks[0].ids[:1])
            )
            yield
            for place, chunk in enumerate(chunks):
                options = self.options if moment is None else replace(self.options, details=False)
                if moment is not None or place > 0:
                    options = replace(options, strip=0)
                tokens = hashlib.blake2b(chunk.ids.numpy().tobytes(), digest_size=16).hexdigest()
                key = {
                    "model": mark,
                    "what": "unit",
                    "tokens": tokens,
                    "special": sorted(chunk.special),
                    "options": asdict(options),
                }
                units.append(self.store.get(key, partial(_seen, measure_unit, model, chunk, options)))
                yield
        self.found.append((moment, units, weights))

    def training(self) -> Training:
        """Curves over the checkpoints."""
        rows = self.found[1:]
        heads: dict[str, list[Any]] = {name: [] for name in HEADS}
        layers: dict[str, list[Any]] = {}
        loss = []
        for _, units, weights in rows:
            tokens = np.array([float(unit["tokens"]) for unit in units])
            loss.append(
                float(summary.average(np.array([float(unit["loss"]) for unit in units]), tokens - 1)[0])
            )
            for name, measure in summary.head_measures(units, weights).items():
                heads[name].append(measure.value)
            for name, layer in summary.layer_measures(units).items():
                if name != "spectrum":
                    layers.setdefault(name, []).append(layer.value)
        steps = np.array([moment.step for moment, _, _ in rows if moment is not None])
        return Training(steps, np.array(loss), _complete(heads), _complete(layers))


def _complete(curves: dict[str, list[Any]]) -> dict[str, Any]:
    """Curves as arrays; those without a value anywhere are left out, single gaps are NaN."""
    found = {}
    for name, values in curves.items():
        shape = next((x.shape for x in values if x is not None), None)
        if shape is not None:
            found[name] = np.stack([np.full(shape, np.nan) if x is None else x for x in values])
    return found


def _seen(measure: Callable[..., Unit], model: nn.Module, *arguments: Any) -> Unit:
    """What a measurement finds; a model whose attention cannot be seen is the caller's mistake."""
    try:
        return measure(model, *arguments)
    except NothingSeenError as problem:
        raise ArgumentError(f"study: no attention to study in {type(model).__name__}. {problem}") from problem


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and back to whatever each module was in."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _vocabulary(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        return None


def _head_total(model: Any) -> int:
    """About how many heads there are."""
    found = [getattr(model.config, name, None) for name in ("num_hidden_layers", "num_attention_heads")]
    return math.prod(x if isinstance(x, int) else 1 for x in found)


def _facts(model: Any, unit: Unit, context: int | None) -> dict[str, str | int | float]:
    config = model.config
    heads = unit["head_count"]
    keys = getattr(config, "num_key_value_heads", None)
    found: dict[str, str | int | float] = {
        "architecture": type(model).__name__,
        "attention layers": len(heads),
        "heads per layer": int(heads.max()),
    }
    if isinstance(keys, int) and keys != int(heads.max()):
        found["key-value heads per layer"] = keys
    if isinstance(width := getattr(config, "hidden_size", None), int):
        found["width"] = width
    found["parameters"] = sum(p.numel() for p in model.parameters())
    if context is not None:
        found["context length"] = context
    if (size := _vocabulary(model)) is not None:
        found["vocabulary"] = size
    found["number format"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    return found


def _text_facts(chunks: list[Chunk], names: list[str] | None, length: int) -> dict[str, str | int | float]:
    sizes = [c.ids.shape[0] for c in chunks]
    named: dict[str, str | int | float] = {}
    if names is not None:
        named["text"] = ", ".join(names[i] for i in sorted({c.text for c in chunks}))
    return named | {
        "texts": len({c.text for c in chunks}), "tokens": sum(sizes), "distinct tokens": int(torch.cat([c.ids for c in
        chunks]).unique().numel()),
        "chunks": len(chunks), "longest chunk": max(sizes), "most tokens in a chunk": length,
    }  # fmt: skip


def _notes(
    taken: Cut, names: list[str], length: int, context: int | None, unit: Unit, few: int | None
) -> list[str]:
    found, chunks = [], taken.chunks
    if taken.unread:
        read = sum(c.ids.shape[0] for c in chunks)
        text = f"Only the first {read} of {read + taken.unread} tokens were read (max_tokens)"
        silent = [names[index] for index in taken.silent]
        shown = ", ".join(silent[:20]) + (f" and {len(silent) - 20} more" if len(silent) > 20 else "")
        found.append(f"{text}; texts not read: {shown}." if silent else f"{text}.")
    if taken.was_cut:
        why = "the model's context" if context == length else "short enough to have several"
        found.append(
            f"Texts were cut into chunks of at most {length} tokens ({why}); a chunk is the unit over which errors are taken."
        )
    if len(chunks) == 1:
        found.append("There is only one chunk of text, so standard errors are not known.")
    if "cross" in unit["kind"]:
        found.append(
            "Encoder and decoder read the same text. Layers are in the order in which they attend; ascent and link are not asked of "
            "cross-attention."
        )
    if few is not None:
        found.append(
            f"Checkpoints were measured on {few} of {len(chunks)} chunks, spread evenly; curves carry no standard errors."
        )
    return found
