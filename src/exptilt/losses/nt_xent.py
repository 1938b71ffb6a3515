r"""NT-Xent and the supervised contrastive loss: which of the others is another view of me, or of my class?

    loss_i = G_i − mean_{p ∈ P(i)} ⟨z_i, z_p⟩/τ,   G_i = log Σ_{j ≠ i} e^{⟨z_i, z_j⟩/τ}

The positives P(i) are the other views of an item, or the others in its class. Their mean score is one dot
product with a sum of embeddings, so nothing here is of size n × n.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.losses.embeddings import (
    all_but_own,
    cooled,
    embeddings,
    log_add_exp,
    reduced,
    surprise,
    without_autocast,
)


@without_autocast
def nt_xent(
    views: Tensor, *, temperature: float | Tensor = 0.5, similarity: str = "cosine", reduction: str = "mean"
) -> Tensor:
    r"""SimCLR's loss: each view of an item picks its other view among all views of all items but itself.

    Args:
        views: ``(V, B, d)``, V ≥ 2 views of B ≥ 2 items: ``torch.stack([z1, z2])``. With more than two, the
            right answer is the mean over the other views, as in `supervised_contrastive`.
        temperature: τ > 0, a number or a tensor ``()`` to learn.
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.
        reduction: ``mean``, ``sum`` or ``none``.

    Returns:
        One number, or ``(V, B)`` with ``reduction="none"``.

    Example:
        >>> z = torch.eye(4)
        >>> xt.losses.nt_xent(torch.stack([z, z]), temperature=1.0)  # log(e + 6) − 1
        tensor(1.1654)
    """
    caller = "nt_xent"
    checks.floating(caller, "views", views)
    if views.ndim != 3 or views.shape[0] < 2 or views.shape[1] < 2:
        raise ArgumentError(
            f"{caller}: views is {tuple(views.shape)}. Pass (views, batch, dimension) with at least two "
            "views of at least two items: torch.stack([z1, z2])."
        )
    (z,) = embeddings(caller, similarity, views=views)
    if views.shape[0] == 2:
        return reduced(caller, _two_views(*cooled(caller, z, temperature), *z), reduction)
    positive = (z.sum(0) - z) / (views.shape[0] - 1)
    losses = _losses(caller, z.flatten(0, 1), positive.flatten(0, 1), temperature)
    return reduced(caller, losses.unflatten(0, views.shape[:2]), reduction)


def _two_views(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``(2, B)``: the loss log(1 + e^{G_wrong − s}) of views x and y; a and b are x/τ and y/τ.

    In this form a certain choice has a small loss and a small gradient.
    """
    right = (a * y).sum(-1)
    G = [[all_but_own(anchor, other).log_normalizer for other in (x, y)] for anchor in (a, b)]
    return torch.stack([-logsigmoid(right - log_add_exp(*pair)) for pair in G])


@without_autocast
def supervised_contrastive(
    embedding: Tensor,
    label: Tensor,
    *,
    temperature: float | Tensor = 0.1,
    without_positives: str = "error",
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    r"""The supervised contrastive loss (Khosla et al. 2020, L_out): items of one class against all others.

    Args:
        embedding: ``(N, d)``.
        label: ``(N,)``, whole numbers; rows with the same label belong together.
        temperature: τ > 0, a number or a tensor ``()`` to learn.
        without_positives: what to do with a row that is alone in its class: ``error``, or ``skip``, which
            leaves it out of the mean (its loss is 0) but not out of the alternatives of others.
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.
        reduction: ``mean`` over the rows that count, ``sum`` or ``none``.

    Returns:
        One number, or ``(N,)`` with ``reduction="none"``.

    Example:
        >>> z = torch.eye(4).repeat(2, 1)
        >>> xt.losses.supervised_contrastive(z, torch.arange(4).repeat(2), temperature=1.0)
        tensor(1.1654)
    """
    caller = "supervised_contrastive"
    checks.choice(caller, "without_positives", without_positives, ("error", "skip"))
    checks.choice(caller, "reduction", reduction, ("mean", "sum", "none"))
    (z,) = embeddings(caller, similarity, embedding=embedding)
    if not isinstance(label, Tensor) or label.is_floating_point() or label.shape != z.shape[:1]:
        got = f"{tuple(label.shape)} {label.dtype}" if isinstance(label, Tensor) else type(label).__name__
        raise ArgumentError(
            f"{caller}: label is {got}, embedding is {tuple(embedding.shape)}. "
            "Pass one whole number for each row, a tensor (rows,)."
        )
    if z.shape[0] < 3:
        raise ArgumentError(f"{caller}: embedding is a batch of {z.shape[0]}, without wrong rows. Pass more.")
    kind = _numbered(label)
    mates = torch.zeros_like(kind).index_add(0, kind, torch.ones_like(kind))[kind] - 1
    some = mates > 0
    if is_concrete(z, label):
        _check_mates(caller, label, some, without_positives)
    total = torch.zeros_like(z).index_add(0, kind, z)
    positive = (total[kind] - z) / mates.clamp(min=1)[:, None]
    losses = torch.where(some, _losses(caller, z, positive, temperature), 0.0)
    mean: Tensor = losses.sum() / some.sum()
    return mean if reduction == "mean" else reduced(caller, losses, reduction)


def _numbered(label: Tensor) -> Tensor:
    """A number from 0 to N − 1 for each row, equal where labels are equal.

    Unlike `unique`, it has the same shape for all labels, as `vmap` and `torch.compile` need.
    """
    ordered, place = label.sort()
    steps = torch.cat([torch.zeros_like(place[:1]), (ordered[1:] != ordered[:-1]).to(place.dtype)])
    return torch.zeros_like(place).scatter(0, place, steps.cumsum(0))


def _check_mates(caller: str, label: Tensor, some: Tensor, without_positives: str) -> None:
    if bool(some.all()) or (without_positives == "skip" and bool(some.any())):
        return
    alone = int((~some).nonzero()[0])
    rows = f"row {alone} (label {int(label[alone])}) has no" if bool(some.any()) else "no row has"
    raise ArgumentError(
        f"{caller}: {rows} other of its label in the batch. Pass batches with at least two of a label, or "
        "without_positives='skip' to leave single rows out."
    )


def _losses(caller: str, z: Tensor, positive: Tensor, temperature: float | Tensor) -> Tensor:
    """One loss for each row of z; `positive` is the mean of the row's positives."""
    # s = ⟨z_i, z_j⟩/τ for both sides of the pair: z/√τ against itself
    root = cooled(caller, torch.ones((), dtype=z.dtype, device=z.device), temperature).sqrt()
    x = z * root
    return surprise(all_but_own(x, x), (x * (positive * root)).sum(-1))
