"""Ready-made edits for ``watch(model, edit=...)``: functions of an attention call that give another output.

    with xt.lens.watch(model, edit=xt.lens.edits.zero([(4, 11)])):
        model(**inputs)

`heads` are pairs of layer and head, both from 0, or None for all. An edit of your own is any function of an
`AttentionCall` that returns the new output ``(batch, heads, query, dim)``, or None to leave it as it is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.lens.watching.call import AttentionCall
from exptilt.tilting import attend
from exptilt.tilting.problem import wide_dtype

Heads = Collection[tuple[int, int]] | None
Edit = Callable[[AttentionCall], Tensor | None]


def zero(heads: Heads = None) -> Edit:
    """An edit by which the heads write nothing."""
    return _replacing(heads, lambda call: torch.zeros_like(call.tilted.output))


def mean(heads: Heads = None) -> Edit:
    """An edit by which the heads write the same at every token: their mean over the real queries."""

    def average(call: AttentionCall) -> Tensor:
        output, real = call.tilted.output, call.real_query
        if real is None:
            return output.mean(2, keepdim=True).expand_as(output)
        use = real[:, None, :, None].to(output.dtype)
        total = (output * use).sum(2, keepdim=True, dtype=wide_dtype(output.dtype))
        return (total / use.sum(2, keepdim=True).clamp(min=1)).expand_as(output)

    return _replacing(heads, average)


def resample(calls: Sequence[AttentionCall], heads: Heads = None) -> Edit:
    """An edit by which the heads write what they wrote in another run, whose calls an observer collected."""
    outputs = _by_layer("resample", calls)
    return _replacing(heads, lambda call: _matching("resample", outputs, call).tilted.output)


def freeze(calls: Sequence[AttentionCall], heads: Heads = None) -> Edit:
    """An edit by which the heads look where they looked in another run, at the values of this one."""
    others = _by_layer("freeze", calls)

    def frozen(call: AttentionCall) -> Tensor:
        other = _matching("freeze", others, call)
        return attend(other.query, other.key, call.value, **other.options).output

    return _replacing(heads, frozen)


def knock_out(edges: Collection[tuple[int, int]], heads: Heads = None) -> Edit:
    """An edit by which query i of the heads does not see key j, for each pair (i, j) of `edges`."""

    def cut(call: AttentionCall) -> Tensor:
        Q, K = call.query.shape[2], call.key.shape[2]
        if any(not (0 <= i < Q and 0 <= j < K) for i, j in edges):
            raise ArgumentError(
                f"knock_out: an edge is outside of {Q} queries and {K} keys: {list(edges)[:5]}."
            )
        seen = torch.ones(1, 1, Q, K, dtype=torch.bool, device=call.query.device)
        for i, j in edges:
            seen[..., i, j] = False
        return _with_mask(call, seen)

    return _replacing(heads, cut)


def without(keys: Collection[int], heads: Heads = None) -> Edit:
    """An edit by which no query of the heads sees these keys, such as the tokens of a name.

    The others' weights grow to a sum of 1; a query that sees nothing else writes 0.
    """

    def cut(call: AttentionCall) -> Tensor:
        K = call.key.shape[2]
        if not keys or any(not 0 <= j < K for j in keys):
            raise ArgumentError(f"without: layer {call.layer} has {K} keys, from 0. Got {list(keys)[:5]}.")
        seen = torch.ones(1, 1, 1, K, dtype=torch.bool, device=call.query.device)
        seen[..., list(keys)] = False
        return _with_mask(call, seen)

    return _replacing(heads, cut)


def _with_mask(call: AttentionCall, seen: Tensor) -> Tensor:
    """The output of a call whose queries see only what `seen` leaves them."""
    mask = call.options.get("mask")
    options = {**call.options, "mask": seen if mask is None else seen & mask}
    return attend(call.query, call.key, call.value, **options).output


def _replacing(heads: Heads, new: Callable[[AttentionCall], Tensor]) -> Edit:
    """An edit that takes the chosen heads from `new`, and the others as they are."""
    if heads is not None and not all(isinstance(place, tuple | list) and len(place) == 2 for place in heads):
        raise ArgumentError(f"edit: heads are pairs of layer and head, as in [(4, 11)]. Got {heads!r:.100}.")

    def edit(call: AttentionCall) -> Tensor | None:
        output, count = call.tilted.output, call.query.shape[1]
        chosen = range(count) if heads is None else [head for layer, head in heads if layer == call.layer]
        if any(not 0 <= head < count for head in chosen):
            raise ArgumentError(f"edit: layer {call.layer} has {count} heads, from 0. Got {list(chosen)}.")
        if not chosen:
            return None
        changed = output.clone()
        changed[:, list(chosen)] = new(call)[:, list(chosen)].to(output.dtype)
        return changed

    return edit


def _by_layer(name: str, calls: Sequence[AttentionCall]) -> dict[tuple[int, int], AttentionCall]:
    if not calls or not all(isinstance(call, AttentionCall) for call in calls):
        raise ArgumentError(
            f"{name}: pass the calls of another run: calls = []; watch(model, observe=calls.append)."
        )
    found = {(call.layer, call.step): call for call in calls}
    if len(found) < len(calls):
        raise ArgumentError(f"{name}: the calls are of several runs. Pass those of one watch.")
    return found


def _matching(
    name: str, calls: Mapping[tuple[int, int], AttentionCall], call: AttentionCall
) -> AttentionCall:
    """The other run's call of the same layer and step; raises if its shape differs."""
    other = calls.get((call.layer, call.step))
    if other is None or other.tilted.output.shape != call.tilted.output.shape:
        got = "no such call" if other is None else f"an output of shape {tuple(other.tilted.output.shape)}"
        raise ArgumentError(
            f"{name}: layer {call.layer} has an output of shape {tuple(call.tilted.output.shape)}, the other "
            f"run {got}. Both must read as many texts of as many tokens."
        )
    return other
