r"""Embeddings and temperatures as every contrastive loss takes them, and the loss of one anchor.

Embeddings of half precision are widened to float32 first, and autocast is kept out, as torch does for its
own losses. A temperature τ may be a number or a tensor to learn: the anchors are divided by it, so that
scores are ⟨x, y⟩/τ and gradients reach τ like any other tensor.
"""

from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import autocasts, derivatives_wanted, full_precision, is_concrete, pytree
from exptilt.distributed.attend import attend_agreed
from exptilt.distributed.group import Group, Members, agree
from exptilt.tilting import AttentionResult, attend, merge
from exptilt.tilting.problem import wide_dtype

SIMILARITIES = ("cosine", "unit", "dot")
REDUCTIONS = ("mean", "sum", "none")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Peers(NamedTuple):
    """The processes that share a loss, and how many rows (pairs, outcomes) each of them has.

    Attributes:
        members: the group.
        sizes: the number of rows of each, in the order of the ranks.
    """

    members: Members
    sizes: tuple[int, ...]


def peers(
    caller: str, group: Group, tensors: dict[str, Tensor | None], options: dict[str, Any], rows: Tensor
) -> Peers | None:
    """The processes that share a loss and the number of rows of each; None without a group.

    The processes first compare arguments, in one exchange of 24 bytes: each raises if an option differs, or
    if a tensor differs in dtype, device, an axis other than the first, or in whether it needs a gradient.
    Options that are tensors of one number are compared by value where values can be looked at.

    Args:
        caller: the name of the loss.
        group: its processes.
        tensors: tensors that must be alike, by name; None where one is not given.
        options: everything else that must be the same.
        rows: the tensor whose rows are counted.
    """
    if group is None:
        return None
    members = Members(caller, group)
    facts = {name: _told(x) for name, x in options.items()}
    facts |= {
        f"{name}, but for its rows,": None
        if x is None
        else f"{tuple(x.shape[1:])} {x.dtype} on {x.device.type}"
        for name, x in tensors.items()
    }
    for name, x in tensors.items():
        facts[f"whether {name} needs a gradient"] = x is not None and is_concrete(x) and x.requires_grad
    learned = (x for x in options.values() if isinstance(x, Tensor))
    facts["whether derivatives are wanted"] = derivatives_wanted((*tensors.values(), *learned))
    return Peers(members, agree(members, caller, facts, count=rows.shape[0]))


def _told(option: Any) -> Any:
    """An option as it is compared: 1 for 1.0; for a tensor its value, and whether it needs a gradient."""
    if isinstance(option, Tensor):
        number = _told(option.item()) if is_concrete(option) else "a tensor"
        return f"{number}, with a gradient" if is_concrete(option) and option.requires_grad else number
    if isinstance(option, Real) and not isinstance(option, bool):
        number = float(option)
        return int(number) if number.is_integer() else number
    return option


def without_autocast(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The loss, run without autocast, so that its sums are taken in float32 or better."""

    @wraps(function)
    def plain(*arguments: _Given.args, **keywords: _Given.kwargs) -> _Result:
        first: object = arguments[0] if arguments else None
        with full_precision(first.device if isinstance(first, Tensor) else torch.device("cpu")):
            return function(*arguments, **keywords)

    return plain


def embeddings(caller: str, similarity: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors ``(..., d)``, checked and widened; for ``cosine`` scaled to length 1.

    ``unit`` is the caller's promise that lengths are 1, which is checked; ``dot`` takes tensors as they are.
    """
    checks.choice(caller, "similarity", similarity, SIMILARITIES)
    for name, x in tensors.items():
        checks.floating(caller, name, x, axes=2, shape="(batch, dimension)")
        checks.finite(caller, **{name: x})
    checks.alike(caller, **tensors)
    (first, x), *others = tensors.items()
    for name, y in others:
        if y.shape[-1] != x.shape[-1]:
            raise ArgumentError(
                f"{caller}: {first} has dimension {x.shape[-1]}, {name} has {y.shape[-1]}. "
                "Scores need the same last axis in both."
            )
    return [_lengthened(caller, similarity, name, x.to(wide_dtype(x.dtype))) for name, x in tensors.items()]


def _lengthened(caller: str, similarity: str, name: str, x: Tensor) -> Tensor:
    if similarity == "dot":
        return x
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    concrete = is_concrete(x)
    if similarity == "unit":
        # Lengths that were normalised in bfloat16 are 1 to about 1 part in 256.
        if concrete and bool(((length - 1).abs() > 0.02).any()):
            far = float(length.flatten()[(length - 1).abs().argmax()])
            raise ArgumentError(
                f"{caller}: similarity is 'unit', but {name} has a row of length {far:.4g}. "
                "Pass similarity='cosine' to have rows divided by their length, or 'dot' to leave them."
            )
        return x
    if concrete and bool((length == 0).any()):
        row = tuple((length[..., 0] == 0).nonzero()[0].tolist())
        raise ArgumentError(
            f"{caller}: {name}{list(row)} is 0, and a zero vector has no cosine. "
            "Remove the row, or pass similarity='dot'."
        )
    found: Tensor = x / length
    return found


def linear_head(caller: str, hidden: Tensor, weight: Tensor, rows: str, **vectors: Tensor | None) -> None:
    """Raise unless hidden ``(rows, d)`` and weight ``(V, d)`` fit, and each vector is ``(V,)`` or None.

    `rows` names the axes of hidden before the last: "..." for any number of them, else one.
    """
    checks.floating(caller, "hidden", hidden, axes=1 if rows == "..." else 2, shape=f"({rows}, dimension)")
    checks.floating(caller, "weight", weight, axes=2, shape="(outcomes, dimension)")
    if not autocasts(hidden.device):
        checks.alike(caller, hidden=hidden, weight=weight)
    one_axis = rows == "..." or hidden.ndim == 2
    if not one_axis or weight.ndim != 2 or weight.shape[-1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{caller}: hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}. "
            f"Pass ({rows}, dimension) and (outcomes, dimension) with the same dimension."
        )
    for name, x in vectors.items():
        if x is not None and (not isinstance(x, Tensor) or x.shape != weight.shape[:1]):
            got = str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
            wanted = f"one number for each of {weight.shape[0]} outcomes"
            raise ArgumentError(f"{caller}: {name} is {got}. Pass {wanted}.")


def paired(caller: str, **tensors: Tensor) -> None:
    """Raise unless both tensors are ``(batch, d)``, of one shape."""
    (first, x), (second, y) = tensors.items()
    if x.ndim != 2 or x.shape != y.shape:
        raise ArgumentError(
            f"{caller}: {first} is {tuple(x.shape)}, {second} is {tuple(y.shape)}. Pass two tensors "
            "(batch, dimension) of one shape; row i of one belongs to row i of the other."
        )


def cooled(caller: str, x: Tensor, temperature: float | Tensor) -> Tensor:
    """The rows divided by the temperature, a positive number or tensor of one number."""
    if not isinstance(temperature, Tensor):
        return x / checks.number(caller, "temperature", temperature, above=0, otherwise=", or a tensor")
    if temperature.numel() != 1 or not temperature.is_floating_point():
        raise ArgumentError(
            f"{caller}: temperature is {tuple(temperature.shape)} {temperature.dtype}. "
            "Pass a number, or a floating-point tensor of one number."
        )
    checks.positive(caller, temperature=temperature)
    return x / temperature.to(x).reshape(())


def alternatives(
    query: Tensor, key: Tensor, *, causal: bool = False, among: Peers | None = None
) -> AttentionResult:
    """The statistics, each ``(N,)``, of the scores ⟨q, k⟩ of queries ``(N, d)`` against keys ``(K, d)``.

    With peers the keys are those of all processes.
    """
    if among is not None:
        tensors = query[None], key[None], key[None, :, :0]
        return unbatched(attend_agreed(*tensors, *among, queries="sharded", scale=1.0))
    found = attend(query[None], key[None], key[None, :, :0], scale=1.0, causal=causal)
    return unbatched(found)


def unbatched(tilted: AttentionResult) -> AttentionResult:
    """The result without its axis of heads, which has length 1."""
    found: AttentionResult = pytree.tree_map(lambda x: x[0], tilted)
    return found


def all_but_own(query: Tensor, key: Tensor) -> AttentionResult:
    """The statistics of each query's scores against every key but the one of its own row.

    Leaving a row out would take a mask of n × n; instead the rows before are one causal sweep, and the rows
    after are another over the reversed rows. Together they cost one full sweep.
    """
    before = alternatives(query, key[:-1], causal=True)  # row i sees j ≤ i − 1: causal aligns the last rows
    after = alternatives(query.flip(0), key.flip(0)[:-1], causal=True)
    leaves, form = pytree.tree_flatten(after)
    return merge([before, pytree.tree_unflatten([x.flip(0) for x in leaves], form)])


def surprise(tilted: AttentionResult, score: Tensor) -> Tensor:
    r"""−log p of the alternative with this score: G − s, never negative.

    G and s are rounded separately. For an alternative that is nearly certain their difference would be all
    rounding, so the value is log Σ e^{s_j − max} + (max − s), with max − s = 0 if the alternative is the
    maximum itself. It is, if s is within 0.1 of the maximum and the sum is below 1.8: a second alternative
    so near would make the sum 1 + e^{−0.1} or more (1 + e^{−0.2}, if s is a mean of several). Derivatives
    are those of G − s.
    """
    plain = tilted.log_normalizer - score
    if tilted.parts is None:
        return plain
    shift, weight = tilted.parts[0], tilted.parts[1]
    behind = shift - score.detach()
    value = weight.log() + torch.where((weight < 1.8) & (behind < 0.1), 0.0, behind)
    return value.detach() + (plain - plain.detach())


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(eᵃ + eᵇ). Second derivatives of `torch.logaddexp` are NaN where a is far below b."""
    larger, smaller = torch.where(a >= b, a, b), torch.where(a >= b, b, a)
    return larger + torch.log1p(torch.exp(smaller - larger))


def reduced(caller: str, losses: Tensor, reduction: str, among: Peers | None = None) -> Tensor:
    """The mean, the sum, or one loss for each anchor.

    With peers each process returns its sum over the mean number of anchors a process has: the mean of these
    numbers, and of their gradients in data-parallel training, is that over all anchors.
    """
    checks.choice(caller, "reduction", reduction, REDUCTIONS)
    if among is not None and reduction == "mean":
        return losses.sum() * (len(among.sizes) / sum(among.sizes))
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
