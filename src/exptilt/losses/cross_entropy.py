r"""The language-model head and its loss, without the matrix of logits.

    loss_i = G_i − (1 − ε) s_{i,t_i} − ε mean_j s_ij + z G_i²,    s_ij = softcap(scale ⟨h_i, w_j⟩) + b_j

with t the targets, ε the label smoothing, z the z-loss. G is streamed over the vocabulary by the core, with
all its derivatives. The score of the target and the mean score are cheap, but their gradients in the
weight would each be another matrix as large as the weight. `Head` adds them to the core's gradient instead.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import (
    apply,
    autocasts,
    full_precision,
    in_forward_mode,
    in_transform,
    is_concrete,
    outside_transforms,
)
from exptilt.distributed.attend import attend_agreed
from exptilt.distributed.collectives import share, total
from exptilt.distributed.group import Group, refused_together
from exptilt.losses.embeddings import REDUCTIONS, Peers, linear_head, peers, surprise, unbatched
from exptilt.tilting import AttentionResult, attend, log_normalizer
from exptilt.tilting.problem import wide_dtype

BLOCK = 2**20  # entries of a block of scores where blocks are taken: 4 MB in float32


class CrossEntropy(NamedTuple):
    """The loss and statistics of each token; these are NaN (rank: −1) where the target is ignored.

    Attributes:
        loss: ``()``, or the shape of target: as without statistics.
        log_normalizer: the shape of target, G = log Σ_j e^{s_j}.
        entropy: the shape of target, of the predicted distribution, in nats.
        score_max: the shape of target, the largest logit.
        target_score: the shape of target, the logit of the target.
        rank: the shape of target, how many outcomes have a larger logit than the target (0: it comes
            first); None if not asked for.
    """

    loss: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    score_max: Tensor
    target_score: Tensor
    rank: Tensor | None = None


class Head(Function):
    """(weight, hidden, target, smooth) → the weight itself, ⟨h_i, w_{t_i}⟩, and the mean row if `smooth`.

    The core is given the weight that comes out, so that in a backward pass this function gets the core's
    gradient and adds its own to it, in place unless the backward pass is itself differentiated. For reverse
    mode; forward mode has no gradient in the weight to save.
    """

    @staticmethod
    def forward(weight: Tensor, hidden: Tensor, target: Tensor, smooth: bool) -> tuple[Tensor, ...]:
        """The weight, the score of each target, and the mean row or 0."""
        mean = weight.mean(0) if smooth else weight.new_zeros(())
        return weight.view_as(weight), (hidden * weight[target]).sum(-1), mean

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the inputs for the backward pass."""
        weight, hidden, target, ctx.smooth = inputs
        ctx.save_for_backward(weight, hidden, target)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, by_weight: Tensor | None, by_score: Tensor | None, by_mean: Tensor | None) -> Any:
        """Gradients in weight and hidden."""
        weight, hidden, target = ctx.saved_tensors
        by_hidden = None
        if by_score is not None and ctx.needs_input_grad[1]:
            by_hidden = by_score[:, None] * weight[target]
        if not ctx.needs_input_grad[0]:
            return None, by_hidden, None, None
        total = torch.zeros_like(weight) if by_weight is None else by_weight
        own = not torch.is_grad_enabled() and total.is_contiguous()
        if by_score is not None:
            rows = by_score[:, None] * hidden
            total = total.index_add_(0, target, rows) if own else total.index_add(0, target, rows)
        if ctx.smooth and by_mean is not None:
            share = by_mean / weight.shape[0]
            total = total.add_(share) if own else total + share
        return total, by_hidden, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    statistics: bool = False,
    rank: bool = False,
    group: Group = None,
) -> Any:
    r"""Cross-entropy of a linear head, ``F.cross_entropy(hidden @ weight.T + bias, target)``, without logits.

    Memory grows with the tokens and with the vocabulary, not with their product. Exact in all derivatives:
    backwards, forwards, twice, under `torch.func` and `torch.compile`.

    Args:
        hidden: ``(..., D)``; float64, float32, bfloat16 or float16 (the last two are summed in float32, and
            the loss is float32). For a causal model pass ``hidden[:, :-1]`` and ``tokens[:, 1:]``.
        weight: ``(V, D)``, one row for each outcome, of the same dtype.
        target: ``(...)``, whole numbers from 0 to V − 1, or `ignore_index`.
        bias: ``(V,)``.
        softcap: c > 0, for logits c·tanh(s/c).
        scale: factor of ⟨h, w⟩.
        z_loss: z ≥ 0 adds z G² to the loss of each token.
        label_smoothing: ε from 0 to 1, the share of the uniform distribution in the target distribution.
        ignore_index: the target of tokens that do not count.
        reduction: ``mean`` over the tokens that count, ``sum``, or ``none`` (0 for tokens that do not).
        statistics: also return statistics of each token, which takes no further sweep.
        rank: also count the outcomes that come before the target (one more pass over the weight); implies
            statistics.
        group: processes that share the vocabulary (`torch.distributed.group.WORLD` for all): hidden and
            target are the same on each, weight ``(V_r, D)`` and bias are its own outcomes, in the order of
            the ranks, as Megatron lays them out. All get the same loss, and the gradients that one
            process would get, of weight and bias for their own outcomes. None for this process alone.

    Returns:
        The loss: one number, or the shape of target with ``reduction="none"``; with statistics a
        `CrossEntropy`.

    Example:
        >>> h, W = torch.zeros(3, 8), torch.randn(100, 8)
        >>> xt.losses.linear_cross_entropy(h, W, torch.tensor([5, 17, -100]))  # log 100
        tensor(4.6052)
    """
    caller = "linear_cross_entropy"
    with refused_together(caller, group):
        _check(caller, hidden, weight, target, bias, z_loss, label_smoothing, reduction)
    options: dict[str, Any] = {
        "softcap": softcap,
        "scale": scale,
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
    }
    options |= {"ignore_index": ignore_index, "reduction": reduction, "statistics": statistics, "rank": rank}
    own = Vocabulary.of(caller, group, hidden, weight, bias, target, options)
    shape, counted = target.shape, target != ignore_index
    _check_targets(caller, target, counted, own.outcomes, reduction)
    h, W = cast(hidden.reshape(-1, hidden.shape[-1])), cast(weight)
    with full_precision(hidden.device):
        h, t, kept = _rows_that_count(h, target.reshape(-1).long(), counted.reshape(-1))
        b = None if bias is None else bias.to(W.dtype)
        tilted, score, mean = _scores(own, h, W, t, b, softcap, scale, label_smoothing > 0)
        losses = surprise(tilted, score)
        if mean is not None:
            losses = losses + label_smoothing * (score - mean)
        if z_loss:
            losses = losses + z_loss * tilted.log_normalizer.square()

        def spread(x: Tensor, empty: float) -> Tensor:
            if kept is None:
                return torch.where(counted, x.reshape(shape), empty)
            filled = x.new_full((counted.numel(),), empty)
            return filled.index_copy(0, kept, x).reshape(shape)

        losses = spread(losses, 0.0)
        loss = losses if reduction == "none" else losses.sum()
        if reduction == "mean":
            loss = loss / counted.sum()
        if not (statistics or rank):
            return loss
        found = tilted.log_normalizer, tilted.entropy, tilted.score_max, score
        said = [spread(x, torch.nan) for x in found]
        place = spread(_rank(own, h, W, t, b, softcap, scale, score), -1) if rank else None
        return CrossEntropy(loss, said[0], said[1], said[2], said[3], place)


def _check(
    caller: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    reduction: str,
) -> None:
    checks.choice(caller, "reduction", reduction, REDUCTIONS)
    checks.number(caller, "z_loss", z_loss, least=0)
    checks.number(caller, "label_smoothing", label_smoothing, least=0, most=1)
    linear_head(caller, hidden, weight, "...", bias=bias)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        hint = "Pass whole numbers; for class probabilities use F.cross_entropy, they are a matrix anyway."
        raise ArgumentError(f"{caller}: target is {got}. {hint}")
    if target.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"{caller}: hidden is {tuple(hidden.shape)}, target is {tuple(target.shape)}. "
            "Pass one target for each row of hidden."
        )


def _check_targets(caller: str, target: Tensor, counted: Tensor, outcomes: int, reduction: str) -> None:
    if not is_concrete(target):
        return
    wrong = counted & ((target < 0) | (target >= outcomes))
    checks.entries(caller, "target", target, ~wrong, f"from 0 to {outcomes - 1}, or ignore_index")
    if reduction == "mean" and not bool(counted.any()):
        raise ArgumentError(
            f"{caller}: every target is ignored, so there is no mean. Leave such batches out, or pass "
            "reduction='sum', which is 0 here."
        )


def cast(x: Tensor) -> Tensor:
    """The tensor cast as autocast would, then widened to the dtype that sums are taken in."""
    if autocasts(x.device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x.to(wide_dtype(x.dtype))


def _rows_that_count(h: Tensor, t: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows and targets without the ignored ones, and their places.

    Where values cannot be read, ignored rows become 0, with target 0, and the places are None.
    """
    if not is_concrete(h, t):
        return torch.where(counted[:, None], h, 0.0), torch.where(counted, t, 0), None
    kept = counted.nonzero()[:, 0]
    return (h, t, kept) if kept.numel() == t.numel() else (h[kept], t[kept], kept)


def _checksum(target: Tensor, group: Group) -> str | None:
    """A hash of targets that all processes of a group must share, in their order; None without a group."""
    if group is None or not is_concrete(target):
        return None
    with outside_transforms():  # a transform would wrap the target and hide its numbers
        numbers = target.to("cpu", torch.int64).numpy().tobytes()
    return hashlib.blake2b(numbers, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Vocabulary:
    """The outcomes: all of them here, or this process's part of them.

    Attributes:
        among: the processes that share them; None if all are here.
        first: the number of the first outcome here.
        here: how many are here.
        outcomes: how many there are.
    """

    among: Peers | None
    first: int
    here: int
    outcomes: int

    @classmethod
    def of(
        cls,
        caller: str,
        group: Group,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: dict[str, Any],
    ) -> "Vocabulary":
        """The vocabulary, once all processes of the group agree on what they must have in common."""
        shared = {
            "the shape of hidden": tuple(hidden.shape),
            "the checksum of target": _checksum(target, group),
        }
        shared["autocast"] = (
            str(torch.get_autocast_dtype(hidden.device.type)) if autocasts(hidden.device) else None
        )
        tensors = {"hidden": hidden, "weight": weight, "bias": bias}
        among = peers(caller, group, tensors, options | shared, weight)
        if among is None:
            return cls(None, 0, weight.shape[0], weight.shape[0])
        first = sum(among.sizes[: among.members.rank])
        return cls(among, first, weight.shape[0], sum(among.sizes))

    def place(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """The place of each target among the outcomes here, else 0; whether it is here, None if all are."""
        if self.among is None:
            return t, None
        here = (t >= self.first) & (t < self.first + self.here)
        return torch.where(here, t - self.first, 0), here

    def common(self, h: Tensor) -> Tensor:
        """Rows that all processes have, for this one's outcomes: gradients are summed over the processes."""
        return h if self.among is None else share(h, self.among.members)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all outcomes, from the sum over the outcomes here."""
        return x if self.among is None else total(x, self.among.members)


def _scores(
    own: Vocabulary,
    h: Tensor,
    W: Tensor,
    t: Tensor,
    b: Tensor | None,
    softcap: float | None,
    scale: float,
    smooth: bool,
) -> tuple[AttentionResult, Tensor, Tensor | None]:
    """The attention result over the outcomes, the target's score, and the mean score if `smooth`."""
    linear = smooth and softcap is None
    all_rows, h = h, own.common(h)
    t, here = own.place(t)
    if torch.compiler.is_compiling() or in_transform() or in_forward_mode():
        along, mean_row = (h * W[t]).sum(-1), W.mean(0)
    else:
        W, along, mean_row = apply(Head, W, h, t, linear)
    score = capped(scale * along, softcap)
    mean = None
    if linear:
        mean = scale * (h @ mean_row)
    elif smooth:
        mean = _mean_capped(h * scale, W, softcap)
    if b is not None:
        score = score + b[t]
        mean = None if mean is None else mean + b.mean()
    log_weight = None if b is None else b[None]
    options: dict[str, Any] = {"scale": scale, "log_weight": log_weight, "softcap": softcap}
    if own.among is None:
        found = attend(h[None], W[None], W[None, :, :0], **options)
        return unbatched(found), score, mean
    found = attend_agreed(all_rows[None], W[None], W[None, :, :0], *own.among, **options)
    score = own.total(torch.where(here, score, 0.0)) if here is not None else score
    mean = None if mean is None else own.total(mean * (own.here / own.outcomes))
    return unbatched(found), score, mean


def capped(s: Tensor, softcap: float | None) -> Tensor:
    """The scores c·tanh(s/c), or as they are without a softcap."""
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def _mean_capped(h: Tensor, W: Tensor, softcap: float | None) -> Tensor:
    """The mean over outcomes of capped scores, in blocks of rows that a backward pass computes again."""

    def block(rows: Tensor, W: Tensor) -> Tensor:
        return capped(rows @ W.T, softcap).mean(-1)

    size = max(1, BLOCK // W.shape[0])
    if in_transform() or not torch.is_grad_enabled():
        return torch.cat([block(rows, W) for rows in h.split(size)])
    return torch.cat([checkpoint(block, rows, W, use_reentrant=False) for rows in h.split(size)])


@torch.no_grad()
def _rank(
    own: Vocabulary,
    h: Tensor,
    W: Tensor,
    t: Tensor,
    b: Tensor | None,
    softcap: float | None,
    scale: float,
    score: Tensor,
) -> Tensor:
    """How many outcomes other than the target have a larger score."""
    found = []
    size = max(1, BLOCK // W.shape[0])
    t, here = own.place(t)
    for rows, place, mark in zip(h.split(size), t.split(size), score.split(size), strict=True):
        s = capped(scale * (rows @ W.T), softcap)
        s = s if b is None else s + b
        before = (s > mark[:, None]).sum(-1)
        itself = s.gather(-1, place[:, None])[:, 0] > mark  # its score, computed again, may round up
        found.append(torch.stack([before, itself.long()]))
    if not found:
        return t.clone()
    before, itself = torch.cat(found, -1)
    return own.total(before - (itself if here is None else itself * here))


def fisher_vector_product(
    hidden: Tensor,
    weight: Tensor,
    direction: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The Fisher information of a linear head's predictions times a direction in (hidden, weight, bias).

        F v = Jᵀ (diag p − p pᵀ) J v,   J v = ḣ Wᵀ + h Ẇᵀ + ḃ   (times scale, but for ḃ)

    summed over tokens, streamed over outcomes. It is also the Gauss–Newton matrix of the cross-entropy's
    sum, whatever the targets. For a network in front of the head, push a direction of its parameters to
    (ḣ, Ẇ, ḃ) with `torch.func.jvp` and pull the product back with `torch.func.vjp`. Hessian products of the
    loss itself are `torch.func.jvp` of its gradient.

    Args:
        hidden: ``(..., D)``.
        weight: ``(V, D)``.
        direction: (ḣ, Ẇ, ḃ), of the shapes of hidden, weight and bias ``(V,)``; None stands for 0.
        bias: ``(V,)``.
        scale: factor of ⟨h, w⟩.

    Returns:
        The product's three parts, of the shapes of hidden, weight and ``(V,)``.

    Example:
        >>> h, W = torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> xt.losses.fisher_vector_product(h, W, (torch.ones(1, 2), None, None))[0]
        tensor([[1., 0.]])
    """
    caller = "losses.fisher_vector_product"
    target = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    _check(caller, hidden, weight, target, bias, 0.0, 0.0, "sum")
    b = torch.zeros_like(weight[:, 0]) if bias is None else bias
    if len(direction) != 3:
        raise ArgumentError(
            f"{caller}: direction has {len(direction)} entries. Pass three, of hidden, weight and bias; "
            "each a tensor or None."
        )
    primal: tuple[Tensor, Tensor, Tensor] = (hidden.reshape(-1, hidden.shape[-1]), weight, b)
    given = [
        torch.zeros_like(x) if v is None else v for x, v in zip((hidden, weight, b), direction, strict=True)
    ]
    for name, x, v in zip(("hidden", "weight", "bias"), (hidden, weight, b), given, strict=True):
        if v.shape != x.shape or v.dtype != x.dtype:
            raise ArgumentError(
                f"{caller}: the direction of {name} is {tuple(v.shape)} {v.dtype}, {name} is "
                f"{tuple(x.shape)} {x.dtype}. Pass tensors alike in shape and dtype, or None."
            )
    h_dot, W_dot, b_dot = given[0].reshape(primal[0].shape), given[1], given[2]

    def total(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
        return log_normalizer(h[None], W[None], scale=scale, log_weight=b[None]).sum()

    # ∇²G has one term more than F: scores are bilinear in h and w, so E[ẇ] and Σ_i p_ij ḣ_i come in.
    product = torch.func.jvp(torch.func.grad(total, (0, 1, 2)), primal, (h_dot, W_dot, b_dot))[1]

    def output(value: Tensor) -> Tensor:
        h, W, b = primal
        return attend(h[None], W[None], value[None], scale=scale, log_weight=b[None]).output[0]

    pulled = torch.func.vjp(output, W_dot)
    mean, by_weight = pulled[0], pulled[1](h_dot)[0]
    found = product[0] - scale * mean, product[1] - scale * by_weight, product[2]
    return found[0].reshape(hidden.shape), found[1], found[2]
