"""Attention of sequences of different lengths, packed one after the other, with keys in pages if need be.

On a GPU the kernels read where sequences begin, and where pages are, by themselves (``plan.py``); elsewhere
each sequence is a call of `attend`.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import derivatives_wanted, is_concrete
from exptilt.tilting import plan
from exptilt.tilting.arguments import explain_keywords, prepare
from exptilt.tilting.attend import attend, check_dropout, drop, run
from exptilt.tilting.backends.dispatch import default_backend
from exptilt.tilting.result import AttentionResult, by_tensor


def _refuse(text: str) -> ArgumentError:
    return ArgumentError(f"attend_packed: {text}")


def _check_starts(name: str, starts: Tensor, length: int | None, what: str, look: bool) -> None:
    """Check that starts are integers that begin at 0, do not fall, and end at `length`, if it is given."""
    if (
        not isinstance(starts, Tensor)
        or starts.dim() != 1
        or starts.shape[0] < 2
        or starts.is_floating_point()
    ):
        got = f"{tuple(starts.shape)} {starts.dtype}" if isinstance(starts, Tensor) else type(starts).__name__
        hint = "Pass where each sequence begins, then where the last ends: torch.tensor([0, 5, 12])."
        raise _refuse(f"{name} is {got}, not a vector of at least two integers. {hint}")
    if not look:
        return
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
        hint = "Pass 0, then the lengths added up: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))."
        raise _refuse(f"{name} is {starts.tolist()[:9]}, which does not rise from 0. {hint}")
    if length is not None and int(starts[-1]) != length:
        raise _refuse(
            f"{name} ends at {int(starts[-1])}, but {what} has {length} positions. Make them equal."
        )


def _check(
    query: Tensor,
    key: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    table: Tensor | None,
    page: int,
    look: bool,
) -> None:
    """Check axes, starts and the table of pages, which `attend` cannot check."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            hint = (
                f"Pass (heads, positions of all sequences, dim): {name}.transpose(0, 1) if heads come second."
            )
            raise _refuse(f"{name} has shape {got}. {hint}")
    _check_starts("query_starts", query_starts, query.shape[1], "query", look)
    _check_starts("key_starts", key_starts, None if table is not None else key.shape[1], "key", look)
    if query_starts.shape != key_starts.shape:
        counts = (
            f"query_starts has {query_starts.shape[0] - 1} sequences, key_starts {key_starts.shape[0] - 1}"
        )
        raise _refuse(f"{counts}. Both name the same sequences: pass as many, some of them empty if need be.")
    if table is None:
        return
    if isinstance(page, bool) or not isinstance(page, int) or page < 1:
        raise _refuse(
            f"page_size is {page!r}. Pass how many keys a page of block_table holds, an integer > 0."
        )
    if table.dim() != 2 or table.shape[0] != key_starts.shape[0] - 1 or table.is_floating_point():
        hint = f"Pass integers ({key_starts.shape[0] - 1} sequences, pages of the longest)."
        raise _refuse(f"block_table has shape {tuple(table.shape)} and dtype {table.dtype}. {hint}")
    if look:
        wanted = -(-key_starts.diff() // page)
        if int(wanted.max()) > table.shape[1]:
            longest = f"{int(key_starts.diff().max())} keys of one sequence take {int(wanted.max())} pages"
            raise _refuse(f"block_table has {table.shape[1]} columns, but {longest}. Add the missing ones.")
        used = torch.arange(table.shape[1], device=table.device) < wanted[:, None]
        count = key.shape[1] // page
        if bool((used & ((table < 0) | (table >= count))).any()):
            worst = table[used & ((table < 0) | (table >= count))][0]
            hint = f"key has {key.shape[1]} positions, that is pages 0 … {count - 1} of {page}."
            raise _refuse(f"block_table names page {int(worst)}, which is not there. {hint}")


def _unpaged(table: Tensor, starts: Tensor, page: int) -> Tensor:
    """(keys of all sequences,): the position of each key in the pages."""
    lengths = starts.diff()
    b = torch.repeat_interleave(torch.arange(lengths.shape[0], device=starts.device), lengths)
    i = torch.arange(b.shape[0], device=starts.device) - starts[b]
    return table[b, i // page].to(torch.int64) * page + i % page


@explain_keywords
def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    page_size: int = 0,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    key_mass: bool = False,
    backend: str | None = None,
    check: bool | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> AttentionResult:
    r"""Attention within each of several sequences of any lengths, packed one after the other without padding.

    Sequence b is query[:, query_starts[b] : query_starts[b + 1]] against the keys from key_starts[b] to
    key_starts[b + 1]; the result is that of `attend` on each, packed in the same way, with the same
    statistics and derivatives. On a GPU this is one call of each kernel, which reads the starts itself.

    With a block_table, keys and values stand in pages of page_size positions: the i-th key of sequence b is
    at position block_table[b, i // page_size] · page_size + i % page_size of key, and key_starts only says
    how many keys each sequence has. Sequences may share pages; pages that no sequence has are not read. A GPU
    reads pages in place, unless a derivative, the key mass or dropout is asked for: then keys and values are
    gathered first, into tensors as long as all sequences together.

    Args:
        query: ``(Hq, queries of all sequences, D)``. From (positions, heads, D) pass ``x.transpose(0, 1)``.
        key: ``(Hkv, keys of all sequences, D)``, or ``(Hkv, pages · page_size, D)``; Hkv divides Hq.
        value: ``(Hkv, positions of key, Dv)``.
        query_starts: ``(B + 1,)`` integers: 0, then the lengths of the B sequences added up.
        key_starts: ``(B + 1,)``, the same for keys; None if equal to query_starts.
        block_table: ``(B, pages of the longest)`` integers, the pages of each sequence in order. Entries past
            its end may be anything.
        page_size: positions of a page.
        scale: as in `attend`, like all that follow.
        log_weight: ``(Hkv, positions of key)``.
        causal: within each sequence, whose queries and keys end together.
        window: see `attend`.
        softcap: see `attend`.
        sink: ``(Hq,)``.
        key_mass: see `attend`; a position in a page gets the sum over all sequences that have the page.
        backend: see `attend`.
        check: see `attend`; also whether starts and table are checked, which waits for the GPU (None: they
            are).
        dropout: see `attend`; off a GPU the dropped weights are found in plain torch, in time that grows with
            the square of all positions.
        seed: an integer or a tensor ``()``, see `attend`; whether a weight is dropped depends on the position
            of its query and of its key among all that are packed (with pages: gathered), so that sequences
            drop differently.

    Returns:
        `AttentionResult`: output ``(Hq, queries, Dv)``, statistics ``(Hq, queries)``, and key_mass
        ``(Hq, positions)``.

    Example:
        >>> x, starts = torch.randn(2, 12, 4), torch.tensor([0, 5, 12])
        >>> both = attend_packed(x, x, x, starts, causal=True)
        >>> torch.allclose(both.output[:, 5:], xt.attend(x[:, 5:], x[:, 5:], x[:, 5:], causal=True).output)
        True
    """
    key_starts = query_starts if key_starts is None else key_starts
    check_dropout(dropout)
    look = check is not False and isinstance(query_starts, Tensor) and is_concrete(query_starts, key_starts)
    _check(query, key, query_starts, key_starts, block_table, page_size, look)
    chosen = backend or default_backend(query.device, query.dtype)
    positions = key.shape[1]
    places = None
    gathered = key_mass or dropout or derivatives_wanted((query, key, value, log_weight, sink))
    if block_table is not None and (chosen != "gpu" or gathered):
        places = _unpaged(block_table, key_starts, page_size)
        key, value = key[:, places], value[:, places]
        log_weight = None if log_weight is None else log_weight[..., places]
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sink": sink,
        "backend": backend,
        "check": check,
    }
    prepared = partial(prepare, "attend_packed", query, key, log_weight=log_weight, **options, autocast=True)
    read = value[..., :0] if dropout else value
    if chosen == "gpu":
        made = _plan(query_starts, key_starts, block_table if places is None else None, page_size, positions)
        call = prepared(value=read)
        found = run(replace(call, inputs=call.inputs._replace(packing=made)), key_mass=key_mass)
    else:
        edges = list(zip(query_starts.tolist(), key_starts.tolist(), strict=True))
        found = by_tensor(
            torch.cat,
            *(
                attend(
                    query[:, q0:q1],
                    key[:, k0:k1],
                    read[:, k0:k1],
                    log_weight=None if log_weight is None else log_weight[..., k0:k1],
                    key_mass=key_mass,
                    **options,
                )
                for (q0, k0), (q1, k1) in pairwise(edges)
            ),
        )
    if dropout:
        found = drop(prepared(value=value), found, query_starts, key_starts, dropout, seed)
    if places is not None and found.key_mass is not None:
        mass = found.key_mass.new_zeros((found.key_mass.shape[0], positions)).index_add(
            1, places, found.key_mass
        )
        found = replace(found, key_mass=mass)
    return found


def _plan(queries: Tensor, keys: Tensor, table: Tensor | None, page: int, positions: int) -> Tensor:
    """The plan of packed sequences; with pages, each sequence has the key places of a row of the table."""
    if table is None:
        return plan.make(queries, keys[:-1], keys[1:])
    starts = torch.arange(table.shape[0], device=table.device) * (table.shape[1] * page)
    table = table.clamp(
        0, max(positions // page - 1, 0)
    )  # entries past the end of a sequence may be anything
    return plan.make(queries, starts, starts + keys.diff(), pages=table, page=page)
