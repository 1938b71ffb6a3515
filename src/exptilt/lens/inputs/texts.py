"""Texts cut into the chunks a model reads at a time.

A text is tokenised as a whole, without special tokens, and cut into the fewest chunks that fit, of nearly
equal length, so that there is no stub at its end. Each chunk gets the special tokens that the tokenizer puts
around a text. A chunk is the unit of a study: one forward pass, nothing padded, and standard errors are over
chunks.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.lens.questions.blocks import inputs

Facts = dict[str, str | int | float]
LEAST = 2  # chunks with fewer tokens are left out: no query has a choice there
PIECE, PIECES = 64, 16  # tokens in a piece, and how many pieces the kinds of heads are measured on


@dataclass(frozen=True)
class Chunk:
    """Tokens that a model reads at once."""

    ids: Tensor  # (token,), special ones included; for a picture 0, 1, 2 and so on
    text: int  # index of the text it comes from
    special: frozenset[int] = frozenset()  # ids that are special to the tokenizer
    delimiters: frozenset[int] = frozenset()  # ids in the chunk that end a line, are punctuation or special
    given: Mapping[str, Tensor] | None = None  # inputs of the model if it does not read tokens
    layout: Any = None  # where the tokens of a picture lie, a `media.Layout`

    def inputs(self, model: nn.Module) -> dict[str, Any]:
        """Keyword arguments with which the model reads this chunk."""
        if self.given is None:
            return inputs(model, self.ids)
        device = next(model.parameters()).device
        return {name: x.to(device) for name, x in self.given.items()}

    @property
    def mark(self) -> str:
        """Hash of the chunk's contents."""
        found = hashlib.blake2b(self.ids.numpy().tobytes(), digest_size=16)
        found.update(f"{sorted(self.special)} {sorted(self.delimiters)} {self.layout}".encode())
        for name, x in (self.given or {}).items():
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.numpy().tobytes())
        return found.hexdigest()

    @cached_property
    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Distinct tokens, how often each stands here, and the index of the token at each position.

        The index is −1 for the first position unless special: the first key draws attention for its place,
        not for what it is; that is measured as mass on the first key.
        """
        ids = self.ids.numpy()
        skip = 0 if int(ids[0]) in self.special else 1
        tokens, inverse, counts = np.unique(ids[skip:], return_inverse=True, return_counts=True)
        return tokens, counts, np.concatenate([np.full(skip, -1), inverse.reshape(-1)]).astype(np.int64)


@dataclass(frozen=True)
class Cut:
    """Chunks to read, and what was left out."""

    chunks: list[Chunk]
    was_cut: bool  # whether a text had to be cut
    unread: int  # tokens left out because of max_tokens
    silent: list[int]  # indices of texts of which nothing is read
    pieces: Sequence[list[int]] = ()  # the first `PIECES` of `PIECE` tokens, special ones included


def as_texts(texts: str | Sequence[str] | Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Texts that are not blank, and their names: those of a mapping, else their numbers from 1."""
    if not isinstance(texts, Mapping):
        listed = [texts] if isinstance(texts, str) else texts
        texts = {str(i + 1): text for i, text in enumerate(listed)}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ArgumentError(f"study: text {name} is a {type(text).__name__}. Pass strings.")
    kept = {name: text for name, text in texts.items() if text.strip()}
    if not kept:
        raise ArgumentError(
            "study: there is no text: all of texts is empty or blank. Pass at least one text of a few words."
        )
    return list(kept.values()), list(kept)


def context_length(model: Any, tokenizer: Any) -> int | None:
    """Most tokens that the model can read at once; None if not known."""
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    found = [getattr(tokenizer, "model_max_length", None), *(getattr(config, name, None) for name in names)]
    known = [int(x) for x in found if isinstance(x, int | float) and 0 < x < 10**9]
    # Learned positions that start after the padding index (RoBERTa) are two fewer than the table's size.
    fewer = getattr(config, "model_type", "") in {"roberta", "xlm-roberta", "camembert", "opt"}
    return min(known) - 2 * fewer if known else None


def cut(
    tokenizer: Any, texts: Sequence[str], *, length: int, max_tokens: int | None, vocabulary: int | None
) -> Cut:
    """Tokenise texts and cut them into chunks of at most `length` tokens, up to `max_tokens` in all.

    Special tokens count. The tokenizer maps a text to ``{"input_ids": [...]}``; the model knows `vocabulary`
    tokens.
    """
    chunks: list[Chunk] = []
    short: list[list[int]] = []
    was_cut, budget, unread = False, max_tokens, 0
    special = frozenset(int(i) for i in getattr(tokenizer, "all_special_ids", None) or ())
    for index, text in enumerate(texts):
        before, bare, after = _tokenise(tokenizer, text)
        highest = max(bare + before + after, default=0)
        if vocabulary is not None and highest >= vocabulary:
            raise ArgumentError(
                f"study: the tokenizer does not match the model: it gives token {highest}, the model knows "
                f"tokens 0 to {vocabulary - 1}. Load both from the same folder."
            )
        room = length - len(before) - len(after)
        if room < 1:
            raise ArgumentError(
                f"study: chunks of {length} tokens leave no room beside {len(before) + len(after)} special "
                "ones. Pass a larger chunk."
            )
        some = PIECE - len(before) - len(after)
        starts = range(0, min(len(bare), PIECES * some) - some + 1, some)
        short += [[*before, *bare[start : start + some], *after] for start in starts]
        pieces = -(-len(bare) // room)
        was_cut = was_cut or pieces > 1
        for part in np.array_split(np.array(bare, dtype=np.int64), max(pieces, 1)):
            ids = [*before, *part.tolist(), *after]
            if budget is not None:
                unread += max(0, len(ids) - budget)
                ids, budget = ids[:budget], budget - min(budget, len(ids))
                if 0 < len(ids) < LEAST and budget == 0:
                    unread += len(ids)
            if len(ids) >= LEAST:
                chunks.append(Chunk(torch.tensor(ids), index, special))
    if not chunks:
        more = "" if max_tokens is None else " or a larger max_tokens"
        raise ArgumentError(f"study: no text has as many as {LEAST} tokens. Pass longer texts{more}.")
    read = {c.text for c in chunks}
    silent = [index for index in range(len(texts)) if index not in read]
    return Cut(chunks, was_cut, unread, silent, short[:PIECES])


def _tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int], list[int]]:
    """Ids of the special tokens before a text, of the text itself, and of the special tokens after it."""
    # Stripped, since a tokenizer may drop blanks, and of blanks alone nothing would be left to find.
    short = text.strip()[:64]
    try:
        quiet = {"verbose": False} if hasattr(tokenizer, "is_fast") else {}
        bare = [int(i) for i in tokenizer(text, add_special_tokens=False, **quiet)["input_ids"]]
        some = [int(i) for i in tokenizer(short, add_special_tokens=False)["input_ids"]]
        full = [int(i) for i in tokenizer(short)["input_ids"]]
    except (TypeError, KeyError, AttributeError) as problem:
        raise ArgumentError(
            f"study: tokenizer is a {type(tokenizer).__name__} that does not turn text into input_ids "
            f"({problem}). Pass a tokenizer of transformers."
        ) from problem
    for start in range(len(full) - len(some) + 1):
        if full[start : start + len(some)] == some:
            return full[:start], bare, full[start + len(some) :]
    raise ArgumentError(
        f"study: cannot tell which special tokens the tokenizer ({type(tokenizer).__name__}) puts "
        f"around a text: it gives {full[:6]}... with them and {some[:6]}... without, and the second is no "
        "part of the first. Pass a tokenizer that adds them before and after only."
    )


def with_delimiters(chunks: Sequence[Chunk], tokenizer: Any) -> list[Chunk]:
    """The chunks with `delimiters`: their tokens that are blank, punctuation or special, but not unknown."""
    used = sorted({int(i) for chunk in chunks for i in chunk.ids})
    ends = set(chunks[0].special) | {
        i for i, text in zip(used, token_texts(tokenizer, used), strict=True) if _ends(text)
    }
    ends.discard(_unknown_id(tokenizer))
    return [replace(c, delimiters=frozenset(ends.intersection(c.ids.tolist()))) for c in chunks]


def _ends(text: str) -> bool:
    """Whether a token is blank or has a line end, or is nothing but punctuation."""
    word = text.strip()
    return "\n" in text or (bool(text) and all(unicodedata.category(c).startswith("P") for c in word))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as text, with the blank before it where a word starts, which some tokenizers drop."""
    texts = [str(tokenizer.decode([int(i)])) for i in ids]
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return texts
    pieces = tokenizer.convert_ids_to_tokens([int(i) for i in ids])
    return [
        f" {text}" if str(piece).startswith("\u2581") and not text.startswith(" ") else text
        for piece, text in zip(pieces, texts, strict=True)
    ]


@dataclass(frozen=True)
class Reading:
    """Chunks for a model to read, with facts and notes about them."""

    chunks: list[Chunk]
    facts: Facts
    notes: list[str]
    words: Callable[[Sequence[int]], list[str]]  # names of tokens, by their ids
    context: int | None = None  # most tokens that the model can read at once
    length: int = 0  # most tokens in a chunk; 0 for pictures, whose tokens cannot be reordered
    picture: Any = None  # of the first chunk, a `media.Picture`
    pieces: Tensor | None = None  # (piece, token), as long for every length of chunks

    def strip_words(self, count: int) -> list[str]:
        """Names of the first `count` tokens of the first chunk, or of the cells of its picture."""
        first = self.chunks[0]
        if first.layout is None:
            return self.words(first.ids[:count].tolist())
        return list(first.layout.names(coarse=True))


def read_texts(model: Any, tokenizer: Any, texts: Any, chunk: int, max_tokens: int | None) -> Reading:
    """Texts as a `Reading`, cut into chunks; the model is in eval mode."""
    context = context_length(model, tokenizer)
    length = chunk if context is None else min(chunk, context)
    _try_to_read(model)
    read, names = as_texts(texts)
    taken = cut(tokenizer, read, length=length, max_tokens=max_tokens, vocabulary=vocabulary(model))
    chunks, sizes = taken.chunks, [c.ids.shape[0] for c in taken.chunks]
    used = sorted({c.text for c in chunks})
    facts: Facts = {"text": ", ".join(names[i] for i in used)} if isinstance(texts, Mapping) else {}
    facts |= {
        "texts": len(used),
        "tokens": sum(sizes),
        "distinct tokens": len(set(torch.cat([c.ids for c in chunks]).tolist())),
        "chunks": len(chunks),
        "longest chunk": max(sizes),
        "most tokens in a chunk": length,
    }
    if (unknown := _unknown_id(tokenizer)) >= 0:
        facts["unknown tokens"] = sum(int((c.ids == unknown).sum()) for c in chunks)
    notes = unread_notes(taken, names)
    if taken.was_cut:
        why = "the model's context" if context == length else "short enough to have several"
        notes.append(
            f"Texts were cut into chunks of at most {length} tokens ({why}); "
            "a chunk is the unit over which errors are taken."
        )
    return Reading(
        with_delimiters(chunks, tokenizer),
        facts,
        notes,
        partial(token_texts, tokenizer),
        context,
        length,
        pieces=torch.tensor(taken.pieces) if taken.pieces and (context or PIECE) >= PIECE else None,
    )


def unread_notes(taken: Cut, names: Sequence[str]) -> list[str]:
    """A note on the tokens and texts that were not read; empty if all were."""
    if not taken.unread:
        return []
    read = sum(c.ids.shape[0] for c in taken.chunks)
    text = f"Only the first {read} of {read + taken.unread} tokens were read (max_tokens)"
    silent = [names[index] for index in taken.silent]
    shown = ", ".join(silent[:20]) + (f" and {len(silent) - 20} more" if len(silent) > 20 else "")
    return [f"{text}; texts not read: {shown}." if silent else f"{text}."]


def _unknown_id(tokenizer: Any) -> int:
    """Id of the token for what the tokenizer does not know; −1 if there is none of its own."""
    found = getattr(tokenizer, "unk_token_id", None)
    known = isinstance(found, int) and found != getattr(tokenizer, "eos_token_id", None)
    return int(found) if known and found is not None else -1


def _try_to_read(model: nn.Module) -> None:
    """Raise if a model does not run on tokens alone, such as one that also needs pictures."""
    try:
        with torch.no_grad():
            model(**inputs(model, torch.tensor([0, 0])))
    except Exception as problem:
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"
        parts = [name for name, part in model.named_children() if hasattr(part, "get_input_embeddings")]
        hint = f" Pass the part that reads text; its parts are {', '.join(parts)}." if parts else ""
        raise ArgumentError(
            f"study: {type(model).__name__} does not run on tokens alone ({said}).{hint}"
        ) from problem


def vocabulary(model: Any) -> int | None:
    """Size of a model's vocabulary; None if not known."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        return None
