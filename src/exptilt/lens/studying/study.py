r"""`study`: measure all that the theory says of a transformer, on texts of your choice.

    units = one forward pass per chunk of text (`one_text`), kept in a store as they finish
    study = means over units with standard errors (`summary`), and the same for each checkpoint

What is measured and what each number means is in `definitions`; how, in `heads` and `questions`.
"""

import hashlib
import math
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.lens.inputs import media
from exptilt.lens.inputs.texts import Chunk, Facts, Reading, read_texts, vocabulary
from exptilt.lens.questions.canonical_link import measure_weights
from exptilt.lens.studying import summary
from exptilt.lens.studying.checkpoints import Checkpoint, Source, load, moments
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.studying.one_text import Options, measure_pieces, measure_repeats, measure_unit
from exptilt.lens.studying.results import Study, Training
from exptilt.lens.studying.store import Store, Unit, fingerprint
from exptilt.lens.watching.modules import evaluating
from exptilt.lens.watching.watch import NothingSeenError

# Tokens in a chunk, if the model can read as many: long enough for distributions, short enough for several.
CHUNK = 512
REPEATED, SEQUENCES = 50, 4  # random tokens that are repeated, and how many sequences of them
TRAINING_CHUNKS = 8  # chunks that checkpoints are measured on
STRIP_WEIGHTS = 1_000_000  # most weights in the strips of all checkpoints together
STRIP, MANY_HEADS, SHORT_STRIP = 64, 100, 32  # tokens in a strip; fewer where there are many heads to show


def study(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Sequence[Any] | Mapping[str, Any],
    *,
    name: str | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    max_tokens: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Study:
    """Measure every head and layer of a transformer on texts.

    The model is run on its own device, in eval mode, one chunk of text at a time, and left as it was found.

    Args:
        model: a transformers model that reads tokens or pictures.
        tokenizer: its tokenizer or image processor.
        texts: one text, several, or several by name; longer ones than the context are cut. For a model that
            reads pictures, those instead: paths of files (`pathlib.Path`), arrays, or tensors as the model
            takes them, for which the tokenizer may be None.
        name: of the model, for the report; by default what the model was loaded from.
        checkpoints: the same model in training: folders, functions that return a model, or pairs of a step
            and either.
        max_tokens: stop after so many tokens, special ones included; notes say what was left out.
        chunk: most tokens the model reads at once, at least 2; by default 512, or as many as it can.
        seed: of the sample of hidden states.
        store: folder where finished parts are kept: an interrupted study resumes there, a repeated one is
            instant.
        progress: whether to show a bar with time left; None shows it if standard error is a terminal.

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
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(
            f"study: model is a {kind}. Pass a transformers model, such as AutoModel.from_pretrained gives."
        )
    for label, most in (("chunk", chunk), ("max_tokens", max_tokens)):
        if most is not None:
            whole("study", label, most, least=2, otherwise=" tokens, or None")
    given = read(model, tokenizer, texts, max_tokens, CHUNK if chunk is None else int(chunk))
    chunks = given.chunks
    sample = int(np.clip(2 * summary.SAMPLE // len(chunks), 8, 256))
    strip = STRIP if _head_total(model) <= MANY_HEADS else SHORT_STRIP
    plan = _Plan(
        model,
        moments(checkpoints),
        chunks,
        Options(seed=seed, sample=sample, strip=strip),
        Store(store),
        {"repeats": (measure_repeats, _repeated(given, seed)), "pieces": (measure_pieces, given.pieces)},
    )
    units, weights = plan.run(progress)
    first = units[0]
    used = sorted({token for unit in units for token in unit["token_ids"].tolist()})
    return Study(
        name=name or getattr(model.config, "_name_or_path", "") or kind,
        facts=_facts(model, first, given.context),
        text_facts=given.facts,
        heads=summary.head_measures(units, weights),
        layers=summary.layer_measures(units),
        details=summary.details(units, dict(zip(used, given.words(used), strict=True))),
        strip_tokens=given.strip_words(first["strip"].shape[-1]),
        training=plan.training() if plan.series else None,
        notes=[*given.notes, *_notes(plan, "cross" in first["kind"])],
        seed=seed,
        layer_names=[
            f"{n} (cross)" if k == "cross" else str(n)
            for n, k in zip(first["name"], first["kind"], strict=True)
        ],
        picture=given.picture,
    )


def read(model: Any, tokenizer: Any, texts: Any, max_tokens: int | None, chunk: int = CHUNK) -> Reading:
    """The texts or pictures as the chunks that a study of this model reads."""
    how = media.read if getattr(model, "main_input_name", "") == media.READS else read_texts
    with evaluating(model):
        return how(model, tokenizer, texts, chunk, max_tokens)


@dataclass
class _Plan:
    """The work of a study, unit by unit."""

    model: nn.Module
    series: list[tuple[float, Source]]
    chunks: list[Chunk]
    options: Options
    store: Store
    once: dict[str, tuple[Callable[..., Unit], torch.Tensor | None]]  # sequences that are measured once
    found: list[tuple[float, list[Unit], Mapping[str, Any]]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)  # of the model, and of every checkpoint

    @property
    def few(self) -> list[Chunk]:
        """The chunks that checkpoints are measured on."""
        last = len(self.chunks) - 1
        wanted = np.linspace(0, last, min(TRAINING_CHUNKS, last + 1)).round().astype(int)
        return [self.chunks[i] for i in wanted]

    def run(self, progress: bool | None) -> tuple[list[Unit], Mapping[str, Any]]:
        """Measure everything; returns the units and the weights' measures of the model itself."""
        total = len(self.chunks) + 3 + len(self.series) * (len(self.few) + 3)
        for _ in track(self._steps(), "studying", total=total, show=progress):
            pass
        return self.found[0][1], self.found[0][2]

    def _steps(self) -> Iterator[None]:
        yield from self._one(math.nan, self.model, self.chunks, self.options)
        layout = self.chunks[0].layout
        size = SHORT_STRIP if layout is None else layout.coarse.tokens
        fits = size**2 * _head_total(self.model) * len(self.series) <= STRIP_WEIGHTS
        for step, source in self.series:
            brief = replace(self.options, details=False, strip=size if fits else 0)
            yield from self._one(step, load(source, step, self.model), self.few, brief)

    def _one(self, step: float, model: nn.Module, chunks: list[Chunk], options: Options) -> Iterator[None]:
        mark = fingerprint(model)
        self.marks.append(mark)
        units: list[Unit] = []
        with evaluating(model):
            one = chunks[0] if chunks[0].given else Chunk(chunks[0].ids[:1], 0)
            measure = partial(_seen, measure_weights, model, one.inputs(model))
            parts = [self.store.get({"model": mark, "what": "weights"}, measure)]
            yield
            for what, (measured, sequences) in self.once.items():
                if sequences is not None:
                    tokens = hashlib.blake2b(sequences.numpy().tobytes(), digest_size=16).hexdigest()
                    key = {"model": mark, "what": what, "tokens": tokens}
                    parts.append(self.store.get(key, partial(_seen, measured, model, sequences)))
                yield
            for chunk in chunks:
                key = {"model": mark, "what": "unit", "chunk": chunk.mark}
                measure = partial(_seen, measure_unit, model, chunk, options)
                units.append(self.store.get({**key, "options": asdict(options)}, measure))
                options = replace(options, strip=0)  # only the first chunk has a strip
                yield
        self.found.append((step, units, ChainMap(*parts)))

    def training(self) -> Training:
        """Loss and measures over the checkpoints."""
        heads: dict[str, list[Any]] = {name: [] for name in HEADS}
        layers: dict[str, list[Any]] = {}
        loss = []
        for _, units, weights in self.found[1:]:
            losses, tokens = (np.array([float(unit[name]) for unit in units]) for name in ("loss", "tokens"))
            loss.append(float(summary.average(losses, tokens - 1)[0]))
            for name, measure in summary.head_measures(units, weights).items():
                heads[name].append(measure.value)
            for name, layer in summary.layer_measures(units).items():
                if name != "spectrum":
                    layers.setdefault(name, []).append(layer.value)
        steps = np.array([step for step, _, _ in self.found[1:]])
        strips = [units[0]["strip"] for _, units, _ in self.found[1:] if "strip" in units[0]]
        kept = np.nan_to_num(np.stack(strips)).round(4) if strips else None
        return Training(
            steps, np.array(loss), _complete(heads), _complete(layers), kept, self.marks[0] == self.marks[-1]
        )


def _complete(curves: dict[str, list[Any]]) -> dict[str, Any]:
    """Curves as arrays; those without a value anywhere are left out, single gaps are NaN."""
    found = {}
    for name, values in curves.items():
        shape = next((x.shape for x in values if x is not None), None)
        if shape is not None:
            found[name] = np.stack([np.full(shape, np.nan) if x is None else x for x in values])
    return found


def _repeated(given: Reading, seed: int) -> torch.Tensor | None:
    """A few sequences of the text's own tokens in random order, each twice in a row; None if too short."""
    used = sorted({int(i) for chunk in given.chunks for i in chunk.ids if int(i) not in chunk.special})
    n = min(REPEATED, len(used), given.length // 2)
    if n < 8:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(len(used), generator=generator)[:n] for _ in range(SEQUENCES)]
    return torch.tensor(used)[torch.stack(drawn)].repeat(1, 2)


def _seen(measure: Callable[..., Unit], model: nn.Module, *arguments: Any) -> Unit:
    """Result of a measurement; raises ArgumentError if the model's attention cannot be seen."""
    try:
        return measure(model, *arguments)
    except NothingSeenError as problem:
        raise ArgumentError(f"study: no attention to study in {type(model).__name__}. {problem}") from problem


def _head_total(model: Any) -> int:
    """Approximate number of heads, from the configuration."""
    found = [getattr(model.config, name, None) for name in ("num_hidden_layers", "num_attention_heads")]
    return math.prod(x if isinstance(x, int) else 1 for x in found)


def _facts(model: Any, unit: Unit, context: int | None) -> Facts:
    layers, heads = len(unit["head_count"]), int(unit["head_count"].max())
    groups, width = (getattr(model.config, name, None) for name in ("num_key_value_heads", "hidden_size"))
    found = {
        "architecture": type(model).__name__,
        "attention layers": layers,
        "heads per layer": heads,
        "key-value heads per layer": groups if isinstance(groups, int) and groups != heads else None,
        "width": width if isinstance(width, int) else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "context length": context,
        "vocabulary": vocabulary(model),
        "number format": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    return {name: fact for name, fact in found.items() if fact is not None}


def _notes(plan: _Plan, cross: bool) -> list[str]:
    found = []
    if len(plan.chunks) == 1:
        found.append("There is only one chunk of text, so standard errors are not known.")
    if cross:
        found.append(
            "Encoder and decoder read the same text. Layers are in the order in which they attend; ascent "
            "and link are not asked of cross-attention."
        )
    if plan.series:
        found.append(
            f"Checkpoints were measured on {len(plan.few)} of {len(plan.chunks)} chunks, spread evenly; "
            "curves carry no standard errors."
        )
    return found
