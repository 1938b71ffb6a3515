"""Texts cut into the chunks a model reads at a time.

A text is tokenised as a whole, without special tokens, and cut into the fewest chunks that fit, of nearly equal length, so that there
is no stub at its end. Each chunk gets the special tokens that the tokenizer puts around a text. A chunk is the unit of a study: one forward
pass, nothing padded, and standard errors are over chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exptilt._support.errors import ArgumentError


@dataclass(frozen=True)
class Chunk:
    """Tokens that a model reads at once.

    Attributes:
        ids: ``(token,)``, special ones included.
        text: index of the text it comes from.
        special: ids that are special to the tokenizer.
    """

    ids: Tensor
    text: int
    special: frozenset[int] = frozenset()

    @cached_property
    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Distinct tokens, how often each stands here, and for each position the index of its token, −1 for the first position unless
        special.

        The first key draws attention for its place, not for what it is; that is measured as mass on the first key.
        """
        ids = self.ids.numpy()
        skip = 0 if int(ids[0]) in self.special else 1
        tokens, inverse, counts = np.unique(ids[skip:], return_inverse=True, return_counts=True)
        return tokens, counts, np.concatenate([np.full(skip, -1), inverse.reshape(-1)]).astype(np.int64)


@dataclass(frozen=True)
class Cut:
    """Texts as chunks.

    Attributes:
        chunks: what is read.
        was_cut: whether a text had to be cut.
        unread: tokens left out because of max_tokens.
        silent: places of texts of which nothing is read.
    """

    chunks: list[Chunk]
    was_cut: bool
    unread: int
    silent: list[int]


def as_texts(texts: str | Sequence[str] | Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Texts that are not blank, and their names: those of a mapping, else their numbers from 1."""
    named = (
        dict(texts)
        if isinstance(texts, Mapping)
        else {str(i + 1): text for i, text in enumerate([texts] if isinstance(texts, str) else texts)}
    )
    for name, text in named.items():
        if not isinstance(text, str):
            raise ArgumentError(f"study: text {name} is a {type(text).__name__}. Pass strings.")
    kept = {name: text for name, text in named.items() if text.strip()}
    if not kept:
        raise ArgumentError(
            "study: there is no text: all of texts is empty or blank. Pass at least one text of a few words."
        )
    return list(kept.values()), list(kept)


def context_length(model: Any, tokenizer: Any) -> int | None:
    """How many tokens the model can read at once; None if nothing says so."""
    config = getattr(model, "config", None)
    found = [
        getattr(config, name, None)
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    ]
    found.append(getattr(tokenizer, "model_max_length", None))
    known = [int(x) for x in found if isinstance(x, int | float) and 0 < x < 10**9]
    # A table of learned positions that starts after the padding token's (RoBERTa) holds two fewer than it says.
    offset = (
        2
        if getattr(config, "model_type", "") in {"roberta", "xlm-roberta", "camembert", "opt"} and known
        else 0
    )
    return min(known) - offset if known else None


def cut(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    length: int,
    max_tokens: int | None,
    vocabulary: int | None,
    least: int = 2,
) -> Cut:
    """Tokenise and cut.

    Args:
        tokenizer: of transformers, or anything that maps a text to ``{"input_ids": [...]}``.
        texts: the texts.
        length: most tokens a chunk may have, special ones included.
        max_tokens: tokens after which to stop, special ones included, or None.
        vocabulary: number of tokens the model knows, or None.
        least: chunks with fewer tokens are left out.
    """
    chunks: list[Chunk] = []
    was_cut, budget, unread = False, max_tokens, 0
    special = frozenset(int(i) for i in getattr(tokenizer, "all_special_ids", None) or ())
    for index, text in enumerate(texts):
        before, bare, after = _tokenise(tokenizer, text)
        _check(bare + before + after, vocabulary, tokenizer)
        room = length - len(before) - len(after)
        if room < 1:
            raise ArgumentError(
                f"study: chunks of {length} tokens leave no room beside {len(before) + len(after)} special ones. Pass a larger chunk."
            )
        pieces = -(-len(bare) // room)
        was_cut = was_cut or pieces > 1
        for part in np.array_split(np.array(bare, dtype=np.int64), max(pieces, 1)):
            ids = [*before, *part.tolist(), *after]
            if budget is not None:
                unread += max(0, len(ids) - budget)
                ids, budget = ids[:budget], budget - min(budget, len(ids))
                if 0 < len(ids) < least and budget == 0:
                    unread += len(ids)
            if len(ids) >= least:
                chunks.append(Chunk(torch.tensor(ids), index, special))
    if not chunks:
        raise ArgumentError(
            f"study: no text has as many as {least} tokens. Pass longer texts{'' if max_tokens is None else ' or a larger max_tokens'}."
        )
    read = {c.text for c in chunks}
    return Cut(chunks, was_cut, unread, [index for index in range(len(texts)) if index not in read])


def _tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int], list[int]]:
    """Special tokens before, the text's own, special tokens after."""
    try:
        quiet = {"verbose": False} if hasattr(tokenizer, "is_fast") else {}
        bare = [int(i) for i in tokenizer(text, add_special_tokens=False, **quiet)["input_ids"]]
        short = text.strip()[
            :64
        ]  # a tokenizer may drop blanks, and of blanks alone nothing may be left to find
        some = [int(i) for i in tokenizer(short, add_special_tokens=False)["input_ids"]]
        full = [int(i) for i in tokenizer(short)["input_ids"]]
    except (TypeError, KeyError, AttributeError) as problem:
        raise ArgumentError(
            f"study: tokenizer is a {type(tokenizer).__name__} that does not turn text into input_ids ({problem}). Pass a tokenizer "
            f"of transformers."
        ) from problem
    for start in range(len(full) - len(some) + 1):
        if full[start : start + len(some)] == some:
            return full[:start], bare, full[start + len(some) :]
    raise ArgumentError(
        f"study: it is not to be seen which special tokens the tokenizer ({type(tokenizer).__name__}) puts around a text: it gives "
        f"{full[:6]}... with them and {some[:6]}... without, and the second is no part of the first. Pass a tokenizer that "
        "adds them before and after only."
    )


def _check(ids: list[int], vocabulary: int | None, tokenizer: Any) -> None:
    highest = max(ids, default=0)
    if vocabulary is not None and highest >= vocabulary:
        raise ArgumentError(
            f"study: the tokenizer does not match the model: it gives token {highest}, the model knows tokens 0 to {vocabulary - 1}. "
            "Load both from the same folder."
        )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as text.

    Args:
        tokenizer: as above.
        ids: tokens.
    """
    return [str(tokenizer.decode([int(i)])) for i in ids]
