r"""One text through one model: everything a study wants to know of it, as plain arrays.

The model runs once under `watch`. At each attention call the statistics of its heads are taken; when a block has run, it is run again as
far as its queries, to differentiate them (`ascent`) and to see them after each head's write. Nothing is kept from one block to the next but
numbers and a sample of hidden states.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt.lens.heads.key_mass import Mass, mass, strip
from exptilt.lens.heads.per_text import head_statistics
from exptilt.lens.heads.scores import Scores
from exptilt.lens.questions.ascent import ascent
from exptilt.lens.questions.blocks import Passage, Tracer, inputs
from exptilt.lens.questions.canonical_link import link_r2
from exptilt.lens.questions.depth import Depth
from exptilt.lens.questions.local_gaussian import gaussian_fit
from exptilt.lens.studying import histograms
from exptilt.lens.studying.texts import Chunk
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.watch import watch

Unit = dict[str, NDArray[Any]]
HISTOGRAMS = ("entropy", "log_normalizer", "score_max")


@dataclass(frozen=True)
class Options:
    """What is measured, and how finely.

    Attributes:
        neighbours: size of the sets for the local Gaussian.
        sample: hidden states kept per text and place.
        seed: of the sample.
        strip: tokens in the attention strip; 0 for none.
        details: also histograms and tokens, which checkpoints do without.
    """

    neighbours: int = 16
    sample: int = 64
    seed: int = 0
    strip: int = 0
    details: bool = True


def measure_unit(model: nn.Module, chunk: Chunk, options: Options) -> Unit:
    """Measure one chunk of text; the model must be in eval mode.

    Args:
        model: a transformers model.
        chunk: what it reads.
        options: what is measured.
    """
    meter = _Meter(model, chunk, options)
    with torch.no_grad(), watch(model, observe=meter.observe) as seen, meter.tracer.attached(seen):
        output = model(**inputs(model, chunk.ids))
    return meter.result() | {
        "loss": np.array(_loss(model, output, chunk.ids)),
        "tokens": np.array(chunk.ids.shape[0]),
    }


def _loss(model: nn.Module, output: Any, ids: Tensor) -> float:
    """Mean next-token loss in nats; NaN where the model does not predict the next token."""
    logits = getattr(output, "logits", None)
    generates = getattr(model, "can_generate", lambda: False)() and not getattr(
        model.config, "is_encoder_decoder", False
    )
    if not generates or logits is None or logits.shape[:2] != (1, ids.shape[0]) or ids.shape[0] < 2:
        return float("nan")
    return float(nn.functional.cross_entropy(logits[0, :-1].double(), ids[1:].to(logits.device)))


class _Meter:
    """Collects what a forward pass shows."""

    def __init__(self, model: nn.Module, chunk: Chunk, options: Options):
        self.chunk, self.options = chunk, options
        self.tracer = Tracer(model, self._block)
        self.depth = Depth(model, chunk.ids.shape[0], options.sample, options.seed)
        self.modules = dict(model.named_modules())
        self.layers: list[dict[str, Any]] = []  # one for each attention call, in order
        self.order: dict[int, int] = {}  # id of a call → its number, while its block runs

    def observe(self, call: AttentionCall) -> None:
        self.tracer.observe(call)  # does not return if a block is only run for its queries
        self.order[id(call)] = len(self.layers)
        self.layers.append(self._heads(call))

    def _heads(self, call: AttentionCall) -> dict[str, Any]:
        scores = Scores.of(call.query, call.key, call.options)
        G = call.tilted.log_normalizer[0]
        m = mass(scores, G)
        heads: dict[str, Tensor] = head_statistics(call.tilted, m, sink=scores.sink is not None)
        if scores.softcap is None:  # a capped score is not linear in the query: neither question applies
            near = gaussian_fit(scores, G, m.mean_key, neighbours=self.options.neighbours)
            everywhere = gaussian_fit(scores, G, m.mean_key)
            heads |= {"gaussian_r2": everywhere.r2, "gaussian_output_error": everywhere.output_error}
            heads |= {"local_gaussian_r2": near.r2, "local_gaussian_output_error": near.output_error}
            heads["link_r2"] = link_r2(scores.scale * scores.query, m.mean_key)
        found: dict[str, Any] = {"name": call.name, "kind": call.kind, "queries": G.shape[1]}
        found["heads"] = {name: x.cpu().numpy() for name, x in heads.items()}
        if self.options.details:
            found["histograms"] = {
                name: [histograms.count(row.double().cpu().numpy()) for row in getattr(call.tilted, name)[0]]
                for name in HISTOGRAMS
            }
            found |= {"token_mass": self._tokens(m, m.key / m.seen_by), "token_drawn": self._tokens(m, m.key)}
            found["token_even"] = self._tokens(m, m.even)
        if self.options.strip:
            found["strip"] = strip(scores, G, self.options.strip).cpu().numpy()
        return found

    def _tokens(self, m: Mass, by_key: Tensor) -> NDArray[np.float64]:
        """``(head, distinct token)``: a quantity ``(head, key)`` summed over each token's occurrences; 0 for a key that nobody sees."""
        tokens, _, inverse = self.chunk.distinct
        if m.key.shape[1] != inverse.size:
            return np.full((m.key.shape[0], tokens.size), np.nan)
        values = torch.where(m.seen_by > 0, by_key, 0.0).double().cpu().numpy()
        return values @ (inverse[:, None] == np.arange(tokens.size))

    def _block(self, name: str, passage: Passage) -> None:
        self.depth.add(name, passage)
        if passage.calls and passage.calls[0].kind == "self" and (write := passage.writes()) is not None:
            call, block = passage.calls[0], self.modules[name]

            def query_at(hidden: Tensor) -> Tensor:
                return self.tracer.run_again(block, passage.arguments, hidden)[0]

            found = ascent(query_at, passage.hidden, call.key, call.options, write)
            heads = self.layers[self.order[id(call)]]["heads"]
            heads |= {
                "ascent_cosine": found.cosine.cpu().numpy(),
                "ascent_cosine_baseline": found.cosine_baseline.cpu().numpy(),
                "ascent_gain": found.gain.cpu().numpy(),
                "ascent_gain_baseline": found.gain_baseline.cpu().numpy(),
            }
        self.order.clear()

    def result(self) -> Unit:
        """All of it as arrays; heads that a layer does not have are NaN."""
        layers = self.layers
        widest = max(len(layer["heads"]["entropy"]) for layer in layers)
        found: Unit = {
            name: np.array([layer[name] for layer in layers]) for name in ("name", "kind", "queries")
        }
        found["head_count"] = np.array([len(layer["heads"]["entropy"]) for layer in layers])
        for name in dict.fromkeys(name for layer in layers for name in layer["heads"]):
            table = np.full((len(layers), widest), np.nan)
            for row, layer in zip(table, layers, strict=True):
                values = layer["heads"].get(name, ())
                row[: len(values)] = values
            found[f"head:{name}"] = table
        if self.options.details:
            tokens, counts, _ = self.chunk.distinct
            found |= {"token_ids": tokens, "token_counts": counts}
            for name in ("token_mass", "token_drawn", "token_even"):
                found[name] = _stack([layer[name] for layer in layers], widest)
            for name in HISTOGRAMS:
                found |= _pack(name, [layer["histograms"][name] for layer in layers], widest)
        if self.options.strip:
            found["strip"] = _stack([layer["strip"] for layer in layers], widest)
        return found | self.depth.result()


def _stack(parts: list[NDArray[np.float64]], heads: int) -> NDArray[np.float64]:
    """Arrays (head, ...) of all layers as one (layer, head, ...), NaN where a layer has fewer heads or positions."""
    shape = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    found = np.full((len(parts), heads, *shape), np.nan)
    for row, part in zip(found, parts, strict=True):
        row[tuple(slice(0, size) for size in part.shape)] = part
    return found


def _pack(name: str, layers: list[list[histograms.Counts]], heads: int) -> Unit:
    """Histograms of unequal length as three arrays."""
    exponent = np.zeros((len(layers), heads), dtype=np.int64)
    first = np.zeros_like(exponent)
    counts = np.zeros(
        (len(layers), heads, max((c[2].size for layer in layers for c in layer), default=0)), dtype=np.float32
    )
    for i, layer in enumerate(layers):
        for j, (width, start, numbers) in enumerate(layer):
            exponent[i, j], first[i, j] = width, start
            counts[i, j, : numbers.size] = numbers
    return {
        f"histogram:{name}:exponent": exponent,
        f"histogram:{name}:first": first,
        f"histogram:{name}:counts": counts,
    }
