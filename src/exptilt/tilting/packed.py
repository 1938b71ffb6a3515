"""Attention of sequences of different lengths, packed one after the other.

On a GPU the kernels read where sequences begin by themselves (``plan.py``); elsewhere each sequence is a call
of `attend`.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.tilting import plan
from exptilt.tilting.arguments import explain_keywords, prepare
from exptilt.tilting.attend import attend, check_dropout, drop, run
from exptilt.tilting.backends.dispatch import default_backend
from exptilt.tilting.result import AttentionResult, by_tensor


def _refuse(text: str) -> ArgumentError:
    return ArgumentError(f"attend_packed: {text}")


def _check_starts(name: str, starts: Tensor, length: int, what: str, look: bool) -> None:
    """Check that starts are integers that begin at 0, do not fall, and end at `length`."""
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
    if int(starts[-1]) != length:
        raise _refuse(
            f"{name} ends at {int(starts[-1])}, but {what} has {length} positions. Make them equal."
        )


def _check(query: Tensor, key: Tensor, query_starts: Tensor, key_starts: Tensor, look: bool) -> None:
    """Check axes and starts, which `attend` cannot check."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            hint = (
                f"Pass (heads, positions of all sequences, dim): {name}.transpose(0, 1) if heads come second."
            )
            raise _refuse(f"{name} has shape {got}. {hint}")
    _check_starts("query_starts", query_starts, query.shape[1], "query", look)
    _check_starts("key_starts", key_starts, key.shape[1], "key", look)
    if query_starts.shape != key_starts.shape:
        counts = (
            f"query_starts has {query_starts.shape[0] - 1} sequences, key_starts {key_starts.shape[0] - 1}"
        )
        raise _refuse(f"{counts}. Both name the same sequences: pass as many, some of them empty if need be.")


@explain_keywords
def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
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

    Args:
        query: ``(Hq, queries of all sequences, D)``. From (positions, heads, D) pass ``x.transpose(0, 1)``.
        key: ``(Hkv, keys of all sequences, D)``; Hkv divides Hq.
        value: ``(Hkv, positions of key, Dv)``.
        query_starts: ``(B + 1,)`` integers: 0, then the lengths of the B sequences added up.
        key_starts: ``(B + 1,)``, the same for keys; None if equal to query_starts.
        scale: as in `attend`, like all that follow.
        log_weight: ``(Hkv, positions of key)``.
        causal: within each sequence, whose queries and keys end together.
        window: see `attend`.
        softcap: see `attend`.
        sink: ``(Hq,)``.
        key_mass: see `attend`.
        backend: see `attend`.
        check: see `attend`; also whether starts are checked, which waits for the GPU (None: they are).
        dropout: see `attend`; off a GPU the dropped weights are found in plain torch, in time that grows with
            the square of all positions.
        seed: an integer or a tensor ``()``, see `attend`; whether a weight is dropped depends on the position
            of its query and of its key among all that are packed, so that sequences drop differently.

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
    _check(query, key, query_starts, key_starts, look)
    chosen = backend or default_backend(query.device, query.dtype)
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
        made = plan.make(query_starts, key_starts[:-1], key_starts[1:])
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
    return found
