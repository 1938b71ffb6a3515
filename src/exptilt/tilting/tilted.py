r"""What tilting yields, and how the results over disjoint sets of keys join.

Let part k hold the keys of set k, with its own G_k, mean μ_k, variance V_k, entropy H_k, output o_k. Over the union, set k has probability
w_k = e^{G_k − G}, and the law of total expectation, variance and entropy give

    G = log Σ e^{G_k},   o = Σ w_k o_k,   μ = Σ w_k μ_k,   V = Σ w_k (V_k + (μ_k − μ)²),   H = Σ w_k (H_k − log w_k).

Every term of V and H is non-negative: nothing cancels. The operation is associative and commutative.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import in_transform, is_plain, pytree


@dataclass(frozen=True)
class Tilted:
    """The measure of the keys tilted by each query: its mean and its statistics.

    Attributes:
        output: ``(..., Hq, Q, Dv)``, the mean of the values: attention.
        log_normalizer: ``(..., Hq, Q)``, G = log Σ_j e^{s_j}; −inf for a query that sees nothing.
        entropy: ``(..., Hq, Q)``, Shannon's, of the attention probabilities, in nats.
        score_mean: ``(..., Hq, Q)``, the mean score under them.
        score_variance: ``(..., Hq, Q)``, its variance.
        score_max: ``(..., Hq, Q)``, the largest score of a visible key.
        key_mass: ``(..., Hq, K)``, the attention each key receives, summed over queries; None if not asked for.
    """

    output: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    score_mean: Tensor
    score_variance: Tensor
    score_max: Tensor
    key_mass: Tensor | None = None

    def __repr__(self) -> str:
        lines = [_described(f.name, getattr(self, f.name)) for f in fields(self)]
        return "Tilted(\n" + "\n".join(line for line in lines if line) + "\n)"


def _described(name: str, x: Any) -> str:
    """One line about a field: shape, dtype, and the range of what is finite in it."""
    if x is None:
        return ""
    if not isinstance(x, Tensor):
        return f"    {name}: {x!r}"
    text = f"    {name}: {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    if not is_plain(x) or x.device.type == "meta" or in_transform() or not x.is_floating_point():
        return text
    finite = x.detach()[torch.isfinite(x.detach())]
    if finite.numel():
        text += f", {finite.min().item():.4g} to {finite.max().item():.4g}"
    odd = x.numel() - finite.numel()
    return text + (f", {odd} not finite" if odd else "")


def _flatten(x: Tilted) -> tuple[list[Tensor], list[str]]:
    there = [f.name for f in fields(x) if getattr(x, f.name) is not None]
    return [getattr(x, name) for name in there], there


pytree.register_pytree_node(
    Tilted, _flatten, lambda values, names: Tilted(**dict(zip(names, values, strict=True))), serialized_type_name="exptilt.Tilted"
)


def merge(parts: Sequence[Tilted]) -> Tilted:
    """Join results of the same queries over disjoint sets of keys, exactly.

    A sink belongs to one part only: give ``sink=`` to one of the calls. Differentiable.

    Args:
        parts: one or more results, all with output ``(..., Hq, Q, Dv)`` of one shape.

    Returns:
        The result over all keys. ``key_mass`` cannot be joined (the share of a part differs from query to query)
        and must not be in the parts.

    Example:
        >>> q, k = torch.ones(1, 2, 3), torch.arange(12.0).reshape(1, 4, 3)
        >>> halves = xt.merge([xt.attend(q, k[:, :2], k[:, :2]), xt.attend(q, k[:, 2:], k[:, 2:])])
        >>> torch.allclose(halves.entropy, xt.attend(q, k, k).entropy)
        True
    """
    parts = list(parts)
    if not parts:
        raise ArgumentError("merge: got no parts. Pass a list with at least one result of attend.")
    shapes = {tuple(part.output.shape) for part in parts}
    if len(shapes) > 1:
        raise ArgumentError(
            f"merge: outputs have shapes {sorted(shapes)}. Merge results of the same queries, with values of one dimension."
        )
    if any(part.key_mass is not None for part in parts):
        raise ArgumentError(
            "merge: a part has key_mass, which cannot be joined: the share of a part differs from query to query. "
            "Call attend(..., key_mass=True) over all keys, or leave it out."
        )
    G_parts = torch.stack([part.log_normalizer for part in parts])
    top = G_parts.detach().amax(0)
    shift = torch.where(top == -torch.inf, 0.0, top)
    z = torch.exp(G_parts - shift).sum(0)
    alive = z > 0
    log_z = torch.where(alive, z, 1.0).log()
    G = torch.where(alive, shift + log_z, -torch.inf)
    log_w = torch.where(G_parts == -torch.inf, -torch.inf, G_parts - shift - log_z)
    w = torch.exp(log_w)
    means = torch.stack([part.score_mean for part in parts])
    mean = (w * means).sum(0)
    spread = torch.where(w > 0, means - mean, 0.0)
    variance = (w * (torch.stack([part.score_variance for part in parts]) + spread.square())).sum(0)
    entropy = (w * (torch.stack([part.entropy for part in parts]) - torch.where(w > 0, log_w, 0.0))).sum(0)
    output = (w[..., None].to(parts[0].output.dtype) * torch.stack([part.output for part in parts])).sum(0)
    maximum = torch.stack([part.score_max for part in parts]).amax(0)
    return Tilted(output, G, entropy, mean, variance, maximum)
