r"""InfoNCE: which of the keys belongs to this query?

    loss_i = G_i − ⟨q_i, k_i⟩/τ,   G_i = log Σ_j e^{⟨q_i, k_j⟩/τ}

over the keys of the batch and whatever further negatives there are. No matrix of similarities is kept: G
and its derivatives are streamed, in memory that grows with the batch and not with its square.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt.distributed.group import Group, Members, refused_together
from exptilt.losses.embeddings import (
    REDUCTIONS,
    Peers,
    all_but_own,
    alternatives,
    cooled,
    embeddings,
    log_add_exp,
    paired,
    peers,
    reduced,
    surprise,
    without_autocast,
)


@without_autocast
def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    negatives: Tensor | None = None,
    in_batch: bool = True,
    symmetric: bool = False,
    similarity: str = "cosine",
    reduction: str = "mean",
    group: Group = None,
) -> Tensor:
    r"""The contrastive loss of pairs: row i of `key` is right for row i of `query`, everything else is not.

    Exact in all derivatives, forwards, backwards and twice, in the embeddings and in the temperature.

    Args:
        query: ``(B, d)``; float64, float32, bfloat16 or float16 (sums are taken in float32 or better).
        key: ``(B, d)``.
        temperature: τ > 0, a number or a tensor ``()`` to learn.
        negatives: ``(N, d)``, further wrong keys for all queries, such as a memory bank; or ``(B, N, d)``,
            hard negatives of each query.
        in_batch: whether the keys of other pairs count as wrong keys; False uses `negatives` only
            (as MoCo does with its bank).
        symmetric: the mean of this loss and the one in which keys choose among the queries (which has no
            further negatives).
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.
        reduction: ``mean``, ``sum`` or ``none``.
        group: processes that each pass their own pairs (`torch.distributed.group.WORLD` for all). Queries are
            compared with the keys of all processes, and no process holds all similarities. Each returns the
            loss of its own queries; the mean over the processes is the loss of the whole batch, and the mean
            of the gradients, which data-parallel training takes, is its gradient. `negatives` are for the
            process's own queries. None for this process alone.

    Returns:
        One number, or ``(B,)`` with ``reduction="none"``; in float32 or better.

    Example:
        >>> x = torch.eye(4)
        >>> xt.losses.info_nce(x, x, temperature=1.0)  # log(e + 3) − 1
        tensor(0.7437)
    """
    caller = "info_nce"
    given = {"query": query, "key": key} | ({} if negatives is None else {"negatives": negatives})
    with refused_together(caller, group):
        paired(caller, query=query, key=key)
        _check_candidates(caller, query, negatives, in_batch, symmetric, group)
        q, k, *more = embeddings(caller, similarity, **given)
        q = cooled(caller, q, temperature)
        checks.choice(caller, "reduction", reduction, REDUCTIONS)
    options = {"temperature": temperature, "symmetric": symmetric, "similarity": similarity}
    options |= {"reduction": reduction, "whether there are negatives": negatives is not None}
    among = peers(caller, group, {"query": query, "key": key}, options, query)
    right = (q * k).sum(-1)
    losses, G = _in_batch(q, k, right, among) if in_batch else (torch.zeros_like(right), right)
    for wrong in more:  # log(e^G + e^G') − s = (G − s) + log(1 + e^{G' − G})
        if wrong.ndim == 2:
            G_wrong = alternatives(q, wrong).log_normalizer
        else:
            G_wrong = torch.einsum("bd,bnd->bn", q, wrong).logsumexp(-1)
        losses = losses - logsigmoid(G - G_wrong)
    if symmetric:
        losses = (losses + _in_batch(k, q, right, among)[0]) / 2
    return reduced(caller, losses, reduction, among)


def _in_batch(q: Tensor, k: Tensor, right: Tensor, among: Peers | None) -> tuple[Tensor, Tensor]:
    r"""The loss of each query among the keys of the batch, and its G.

    The loss is log(1 + e^{G_wrong − s}), from the wrong keys alone: where the right key is certain, loss and
    gradient are as small as they should be, and not the rounding of a difference. Over several processes
    right and wrong keys are summed together, and the loss is G − s.
    """
    if among is None:
        G_wrong = all_but_own(q, k).log_normalizer
        return -logsigmoid(right - G_wrong), log_add_exp(G_wrong, right)
    seen = alternatives(q, k, among=among)
    return surprise(seen, right), seen.log_normalizer


def _check_candidates(
    caller: str, query: Tensor, negatives: Tensor | None, in_batch: bool, symmetric: bool, group: Group
) -> None:
    if group is not None and not in_batch:
        hint = "Leave in_batch=True, or group=None: its own negatives need no other process."
        raise ArgumentError(f"{caller}: group without the batch's own pairs. {hint}")
    if negatives is None and not in_batch:
        raise ArgumentError(f"{caller}: in_batch is False and there are no negatives. Pass one of them.")
    if symmetric and not in_batch:
        raise ArgumentError(f"{caller}: symmetric needs the batch's own pairs. Leave in_batch=True.")
    if negatives is None and query.shape[0] == 1 and (group is None or Members(caller, group).count == 1):
        raise ArgumentError(
            f"{caller}: query and key are a batch of 1, without wrong keys: the loss is always 0. "
            "Pass more rows, or negatives=."
        )
    wrong = negatives is not None and (
        negatives.ndim not in (2, 3) or (negatives.ndim == 3 and negatives.shape[0] != query.shape[0])
    )
    if wrong and negatives is not None:
        raise ArgumentError(
            f"{caller}: negatives is {tuple(negatives.shape)}, query is {tuple(query.shape)}. "
            "Pass (N, dimension) for all queries, or (batch, N, dimension) for each."
        )


def clip(
    image: Tensor,
    text: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    similarity: str = "cosine",
    reduction: str = "mean",
    group: Group = None,
) -> Tensor:
    r"""CLIP's loss: images choose among the texts and texts among the images, half each.

    With a parameter `logit_scale` as open_clip keeps it, pass ``temperature=(-logit_scale).exp()``; the
    gradient reaches it.

    Args:
        image: ``(B, d)``.
        text: ``(B, d)``; row i belongs to image i.
        temperature: τ > 0, a number or a tensor ``()`` to learn; scores are cosines over τ.
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.
        reduction: ``mean``, ``sum`` or ``none`` (one loss for each pair).
        group: processes that each pass their own pairs, as in `info_nce`; None for this process alone.

    Returns:
        One number, or ``(B,)`` with ``reduction="none"``.

    Example:
        >>> xt.losses.clip(torch.eye(4), torch.eye(4), temperature=1.0)
        tensor(0.7437)
    """
    with refused_together("clip", group):
        paired("clip", image=image, text=text)
    return info_nce(
        image,
        text,
        temperature=temperature,
        symmetric=True,
        similarity=similarity,
        reduction=reduction,
        group=group,
    )
