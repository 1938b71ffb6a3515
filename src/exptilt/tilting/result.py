r"""The result of tilting, and how results over disjoint sets of keys join.

Let part k hold the keys of set k, with its own G_k, mean μ_k, variance V_k, entropy H_k, output o_k. Over the
union, set k has probability w_k = e^{G_k − G}, and the law of total expectation, variance and entropy give

    G = log Σ e^{G_k},   o = Σ w_k o_k,   μ = Σ w_k μ_k,   V = Σ w_k (V_k + (μ_k − μ)²),
    H = Σ w_k (H_k − log w_k).

Every term of V and H is non-negative: nothing cancels. The operation is associative and commutative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.plotting import html_curves, html_table
from exptilt._support.transforms import in_transform, is_concrete, is_plain, pytree
from exptilt.tilting.derivatives.identities import apart_from

_LINES = "log_normalizer", "entropy", "score_mean", "score_variance", "score_max", "parts"


@dataclass(frozen=True)
class AttentionResult:
    """Result of `attend`: the output, and statistics of the scores of each query.

    Attributes:
        output: ``(..., Hq, Q, Dv)``, the mean of the values: attention.
        log_normalizer: ``(..., Hq, Q)``, G = log Σ_j e^{s_j}; −inf for a query that sees nothing.
        entropy: ``(..., Hq, Q)``, Shannon's, of the attention probabilities, in nats.
        score_mean: ``(..., Hq, Q)``, the mean score under these probabilities.
        score_variance: ``(..., Hq, Q)``, the variance of the score under them.
        score_max: ``(..., Hq, Q)``, the largest score of a visible key.
        key_mass: ``(..., Hq, K)``, the attention each key receives, summed over queries; None if not asked
            for.
        parts: three ``(..., Hq, Q)`` of which log_normalizer and score_mean are rounded sums, for `merge`;
            None if not known.
        top_index: ``(..., Hq, Q, k)``, the keys that get most of a query's attention, heaviest first; −1 for
            places without a key. None if not asked for, like all that follow; without derivatives.
        top_weight: ``(..., Hq, Q, k)``, their weights.
        top_rest: ``(..., Hq, Q)``, the weight of all others and of the sink.
        segment_mass: ``(..., Hq, Q, S)``, the attention that each segment of keys gets; differentiable.
    """

    output: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    score_mean: Tensor
    score_variance: Tensor
    score_max: Tensor
    key_mass: Tensor | None = None
    parts: tuple[Tensor, Tensor, Tensor] | None = None  # shift, weight and gap of ``problem.RowStatistics``
    top_index: Tensor | None = None
    top_weight: Tensor | None = None
    top_rest: Tensor | None = None
    segment_mass: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """A statistic from the stacked lines that `of_lines` has stored."""
        lines = self.__dict__.get("_lines")
        if lines is None or name not in _LINES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "parts":
            found = self.score_max, *lines[-2:].unbind()
        else:
            found = lines[_LINES.index(name)]
        self.__dict__[name] = found
        return found

    def __repr__(self) -> str:
        lines = [_described(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "parts"]
        return "AttentionResult(\n" + "\n".join(line for line in lines if line) + "\n)"

    def _repr_html_(self) -> str:
        """The result in a notebook: shape and range of each tensor, and the entropy along the queries."""
        lines = [_described(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "parts"]
        rows = [line.strip().partition(": ")[::2] for line in lines if line]
        table = html_table(("tensor", "shape, dtype, range"), rows, "Attention and its statistics")
        H = self.entropy
        if not is_plain(H) or H.device.type == "meta" or in_transform() or H.dim() < 1:
            return table
        by_query = H.detach().double().reshape(-1, H.shape[-1]).mean(0).cpu().numpy()
        return table + html_curves(by_query[:, None], "entropy by query, mean over heads, nats")


Tilted = AttentionResult
"""The former name of `AttentionResult`."""
del AttentionResult.parts  # this default would keep `__getattr__` from making the parts


def of_lines(output: Tensor, lines: Tensor) -> AttentionResult:
    """The result of a forward sweep, whose stacked lines are taken apart when one of them is asked for."""
    result = object.__new__(AttentionResult)
    result.__dict__.update(output=output, _lines=lines)
    return result


def _described(name: str, x: Any) -> str:
    """One line about a field: shape, dtype, and the range of its numbers."""
    if x is None:
        return ""
    if not isinstance(x, Tensor):
        return f"    {name}: {x!r}"
    text = f"    {name}: {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    if not is_plain(x) or x.device.type == "meta" or in_transform() or not x.is_floating_point():
        return text
    numbers = x.detach()[~x.detach().isnan()]
    if numbers.numel():
        text += f", {numbers.min().item():.3g} to {numbers.max().item():.3g}"
    missing = x.numel() - numbers.numel()
    return text + (f", {missing} NaN" if missing else "")


def _flatten(x: AttentionResult) -> tuple[list[Tensor], list[str]]:
    there = [f.name for f in fields(x) if getattr(x, f.name) is not None]
    return [getattr(x, name) for name in there], there


pytree.register_pytree_node(
    AttentionResult,
    _flatten,
    lambda values, names: AttentionResult(**dict(zip(names, values, strict=True))),
    serialized_type_name="exptilt.Tilted",
)


def by_tensor(function: Callable[[list[Tensor], int], Tensor], *results: AttentionResult) -> AttentionResult:
    """The result whose tensors are ``function(tensors of one name in the results, axis of the queries)``."""
    flat = [pytree.tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    made = [function(list(tensors), -1 if place else -2) for place, tensors in enumerate(columns)]
    found: AttentionResult = pytree.tree_unflatten(made, flat[0][1])  # output comes first
    return found


def merge(parts: Sequence[AttentionResult]) -> AttentionResult:
    """Join results of the same queries over disjoint sets of keys, exactly.

    A sink belongs to one part only: give ``sink=`` to one of the calls. Differentiable.

    Args:
        parts: one or more results, all with output ``(..., Hq, Q, Dv)`` of one shape.

    Returns:
        The result over all keys. ``key_mass`` cannot be joined (the share of a part differs from query to
        query) and must not be in the parts.

    Example:
        >>> q, k = torch.ones(1, 2, 3), torch.arange(12.0).reshape(1, 4, 3)
        >>> halves = xt.merge([xt.attend(q, k[:, :2], k[:, :2]), xt.attend(q, k[:, 2:], k[:, 2:])])
        >>> torch.allclose(halves.entropy, xt.attend(q, k, k).entropy)
        True
    """
    parts = [] if parts is None or isinstance(parts, AttentionResult) else list(parts)
    if not parts or not all(isinstance(part, AttentionResult) for part in parts):
        got = "something else" if parts else "no parts"
        raise ArgumentError(f"merge: got {got}. Pass a list with at least one result of attend.")
    shapes = {tuple(part.output.shape) for part in parts}
    if len(shapes) > 1:
        hint = "Merge results of the same queries, with values of one dimension."
        raise ArgumentError(f"merge: outputs have shapes {sorted(shapes)}. {hint}")
    if any(part.key_mass is not None for part in parts):
        raise ArgumentError(
            "merge: a part has key_mass, which cannot be joined: the share of a part differs from query to "
            "query. Call attend(..., key_mass=True) over all keys, or leave it out."
        )
    shift, weight, gap = (torch.stack(x) for x in zip(*(_parts(part) for part in parts), strict=True))
    G_parts, means, variances, entropies, maxima = (
        torch.stack([getattr(part, name) for part in parts])
        for name in ("log_normalizer", "score_mean", "score_variance", "entropy", "score_max")
    )
    some = weight != 0
    top = torch.where(some, shift, -torch.inf).amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    apart, slip = apart_from(torch.where(some, shift, top), top)
    z = torch.where(some, weight * torch.exp(apart) * (1 + slip), 0.0)
    total = z.sum(0)
    alive, some = total != 0, z != 0  # a part whose share rounds to 0 does not count
    share = z / torch.where(alive, total, 1.0)
    # The log-share of the heaviest part is found from the other parts, and means are taken about its mean: so
    # a share near 0 costs no digits.
    heaviest = _first_largest(z)
    most = torch.where(alive, z.gather(0, heaviest)[0], 1.0)
    log_lack = torch.log1p(z.scatter(0, heaviest, 0.0).sum(0) / most)  # − log of the heaviest part's share
    log_share = torch.where(some, share, 1.0).log().scatter(0, heaviest, -log_lack.unsqueeze(0))
    # Values come from the parts, derivatives from the rounded results.
    log_z = valued(torch.where(some, z, 1.0).log(), torch.where(some, G_parts, 0.0))
    joined = torch.where(alive, torch.where(some, log_z, -torch.inf), 0.0).logsumexp(0)
    log_normalizer = valued(most.log() + log_lack, joined)
    moved = torch.where(some, log_z - log_normalizer, 0.0)
    w = share * torch.exp(moved - moved.detach())
    log_w = valued(log_share, moved)
    centres = torch.where(some, valued(apart + (gap + slip), torch.where(some, means, 0.0)), 0.0)
    middle = centres.gather(0, heaviest)
    away = torch.where(some, centres - middle, 0.0)
    step = (w * away).sum(0)
    variance = (w * (variances + torch.where(some, away - step, 0.0).square())).sum(0)
    main = torch.where(alive, means.gather(0, heaviest)[0], 0.0)
    mean = main + (w * torch.where(some, means - main, 0.0)).sum(0)
    entropy = (w * (entropies - log_w)).sum(0)
    output = w[0].unsqueeze(-1) * parts[0].output
    for k, part in enumerate(parts[1:], 1):
        output = output + w[k].unsqueeze(-1) * part.output
    output = output.to(parts[0].output.dtype)
    maximum = maxima.gather(0, _first_largest(maxima.detach()))[0]
    G, centre = torch.where(alive, top + log_normalizer, -torch.inf), (middle[0] + step).detach()
    return AttentionResult(output, G, entropy, mean, variance, maximum, parts=(top, total.detach(), centre))


def unmerge(whole: AttentionResult, part: AttentionResult, *, tolerance: float = 1e-3) -> AttentionResult:
    """The result over the keys of `whole` that are not in `part`: the inverse of `merge`. Differentiable.

    Digits are lost where the part has nearly all the weight: the relative error grows like ε / (1 − w).

    Args:
        whole: the result over all keys, output ``(..., Hq, Q, Dv)``.
        part: the result of the same queries over some of these keys, of the same shape.
        tolerance: the largest relative error ε / (1 − w) to accept; beyond it the call is refused. For
            outputs in half precision, whose ε is larger, 8ε is accepted in any case.

    Returns:
        The result over the other keys. Its score_max is that of the whole, NaN where the maximum was in the
        part and the next one is not known.

    Example:
        >>> q, k = torch.ones(1, 2, 3), torch.arange(12.0).reshape(1, 4, 3) / 12
        >>> rest = xt.unmerge(xt.attend(q, k, k), xt.attend(q, k[:, :1], k[:, :1]))
        >>> torch.allclose(rest.output, xt.attend(q, k[:, 1:], k[:, 1:]).output)
        True
    """
    if not isinstance(whole, AttentionResult) or not isinstance(part, AttentionResult):
        got = f"{type(whole).__name__} and {type(part).__name__}"
        raise ArgumentError(f"unmerge: got {got}. Pass two results of attend.")
    checks.number("unmerge", "tolerance", tolerance, above=0)
    if whole.output.shape != part.output.shape:
        got = f"{tuple(whole.output.shape)} and {tuple(part.output.shape)}"
        raise ArgumentError(
            f"unmerge: the outputs of whole and part are {got}. Pass results of the same queries and values."
        )
    w = share_of(part, whole)
    eps = torch.finfo(w.dtype).eps
    if is_concrete(w):
        most = float(w.detach().max()) if w.numel() else 0.0
        if not most <= 1 + 100 * eps:
            raise ArgumentError(
                f"unmerge: the part weighs {most:.6g} of the whole, so its keys are not among the whole's. "
                "Pass the result over all keys first, then the one over some of them, with the same options."
            )
        rough = max(torch.finfo(x.output.dtype).eps for x in (whole, part))
        tolerance = tolerance if rough == eps else max(tolerance, 8 * rough)
        few = 1 - w.detach() < rough / tolerance
        if bool(few.any()):
            raise ArgumentError(
                f"unmerge: the part has all but {max(0.0, 1 - most):.2g} of the weight of "
                f"{int(few.sum())} queries, so nothing is known of the rest within {tolerance:g}. Call "
                "attend over the other keys, use float64, or pass a larger tolerance."
            )
    left = 1 - w
    ratio = w / left
    some = part.log_normalizer.detach() != -torch.inf  # a part that sees no key takes nothing away
    mean = whole.score_mean + ratio * torch.where(some, whole.score_mean - part.score_mean, 0.0)
    apart = torch.where(some, (part.score_mean - whole.score_mean).square(), 0.0)
    variance = (whole.score_variance - w * (part.score_variance + apart)) / left
    log_w = torch.where(some & (w > 0), torch.where(w > 0, w, 1.0).log(), 0.0)
    log_left = torch.log1p(-w)
    output = whole.output + ratio.unsqueeze(-1) * (whole.output.to(w.dtype) - part.output)
    kept = (part.score_max < whole.score_max) | (whole.score_max == -torch.inf)
    return AttentionResult(
        output.to(whole.output.dtype),
        whole.log_normalizer + log_left,
        ((whole.entropy - w * (part.entropy - log_w)) / left + log_left).clamp(min=0),
        mean,
        (variance - (mean - whole.score_mean).square()).clamp(min=0),
        torch.where(kept, whole.score_max, torch.nan),
    )


def _first_largest(x: Tensor) -> Tensor:
    """(1, ...): the first place along the first axis where x is largest; torch's argmax is slow there."""
    top, at = x[0], torch.zeros(x.shape[1:], dtype=torch.int64, device=x.device)
    for k in range(1, len(x)):
        at = torch.where(x[k] > top, k, at)
        top = torch.maximum(top, x[k])
    return at.unsqueeze(0)


def share_of(part: AttentionResult, whole: AttentionResult) -> Tensor:
    """(..., Hq, Q): the weight of some of the keys among all, e^{G' − G}; differentiable."""
    (shift, weight, _), (top, total, _) = _parts(part), _parts(whole)
    some = weight != 0
    apart, slip = apart_from(torch.where(some, shift, 0.0), torch.where(some, top, 0.0))
    ratio = torch.where(some, weight / torch.where(some, total, 1.0) * torch.exp(apart) * (1 + slip), 0.0)
    moved = torch.where(some, part.log_normalizer - torch.where(some, whole.log_normalizer, 0.0), 0.0)
    return ratio.detach() * torch.exp(moved - moved.detach())


def _parts(x: AttentionResult) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, weight and gap of a result; derived from its statistics if it does not carry them."""
    if x.parts is not None:
        return x.parts
    G = x.log_normalizer.detach()
    some = torch.isneginf(G).logical_not()
    shift = torch.where(some, G, 0.0)
    return shift, some.to(G.dtype), torch.where(some, x.score_mean.detach() - shift, 0.0)


def valued(value: Tensor, derivative: Tensor) -> Tensor:
    """A number with the value of one tensor and the derivatives of another."""
    return value.detach() + (derivative - derivative.detach())
