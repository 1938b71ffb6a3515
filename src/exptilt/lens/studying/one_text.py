r"""All measurements of a study on one text, as plain arrays.

The model runs once under `watch`. At each attention call the statistics of its heads are taken; when a block
has run, it is run again as far as its queries, to differentiate them (`ascent`) and to see them after each
head's write. Nothing is kept from one block to the next but numbers and a sample of hidden states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt.lens.heads.kinds import mass_at
from exptilt.lens.heads.scores import Scores
from exptilt.lens.heads.statistics import TextStatistics, evenness, shares, text_statistics
from exptilt.lens.heads.visibility import Visibility
from exptilt.lens.inputs.texts import Chunk
from exptilt.lens.questions.ascent import ascent
from exptilt.lens.questions.blocks import DoesNotRunAgainError, Passage, Tracer, inputs, write_size
from exptilt.lens.questions.canonical_link import link_r2
from exptilt.lens.questions.depth import Depth
from exptilt.lens.questions.local_gaussian import gaussian_fit
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.studying.store import Unit
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.record import by_layer
from exptilt.lens.watching.watch import watch
from exptilt.tilting.problem import wide_dtype

HISTOGRAMS = ("entropy", "log_normalizer", "score_max")
TOKENS = ("token_mass", "token_drawn", "token_even")


@dataclass(frozen=True)
class Options:
    """Options of `measure_unit`: what is measured, and how finely."""

    neighbours: int = 16  # size of the sets for the local Gaussian
    sample: int = 64  # hidden states kept per text and place
    seed: int = 0  # of the sample
    strip: int = 0  # tokens in the attention strip; 0 for none
    details: bool = True  # also histograms and tokens, which checkpoints do without


def measure_unit(model: nn.Module, chunk: Chunk, options: Options) -> Unit:
    """All measurements on one chunk of text; the model must be in eval mode."""
    meter = _Meter(model, chunk, options)
    with torch.no_grad(), watch(model, observe=meter.observe) as seen, meter.tracer.attached(seen):
        output = model(**chunk.inputs(model))
    loss = np.array(_loss(model, output, chunk.ids))
    return meter.result() | {"loss": loss, "tokens": np.array(chunk.ids.shape[0])}


def _loss(model: Any, output: Any, ids: Tensor) -> float:
    """Mean next-token loss in nats; NaN where the model does not predict the next token."""
    logits = getattr(output, "logits", None)
    both_sides = getattr(model.config, "is_encoder_decoder", False)
    generates = getattr(model, "can_generate", lambda: False)() and not both_sides
    if not generates or logits is None or logits.shape[:2] != (1, ids.shape[0]) or ids.shape[0] < 2:
        return float("nan")
    return float(nn.functional.cross_entropy(logits[0, :-1].float(), ids[1:].to(logits.device)))


def measure_repeats(model: nn.Module, sequences: Tensor) -> Unit:
    """Attention on repeated tokens, in sequences ``(sequence, 2n)`` whose second half repeats the first.

    Means over the sequences with their standard errors, by layer and head; NaN for cross-attention.
    """
    n = sequences.shape[1] // 2
    place = torch.arange(2 * n)
    keys = {"duplicate_mass": torch.where(place >= n, place - n, -1)}
    keys["induction_mass"] = torch.where(place >= n, place - n + 1, -1)

    def measure(call: AttentionCall) -> dict[str, Tensor]:
        query, key, options = _widened(call)
        items = [(Scores.of(query, key, options, k), G) for k, G in enumerate(call.tilted.log_normalizer)]
        return {
            name: torch.stack([mass_at(scores, G, index.to(G.device)) for scores, G in items])
            for name, index in keys.items()
        }

    return _over_sequences(model, sequences, measure, list(keys))


def measure_pieces(model: nn.Module, pieces: Tensor) -> Unit:
    """Evenness and shares of the first token and of near ones in pieces ``(piece, token)``, as for repeats.

    Pieces are as long whatever the chunks of a study, and so the kinds that are made of these numbers are the
    same.
    """

    def measure(call: AttentionCall) -> dict[str, Tensor]:
        query, key, options = _widened(call)
        sink, visible = options.get("sink") is not None, Visibility.of(query, key, options)
        even = evenness(call.tilted.entropy, visible, sink)
        return shares(query, key, options) | {"evenness": even}

    names = ["evenness"]
    names += [f"{name}{end}" for name in ("first_token_share", "near_share") for end in ("", "_baseline")]
    return _over_sequences(model, pieces, measure, names)


def _over_sequences(
    model: nn.Module,
    sequences: Tensor,
    measure: Callable[[AttentionCall], dict[str, Tensor]],
    names: list[str],
) -> Unit:
    """Means and standard errors over sequences of what `measure` gives, ``(batch, head)`` by name."""
    rows: dict[int, list[dict[str, NDArray[np.float64]]]] = {}
    place = 0

    def observe(call: AttentionCall) -> None:
        nonlocal place
        found = {name: np.full(call.query.shape[:2], np.nan) for name in names}
        if call.kind == "self" and call.query.shape[2] == call.key.shape[2] == sequences.shape[1]:
            found = {name: x.cpu().numpy() for name, x in measure(call).items()}
        rows.setdefault(place, []).append(found)
        place += 1

    with torch.no_grad(), watch(model, observe=observe):
        for few in sequences.split(4):  # so that their logits take little memory
            place = 0
            model(**inputs(model, few))
    found: Unit = {}
    for name in names:
        every = [np.concatenate([part[name] for part in parts]) for parts in rows.values()]
        found[f"head:{name}"] = by_layer([x.mean(0) for x in every])
        if len(sequences) > 1:
            found[f"error:{name}"] = by_layer([x.std(0, ddof=1) / len(x) ** 0.5 for x in every])
    return found


class _Meter:
    """Collects the measurements of one forward pass."""

    def __init__(self, model: nn.Module, chunk: Chunk, options: Options):
        self.model, self.chunk, self.options = model, chunk, options
        self.tracer = Tracer(model, self._block)
        self.depth = Depth(model, chunk.ids.shape[0], options.sample, options.seed)
        self.places = None if chunk.layout is None else chunk.layout.places()
        self.layers: list[dict[str, Any]] = []  # one for each attention call, in order
        self.order: dict[int, int] = {}  # id of a call → its number, while its block runs

    def observe(self, call: AttentionCall) -> None:
        self.tracer.observe(call)  # does not return if a block is only run for its queries
        self.order[id(call)] = len(self.layers)
        self.layers.append(self._heads(call))

    def _heads(self, call: AttentionCall) -> dict[str, Any]:
        query, key, options = _widened(call)
        scores = Scores.of(query, key, options)
        G = call.tilted.log_normalizer[0]
        text = text_statistics(query, key, options, call.tilted, places=self.places)
        heads = {name: x for name, x in text.by_name.items() if name.removesuffix("_baseline") in HEADS}
        if call.kind == "self":
            heads |= self._chosen_keys(scores, G, text)
        else:
            heads = {name: x for name, x in heads.items() if "_share" not in name}
        if scores.rule.softcap is None:  # a capped score is not linear in the query: neither question applies
            for prefix, neighbours in (("", None), ("local_", self.options.neighbours)):
                fit = gaussian_fit(scores, G, text.mean_key, neighbours=neighbours)
                heads |= {f"{prefix}gaussian_{name}": x for name, x in fit._asdict().items()}
            heads["link_r2"] = link_r2(scores.rule.scale * scores.inputs.query, text.mean_key)
        found: dict[str, Any] = {"name": call.name, "kind": call.kind, "queries": G.shape[1]}
        found["heads"] = {name: x.cpu().numpy() for name, x in heads.items()}
        if self.options.details:
            for name in HISTOGRAMS:
                found[name] = getattr(call.tilted, name)[0].float().cpu().numpy()
            for name, by_key in zip(TOKENS, (text.drawn / text.seen_by, text.drawn, text.even), strict=True):
                found[name] = self._tokens(text, by_key)
        if self.options.strip:
            found["strip"] = self._strip(scores, G).cpu().numpy()
        return found

    def _strip(self, scores: Scores, G: Tensor) -> Tensor:
        """Attention over the first tokens of a text, or over the cells of a whole picture or sound."""
        layout = self.chunk.layout
        if layout is None:
            return scores.strip(G, self.options.strip)
        if not layout.tokens == scores.inputs.key.shape[1] == G.shape[1]:
            return G.new_zeros(G.shape[0], layout.coarse.tokens, layout.coarse.tokens)
        return scores.pooled(G, layout.cells().to(G.device))

    def _chosen_keys(self, scores: Scores, G: Tensor, text: TextStatistics) -> dict[str, Tensor]:
        """Attention on the token before, on the one after, and on delimiters."""
        Q, K = G.shape[1], text.drawn.shape[1]
        if not Q == K == self.chunk.ids.shape[0]:
            return {}
        own = torch.arange(Q, device=G.device)
        before, after = own - 1, torch.where(own + 1 < Q, own + 1, -1)
        if self.places is not None:  # in the same row of a picture
            column = self.places[:, 1].to(G.device)
            before = torch.where(column > 0, before, -1)
            after = torch.where(column < self.chunk.layout.columns - 1, after, -1)
        found = {"previous_mass": mass_at(scores, G, before), "next_mass": mass_at(scores, G, after)}
        if self.chunk.given is None:
            ends = torch.tensor([int(token) in self.chunk.delimiters for token in self.chunk.ids])
            ends[0] = False  # the first key draws attention for its place
            drawn, even = text.drawn.cpu(), text.even.cpu().expand(text.drawn.shape)
            found["delimiter_mass"] = drawn[:, ends].sum(-1) / drawn.sum(-1)
            found["delimiter_mass_baseline"] = even[:, ends].sum(-1) / even.sum(-1)
        return found

    def _tokens(self, text: TextStatistics, by_key: Tensor) -> NDArray[np.float64]:
        """(head, distinct token): a quantity (head, key) summed over the places of a token that are seen."""
        tokens, _, inverse = self.chunk.distinct
        heads, K = text.drawn.shape
        if inverse.size != K:
            return np.full((heads, tokens.size), np.nan)
        seen = torch.where(text.seen_by > 0, by_key, 0.0).expand(heads, K).cpu().numpy()
        summed: NDArray[np.float64] = seen @ (inverse[:, None] == np.arange(tokens.size))
        return summed

    def _block(self, name: str, passage: Passage) -> None:
        self.depth.add(name, passage)
        if passage.calls and passage.calls[0].kind == "self" and (write := passage.writes()) is not None:
            call, block = passage.calls[0], self.model.get_submodule(name)

            def query_at(hidden: Tensor) -> Tensor:
                return self.tracer.run_again(block, passage.arguments, hidden)[0]

            try:
                found = ascent(query_at, passage.hidden, call.key, call.options, write)
            except DoesNotRunAgainError:
                found = None
            heads = self.layers[self.order[id(call)]]["heads"]
            heads["write_size"] = write_size(write, passage.hidden[0]).cpu().numpy()
            if found is not None:
                heads |= {f"ascent_{measure}": x.cpu().numpy() for measure, x in found._asdict().items()}
        self.order.clear()

    def result(self) -> Unit:
        """All measurements as arrays; heads that a layer does not have are NaN."""
        layers = self.layers
        found: Unit = {
            name: np.array([layer[name] for layer in layers]) for name in ("name", "kind", "queries")
        }
        found["head_count"] = np.array([len(layer["heads"]["entropy"]) for layer in layers])
        most = int(found["head_count"].max())
        for name in dict.fromkeys(name for layer in layers for name in layer["heads"]):
            none = np.full(0, np.nan)
            found[f"head:{name}"] = by_layer([layer["heads"].get(name, none) for layer in layers], most)
        if self.options.details:
            found["token_ids"], found["token_counts"], _ = self.chunk.distinct
            for name in (*TOKENS, *HISTOGRAMS):
                found[name] = by_layer([layer[name] for layer in layers], most)
        if self.options.strip:
            found["strip"] = by_layer([layer["strip"] for layer in layers], most)
        return found | self.depth.result()


def _widened(call: AttentionCall) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Query, key and options of a call, half precision made float32."""
    wide = wide_dtype(call.query.dtype)
    options = {
        name: x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.options.items()
    }
    return call.query.to(wide), call.key.to(wide), options
